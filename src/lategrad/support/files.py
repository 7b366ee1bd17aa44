"""Atomic replacement of files, and opening of those that are plain files."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file next to ``path`` that replaces it at the end, synced to disk, unless an exception is raised.

    A reader sees the old file or the new one, never half of one. The folder is made if there is none.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.unlink(missing_ok=True)  # a link there would be followed
    try:
        yield part
        _sync(part)
        os.replace(part, path)
        _sync(path.parent)
    finally:
        part.unlink(missing_ok=True)


def write_text(path: str | os.PathLike[str], text: str) -> Path:
    """Write a text file, as a whole or not at all."""
    path = Path(path)
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")
    return path


def require_plain(path: Path) -> None:
    """Raise an ``OSError`` if there is something else than a plain file: a link, a FIFO, a device or a folder."""
    if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
        raise OSError(f"{str(path)!r} is not a plain file: remove it, or choose another folder")


def open_plain(path: Path, mode: str, **options: Any) -> IO[Any]:
    """Open a plain file; anything else is an ``OSError`` at once, where opening a FIFO would block."""
    require_plain(path)
    safely = os.O_NOFOLLOW | os.O_NONBLOCK
    return open(path, mode, opener=lambda name, flags: os.open(name, flags | safely, 0o666), **options)


def read_plain(path: Path, most: int | None = None) -> bytes:
    """The contents of a plain file, or its first ``most`` bytes."""
    with open_plain(path, "rb") as file:
        contents: bytes = file.read() if most is None else file.read(most)
        return contents


def _sync(path: Path) -> None:
    """Sync a file, or the names in a folder, which only POSIX systems can open."""
    if path.is_dir() and os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
