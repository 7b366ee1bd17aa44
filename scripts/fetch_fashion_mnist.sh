#!/usr/bin/env bash
# Puts Fashion-MNIST in the user's cache, verified: from Debian's package where there is apt-get, else OpenML.
# Nothing is installed, and root is not needed.
set -euo pipefail
cd "$(dirname "$0")/.."

python=.venv/bin/python
package=dataset-fashion-mnist
if [[ ! -x $python ]]; then
    echo "$python is missing: run \`make setup\` first" >&2
    exit 1
fi

# Prints where a verified copy is. Does not look online: status 1 without a copy, 2 with a damaged one.
verified_copy() {
    "$python" - <<'EOF'
import sys
from lategrad.problems import data

folder = data.find_fashion_mnist()
if folder is None:
    sys.exit(1)
try:
    data.load("fashion-mnist")
except (ValueError, OSError) as error:
    print(error, file=sys.stderr)
    sys.exit(2)
print(folder)
EOF
}

# Run in the temporary folder: leaves the .deb there.
download_package() {
    apt-get -qq download "$package" && return
    echo "The package lists are missing or old: updating them ..."
    if [[ $EUID -eq 0 ]]; then
        apt-get -qq update && apt-get -qq download "$package"
    else
        mkdir -p lists/partial cache/archives/partial
        local own=(-o "Dir::State::Lists=$PWD/lists" -o "Dir::Cache=$PWD/cache")
        apt-get -qq "${own[@]}" update && apt-get -qq "${own[@]}" download "$package"
    fi
}

# Each file arrives whole or not at all; an unpacked copy would be read before the new one, so it goes.
copy_to_cache() {
    local cache file name
    cache=$("$python" -c 'from lategrad.problems import data; print(data.cache_folder())')
    mkdir -p "$cache"
    for name in train-images-idx3-ubyte train-labels-idx1-ubyte t10k-images-idx3-ubyte t10k-labels-idx1-ubyte; do
        file=$1/usr/share/datasets/fashion-mnist/$name.gz
        cp "$file" "$cache/.$name.$$"
        mv "$cache/.$name.$$" "$cache/$name.gz"
        rm -f "$cache/$name"
    done
}

if folder=$(verified_copy); then
    echo "Fashion-MNIST is in $folder, verified: nothing to do"
    exit
fi

if [[ -n $(command -v apt-get) && -n $(command -v dpkg-deb) ]]; then
    temporary=$(mktemp -d)
    trap 'rm -rf "$temporary"' EXIT
    echo "Downloading Debian's package $package (31 MB) ..."
    if (cd "$temporary" && download_package) && dpkg-deb -x "$temporary"/*.deb "$temporary/unpacked"; then
        copy_to_cache "$temporary/unpacked"
        folder=$(verified_copy)
        echo "Fashion-MNIST is in $folder, verified"
        exit
    fi
    echo "Debian's package could not be downloaded: trying OpenML ..."
fi

"$python" - <<'EOF'
import sys
from lategrad.problems import data

try:
    data.load("fashion-mnist")
except (ValueError, OSError) as error:
    sys.exit(str(error))
print(f"Fashion-MNIST is in {data.find_fashion_mnist()}, verified")
EOF
