"""A problem on its way to worker processes: pickled once into a memory file, whose tensors all workers map.

Each tensor on its own would take a file descriptor in every worker, and a fork server passes no more than 256.
"""

import os
import pickle
import weakref
from multiprocessing import reduction
from typing import Any

import torch


class SharedPickle:
    """An object that ``multiprocessing`` sends as a file descriptor; its tensors are copied where they are written to.

    >>> SharedPickle(torch.nn.Linear(2, 3)).load()
    Linear(in_features=2, out_features=3, bias=True)
    """

    def __init__(self, contents: Any) -> None:
        self._own(os.memfd_create("lategrad-problem"))
        with open(self._descriptor, "wb", closefd=False) as file:
            torch.save(contents, file, pickle_protocol=pickle.HIGHEST_PROTOCOL)

    def _own(self, descriptor: int) -> None:
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)

    def load(self) -> Any:
        return torch.load(f"/proc/self/fd/{self._descriptor}", mmap=True, weights_only=False, map_location="cpu")

    def __getstate__(self) -> Any:
        return reduction.DupFd(self._descriptor)

    def __setstate__(self, duplicate: Any) -> None:
        self._own(duplicate.detach())
