"""Atomic replacement of files."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file next to ``path`` that replaces it at the end, synced to disk, unless an exception is raised.

    A reader sees the old file or the new one, never half of one.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        _sync(part)
        os.replace(part, path)
        _sync(path.parent)
    finally:
        part.unlink(missing_ok=True)


def read_regular(path: Path, most: int | None = None) -> bytes:
    """The contents of a file, or its first ``most`` bytes; a folder, a FIFO or a device is an ``OSError`` at once."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # without it, opening a FIFO blocks
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{str(path)!r} is not a file")
        return file.read() if most is None else file.read(most)


def _sync(path: Path) -> None:
    """Sync a file, or the names in a folder, which only POSIX systems can open."""
    if path.is_dir() and os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
