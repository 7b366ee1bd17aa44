"""Keeps the newest checkpoints of a run and its log of updates in a folder, which one process may use at a time; they
are written in a thread, while the server continues with its updates."""

import dataclasses
import fcntl
import os
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from lategrad.serve.checkpoints.checkpoint import Checkpoint, DamagedError, checkpoint_paths, read_checkpoint
from lategrad.serve.observe.update_log import LogFile, LogMark, Rows, UpdateLog
from lategrad.serve.settings import Settings
from lategrad.support.files import require_plain
from lategrad.support.threads import run_in_thread

_WRITTEN = ("updates.bin", "log.csv", "log.jsonl", "records.csv", "trace.safetensors", "training.png",
            "best.safetensors", "wandb-id")  # fmt: skip
WRITE_TIMEOUT = 30.0  # seconds that the disk has for a checkpoint
_BYTES_PER_SECOND = 1e7  # of a slow disk: large checkpoints have more time


def _require_settings(saved: dict[str, Any]) -> None:
    """Raise a :class:`DamagedError` unless these are the settings of a run of this version, on any machine."""
    if unknown := sorted(saved.keys() - {field.name for field in dataclasses.fields(Settings)}):
        raise DamagedError(f"the checkpoint is from a newer version of lategrad: it has the setting {unknown[0]!r}")
    anywhere = {"device": "cpu", "server_device": "cpu", "schedule": None}  # a schedule may have been a function
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            Settings(**{**saved, **anywhere})
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise DamagedError(f"the settings of the checkpoint are damaged: {error}") from None


@contextmanager
def lock_folder(folder: Path | None) -> Iterator[None]:
    """Reserve a run's folder for this process: two would overwrite each other's files."""
    if folder is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)  # the folder itself: a lock file in it could be removed
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released when the process ends, however it ends
        for name in _WRITTEN:
            require_plain(folder / name)
        yield
    except BlockingIOError:
        remedy = "wait until it ends, or choose another folder"
        raise ValueError(f"another run is using {str(folder)!r}: {remedy}") from None
    finally:
        os.close(descriptor)


class Schedule:
    """When checkpoints are due: after ``every`` updates, or by default after ``seconds``."""

    def __init__(self, every: int | None, seconds: float = 60.0) -> None:
        self.every, self.seconds = every, seconds
        self.note(0)

    def note(self, version: int) -> None:
        """A checkpoint was tried, or loaded."""
        self._at, self._version = time.monotonic(), version

    def is_due(self, version: int) -> bool:
        if self.every is not None:
            return version - self._version >= self.every
        return time.monotonic() - self._at >= self.seconds


class MemoryArchive:
    """Keeps the newest checkpoint in memory, so that a run without a folder can return to it."""

    def __init__(self, every: int | None = None, seconds: float = 60.0) -> None:
        self.schedule = Schedule(every, seconds)
        self._newest: Checkpoint | None = None

    @property
    def is_filled(self) -> bool:
        return self._newest is not None

    @property
    def logged(self) -> int:
        return 0 if self._newest is None else len(self._newest.rows)

    def save(self, checkpoint: Checkpoint) -> bool:
        self.schedule.note(checkpoint.version)
        before = checkpoint.rows[:0] if self._newest is None else self._newest.rows
        self._newest = dataclasses.replace(checkpoint, rows=np.concatenate([before, checkpoint.rows]))
        return True

    def load(self) -> Checkpoint:
        assert self._newest is not None, "there is one from the start"
        self.schedule.note(self._newest.version)
        return self._newest


class Archive:
    """Saves checkpoints in a folder, keeps the newest ``keep`` of them, and loads the newest intact one."""

    def __init__(self, folder: Path, every: int | None = None, keep: int = 2) -> None:
        self.folder, self.keep = folder, keep
        self.schedule = Schedule(every)
        self._log = LogFile(folder / "updates.bin")

    @property
    def logged(self) -> int:
        """The number of updates whose rows are in the log; a checkpoint to be saved has those after them."""
        self._log.check()
        return self._log.mark.updates

    def save(self, checkpoint: Checkpoint) -> bool:
        """Write a checkpoint and remove old ones; False, with a warning, if that failed, as on a full disk."""
        self.schedule.note(checkpoint.version)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            checkpoint.write(self.folder, self._append(checkpoint)._asdict())
        except OSError as error:
            failed = f"checkpoint at update {checkpoint.version} failed, training continues"
            warnings.warn(f"{failed}: {error}", stacklevel=2)
            return False
        self._remove_old(checkpoint.version)
        return True

    def _append(self, checkpoint: Checkpoint) -> LogMark:
        """Write the new rows; if that fails, the checkpoint is saved without its log."""
        try:
            return self._log.append(checkpoint.rows)
        except OSError as error:
            warnings.warn(f"the log of updates cannot be written at update {checkpoint.version}: {error}", stacklevel=3)
            return LogMark(0, 0)

    def _remove_old(self, version: int) -> None:
        """Remove all but the last checkpoints up to ``version``, and files that killed processes left."""
        intact = checkpoint_paths(self.folder, version)  # one above this version was skipped because it is damaged
        stems = {path.stem for path in intact[: self.keep]}
        for path in [*self.folder.glob("checkpoint-*"), *self.folder.glob(".checkpoint-*.part")]:
            if path.stem not in stems:
                with suppress(OSError):  # a folder of that name is not ours
                    path.unlink(missing_ok=True)

    def _history(self, version: int, mark: LogMark) -> Rows:
        """The log up to a checkpoint; if it is damaged, only the history is lost."""
        try:
            if mark.updates != version:
                raise DamagedError(f"the log of updates ends at {mark.updates}")
            return self._log.read(mark)
        except DamagedError as error:
            warnings.warn(f"{error}; the parameters are intact, but the workers and delays of the first {version} "
                          "updates are lost", stacklevel=3)  # fmt: skip
            self._log.mark = LogMark(0, 0)
            return UpdateLog.unknown(version).rows()

    def load(self, check: Callable[[dict[str, Any]], object] | None = None) -> Checkpoint:
        """The newest intact checkpoint, with its log; damaged ones, also by ``check``, are skipped with a warning."""
        if not (paths := checkpoint_paths(self.folder)):
            raise FileNotFoundError(f"no checkpoint in {str(self.folder)!r}")
        for path in paths:
            try:
                tensors, description = read_checkpoint(path)
                version, mark = description["version"], LogMark(**description["log"])
                found = Checkpoint(version, tensors, description, self._history(version, mark))
                _require_settings(found.settings)
                if check is not None:
                    check(found.settings)
            except (DamagedError, MemoryError) as error:
                last = error
                warnings.warn(f"{error}; trying the one before it", stacklevel=2)
            else:
                self.schedule.note(version)
                return found
        raise DamagedError(f"no checkpoint in {str(self.folder)!r} is usable; the last tried: {last}")


class Writer:
    """Writes to an archive, one checkpoint at a time; training continues if the disk hangs."""

    def __init__(self, archive: Archive | MemoryArchive) -> None:
        self.archive = archive
        self.saved_version = -1  # of the newest checkpoint on disk
        self.newest: Checkpoint | None = None  # in memory: the run can return to it whatever happens to the disk
        self._writing: Future[None] | None = None
        self._until = 0.0

    @property
    def is_free(self) -> bool:
        """Whether nothing is being written; only then may the archive be used."""
        return self._writing is None or self._writing.done()

    def write(self, checkpoint: Checkpoint) -> None:
        """Start to write a checkpoint, once the one before is written."""
        assert self.is_free
        self._raise_error()
        self.newest = checkpoint
        size = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
        self._until = time.monotonic() + WRITE_TIMEOUT + size / _BYTES_PER_SECOND
        self._writing = run_in_thread(lambda: self._save(checkpoint), "lategrad-checkpoint")

    def _save(self, checkpoint: Checkpoint) -> None:
        if self.archive.save(checkpoint):
            self.saved_version = checkpoint.version

    def wait(self) -> bool:
        """Wait until the checkpoint is on disk; False, with a warning, if the disk hangs."""
        if self._writing is not None:
            wait([self._writing], max(0.0, self._until - time.monotonic()))
        if not self.is_free:
            assert self.newest is not None
            warnings.warn(f"the checkpoint at update {self.newest.version} timed out: the disk hangs, and training "
                          "continues without it", stacklevel=3)  # fmt: skip
            return False
        self._raise_error()
        return True

    def _raise_error(self) -> None:
        """Raise what the thread raised, once."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()
