#!/usr/bin/env bash
# Install Debian's chromium, with which the tests open the report as a reader would.
#
#   scripts/install_chromium.sh
#
# Does nothing where a Chromium or Chrome is on the PATH. Where it cannot install one it says why and still
# succeeds: the tests that need a browser are then skipped.
set -uo pipefail

skip() {
    echo "no chromium: $1; the browser tests will be skipped"
    exit 0
}

for browser in chromium chromium-browser google-chrome; do
    if command -v "$browser" >/dev/null; then
        echo "$browser is already installed: $(command -v "$browser")"
        exit 0
    fi
done

command -v apt-get >/dev/null || skip "there is no apt-get here; install Chromium or Chrome by hand"
as_root=()
if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null || skip "apt-get needs root, and there is no sudo here"
    sudo -n true 2>/dev/null || skip "apt-get needs root, and sudo asks for a password"
    as_root=(sudo -n)
fi

install() {
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet --no-install-recommends chromium
}

log=$(mktemp) || skip "no room for a temporary file"
trap 'rm -f "$log"' EXIT
echo "installing chromium with apt-get (about 100 MB to download)"
# The package lists may be missing or out of date: fetch them once and try again.
if ! install >"$log" 2>&1 && ! { "${as_root[@]}" apt-get update --quiet && install; } >"$log" 2>&1; then
    tail -n 5 "$log"
    skip "apt-get could not install it (its last lines are above)"
fi
command -v chromium >/dev/null || skip "apt-get succeeded, but there is no chromium on the PATH"
echo "installed $(chromium --version 2>/dev/null || echo chromium)"
