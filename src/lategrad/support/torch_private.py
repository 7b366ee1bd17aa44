"""The private functions of torch that the package uses: all in this file, and a test fails when one is gone.

- ``CppCodeCache`` compiles C++ with the flags that torch found for this machine, and keeps it on disk;
- ``torch.cuda._compile_kernel`` compiles and launches CUDA, without an extension to build;
- ``TorchDynamoException`` is what ``torch.compile`` raises for what it cannot do;
- ``flatten_dense_tensors``, ``unflatten_dense_tensors`` and ``torch._foreach_copy_`` gather and scatter many tensors in
  a few calls: 400 take a quarter of the time of a loop in Python;
- ``_make_wrapper_subclass`` and ``_disabled_torch_function_impl`` make tensors whose operations are defined in Python,
  as DTensor is one;
- ``_engine_run_backward`` is what ``torch.autograd.grad`` calls after some 40 µs of checking its arguments.
"""

from collections.abc import Sequence
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward


@lru_cache(maxsize=256)
def cpu_library(code: str, *flags: str) -> Any:
    """C++ code, compiled with flags of its own and loaded with ctypes."""
    from torch._inductor.codecache import CppCodeCache

    # torch's default flags assume vectorized code
    vectorize = ("-ftree-loop-vectorize", "-fno-unswitch-loops", "-fno-math-errno")
    return CppCodeCache.load(code, device_type="cpu", extra_flags=(*vectorize, *flags))


@lru_cache(maxsize=256)
def cuda_kernel(code: str, name: str, device: int) -> Any:
    """A compiled kernel, called with (grid, block, arguments); it runs on the current stream."""
    with torch.cuda.device(device):
        return torch.cuda._compile_kernel(code, name)


@cache
def missing_compiler(device_type: str, backend: str) -> str | None:
    """Why nothing can be compiled for a type of device on this machine; None when it can."""
    try:
        if device_type == "cpu":
            cpu_library('extern "C" int works() { return 1; }')
        elif device_type != "cuda":
            return f"no compiler for {device_type}"
        elif backend == "loops":
            cuda_kernel('extern "C" __global__ void works() {}', "works", torch.cuda.current_device())
        elif find_spec("triton") is None:
            return "the package triton is not installed"
    except compiler_errors() as error:
        return f"no compiler works here: {str(error).strip().splitlines()[0]}"
    return None


def compiler_errors() -> tuple[type[Exception], ...]:
    """What is raised where a compiler is missing, fails or is killed, also by the Ctrl-C that ends a run."""
    from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

    return InvalidCxxCompiler, CppCompileError, OSError


def tracing_error() -> type[Exception]:
    """The exception of ``torch.compile`` for code that it cannot trace; importing it takes a second."""
    from torch._dynamo.exc import TorchDynamoException

    return TorchDynamoException


def gather(parts: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """Tensors, each in row-major order, as one vector; a single contiguous tensor is not copied."""
    vector: Tensor = torch._C._nn.flatten_dense_tensors(list(parts))
    return vector if dtype is None else vector.to(dtype)


def scatter(vector: Tensor, targets: Sequence[Tensor]) -> None:
    """Copy a vector into the tensors that :func:`gather` would make it from."""
    torch._foreach_copy_(list(targets), torch._C._nn.unflatten_dense_tensors(vector, list(targets)))


def gradients(value: Tensor, parameters: tuple[Tensor, ...]) -> list[Tensor]:
    """The gradients of one number, zeros for parameters that it does not depend on; frees the graph.

    Anything but a differentiable plain tensor of one number goes through ``torch.autograd.grad``, which handles more
    kinds of tensors and says what is wrong.
    """
    if type(value) is not Tensor or value.numel() != 1 or not value.requires_grad:
        return list(torch.autograd.grad(value, parameters, materialize_grads=True))
    parts = _engine_run_backward((value,), (torch.ones_like(value),), False, False, parameters, True,
                                 accumulate_grad=False)  # fmt: skip
    return [torch.zeros_like(p) if part is None else part for p, part in zip(parameters, parts, strict=True)]


class WrapperTensor(Tensor):
    """A tensor without memory of its own; subclasses define its operations in ``__torch_dispatch__``."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def allocate(cls, shape: Sequence[int], like: Tensor) -> Any:
        """An object of this class, with the dtype and device of ``like``."""
        return Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=like.dtype, device=like.device)
