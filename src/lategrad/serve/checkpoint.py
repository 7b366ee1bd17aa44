"""Checkpoints: a pair of files for each, tensors (safetensors) and their description (JSON); nothing executes.

The description is written last, renamed into place, and holds checksums of itself and of the tensors: a
checkpoint is there as a whole or not at all, and a damaged one is noticed. In ``tensors``, ``output`` is the
vector to evaluate and ship; ``state.N`` are the rule's own and of no use without it.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

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
    """Write, wait for the disk, rename: a reader sees the old file or the new one, never half of one."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(part, "wb") as file:
            file.write(contents)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Make a rename last, where folders can be opened."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def save_checkpoint(folder: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Write a checkpoint and drop the oldest, so that ``keep`` remain; returns its description's path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"checkpoint-{checkpoint.version:012d}.json"
    tensors = safetensors.torch.save({name: leaf.contiguous().cpu() for name, leaf in checkpoint.tensors.items()})
    write_atomically(path.with_suffix(".safetensors"), tensors)
    description = {
        "format": FORMAT,
        "version": checkpoint.version,
        "output": "the tensor 'output': the vector to evaluate and ship",
        "tensors": hashlib.sha256(tensors).hexdigest(),
        **checkpoint.description,
    }
    text = json.dumps(description, indent=1)
    sealed = json.dumps({"checksum": hashlib.sha256(text.encode()).hexdigest(), "checkpoint": text}, indent=1)
    write_atomically(path, sealed.encode())
    for old in checkpoint_paths(folder)[keep:]:
        old.unlink()
        old.with_suffix(".safetensors").unlink(missing_ok=True)
    return path


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
