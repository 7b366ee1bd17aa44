"""What a worker and the server say to each other on Ray, and how their vectors travel.

Up to a few kilobytes, header and vector travel as one string of bytes inside the call, which Ray neither pickles nor
stores. Longer vectors go through the object store: written there once by the sender, read in place by the receiver,
also from another machine's copy. Where worker and server are on one machine, both go through a segment of memory that
they share, and the call carries the header alone: nothing is stored and freed for an update.
"""

import warnings
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from lategrad.serve.engines.segment import HEADER, Header

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8)
INLINE = 65_536  # bytes of a vector that travels inside the call; Ray keeps up to 100 KiB out of the object store
Parts = tuple[bytes] | tuple[bytes, NDArray[Any]]
Reply = bytes | tuple[bytes, NDArray[Any]] | None  # a job, or a request; None when there is no more work
WAIT = b"wait"  # the reply of a server that has no state yet: join again in a while
REJOIN = b"join"  # the reply to a gradient for an earlier start of the server, which is discarded: join again


def pack(header: Header, vector: Tensor) -> Parts:
    """The arguments of a call, or a reply.

    >>> header = Header(kind=2, sequence=1, version=2, member=3, server_start=7)
    >>> again, vector = unpack(*pack(header, torch.tensor([1.0, 2.0])))
    >>> again.member, again.sequence, vector
    (3, 1, tensor([1., 2.]))
    """
    head = header._replace(dtype=_DTYPES.index(vector.dtype)).pack()
    array = vector.contiguous().view(torch.uint8).numpy()
    return (head + array.tobytes(),) if len(array) <= INLINE else (head, array)


def unpack(head: bytes, array: NDArray[Any] | None = None) -> tuple[Header, Tensor | None]:
    """The header and the vector, which is a read-only view, or None if it lies in the segment."""
    header = Header.unpack(head)
    if header.dtype < 0:
        return header, None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable")
        if array is None:
            return header, torch.frombuffer(head, dtype=_DTYPES[header.dtype], offset=HEADER.size)
        return header, torch.from_numpy(array).view(_DTYPES[header.dtype])
