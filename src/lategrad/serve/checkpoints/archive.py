"""A run's folder: its last checkpoints and the log of its updates; one process at a time has it."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from lategrad.serve.checkpoints.checkpoint import (
    Checkpoint,
    DamagedError,
    checkpoint_paths,
    read_pair,
    version_of,
    write_pair,
)
from lategrad.serve.observe.update_log import LogFile, LogMark, Rows, UpdateLog

_SECONDS = 60.0  # between two checkpoints, unless it is said after how many updates


@contextmanager
def locked(folder: Path | None) -> Iterator[None]:
    """Keep a run's folder to one process: two would overwrite each other's files."""
    if folder is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)  # the folder itself: a file in it could be removed, and the lock with it
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # given back when the process ends, however it ends
        yield
    except BlockingIOError:
        wait = "wait for its end, or choose another folder"
        raise ValueError(f"a run is going on in {str(folder)!r}: {wait}") from None
    finally:
        os.close(descriptor)


class Schedule:
    """When checkpoints are due; a failed one is tried again when the next would be.

    Args:
        every: updates between two checkpoints; by default so many seconds pass between them.
        seconds: by default a minute.
    """

    def __init__(self, every: int | None, seconds: float = _SECONDS) -> None:
        self.every, self.seconds = every, seconds
        self.note(0)

    def note(self, version: int) -> None:
        """One was tried, or loaded."""
        self._at, self._version = time.monotonic(), version

    def is_due(self, version: int) -> bool:
        """Whether it is time for one."""
        if self.every is not None:
            return version - self._version >= self.every
        return time.monotonic() - self._at >= self.seconds


class MemoryArchive:
    """The newest checkpoint, in memory: for a run without a folder, which may have to go back all the same."""

    def __init__(self, every: int | None = None, seconds: float = _SECONDS) -> None:
        self.schedule = Schedule(every, seconds)
        self._newest: Checkpoint | None = None

    @property
    def is_filled(self) -> bool:
        """Whether there is one."""
        return self._newest is not None

    @property
    def logged(self) -> int:
        """Updates whose rows it has."""
        return 0 if self._newest is None else len(self._newest.rows)

    def save(self, checkpoint: Checkpoint) -> bool:
        """Keep a checkpoint."""
        self.schedule.note(checkpoint.version)
        before = checkpoint.rows[:0] if self._newest is None else self._newest.rows
        self._newest = dataclasses.replace(checkpoint, rows=np.concatenate([before, checkpoint.rows]))
        return True

    def load(self) -> Checkpoint:
        """The newest."""
        assert self._newest is not None, "there is one from the start"
        self.schedule.note(self._newest.version)
        return self._newest

    def unusable(self) -> OSError:
        """Memory always is."""
        raise AssertionError


class Archive:
    """Where checkpoints go and come from.

    :meth:`save` takes a ``Checkpoint`` that shares no memory with the server, and
    touches nothing else.

    Args:
        folder: made if it is not there.
        every: updates between two checkpoints; by default a minute passes between them.
        keep: checkpoints to keep.
    """

    def __init__(self, folder: Path, every: int | None = None, keep: int = 2) -> None:
        self.folder, self.keep = folder, keep
        self.schedule = Schedule(every)
        self._log = LogFile(folder / "updates.bin")

    @property
    def logged(self) -> int:
        """Updates whose rows are in the log; a checkpoint brings those after them."""
        self._log.look_after()
        return self._log.mark.updates

    def save(self, checkpoint: Checkpoint) -> bool:
        """Write a checkpoint and drop those it supersedes; False, with a warning, if the disk would not take it."""
        self.schedule.note(checkpoint.version)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            mark = self._append(checkpoint)
            write_pair(self.folder, checkpoint, mark._asdict())
        except OSError as error:
            warnings.warn(f"checkpoint at update {checkpoint.version} failed, training goes on: {error}", stacklevel=2)
            return False
        self._drop_superseded(checkpoint.version)
        return True

    def _append(self, checkpoint: Checkpoint) -> LogMark:
        """What is new in the log; where it cannot be written, the checkpoint goes without."""
        try:
            return self._log.append(checkpoint.rows)
        except OSError as error:
            warnings.warn(f"the log of updates cannot be written at update {checkpoint.version}: {error}", stacklevel=3)
            return LogMark(0, 0)

    def unusable(self) -> OSError:
        """What to raise where not even a first checkpoint can be saved."""
        return OSError(f"no checkpoint can be written to {str(self.folder)!r}: choose another folder")

    def _drop_superseded(self, version: int) -> None:
        """Remove all but the last checkpoints up to ``version``, and what killed processes left.

        A checkpoint above the version is one that was passed over because it is damaged.
        """
        kept = [path for path in checkpoint_paths(self.folder) if version_of(path) <= version]
        stems = {path.stem for path in kept[: self.keep]}
        for path in [*self.folder.glob("checkpoint-*"), *self.folder.glob(".checkpoint-*.part")]:
            if path.stem not in stems:
                with suppress(OSError):  # a folder of that name is not ours
                    path.unlink(missing_ok=True)

    def _history(self, version: int, mark: LogMark) -> Rows:
        """The log up to a checkpoint; a damaged one costs the history, and nothing else."""
        try:
            if mark.updates != version:
                raise DamagedError(f"the log of updates ends at {mark.updates}")
            return self._log.read(mark)
        except DamagedError as error:
            warnings.warn(f"{error}; the parameters are whole, but who sent the gradients of the first {version} "
                          "updates, and how late, is not known any more", stacklevel=3)  # fmt: skip
            self._log.mark = LogMark(0, 0)
            return UpdateLog.unknown(version).rows()

    def load(self) -> Checkpoint:
        """The newest checkpoint that is whole, with the log up to it; those passed over are warned of."""
        paths = checkpoint_paths(self.folder)
        if not paths:
            raise FileNotFoundError(f"no checkpoint in {str(self.folder)!r}")
        for path in paths:
            try:
                tensors, description = read_pair(path)
            except DamagedError as error:
                last: DamagedError = error
                warnings.warn(f"{error}; trying the one before", stacklevel=2)
            else:
                version = description["version"]
                self.schedule.note(version)
                return Checkpoint(version, tensors, description, self._history(version, LogMark(**description["log"])))
        raise DamagedError(f"no checkpoint in {str(self.folder)!r} is usable; the last tried: {last}")
