"""Checkpoints on the move: the files of a run's newest checkpoint as bytes, from one machine's folder to another's."""

from __future__ import annotations

from pathlib import Path

from lategrad.serve.checkpoint import checkpoint_paths, drop_superseded, newest, write_atomically

Files = dict[str, bytes]
"""Contents by name, the description of the checkpoint last."""


def read_checkpoint(folder: Path) -> Files | None:
    """The newest whole checkpoint and the log of updates that it refers to; None if there is no checkpoint."""
    if not checkpoint_paths(folder):
        return None
    version = newest(folder, lambda checkpoint: checkpoint.version)
    stem = f"checkpoint-{version:012d}"
    names = ("updates.bin", f"{stem}.safetensors", f"{stem}.json")
    return {name: (folder / name).read_bytes() for name in names if (folder / name).exists()}


def write_checkpoint(folder: Path, files: Files, keep: int) -> None:
    """Write them so that a reader finds this checkpoint or the one before, never a part; ``keep`` remain."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, contents in files.items():
        write_atomically(folder / name, contents)
    version = max(int(Path(name).stem.partition("-")[2] or 0) for name in files)
    drop_superseded(folder, version, keep)
