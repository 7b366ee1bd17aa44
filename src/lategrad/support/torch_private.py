"""Functions of torch that are private: all in this file, and a test tells when one is gone.

- ``CppCodeCache`` compiles C++ with the flags that torch found for this machine, and keeps it on disk;
- ``torch.cuda._compile_kernel`` compiles and launches CUDA, without an extension to build;
- ``TorchDynamoException`` is what ``torch.compile`` raises for what it cannot do;
- ``torch._foreach_copy_`` copies many tensors in a few launches;
- ``_engine_run_backward`` is what ``torch.autograd.grad`` calls after some 40 µs of looking at its arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward


@lru_cache(maxsize=256)
def cpu_library(code: str) -> Any:
    """The functions of C++ code, through ctypes."""
    from torch._inductor.codecache import CppCodeCache

    flags = ("-ftree-loop-vectorize", "-fno-math-errno")  # torch compiles code that is vectorized already
    return CppCodeCache.load(code, device_type="cpu", extra_flags=flags)


@lru_cache(maxsize=256)
def cuda_kernel(code: str, name: str, device: int) -> Any:
    """A kernel, to be called with (grid, block, arguments); it runs on the current stream."""
    with torch.cuda.device(device):
        return torch.cuda._compile_kernel(code, name)


@cache
def missing_compiler(device_type: str, backend: str) -> str | None:
    """Why nothing can be compiled for a kind of device here; None when it can be."""
    try:
        if device_type == "cpu":
            cpu_library('extern "C" int works() { return 1; }')
        elif device_type != "cuda":
            return f"no compiler for {device_type}"
        elif backend == "loops":
            cuda_kernel('extern "C" __global__ void works() {}', "works", torch.cuda.current_device())
        elif find_spec("triton") is None:
            return "the package triton is not installed"
    except _compiler_errors() as error:
        return f"no compiler works here: {str(error).strip().splitlines()[0]}"
    return None


def _compiler_errors() -> tuple[type[Exception], ...]:
    from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

    return InvalidCxxCompiler, CppCompileError, OSError


def tracing_error() -> type[Exception]:
    """What ``torch.compile`` raises for what it cannot do; a function, as importing it takes a second."""
    from torch._dynamo.exc import TorchDynamoException

    return TorchDynamoException


def copy_all(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy each tensor to its target."""
    torch._foreach_copy_(list(targets), list(sources))


def gradients(value: Tensor, parameters: tuple[Tensor, ...]) -> list[Tensor]:
    """Those of one number in parameters, zeros where it does not depend on one; the graph is given up.

    Whatever is not a plain tensor of one number that can be differentiated goes the long way, which knows more kinds
    of tensors, and says what is wrong.
    """
    if type(value) is not Tensor or value.numel() != 1 or not value.requires_grad:
        return list(torch.autograd.grad(value, parameters, materialize_grads=True))
    parts = _engine_run_backward((value,), (torch.ones_like(value),), False, False, parameters, True,
                                 accumulate_grad=False)  # fmt: skip
    return [torch.zeros_like(p) if part is None else part for p, part in zip(parameters, parts, strict=True)]
