"""The log of a run: for every update its worker, the delay of its gradient, and when it was applied."""

import math
import os
import warnings
import zlib
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lategrad.serve.checkpoints.checkpoint import DamagedError
from lategrad.serve.messages import STATELESS, JobInfo
from lategrad.support.files import open_plain, read_plain

_ROW = np.dtype([("time", "<f8"), ("drift", "<f8"), ("sequence", "<i8"), ("parent_job", "<i8"), ("worker", "<i4"),
                 ("delay", "<i4"), ("local_steps", "<i4")])  # fmt: skip
Rows = NDArray[Any]


class UpdateLog:
    """One row for every update, in memory.

    >>> log = UpdateLog()
    >>> log.append(worker=1, sequence=0, delay=0, time=0.5)
    >>> len(log), log.column("worker")
    (1, tensor([1], dtype=torch.int32))
    """

    def __init__(self, rows: Rows | None = None) -> None:
        first = np.zeros(0, _ROW) if rows is None else rows
        self._rows: Rows = np.concatenate([first, np.zeros(1024, _ROW)])
        self._count = len(first)

    def __len__(self) -> int:
        return self._count

    def append(self, worker: int, sequence: int, delay: int, time: float, info: JobInfo = STATELESS,
               drift: float = math.nan) -> None:  # fmt: skip
        if self._count == len(self._rows):
            self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)])
        self._rows[self._count] = (time, drift, sequence, info.parent_job, worker, delay, info.local_steps)
        self._count += 1

    def column(self, name: str, last: int | None = None) -> Tensor:
        """A column, such as ``time``, ``worker`` or ``delay``, of all updates or the ``last`` few."""
        first = 0 if last is None else max(0, self._count - last)
        return torch.from_numpy(self._rows[name][first : self._count].copy())

    @classmethod
    def unknown(cls, count: int) -> "UpdateLog":
        """The log of ``count`` updates whose rows were lost: of worker -1, without delay."""
        rows = np.zeros(count, _ROW)
        rows["worker"] = rows["sequence"] = -1
        rows["drift"] = math.nan
        return cls(rows)

    def rows(self, first: int = 0) -> Rows:
        """A copy of all rows from row ``first``."""
        return cast(Rows, self._rows[first : self._count].copy())


class LogMark(NamedTuple):
    """The number of updates in a log file, and the checksum of their rows."""

    updates: int
    checksum: int


class LogFile:
    """The rows of a run in a file that only grows, so that checkpoints need not repeat them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.mark = LogMark(0, 0)

    def check(self) -> None:
        """If the file, or a part of it, was removed, all rows will be written again."""
        if not self._is_long_enough():
            warnings.warn(f"{str(self._path)!r} was removed or truncated during the run: it is written again",
                          stacklevel=2)  # fmt: skip
            self.mark = LogMark(0, 0)

    def _is_long_enough(self) -> bool:
        try:
            return self._path.stat().st_size >= self.mark.updates * _ROW.itemsize
        except OSError:
            return self.mark.updates == 0

    def append(self, rows: Rows) -> LogMark:
        """Write new rows and wait for the disk; a failed attempt can be repeated."""
        contents = rows.tobytes()
        if not self._is_long_enough():
            raise OSError(f"{str(self._path)!r} was removed or truncated")
        with open_plain(self._path, "r+b" if self._path.exists() else "w+b") as file:
            file.truncate(self.mark.updates * _ROW.itemsize)  # what an earlier attempt left behind
            file.seek(0, os.SEEK_END)
            file.write(contents)
            file.flush()
            os.fsync(file.fileno())
        self.mark = LogMark(self.mark.updates + len(rows), zlib.crc32(contents, self.mark.checksum))
        return self.mark

    def read(self, mark: LogMark) -> Rows:
        """The rows up to a mark; the next append overwrites those after it."""
        try:
            contents = read_plain(self._path, mark.updates * _ROW.itemsize)
        except FileNotFoundError:
            contents = b""
        except OSError as error:
            raise DamagedError(str(error)) from None
        if len(contents) < mark.updates * _ROW.itemsize or zlib.crc32(contents) != mark.checksum:
            raise DamagedError(f"{str(self._path)!r} is damaged: its first {mark.updates} updates do not match their "
                               "checksum")  # fmt: skip
        self.mark = mark
        return np.frombuffer(contents, _ROW)
