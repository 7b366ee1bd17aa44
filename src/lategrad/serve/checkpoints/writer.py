"""Writes checkpoints in a thread, while the server continues with its updates."""

import time
import warnings
from concurrent.futures import Future, wait

from lategrad.serve.checkpoints.archive import Archive, MemoryArchive
from lategrad.serve.checkpoints.checkpoint import Checkpoint
from lategrad.support.timeouts import run_in_thread

WRITE_TIMEOUT = 30.0  # seconds that the disk has for a checkpoint
_BYTES_PER_SECOND = 1e7  # of a slow disk: large checkpoints have more time


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
