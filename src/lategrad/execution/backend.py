"""The backends that run a rule's update in place, which one is used, and when compiling pays.

- ``eager``: the rule's own operations one after another, then a copy into the host's buffers. It runs anything and
  starts at once. On large CPU vectors the fresh memory of every operation costs ten to thirty times the arithmetic.
- ``compile``: ``torch.compile`` fuses the update and the copy into one pass that allocates nothing. It runs whatever
  torch can trace: many runs at once, matrix products, sorting. Compiling takes 1 to 6 seconds and a call costs 20 to
  50 microseconds before any arithmetic. Its guards stay on: without them a call is 2 to 20 microseconds cheaper, but
  code for one size silently runs on another (on a GPU that was an illegal memory access).
- ``loops``: generated C loops (:mod:`lategrad.execution.codegen`), where a call must cost microseconds.
"""

import warnings
from collections.abc import Callable, Mapping
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from lategrad.rules.rule import AnyRule, apply_update
from lategrad.support.runs import leaf_names, tensors
from lategrad.support.torch_private import missing_compiler, tracing_error

BACKENDS = ("eager", "compile", "loops")

Run = Callable[..., None]
"""A function of (state, gradient, delay, ticket, query_out) that overwrites the state and, unless ``query_out`` is
None, writes the next query there."""


class UnsupportedError(Exception):
    """A backend cannot run this function; nothing has been computed, so another backend can take over."""


# ---- When compiling pays

COMPILE_SECONDS = {"loops": 1.0, "compile": 6.0}  # time to compile, on one core with empty caches

SAVED_PER_UPDATE, SAVED_PER_ENTRY = 60e-6, 5e-9
"""Seconds by which a compiled update is faster (``benchmarks/bench_backends.py``): for its calls, and for every entry
of every run, mostly for fresh memory."""

EXPECTED_STEPS = 1_000  # steps that an optimizer, which is not told their number, is assumed to take at least


def compiling_pays(updates: int, entries: int, *, backend: str = "compile") -> bool:
    """Whether compiling saves more time than it takes, for vectors and runs with ``entries`` numbers in all.

    >>> compiling_pays(2_500, 10 * 36), compiling_pays(20_000, 10 * 7_850)
    (False, True)
    """
    return updates * (SAVED_PER_UPDATE + SAVED_PER_ENTRY * entries) > COMPILE_SECONDS[backend]


# ---- Eager, and torch.compile


def overwrite(buffers: Any, values: Any) -> None:
    """Copy one state into the tensors of another, which may share some of them."""
    old, new = tensors(buffers), tensors(values)
    # A value that sits in another buffer must be saved before that buffer is written.
    safe = [n.clone() if any(n is o for o in old) and n is not old[i] else n for i, n in enumerate(new)]
    for buffer, value in zip(old, safe, strict=True):
        if buffer is not value:
            buffer.copy_(value)


def eager_run(rule: AnyRule[Any], maximize: bool = False) -> Run:

    def run(state: Any, grad: Tensor, delay: Tensor, ticket: Tensor, query_out: Tensor | None) -> None:
        updated = apply_update(rule, state, -grad if maximize else grad, delay, ticket)
        shapes = [[tuple(leaf.shape) for leaf in tensors(tree)] for tree in (state, updated)]
        if shapes[0] != shapes[1]:  # a copy would broadcast some of them
            raise ValueError(f"the update of {type(rule).__name__} must keep the shapes of its state: "
                             f"{leaf_names(state)} had {shapes[0]}, and then {shapes[1]}")  # fmt: skip
        if query_out is not None:
            query_out.copy_(rule.query(updated))
        overwrite(state, updated)

    return run


class Compiled:
    """``function`` through ``torch.compile``, compiled at the first call.

    Raises :class:`UnsupportedError` where no compiler works for the device, if one is given; the first call raises it
    when torch cannot trace the function.
    """

    def __init__(self, function: Callable[..., Any], device: torch.device | None = None) -> None:
        if device is not None and (missing := missing_compiler(device.type, "compile")) is not None:
            raise UnsupportedError(missing)

        def entry(*args: Any) -> Any:
            return function(*args)

        # torch.compile counts recompilations per code object and gives up after a few: one entry per function.
        own = FunctionType(entry.__code__.replace(), globals(), "entry", None, entry.__closure__)
        self._call = torch.compile(own, fullgraph=True, dynamic=False)
        self._has_run = False

    def __call__(self, *args: Any) -> Any:
        if self._has_run:
            return self._call(*args)
        try:
            result = self._call(*args)
        except tracing_error() as error:
            raise UnsupportedError(f"torch.compile: {str(error).strip().splitlines()[0]}") from error
        self._has_run = True
        return result


# ---- Which backend runs


@cache
def warn_once(reason: str) -> None:
    warnings.warn(f"running eagerly: {reason}", stacklevel=2)


class Backend:
    """The first of several backends that can run a function: ``run`` is that function, ``name`` the backend.

    ``builders``, in order of preference, return the function or raise :class:`UnsupportedError`; the last is "eager",
    which a warning announces. If one backend is ``requested``, its error is raised instead.
    """

    def __init__(self, builders: Mapping[str, Callable[[], Run]], requested: str | None = None) -> None:
        self.name: str
        self.run: Run
        self._eager = builders["eager"]
        if requested is not None:
            self.name, self.run = requested, builders[requested]()
            return
        reason = ""
        for name, build in builders.items():
            try:
                self.name, self.run = name, build()
                break
            except UnsupportedError as error:
                reason = str(error)
        if self.name == "eager":
            warn_once(reason)
        else:
            self.run = partial(self._run_or_fall_back, self.run)

    def _run_or_fall_back(self, run: Run, *args: Any) -> None:
        """torch.compile raises at its first call, loops at the first that writes the query, before they compute."""
        try:
            run(*args)
            if self.name == "compile":
                self.run = run
        except UnsupportedError as error:
            warn_once(str(error))
            self.name, self.run = "eager", self._eager()
            self.run(*args)
