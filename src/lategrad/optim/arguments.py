"""Checks of what users pass to an optimizer by mistake."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

LABELS = ("params", "param_names", "name", "initial_lr")
"""Entries of any parameter group beside hyper-parameters: tensors, names, and the start of an LR schedule."""


def require_params(optimizer: str, params: Any) -> None:
    """Raise for what is often passed instead of ``model.parameters()``."""
    remedy = f"{optimizer} needs parameters, such as model.parameters()"
    if isinstance(params, torch.nn.Module):
        raise TypeError(f"{remedy}; params is a module, {type(params).__name__}: call its parameters()")
    if isinstance(params, DataLoader | Dataset):
        raise TypeError(f"{remedy}; params is a {type(params).__name__}, which holds data")
    if isinstance(params, torch.optim.Optimizer):
        raise TypeError(f"{remedy}; params is an optimizer, {type(params).__name__}")
    if isinstance(params, type):
        raise TypeError(f"{remedy}; params is the class {params.__name__}")
    if callable(params):
        raise TypeError(f"{remedy}; params is a function, {getattr(params, '__qualname__', params)}: call it")


def require_object(name: str, value: object) -> None:
    """Raise for a class where an instance is needed."""
    if isinstance(value, type):
        raise TypeError(f"{name} must be an object, got the class {value.__name__}: write {value.__name__}(...)")


def require_known_keys(optimizer: str, group: Mapping[str, Any], valid: Iterable[str]) -> None:
    """Raise for a key of a parameter group that would have no effect."""
    known = {*valid, *LABELS}
    unknown = sorted(map(str, set(group) - known))
    if unknown:
        raise ValueError(f"{optimizer} does not know {', '.join(map(repr, unknown))} in a parameter group; "
                         f"valid are {', '.join(map(repr, sorted(known)))}")  # fmt: skip


def require_state_of(optimizer: str, saved: Any, needed: Iterable[str]) -> None:
    """Raise for a state dict of a model, a whole checkpoint or another kind of optimizer."""
    if not isinstance(saved, Mapping) or not {"state", "param_groups"} <= set(saved):
        what = f"keys {sorted(map(str, saved))[:5]}" if isinstance(saved, Mapping) else type(saved).__name__
        raise ValueError(f"{optimizer} loads what its state_dict() gave, with 'state' and 'param_groups'; got {what}")
    for group in saved["param_groups"]:
        missing = sorted(set(needed) - set(group))
        if missing:
            has = ", ".join(sorted(map(repr, set(group) - {"params"})))
            lacks = ", ".join(map(repr, missing))
            raise ValueError(f"the state dict is not of {optimizer}: its groups have no {lacks}, they have {has}")
