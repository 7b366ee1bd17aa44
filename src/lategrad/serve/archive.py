"""A run's folder: its last checkpoints and the log of its updates; one process at a time has it."""

from __future__ import annotations

import fcntl
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lategrad.serve.checkpoint import Checkpoint, DamagedError, checkpoint_paths, read_pair, write_pair
from lategrad.serve.update_log import LogFile, LogMark, Rows, UpdateLog

_SECONDS = 60.0  # between two checkpoints, unless it is said after how many updates


@contextmanager
def locked(folder: Path | None) -> Iterator[None]:
    """Keep a run's folder to one process: two would overwrite each other's files."""
    if folder is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # given back when the process ends, however it ends
        except BlockingIOError:
            wait = "wait for its end, or choose another folder"
            raise ValueError(f"a run is going on in {str(folder)!r}: {wait}") from None
        yield


class Archive:
    """Where checkpoints go and come from.

    :meth:`save` takes a :class:`~lategrad.serve.checkpoint.Checkpoint` that shares no memory with the server, and
    touches nothing else.

    Args:
        folder: made if it is not there.
        every: updates between two checkpoints; by default a minute passes between them.
        keep: checkpoints to keep.
    """

    def __init__(self, folder: Path, every: int | None = None, keep: int = 2) -> None:
        self.folder, self.every, self.keep = folder, every, keep
        self._log = LogFile(folder / "updates.bin")
        self._tried_at, self._tried_version = time.monotonic(), 0

    @property
    def logged(self) -> int:
        """Updates whose rows are in the log; a checkpoint brings those after them."""
        self._log.look_after()
        return self._log.mark.updates

    def is_due(self, version: int) -> bool:
        """Whether it is time for a checkpoint; a failed one is tried again when the next would be due."""
        if self.every is not None:
            return version - self._tried_version >= self.every
        return time.monotonic() - self._tried_at >= _SECONDS

    def save(self, checkpoint: Checkpoint) -> bool:
        """Write a checkpoint and drop those it supersedes; False, with a warning, if the disk would not take it."""
        self._tried_at, self._tried_version = time.monotonic(), checkpoint.version
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
        kept = [path for path in checkpoint_paths(self.folder) if int(path.stem.partition("-")[2]) <= version]
        stems = {path.stem for path in kept[: self.keep]}
        for path in [*self.folder.glob("checkpoint-*"), *self.folder.glob(".checkpoint-*.part")]:
            if path.stem not in stems:
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
                last = error
                warnings.warn(f"{error}; trying the one before", stacklevel=2)
            else:
                version = description["version"]
                self._tried_at, self._tried_version = time.monotonic(), version
                return Checkpoint(version, tensors, description, self._history(version, LogMark(**description["log"])))
        raise DamagedError(f"no checkpoint in {str(self.folder)!r} is usable; the last tried: {last}")
