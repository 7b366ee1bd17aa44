"""Checkpoints: a pair of files for each, tensors (safetensors) and their description (JSON); nothing executes.

The description is written last, renamed into place, and holds checksums of itself and of the tensors: a
checkpoint is there as a whole or not at all, and a damaged one is noticed. In ``tensors``, ``output`` is the
vector to evaluate and ship; ``state.N`` are the rule's own and of no use without it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from lategrad.support.files import replacing

FORMAT = "lategrad-checkpoint-1"
Loaded = TypeVar("Loaded")


class DamagedError(ValueError):
    """A file of a run that is not as it was written."""


@dataclass(frozen=True)
class Checkpoint:
    """What a run needs to go on."""

    version: int
    """Updates made so far."""
    tensors: dict[str, Tensor]
    """``output``: what to ship; ``state.0``, ``state.1``, ...: the rule's state."""
    description: dict[str, Any]
    """Plain JSON values."""


def write_atomically(path: Path, contents: bytes) -> None:
    """Write, wait for the disk, rename."""
    with replacing(path) as part:
        part.write_bytes(contents)


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


def save_checkpoint(folder: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Write a checkpoint and drop what it supersedes, so that ``keep`` remain; returns its description's path."""
    path = folder / f"checkpoint-{checkpoint.version:012d}.json"
    tensors = safetensors.torch.save({name: leaf.contiguous().cpu() for name, leaf in checkpoint.tensors.items()})
    description = {
        "format": FORMAT,
        "version": checkpoint.version,
        "output": "the tensor 'output': the vector to evaluate and ship",
        "tensors": hashlib.sha256(tensors).hexdigest(),
        **checkpoint.description,
    }
    text = json.dumps(description, indent=1)
    sealed = json.dumps({"checksum": hashlib.sha256(text.encode()).hexdigest(), "checkpoint": text}, indent=1)
    try:
        write_atomically(path.with_suffix(".safetensors"), tensors)
        write_atomically(path, sealed.encode())
    except OSError:
        if not path.exists():
            path.with_suffix(".safetensors").unlink(missing_ok=True)  # where the disk is full, it must not fill it more
        raise
    drop_superseded(folder, checkpoint.version, keep)
    return path


def drop_superseded(folder: Path, version: int, keep: int) -> None:
    """Remove all but the last ``keep`` checkpoints up to ``version``, and what killed processes left.

    A checkpoint above the version is one that was passed over because it is damaged.
    """
    kept = [path for path in checkpoint_paths(folder) if int(path.stem.partition("-")[2]) <= version][:keep]
    stems = {path.stem for path in kept}
    for path in [*folder.glob("checkpoint-*"), *folder.glob(".checkpoint-*.part")]:
        if path.stem not in stems:
            path.unlink(missing_ok=True)


def checkpoint_paths(folder: Path) -> list[Path]:
    """The descriptions of all checkpoints in a folder, the newest first."""
    return sorted(folder.glob("checkpoint-*.json"), reverse=True)


def load_checkpoint(path: Path) -> Checkpoint:
    """Read one checkpoint; raises :class:`DamagedError` with what is wrong."""
    try:
        sealed = json.loads(path.read_bytes())
        text: str = sealed["checkpoint"]
        if hashlib.sha256(text.encode()).hexdigest() != sealed["checksum"]:
            raise ValueError("its checksum does not match")
        description = json.loads(text)
        if description["format"] != FORMAT:
            raise ValueError(f"its format is {description['format']!r}, not {FORMAT!r}")
        tensors = path.with_suffix(".safetensors").read_bytes()
        if hashlib.sha256(tensors).hexdigest() != description["tensors"]:
            raise ValueError("the checksum of its tensors does not match")
        return Checkpoint(description["version"], safetensors.torch.load(tensors), description)
    except (ValueError, KeyError, TypeError, OSError, SafetensorError) as error:
        raise DamagedError(f"checkpoint {str(path)!r} is damaged: {error}") from None


def newest(folder: Path, use: Callable[[Checkpoint], Loaded]) -> Loaded:
    """``use`` of the newest checkpoint that is whole; those passed over are warned of."""
    paths = checkpoint_paths(folder)
    if not paths:
        raise FileNotFoundError(f"no checkpoint in {str(folder)!r}")
    for path in paths:
        try:
            return use(load_checkpoint(path))
        except DamagedError as error:
            last = error
            warnings.warn(f"{error}; trying the one before", stacklevel=2)
    raise DamagedError(f"no checkpoint in {str(folder)!r} is usable; the last tried: {last}")
