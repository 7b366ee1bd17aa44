"""Reads and writes one checkpoint: a file of tensors (safetensors) and its description (JSON), without pickle.

The description is written last, renamed into place, and holds checksums of itself and of the tensors: a checkpoint is
complete or not there, and damage is noticed. Among the tensors, ``output`` is the vector to evaluate and ship,
``state.N`` is the rule's state, and ``record.V`` the output after V updates if it was not yet evaluated.
"""

import hashlib
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor

from lategrad.support.files import read_plain, replacing, write_text
from lategrad.support.validation import require_form

FORMAT = "lategrad-checkpoint-5"
_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
           torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL"}  # fmt: skip
# Of a description: everything that a run needs to continue.
_COUNTS = {str: int}
_CONFIG = {"problem": str, "contents": str, "rule": dict, "settings": dict, "compiled": bool, "replaced": _COUNTS}
_FORM = {"version": int, "log": {"updates": int, "checksum": int}, "records": {str: [(int, float)], "loss": [float]},
         "refusals": _COUNTS, "bytes": {"up": int, "down": int}, "memories_lost": _COUNTS, "seconds": float,
         "gate": {str: {"applied": int, "dropped": int}}, "next_sequence": _COUNTS, "config": _CONFIG}  # fmt: skip


class DamagedError(ValueError):
    """A file of a run has changed since it was written."""


@dataclass(frozen=True)
class Checkpoint:
    """What a run needs to continue, in memory of its own: it may be sent to another machine, or written by a thread."""

    version: int
    tensors: dict[str, Tensor]  # `output`, which may share memory with the state, and the state: `state.0`, ...
    description: dict[str, Any]  # plain JSON values; the run's configuration is its `config`
    rows: NDArray[Any]  # the log of updates; of a checkpoint to be saved, the rows that the archive does not have yet

    @property
    def settings(self) -> dict[str, Any]:
        """The run's options, with the choice that was made for ``compile``."""
        config = self.description["config"]
        return {**config["settings"], "compile": config["compiled"]}

    def write(self, folder: Path, log_mark: dict[str, int]) -> None:
        """Write both files, so that a reader finds this checkpoint or the one before, never a part."""
        path = folder / f"checkpoint-{self.version:012d}.json"
        output = {"output": self.tensors["output"].clone()}  # in the file it shares no memory
        try:
            tensors = write_tensors(path.with_suffix(".safetensors"), self.tensors | output)
            description = {"format": FORMAT, "version": self.version, "tensors": tensors, "log": log_mark,
                           "output": "the tensor 'output': the vector to evaluate and ship",
                           **self.description}  # fmt: skip
            text = json.dumps(description, indent=1)
            sealed = json.dumps({"checksum": hashlib.sha256(text.encode()).hexdigest(), "checkpoint": text}, indent=1)
            write_text(path, sealed)
        except OSError:
            if not path.exists():
                path.with_suffix(".safetensors").unlink(missing_ok=True)  # it must not fill a full disk
            raise


def checkpoint_paths(folder: Path, last: float = math.inf) -> list[Path]:
    """The descriptions of the checkpoints in a folder, up to update ``last``, the newest first."""
    paths = [path for path in folder.glob("checkpoint-*.json") if re.fullmatch(r"checkpoint-\d{12,18}", path.stem)]
    return sorted((path for path in paths if version_of(path) <= last), key=version_of, reverse=True)


def version_of(path: Path) -> int:
    return int(path.stem.partition("-")[2])


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> str:
    """Write a safetensors file; returns its checksum.

    The format is a header (its length, then names, types, shapes and offsets as JSON) and the bytes of all tensors,
    written without a copy. ``safetensors`` itself would copy the state twice and hold the interpreter's lock meanwhile.
    """
    parts = {name: leaf.detach().cpu().contiguous() for name, leaf in tensors.items()}
    header, end = {}, 0
    for name, leaf in parts.items():
        begin, end = end, end + leaf.nbytes
        header[name] = {"dtype": _DTYPES[leaf.dtype], "shape": list(leaf.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with replacing(path) as part, part.open("wb") as file:
        pieces: list[Any] = [len(text).to_bytes(8, "little"), text]
        pieces += [leaf.reshape(-1).view(torch.uint8).numpy() for leaf in parts.values()]
        for piece in pieces:
            file.write(piece)
            digest.update(piece)
    return digest.hexdigest()


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and description of one checkpoint; raises :class:`DamagedError` with what is wrong."""
    try:
        sealed = json.loads(read_plain(path))
        text: str = sealed["checkpoint"]
        if hashlib.sha256(text.encode()).hexdigest() != sealed["checksum"]:
            raise ValueError("its checksum does not match")
        description = json.loads(text)
        if description["format"] != FORMAT:
            raise DamagedError(f"checkpoint {str(path)!r} is of another version of lategrad: its format is "
                               f"{description['format']!r}, not {FORMAT!r}")  # fmt: skip
        require_form("its description", description, _FORM)
        if description["version"] != version_of(path):
            raise ValueError(f"its version is {description['version']}")
        workers, series = {**description["next_sequence"], **description["gate"]}, description["records"]
        if not all(map(str.isdecimal, workers)) or len({len(values) for values in series.values()}) > 1:
            raise ValueError("its workers have no numbers, or its records differ in length")
        contents = read_plain(path.with_suffix(".safetensors"))
        if hashlib.sha256(contents).hexdigest() != description["tensors"]:
            raise ValueError("the checksum of its tensors does not match")
        tensors = safetensors.torch.load(contents)
        leaves = sum(name.startswith("state.") for name in tensors)
        expected = {"output", *(f"state.{i}" for i in range(max(1, leaves)))}
        records = {name for name in tensors if re.fullmatch(r"record\.\d{1,15}", name)}
        odd = [name for name in records if tensors[name].shape != tensors["output"].shape]
        if odd or (odd := sorted(tensors.keys() ^ (expected | records))):
            raise ValueError(f"its tensor {odd[0]!r} is missing, unknown or of another shape")
        return tensors, description
    except DamagedError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError, SafetensorError) as error:
        raise DamagedError(f"checkpoint {str(path)!r} is damaged: {type(error).__name__}: {error}") from None
