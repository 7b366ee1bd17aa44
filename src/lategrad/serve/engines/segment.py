"""How a server and a worker process talk: the header of every message, and memory that both share for the vectors.

A segment has no name (it is a memory file, reached through its descriptor, or memory of a GPU, reached through a
handle), so that nothing is left behind however a process ends.
"""

import mmap
import os
import struct
import weakref
from multiprocessing import reduction
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lategrad.serve.compression import Compression
from lategrad.serve.messages import JobInfo
from lategrad.support import cuda_ipc

READY, JOB, RESULT, FAILED, END = range(5)
"""Kinds of messages: a worker has started; a job for it; its gradient; why there is none; there is no more work."""
HEADER = struct.Struct("<BBb5xqqqqqq")  # 56 bytes: a vector that follows is aligned
_ALIGNMENT = 64


class Header(NamedTuple):
    """What every message begins with; text or the bytes of a vector may follow."""

    kind: int
    slot: int = 0  # where in the segment the vector lies
    dtype: int = -1  # of the vector that follows; negative if none does
    sequence: int = 0
    version: int = 0
    local_steps: int = 0
    parent_job: int = -1
    member: int = 0
    server_start: int = 0  # a random number of each start of the server: gradients for an earlier one are discarded

    def pack(self) -> bytes:
        return HEADER.pack(*self)

    @classmethod
    def unpack(cls, message: bytes) -> "Header":
        return cls._make(HEADER.unpack_from(message))

    @property
    def info(self) -> JobInfo:
        return JobInfo(self.local_steps, self.parent_job)


class SegmentAddress(NamedTuple):
    """Where another process of the same machine finds a segment."""

    pid: int
    descriptor: int
    slots: int
    compression: Compression


class Segment:
    """Memory that a worker and the server share: a query and a gradient, as it travels, for each job of the worker.

    >>> mine = Segment.create(Compression("none", 3, torch.float32))
    >>> theirs = Segment.attach(mine.address)
    >>> _ = mine.grads[0].copy_(torch.tensor([1.0, 2.0, 3.0]))
    >>> theirs.grads[0]
    tensor([1., 2., 3.])
    """

    def __init__(self, address: SegmentAddress) -> None:
        self.address = address
        size = _sizes(address.compression, address.slots)[1]
        memory = torch.frombuffer(mmap.mmap(address.descriptor, size), dtype=torch.uint8)
        self.queries, self.grads = _vectors(memory, address.compression, address.slots)

    def synchronize(self) -> None:
        """What is written is there for the other process at once."""

    @classmethod
    def create(cls, compression: Compression, slots: int = 1) -> "Segment":
        descriptor = os.memfd_create("lategrad-segment")
        address = SegmentAddress(os.getpid(), descriptor, slots, compression)
        os.ftruncate(descriptor, _sizes(compression, slots)[1])
        segment = cls(address)
        weakref.finalize(segment, os.close, descriptor)
        return segment

    @classmethod
    def attach(cls, address: SegmentAddress) -> "Segment":
        """Open the segment of another process of this user; ``OSError`` if the system does not allow it."""
        return cls._open(os.open(f"/proc/{address.pid}/fd/{address.descriptor}", os.O_RDWR), address)

    @classmethod
    def _open(cls, descriptor: int, address: SegmentAddress) -> "Segment":
        try:
            return cls(address._replace(pid=os.getpid(), descriptor=descriptor))
        finally:
            os.close(descriptor)

    def __reduce__(self) -> tuple[Any, ...]:  # worker processes inherit the descriptor when they are started
        return _inherit, (reduction.DupFd(self.address.descriptor), self.address)


def _inherit(duplicate: Any, address: SegmentAddress) -> Segment:
    return Segment._open(duplicate.detach(), address)


class GpuSegment:
    """The same in the memory of a GPU that both compute on; who creates it keeps it until the other has ended."""

    def __init__(self, memory: Tensor, handle: bytes, compression: Compression, slots: int) -> None:
        self._memory, self._parts = memory, (handle, memory.device, compression, slots)
        self.queries, self.grads = _vectors(memory, compression, slots)

    @classmethod
    def create(cls, compression: Compression, slots: int, device: torch.device) -> "GpuSegment":
        memory, handle = cuda_ipc.allocate(_sizes(compression, slots)[1], device)
        return cls(memory, handle, compression, slots)

    @classmethod
    def open(cls, handle: bytes, device: torch.device, compression: Compression, slots: int) -> "GpuSegment":
        try:
            memory = cuda_ipc.open_handle(handle, _sizes(compression, slots)[1], device)
        except OSError as error:
            raise OSError(f"a worker cannot share memory on {device} with the server: {error}; use "
                          "server_device='cpu'") from None  # fmt: skip
        return cls(memory, handle, compression, slots)

    def synchronize(self) -> None:
        """Wait until the GPU has written, and read, what this process asked it to."""
        torch.cuda.current_stream(self._memory.device).synchronize()

    def __reduce__(self) -> tuple[Any, ...]:
        return GpuSegment.open, self._parts


def _sizes(form: Compression, slots: int) -> tuple[int, int]:
    """Bytes of the queries, with room to align what follows, and of the whole segment."""
    queries = -(-slots * form.dim * form.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    return queries, queries + slots * form.message_length * form.message_dtype.itemsize


def _vectors(memory: Tensor, form: Compression, slots: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The queries and the gradients in the bytes of a segment."""
    queries, grads = memory[: slots * form.dim * form.dtype.itemsize], memory[_sizes(form, slots)[0] :]
    return queries.view(form.dtype).view(slots, -1).unbind(), grads.view(form.message_dtype).view(slots, -1).unbind()
