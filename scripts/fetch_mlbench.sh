#!/usr/bin/env bash
# Puts the letters and the satellite images of Debian's package r-cran-mlbench in the user's cache, verified.
# Nothing is installed; neither R nor root is needed.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-.venv/bin/python}
package=r-cran-mlbench
if [[ ! -x $(command -v "$python") ]]; then
    echo "$python is missing: run \`make setup\` first" >&2
    exit 1
fi

verified() {
    "$python" -c 'from benchmarks import mlbench; [mlbench.find(name) for name in mlbench.FILES]' 2>"${1:-/dev/stderr}"
}

if verified /dev/null; then
    echo "The files of mlbench are there, verified: nothing to do"
    exit
fi
for tool in apt-get dpkg-deb; do
    if [[ -z $(command -v $tool) ]]; then
        echo "$tool is missing: copy LetterRecognition.rda and Satellite.rda of R's package mlbench into the folder" \
            "that the environment variable LATEGRAD_DATA names" >&2
        exit 1
    fi
done

temporary=$(mktemp -d)
trap 'rm -rf "$temporary"' EXIT
echo "Downloading Debian's package $package (1 MB) ..."
(
    cd "$temporary"
    mkdir -p lists/partial cache/archives/partial
    own=(-o "Dir::State::Lists=$PWD/lists" -o "Dir::Cache=$PWD/cache" -o APT::Sandbox::User=)
    apt-get -qq download "$package" 2>/dev/null ||
        { apt-get -qq "${own[@]}" update && apt-get -qq "${own[@]}" download "$package"; }
)
dpkg-deb -x "$temporary"/*.deb "$temporary/unpacked"
cache=$("$python" -c 'from lategrad.problems.data import cache_folder; print(cache_folder().parent / "mlbench")')
mkdir -p "$cache"
for table in LetterRecognition Satellite; do
    cp "$temporary/unpacked/usr/lib/R/site-library/mlbench/data/$table.rda" "$cache/.$table.$$"
    mv "$cache/.$table.$$" "$cache/$table.rda" # whole or not at all
done
verified
echo "The files of mlbench are in $cache, verified"
