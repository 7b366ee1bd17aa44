"""Checks of what users pass to an optimizer by mistake."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

LABELS = ("params", "param_names", "name", "initial_lr")
"""Entries of any parameter group beside hyper-parameters: tensors, names, and the start of an LR schedule."""


def require_params(optimizer: str, params: Any) -> None:
    """Raise for what is often passed instead of ``model.parameters()``."""
    name = getattr(params, "__qualname__", type(params).__name__)
    mistakes = {
        torch.nn.Module: f"a module, {name}: call its parameters()",
        DataLoader | Dataset: f"a {name}, which holds data",
        torch.optim.Optimizer: f"an optimizer, {name}",
        type: f"the class {name}",
        Callable: f"a function, {name}: call it",
    }
    for kind, mistake in mistakes.items():
        if isinstance(params, kind):  # type: ignore[arg-type]
            raise TypeError(f"{optimizer} needs parameters, such as model.parameters(); params is {mistake}")


def require_object(name: str, value: object) -> None:
    """Raise for a class where an instance is needed."""
    if isinstance(value, type):
        raise TypeError(f"{name} must be an object, got the class {value.__name__}: write {value.__name__}(...)")


def require_known_keys(optimizer: str, group: Mapping[str, Any], valid: Iterable[str]) -> None:
    """Raise for a key of a parameter group that would have no effect."""
    known = {*valid, *LABELS}
    if unknown := sorted(map(str, set(group) - known)):
        raise ValueError(f"{optimizer} does not know {', '.join(map(repr, unknown))} in a parameter group; "
                         f"valid are {', '.join(map(repr, sorted(known)))}")  # fmt: skip


def require_state_of(optimizer: str, saved: Any, needed: Iterable[str]) -> None:
    """Raise for a state dict of a model, a whole checkpoint or another kind of optimizer."""
    if not isinstance(saved, Mapping) or not {"state", "param_groups"} <= set(saved):
        what = f"keys {sorted(map(str, saved))[:5]}" if isinstance(saved, Mapping) else type(saved).__name__
        raise ValueError(f"{optimizer} loads what its state_dict() gave, with 'state' and 'param_groups'; got {what}")
    if "delayed" in saved:
        raise ValueError(f"the state is of Delayed({optimizer}), with pending gradients: load it into Delayed")
    for group in saved["param_groups"]:
        if missing := sorted(set(needed) - set(group)):
            has = ", ".join(sorted(map(repr, set(group) - {"params"})))
            lacks = ", ".join(map(repr, missing))
            raise ValueError(f"the state dict is not of {optimizer}: its groups have no {lacks}, they have {has}")
