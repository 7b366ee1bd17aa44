"""Checkpoints are written beside the updates: the server makes a copy, and a thread takes it to the disk."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from lategrad.serve.archive import Archive, MemoryArchive
from lategrad.serve.checkpoint import Checkpoint


class Writer:
    """Writes to an archive in a thread of its own, one checkpoint at a time."""

    def __init__(self, archive: Archive | MemoryArchive) -> None:
        self.archive = archive
        self.saved_version = -1
        """Of the newest checkpoint that is on the disk."""
        self.newest: Checkpoint | None = None
        """Stays in memory: the run can go back to it whatever becomes of the disk; the next takes its place."""
        self._thread = ThreadPoolExecutor(1, "lategrad-checkpoint")
        self._writing: Future[None] | None = None

    @property
    def is_free(self) -> bool:
        """Whether nothing is being written; only then may the archive be asked anything."""
        return self._writing is None or self._writing.done()

    def write(self, checkpoint: Checkpoint) -> None:
        """Begin to write a checkpoint; the one before must be written."""
        self.wait()
        self.newest = checkpoint
        self._writing = self._thread.submit(self._write, checkpoint)

    def _write(self, checkpoint: Checkpoint) -> None:
        if self.archive.save(checkpoint):
            self.saved_version = checkpoint.version

    def wait(self) -> None:
        """Until the disk has what was given to it."""
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()
