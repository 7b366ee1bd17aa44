"""What the backends have in common: their names, how one says that it cannot, and which one is taken."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from lategrad.execution.compiled import Compiled, compiled_run
from lategrad.execution.eager import Run, eager_run
from lategrad.execution.unsupported import UnsupportedError
from lategrad.rules.rule import AnyRule
from lategrad.support.torch_private import missing_compiler

BACKENDS = ("eager", "compile", "loops")
"""Operation by operation; ``torch.compile``; C loops."""


@cache
def warn_once(reason: str) -> None:
    """A step that was to be compiled is not: said once for every reason."""
    warnings.warn(f"running eagerly: {reason}", stacklevel=2)


class Backend:
    """The backend that was asked for, or else the first that can: loops, ``torch.compile``, eager with a warning."""

    def __init__(
        self, rule: AnyRule[Any], device: torch.device, asked: str | None, loops: Callable[[], Callable[..., None]]
    ) -> None:
        self._rule, self._asked = rule, asked
        makers: dict[str, Callable[[], Run]] = {
            "loops": loops,
            "compile": lambda: compiled_run(rule, device),
            "eager": lambda: eager_run(rule),
        }
        self.name: str
        self.run: Run
        for name in ("loops", "compile") if asked is None else (asked,):
            try:
                self.name, self.run = name, makers[name]()
                return
            except UnsupportedError as error:
                if asked is not None:
                    raise
                reason = str(error)
        self._run_eagerly(reason)

    def _run_eagerly(self, reason: str) -> None:
        warn_once(reason)
        self.name, self.run = "eager", eager_run(self._rule)

    def __call__(self, *args: Any) -> None:
        """One update."""
        try:
            self.run(*args)
        except UnsupportedError as error:  # torch.compile tells at its first call, before it computes
            if self._asked is not None:
                raise
            self._run_eagerly(str(error))
            self.run(*args)


class OneCall:
    """A host's own function, the rule's update within it, as one call through ``torch.compile``.

    Where that does not work, a warning says why it runs eagerly; ``backend`` says which one it is.
    """

    def __init__(self, function: Callable[..., None], device: torch.device) -> None:
        self._function, self.backend = function, "compile"
        missing = missing_compiler(device.type, "compile")
        self._run: Callable[..., None] = function if missing else Compiled(function)
        if missing:
            self._run_eagerly(missing)

    def _run_eagerly(self, reason: str) -> None:
        warn_once(reason)
        self.backend, self._run = "eager", self._function

    def __call__(self, *args: Any) -> None:
        """One update."""
        try:
            self._run(*args)
        except UnsupportedError as error:  # told at the first call, before anything is computed
            self._run_eagerly(str(error))
            self._run(*args)
