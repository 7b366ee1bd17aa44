"""What a worker and the server say to each other on Ray, and how their vectors travel.

Up to a few kilobytes, header and vector travel as one string of bytes inside the call, which Ray neither pickles nor
stores. Longer vectors go through the object store: written there once by the sender, read in place by the receiver,
also from another machine's copy. Where worker and server are on one machine, both go through a segment of memory that
they share, and the call carries the header alone: nothing is stored and freed for an update.

A segment has no name (it is a memory file of the worker, which the server opens through ``/proc``), so that nothing is
left behind however a process ends.
"""

from __future__ import annotations

import mmap
import os
import struct
import warnings
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from lategrad.serve.compression import Compression
from lategrad.serve.messages import Made

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8)
_HEADER = struct.Struct("<8q")  # the seven numbers of a Header, and the vector's dtype
_ALIGNMENT = 64
INLINE = 65_536
"""Bytes of a vector that travels inside the call; Ray itself keeps up to 100 KiB of a call out of the object store."""

Parts = tuple[bytes] | tuple[bytes, NDArray[Any]]
Reply = bytes | tuple[bytes, NDArray[Any]] | None
"""A job; or nothing, when there is no more work for this worker; or a request."""
WAIT = b"wait"
"""The reply of a server that does not know yet where to go on: join again in a while."""
REJOIN = b"join"
"""The reply to a gradient of an earlier start of the server, which is void: join again."""


class Header(NamedTuple):
    """What travels with every vector."""

    server_start: int
    """A number that is drawn anew at each start of the server: gradients for an earlier one are void."""
    member: int
    worker: int
    sequence: int
    version: int
    steps: int = 0
    """Of the worker's own, and the job before; see :class:`~lategrad.serve.messages.Made`."""
    previous: int = -1

    @property
    def made(self) -> Made:
        """How the worker made its vector."""
        return Made(self.steps, self.previous)


def _size(form: tuple[int, int]) -> int:
    """Bytes of a vector, with room to align the next one."""
    length, dtype = form
    return -(-length * _DTYPES[dtype].itemsize // _ALIGNMENT) * _ALIGNMENT


def pack(header: Header, vector: Tensor) -> Parts:
    """The arguments of a call, or a reply.

    >>> header = Header(server_start=7, member=0, worker=0, sequence=1, version=2)
    >>> unpack(*pack(header, torch.tensor([1.0, 2.0])))
    (Header(server_start=7, member=0, worker=0, sequence=1, version=2, steps=0, previous=-1), tensor([1., 2.]))
    """
    head = _HEADER.pack(*header, _DTYPES.index(vector.dtype))
    array = vector.contiguous().view(torch.uint8).numpy()
    return (head + array.tobytes(),) if len(array) <= INLINE else (head, array)


def pack_header(header: Header) -> bytes:
    """A header whose vector lies in the segment."""
    return _HEADER.pack(*header, -1)


def unpack(head: bytes, array: NDArray[Any] | None = None) -> tuple[Header, Tensor | None]:
    """What was packed; the vector is a view, not to be written to, and None if it lies in the segment."""
    *numbers, kind = _HEADER.unpack_from(head)
    if kind < 0:
        return Header(*numbers), None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable")
        if array is None:
            return Header(*numbers), torch.frombuffer(head, dtype=_DTYPES[kind], offset=_HEADER.size)
        return Header(*numbers), torch.from_numpy(array).view(_DTYPES[kind])


class SegmentAddress(NamedTuple):
    """Where on its machine another process finds a segment."""

    pid: int
    descriptor: int
    query: tuple[int, int]
    """Length and dtype."""
    grad: tuple[int, int]
    """Of a gradient as it travels, likewise."""


class Segment:
    """A gradient, as it travels, and a query in memory that a worker and the server share.

    >>> mine = Segment.create(Compression("none", 3, torch.float32))
    >>> theirs = Segment.attach(mine.address)
    >>> _ = mine.grad.copy_(torch.tensor([1.0, 2.0, 3.0]))
    >>> theirs.grad
    tensor([1., 2., 3.])
    """

    def __init__(self, address: SegmentAddress) -> None:
        self.address = address
        memory = mmap.mmap(address.descriptor, _size(address.query) + _size(address.grad))
        self.query, self.grad = (
            torch.frombuffer(memory, dtype=_DTYPES[dtype], count=length, offset=offset)
            for (length, dtype), offset in ((address.query, 0), (address.grad, _size(address.query)))
        )

    @classmethod
    def create(cls, compression: Compression) -> Segment:
        """A new one, which lives as long as someone has it."""
        query = compression.dim, _DTYPES.index(compression.dtype)
        grad = compression.message_length, _DTYPES.index(compression.message_dtype)
        descriptor = os.memfd_create("lategrad-segment")
        os.ftruncate(descriptor, _size(query) + _size(grad))
        return cls(SegmentAddress(os.getpid(), descriptor, query, grad))

    @classmethod
    def attach(cls, address: SegmentAddress) -> Segment:
        """That of another process of this user; ``OSError`` if the system does not allow it."""
        descriptor = os.open(f"/proc/{address.pid}/fd/{address.descriptor}", os.O_RDWR)
        try:
            return cls(address._replace(pid=os.getpid(), descriptor=descriptor))
        finally:
            os.close(descriptor)
