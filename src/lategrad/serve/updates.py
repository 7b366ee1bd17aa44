"""The log of a real run: who sent the gradient of every update, how late it was, and when it was applied."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lategrad.serve.checkpoint import DamagedError

_ROW = np.dtype([("time", "<f8"), ("sequence", "<i8"), ("worker", "<i4"), ("delay", "<i4")])


class LogMark(NamedTuple):
    """How far a log file has been written, and a checksum of it up to there."""

    updates: int
    checksum: int


class UpdateLog:
    """One row for every update, in memory and, as far as it was :meth:`flush`-ed, in a file that only grows.

    >>> log = UpdateLog()
    >>> log.append(worker=1, sequence=0, delay=0, time=0.5)
    >>> len(log), log.column("worker")
    (1, tensor([1], dtype=torch.int32))
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._rows: NDArray[Any] = np.zeros(1024, _ROW)
        self._count = 0
        self._flushed = LogMark(0, 0)

    def __len__(self) -> int:
        return self._count

    def append(self, worker: int, sequence: int, delay: int, time: float) -> None:
        """Add the row of the update that was just applied."""
        if self._count == len(self._rows):
            self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)])
        self._rows[self._count] = (time, sequence, worker, delay)
        self._count += 1

    def column(self, name: str, last: int | None = None) -> Tensor:
        """``time``, ``sequence``, ``worker`` or ``delay`` of all updates, or of the ``last`` so many."""
        first = 0 if last is None else max(0, self._count - last)
        return torch.from_numpy(self._rows[name][first : self._count].copy())

    def flush(self) -> LogMark:
        """Append what is new to the file and wait for the disk; a failed attempt can be repeated."""
        if self._path is None:
            return LogMark(self._count, 0)
        fresh = self._rows[self._flushed.updates : self._count].tobytes()
        with open(self._path, "r+b" if self._path.exists() else "w+b") as file:
            file.truncate(self._flushed.updates * _ROW.itemsize)  # what an earlier attempt left behind
            file.seek(0, os.SEEK_END)
            file.write(fresh)
            file.flush()
            os.fsync(file.fileno())
        self._flushed = LogMark(self._count, zlib.crc32(fresh, self._flushed.checksum))
        return self._flushed

    @staticmethod
    def load(path: Path, mark: LogMark) -> UpdateLog:
        """The log as it was at a mark; what was written after it is dropped from the file with the next flush."""
        try:
            with open(path, "rb") as file:
                contents = file.read(mark.updates * _ROW.itemsize)
        except FileNotFoundError:
            contents = b""
        if len(contents) < mark.updates * _ROW.itemsize or zlib.crc32(contents) != mark.checksum:
            raise DamagedError(
                f"{str(path)!r} is damaged: its first {mark.updates} updates do not match their checksum"
            )
        log = UpdateLog(path)
        log._rows = np.concatenate([np.frombuffer(contents, _ROW), np.zeros(1024, _ROW)])
        log._count, log._flushed = mark.updates, mark
        return log
