"""A problem on its way to worker processes: a few bytes, and all its tensors in one shared segment.

Each tensor on its own would take a file descriptor in every worker, and a fork server passes no more than 256.
The segment is made once, however many workers are started, and read in place by all of them.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor
from torch.storage import TypedStorage, UntypedStorage

_ALIGNMENT = 64


class _Packer(pickle.Pickler):
    """Notes where in the segment each storage is to be."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.storages: dict[int, tuple[int, UntypedStorage]] = {}
        self.size = 0

    def persistent_id(self, part: Any) -> Any:
        """For a storage its offset, its size and the dtype of what is in it."""
        if not isinstance(part, TypedStorage):
            return None
        storage = part._untyped_storage
        if storage._cdata not in self.storages:
            self.storages[storage._cdata] = (self.size, storage)
            self.size += -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT
        return self.storages[storage._cdata][0], storage.nbytes(), part.dtype


class _Unpacker(pickle.Unpickler):
    """Finds the storages in the segment again."""

    def __init__(self, file: io.BytesIO, segment: Tensor) -> None:
        super().__init__(file)
        self.bytes = segment.untyped_storage()

    def persistent_load(self, where: Any) -> TypedStorage:
        """A part of the segment, not a copy."""
        offset, size, dtype = where
        return TypedStorage(wrap_storage=self.bytes[offset : offset + size], dtype=dtype, _internal=True)


class Packed:
    """What was packed, ready to be pickled by ``multiprocessing``; :meth:`unpack` gives it back.

    >>> packed = Packed(torch.nn.Linear(2, 3))
    >>> packed.unpack().weight.data_ptr() == packed.unpack().weight.data_ptr()
    True
    """

    def __init__(self, part: Any) -> None:
        file = io.BytesIO()
        packer = _Packer(file)
        packer.dump(part)
        self._form = file.getvalue()
        self._segment = torch.empty(max(packer.size, 1), dtype=torch.uint8).share_memory_()
        for offset, storage in packer.storages.values():
            target = self._segment.untyped_storage()[offset : offset + storage.nbytes()]
            target.copy_(storage)

    def unpack(self) -> Any:
        """The same, with its tensors in the shared segment."""
        return _Unpacker(io.BytesIO(self._form), self._segment).load()
