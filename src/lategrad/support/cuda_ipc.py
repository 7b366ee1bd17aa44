"""Memory of a GPU that two processes share: one allocates it, the other opens it by a handle (CUDA IPC).

The calls are those of the CUDA driver, because torch counts the references of other processes to what it shares, and
never frees what a killed process did not return.
"""

import ctypes
import weakref
from functools import cache
from typing import Any

import torch
from torch import Tensor

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1  # the one flag that cuIpcOpenMemHandle takes


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


class _Memory:
    """An address of the GPU as torch takes it: the tensor made of it keeps this object alive."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: Any) -> None:
    if (code := getattr(_driver(), name)(*arguments)) != 0:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        reason = (text.value or b"unknown error").decode()
        raise OSError(f"{name.partition('_')[0]}: {reason} (CUDA error {code})")


def _as_tensor(address: int, size: int, device: torch.device, release: str) -> Tensor:
    memory = _Memory(address, size)
    free = weakref.finalize(memory, getattr(_driver(), release), ctypes.c_uint64(address))
    free.atexit = False  # the end of a process frees what it has
    return torch.as_tensor(memory, device=device)


def allocate(size: int, device: torch.device) -> tuple[Tensor, bytes]:
    """Bytes on a GPU, and the handle by which another process opens them; the tensor must outlive its use of them."""
    address, handle = ctypes.c_uint64(), _Handle()
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # the driver needs torch's context on this thread
        _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        memory = _as_tensor(address.value, size, device, "cuMemFree_v2")
        _call("cuIpcGetMemHandle", ctypes.byref(handle), address)
    return memory, ctypes.string_at(ctypes.byref(handle), HANDLE_BYTES)


def open_handle(handle: bytes, size: int, device: torch.device) -> Tensor:
    """The memory of another process on the same GPU."""
    address = ctypes.c_uint64()
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()
        given = _Handle.from_buffer_copy(handle)
        _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, ctypes.c_uint(_LAZY_PEER_ACCESS))
        return _as_tensor(address.value, size, device, "cuIpcCloseMemHandle")
