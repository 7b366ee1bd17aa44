"""The ``torch.compile`` backend: update and copy become one pass over the buffers, with nothing allocated.

It can run whatever torch can trace: many runs at once, matrix products, sorting, a gradient and an update as
one. Compiling takes 1 to 6 seconds; a call costs 20 to 50 microseconds before any arithmetic. Its guards stay:
without them (``guard_filter_fn``) a call is 2 to 20 microseconds cheaper, and code for one size runs on another
without a word (on a GPU that was an illegal memory access). Where microseconds count there are the loops.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from lategrad.execution.eager import Run, eager_run
from lategrad.execution.unsupported import UnsupportedError
from lategrad.rules.rule import AnyRule
from lategrad.support.torch_private import missing_compiler, tracing_error


class Compiled:
    """``function`` through ``torch.compile``, compiled at the first call.

    The first call raises :class:`~lategrad.execution.UnsupportedError` when torch cannot trace the function;
    nothing has been computed then.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        def entry(*args: Any) -> Any:
            return function(*args)

        # torch.compile counts recompilations per code object and gives up after a few: one entry per function.
        own = FunctionType(entry.__code__.replace(), globals(), "entry", None, entry.__closure__)
        self._fast = torch.compile(own, fullgraph=True, dynamic=False)
        self._has_run = False

    def __call__(self, *args: Any) -> Any:
        """The function's result."""
        if self._has_run:
            return self._fast(*args)
        try:
            result = self._fast(*args)
        except tracing_error() as error:
            raise UnsupportedError(f"torch.compile: {str(error).strip().splitlines()[0]}") from error
        self._has_run = True
        return result


def compiled_run(rule: AnyRule[Any], device: torch.device) -> Run:
    """The update through ``torch.compile``."""
    missing = missing_compiler(device.type, "compile")
    if missing is not None:
        raise UnsupportedError(missing)
    return Compiled(eager_run(rule))
