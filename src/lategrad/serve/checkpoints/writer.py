"""Checkpoints are written beside the updates: the server makes a copy, and a thread takes it to the disk."""

from __future__ import annotations

import threading
import time
import warnings

from lategrad.serve.checkpoints.archive import Archive, MemoryArchive
from lategrad.serve.checkpoints.checkpoint import Checkpoint

_PATIENCE = 30.0  # seconds that the disk has for a checkpoint
_BYTES_PER_SECOND = 1e7  # on a bad day: it has more where there is more to write


class Writer:
    """Writes to an archive in a thread, one checkpoint at a time; a disk that hangs keeps nobody from going on."""

    def __init__(self, archive: Archive | MemoryArchive) -> None:
        self.archive = archive
        self.saved_version = -1
        """Of the newest checkpoint that is on the disk."""
        self.newest: Checkpoint | None = None
        """Stays in memory: the run can go back to it whatever becomes of the disk; the next takes its place."""
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._until = 0.0

    @property
    def is_free(self) -> bool:
        """Whether nothing is being written; only then may the archive be asked anything."""
        return self._thread is None or not self._thread.is_alive()

    def write(self, checkpoint: Checkpoint) -> None:
        """Begin to write a checkpoint; the one before must be written."""
        assert self.is_free
        self._raise()
        self.newest = checkpoint
        size = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
        self._until = time.monotonic() + _PATIENCE + size / _BYTES_PER_SECOND
        self._thread = threading.Thread(target=self._write, args=(checkpoint,), name="lategrad-checkpoint", daemon=True)
        self._thread.start()

    def _write(self, checkpoint: Checkpoint) -> None:
        try:
            if self.archive.save(checkpoint):
                self.saved_version = checkpoint.version
        except BaseException as error:  # a thread must not fail unnoticed
            self._error = error

    def wait(self) -> bool:
        """Until the disk has what was given to it; False, with a warning, if it hangs."""
        if self._thread is not None:
            self._thread.join(max(0.0, self._until - time.monotonic()))
            if self._thread.is_alive():
                assert self.newest is not None
                warnings.warn(f"the disk does not take the checkpoint at update {self.newest.version}: it is waited "
                              "for no longer", stacklevel=3)  # fmt: skip
                return False
        self._raise()
        return True

    def _raise(self) -> None:
        """What the thread could not."""
        error, self._error = self._error, None
        if error is not None:
            raise error
