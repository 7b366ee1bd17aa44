#!/usr/bin/env python3
"""Turn the Python source files of this machine into tokens, for the GPT of 34 million parameters of the study.

    make tokens                          # or: python -m scripts.make_tokens

The files are those of the standard library and of packages that lategrad needs, without their tests. A tenth of them is
held out. The tokens, with the tokenizer, are put into the user's cache; a machine without the package `tokenizers` can
use the same file in the folder that LATEGRAD_DATA names.
"""

import hashlib
import sysconfig
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import ByteLevelBPETokenizer

from lategrad.support.files import replacing
from reproduction.text import VOCABULARY, load_tokens, tokens_file

PACKAGES = ("torch", "numpy", "scipy", "sklearn", "matplotlib")
LEFT_OUT = {"test", "tests", "site-packages", "dist-packages"}  # some systems install a library without its tests
END = "<|end|>"  # after every file


def read_sources() -> dict[str, str]:
    """Sorted, by the path inside the library or package."""
    standard = Path(sysconfig.get_paths()["stdlib"])
    found = {path.relative_to(standard): path for path in standard.rglob("*.py")}
    for name in PACKAGES:
        package = Path(find_spec(name).origin).parent
        found |= {path.relative_to(package.parent): path for path in package.rglob("*.py")}
    kept = {inside.as_posix(): path for inside, path in found.items() if not LEFT_OUT.intersection(inside.parts)}
    return {inside: path.read_text(encoding="utf-8", errors="replace") for inside, path in sorted(kept.items())}


def is_held_out(inside: str) -> bool:
    """Whether a file is in the tenth that is not trained on, by a hash of its path: the same on every machine."""
    return int(hashlib.sha256(inside.encode()).hexdigest(), 16) % 10 == 0


def write_tokens(sources: Mapping[str, str], path: Path, vocabulary: int = VOCABULARY) -> None:
    """Train a byte-level BPE tokenizer on the files that are not held out, encode all, and store both."""
    tokenizer = ByteLevelBPETokenizer()
    trained_on = (text for inside, text in sources.items() if not is_held_out(inside))
    tokenizer.train_from_iterator(trained_on, vocabulary, show_progress=False, special_tokens=[END])
    parts = {"train": [], "held_out": []}
    for inside, text in sources.items():
        numbers = [*tokenizer.encode(text).ids, tokenizer.token_to_id(END)]
        parts["held_out" if is_held_out(inside) else "train"].append(torch.tensor(numbers, dtype=torch.int16))
    with replacing(path) as part:
        save_file({name: torch.cat(files) for name, files in parts.items()}, part, {"tokenizer": tokenizer.to_str()})


def main() -> None:
    """Make the tokens, unless they are there."""
    if not tokens_file().exists():
        sources = read_sources()
        print(f"{len(sources):,} files, {sum(map(len, sources.values())):,} characters: this takes a minute or two")
        write_tokens(sources, tokens_file())
    tokens = load_tokens()
    print(f"{len(tokens.train):,} tokens to train on, {len(tokens.held_out):,} held out, SHA-256 {tokens.sha256}")


if __name__ == "__main__":
    main()
