"""Every public name of the library, once, at the place that users import it from; and which lack a docstring."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from sphinx.ext.autodoc.mock import mock

FOREIGN = ("lightning", "transformers", "accelerate")
"""Libraries that integrations import and that need not be installed to describe them."""

MODULES = {
    "lategrad": "Traces, delays, texts",
    "lategrad.rules": "Server rules: the contract",
    "lategrad.rules.baselines": "Baselines",
    "lategrad.learners": "Online learners",
    "lategrad.sets": "Constraint sets",
    "lategrad.problems": "Problems and data",
    "lategrad.delays": "Delays",
    "lategrad.delays.clocks": "Clusters of workers",
    "lategrad.simulator": "The simulator",
    "lategrad.serve": "Training",
    "lategrad.optim": "PyTorch optimizers",
    "lategrad.pipeline": "Asynchronous pipelines",
    "lategrad.tolerance_study": "Tolerance of delay",
    "lategrad.sklearn": "scikit-learn estimators",
    "lategrad.integrations.lightning": "Lightning",
    "lategrad.integrations.transformers": "Hugging Face",
    "lategrad.theory": "The theorems as functions",
    "lategrad.checks": "Checks for rules of your own",
    "lategrad.execution": "Execution",
}
"""Modules whose ``__all__`` is public, with their titles; a name belongs to the first that has it."""

_OWN_NAME = {"lategrad.rules.baselines": "lategrad.baselines"}


@dataclass(frozen=True)
class Name:
    """A public name."""

    module: str
    """The module of :data:`MODULES` that it belongs to."""
    name: str
    value: Any
    page: str
    """The module whose page shows it: the one that it is from, where that is public, too."""

    @property
    def full(self) -> str:
        """As users write it."""
        return f"{_OWN_NAME.get(self.module, self.module)}.{self.name}"

    @property
    def target(self) -> str:
        """For autodoc: the colons end the module's name."""
        return f"lategrad::baselines.{self.name}" if self.module in _OWN_NAME else f"{self.module}::{self.name}"

    @property
    def is_rule(self) -> bool:
        """Whether it is a class of server rules, and not the contract itself."""
        members = ("init", "query", "update", "output")
        return (isinstance(self.value, type) and not getattr(self.value, "_is_protocol", False)
                and all(hasattr(self.value, member) for member in members))  # fmt: skip


def public_names() -> list[Name]:
    """All of them, each once."""
    found: dict[int, Name] = {}
    for module in MODULES:
        with mock(list(FOREIGN)):
            exported = importlib.import_module(module)
        for name in exported.__all__:
            value = getattr(exported, name)
            if not isinstance(value, ModuleType):
                known = found.get(id(value))
                if known is None:
                    found[id(value)] = Name(module, name, value, page=module)
                elif known.page == "lategrad":
                    found[id(value)] = dataclasses.replace(known, page=module)
    return list(found.values())


def _has_docstring(value: Any) -> bool:
    text = value.__doc__ or ""
    generated = dataclasses.is_dataclass(value) and text.startswith(f"{getattr(value, '__name__', '')}(")
    return bool(text.strip()) and not generated


def undocumented(name: Name) -> Iterator[str]:
    """The name, if it is a class or a function without a docstring; members whose name says it need none."""
    if (isinstance(name.value, type) or inspect.isroutine(name.value)) and not _has_docstring(name.value):
        yield name.full
