"""Shakespeare's works as one text, verified by checksum: the data of the language models in the study."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from lategrad.problems import Text
from lategrad.problems.data import cache_folder

SHAKESPEARE_SHA256 = "4ea31573b537e8d007c358af8371396942a00278301f3182cdf0e132f1a95737"
"""Of the file that ``scripts/fetch_shakespeare.sh`` makes: 42 works, one after another in the order of their names."""

_SEPARATOR = "\f"
"""A form feed separates the works in that file; none is in them."""


def shakespeare_file() -> Path:
    """Where the fetched works are stored: ``lategrad/shakespeare/shakespeare.txt`` in the user's cache."""
    return cache_folder().parent / "shakespeare" / "shakespeare.txt"


def find_shakespeare() -> Path | None:
    """The file in the folder ``$LATEGRAD_DATA`` or in the user's cache, not yet verified; None without one."""
    folder = os.environ.get("LATEGRAD_DATA")
    places = ([Path(folder).expanduser() / shakespeare_file().name] if folder else []) + [shakespeare_file()]
    return next((place for place in places if place.is_file()), None)


def join_works(works: Sequence[str]) -> str:
    """Many works as the one file that is stored."""
    return _SEPARATOR.join(works)


def load_shakespeare() -> Text:
    """The complete works as `make data` fetches them; the last tenth of each is held out."""
    path = find_shakespeare()
    if path is None:
        raise FileNotFoundError(f"Shakespeare's works were not found: run `make data`, which puts them at "
                                f"{shakespeare_file()}")  # fmt: skip
    contents = path.read_bytes()
    if hashlib.sha256(contents).hexdigest() != SHAKESPEARE_SHA256:
        raise ValueError(f"{path} does not have SHA-256 {SHAKESPEARE_SHA256}: delete it, then run `make data`")
    return Text.of_strings("shakespeare", contents.decode("ascii").split(_SEPARATOR))
