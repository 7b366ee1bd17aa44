"""Text as a sequence of characters: the user's own files, or Shakespeare's works."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lategrad.problems.data import cache_folder
from lategrad.support.validation import require, require_number

__all__ = ["SHAKESPEARE_SHA256", "Text", "find_shakespeare", "load_text", "shakespeare_file"]

SHAKESPEARE_SHA256 = "4ea31573b537e8d007c358af8371396942a00278301f3182cdf0e132f1a95737"
"""Of the file that ``scripts/fetch_shakespeare.sh`` makes: 42 works, one after another in the order of their names."""

_WORK_ENDS = "\f"
"""A form feed separates the works in that file; none is in them."""

PathLike = str | os.PathLike[str]


class Text(NamedTuple):
    """Characters as numbers: a part to train on, and a part that is held out."""

    name: str
    train: Tensor
    """int64 ``(n,)``: places in the vocabulary."""
    held_out: Tensor
    vocabulary: str
    """All characters of the text, sorted."""

    def decode(self, tokens: Tensor) -> str:
        """The characters that numbers stand for."""
        return "".join(self.vocabulary[token] for token in tokens.flatten().tolist())


def load_text(path: PathLike | Sequence[PathLike], held_out: float = 0.1) -> Text:
    """Load text files, character by character.

    Args:
        path: ``"shakespeare"``, the complete works as `make data` fetches them; a file in UTF-8; or several.
        held_out: the last tenth (by default) of *every* file is held out, so that all files are in both parts.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder) / "song.txt"
    ...     _ = file.write_text("tra la la " * 10)
    ...     text = load_text(file)
    >>> text.vocabulary, len(text.train), len(text.held_out), text.decode(text.train[:9])
    (' alrt', 90, 10, 'tra la la')
    """
    require_number("held_out", held_out, low=0, strict=True)
    require("held_out", held_out, held_out < 1, "a number in (0, 1)")
    if path == "shakespeare":
        name, pieces = "shakespeare", _shakespeare()
    else:
        paths = [Path(one).expanduser() for one in ([path] if isinstance(path, str | os.PathLike) else path)]
        require("path", path, len(paths) > 0, "at least one file")
        name, pieces = ", ".join(one.name for one in paths), [_read(one) for one in paths]
    vocabulary = "".join(sorted(set().union(*pieces)))
    numbers = [_numbers(piece, vocabulary) for piece in pieces]
    cuts = [len(piece) - round(held_out * len(piece)) for piece in pieces]
    train = torch.cat([piece[:cut] for piece, cut in zip(numbers, cuts, strict=True)])
    rest = torch.cat([piece[cut:] for piece, cut in zip(numbers, cuts, strict=True)])
    return Text(name, train, rest, vocabulary)


def _numbers(text: str, vocabulary: str) -> Tensor:
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    known = np.frombuffer(vocabulary.encode("utf-32-le"), np.uint32)
    return torch.from_numpy(np.searchsorted(known, codes))


def _read(path: Path) -> str:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r}: check the path")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8: save it as such") from error
    require(f"the number of characters in {path}", len(text), len(text) > 1, "at least 2")
    return text


# ---- Shakespeare


def shakespeare_file() -> Path:
    """Where the fetched works are kept: ``lategrad/shakespeare/shakespeare.txt`` in the user's cache."""
    return cache_folder().parent / "shakespeare" / "shakespeare.txt"


def find_shakespeare() -> Path | None:
    """The file in the folder ``$LATEGRAD_DATA`` or in the user's cache, not yet verified; None without one."""
    own = os.environ.get("LATEGRAD_DATA")
    places = ([Path(own).expanduser() / shakespeare_file().name] if own else []) + [shakespeare_file()]
    return next((place for place in places if place.is_file()), None)


def join_works(works: Sequence[str]) -> str:
    """Many works as the one file that is kept."""
    return _WORK_ENDS.join(works)


def _shakespeare() -> list[str]:
    path = find_shakespeare()
    if path is None:
        raise FileNotFoundError(f"Shakespeare's works were not found: run `make data`, which puts them at "
                                f"{shakespeare_file()}")  # fmt: skip
    contents = path.read_bytes()
    if hashlib.sha256(contents).hexdigest() != SHAKESPEARE_SHA256:
        raise ValueError(f"{path} does not have SHA-256 {SHAKESPEARE_SHA256}: delete it, then run `make data`")
    return contents.decode("ascii").split(_WORK_ENDS)
