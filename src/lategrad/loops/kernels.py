"""Compiled C loops on vectors that lie in many tensors; see :mod:`lategrad.loops.c_source`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lategrad.loops.c_source import CHUNK, THREADS, Source

_NUMBER_THREADS = 1024


Place = Tensor | Sequence[Tensor]
"""What lies at a place: a number, or a vector as its tensors."""


class Kernels:
    """The loops of one function on vectors that lie in tensors of given sizes.

    Args:
        source: the code.
        sizes: the entries of each tensor of a vector.
        device: where everything lies.
    """

    def __init__(self, source: Source, sizes: Sequence[int], device: torch.device) -> None:
        self.device, self.tensors = device, len(sizes)
        where = [(t, begin) for t, size in enumerate(sizes) for begin in range(0, size, CHUNK)]
        self.chunks = len(where)
        self.where = torch.tensor(where, dtype=torch.int64, device=device)
        self.sizes = torch.tensor(sizes, dtype=torch.int64, device=device)
        self.kept = torch.zeros(source.numbers, dtype=torch.float64, device=device)
        self.sums = torch.zeros(source.sums * self.chunks, dtype=torch.float64, device=device)
        self.table = torch.zeros(source.places * (1 + self.tensors), dtype=torch.int64, device=device)
        self.numbers, self.vectors = self.table[: source.places], self.table[source.places :]
        self.addresses: list[int] = []
        self.launch = _launcher(source, self)

    def __call__(self, places: Sequence[Place]) -> None:
        """Run on what lies at each place now."""
        self.run(self.addresses_of(places))

    def addresses_of(self, places: Sequence[Place]) -> list[int]:
        """Where that is in memory."""
        none = [0] * self.tensors
        addresses = [place.data_ptr() if isinstance(place, Tensor) else 0 for place in places]
        for place in places:
            addresses += none if isinstance(place, Tensor) else [tensor.data_ptr() for tensor in place]
        return addresses

    def run(self, addresses: list[int]) -> None:
        """Run on what lies at addresses that are known already."""
        if addresses != self.addresses:
            self.table.copy_(torch.tensor(addresses), non_blocking=True)
            self.addresses = addresses
        self.launch()


def _launcher(source: Source, kernels: Kernels) -> Any:
    if kernels.device.type == "cpu":
        run = _cpu_library(source.cpu).run
        run.restype = None
        tables = [kernels.numbers, kernels.vectors, kernels.where, kernels.sizes, kernels.kept, kernels.sums]
        numbers, vectors, where, sizes, kept, sums = (ctypes.c_void_p(t.data_ptr()) for t in tables)
        counts = ctypes.c_longlong(kernels.tensors), ctypes.c_longlong(kernels.chunks)
        arguments = (numbers, vectors, counts[0], where, sizes, counts[1], kept, sums)
        return lambda: run(*arguments, ctypes.c_longlong(torch.get_num_threads()))
    return _CudaLauncher(source, kernels)


@lru_cache(maxsize=256)
def _cpu_library(code: str) -> Any:
    from torch._inductor.codecache import CppCodeCache

    flags = ("-ftree-loop-vectorize", "-fno-math-errno")  # torch compiles code that is vectorized already
    return CppCodeCache.load(code, device_type="cpu", extra_flags=flags)


@lru_cache(maxsize=256)
def _cuda_functions(code: str, names: tuple[str, ...], device: int) -> list[Any]:
    from torch.cuda._utils import _cuda_load_module, _nvrtc_compile

    with torch.cuda.device(device):
        machine_code, _ = _nvrtc_compile(code, names[0])
        loaded: Any = _cuda_load_module(machine_code, list(names))
    return [loaded[name] for name in names]


class _CudaLauncher:
    """Launches the numbers and passes of each level, one after another, on the current stream."""

    def __init__(self, source: Source, kernels: Kernels) -> None:
        from torch.cuda._utils import _get_gpu_runtime_library

        self.kernels = kernels
        self.driver = _get_gpu_runtime_library()
        names = tuple(name for name, _ in source.cuda_kernels)
        functions = _cuda_functions(source.cuda, names, kernels.device.index or 0)
        self.plan = [
            (function, kernels.chunks if over_chunks else 1, THREADS if over_chunks else _NUMBER_THREADS)
            for function, (_, over_chunks) in zip(functions, source.cuda_kernels, strict=True)
        ]
        self.arguments: Any = None

    def __call__(self) -> None:
        k = self.kernels
        if self.arguments is None:
            pointers = [ctypes.c_void_p(t.data_ptr())
                        for t in (k.numbers, k.vectors, k.where, k.sizes, k.kept, k.sums)]  # fmt: skip
            counts = ctypes.c_int(k.tensors), ctypes.c_int(k.chunks)
            self.values = [*pointers[:2], counts[0], *pointers[2:4], counts[1], *pointers[4:]]
            self.arguments = (ctypes.c_void_p * 8)(*(ctypes.addressof(value) for value in self.values))
        with torch.cuda.device(k.device):
            stream = torch.cuda.current_stream()._as_parameter_
            for function, blocks, threads in self.plan:
                error = self.driver.cuLaunchKernel(
                    function.func, blocks, 1, 1, threads, 1, 1, 0, stream, self.arguments, None
                )
                if error:
                    raise RuntimeError(f"CUDA error {error} when launching a step")
