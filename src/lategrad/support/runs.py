"""Many runs at once: tensors of shape ``(*runs, d)`` and hyper-parameters of shape ``(*runs, 1)``.

Rules, learners and sets are frozen dataclasses; states are named tuples, or other tuples, lists, dicts or dataclasses.
All are trees whose leaves are tensors, which the functions here walk in one fixed order.
"""

import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

Tree = TypeVar("Tree")


def _children(tree: object) -> list[Any]:
    if isinstance(tree, tuple):  # first: states are walked inside compiled code, where this is simple to trace
        return list(tree)
    if isinstance(tree, list):
        return tree
    if isinstance(tree, dict):
        return [tree[key] for key in _keys(tree)]
    return [getattr(tree, field.name) for field in dataclasses.fields(tree)] if dataclasses.is_dataclass(tree) else []


def _keys(tree: dict[Any, Any]) -> list[Any]:
    return sorted(tree, key=str)  # whatever the order of insertion


def _child_names(tree: object) -> list[str]:
    if isinstance(tree, tuple | list):
        return list(getattr(tree, "_fields", map(str, range(len(tree)))))
    if isinstance(tree, dict):
        return list(map(str, _keys(tree)))
    return [field.name for field in dataclasses.fields(tree)] if dataclasses.is_dataclass(tree) else []


def tensors(tree: object) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    return [leaf for child in _children(tree) for leaf in tensors(child)]


def map_tensors(function: Callable[..., Tensor], tree: Tree, *others: object) -> Tree:
    """The same tree with ``function`` applied to every tensor, and to those of other trees at the same place.

    >>> import lategrad as lg
    >>> map_tensors(torch.Tensor.double, lg.OGD(lr=torch.tensor([0.5]))).lr
    tensor([0.5000], dtype=torch.float64)
    """
    if others:
        rest = zip(*map(tensors, others), strict=True)
        return map_tensors(lambda leaf: function(leaf, *next(rest)), tree)
    if isinstance(tree, Tensor):
        return function(tree)  # type: ignore[return-value]
    changed = [map_tensors(function, child) for child in _children(tree)]
    if dataclasses.is_dataclass(tree):
        copy = object.__new__(type(tree))  # validated already, and Product has a constructor of its own
        for field, value in zip(dataclasses.fields(tree), changed, strict=True):
            object.__setattr__(copy, field.name, value)
        return copy
    if isinstance(tree, tuple):
        return type(tree)(*changed) if hasattr(tree, "_fields") else type(tree)(changed)
    if isinstance(tree, list):
        return type(tree)(changed)
    if isinstance(tree, dict):
        return type(tree)(zip(_keys(tree), changed, strict=True))
    return tree


def checksum(tree: object) -> str:
    """SHA-256 of the values of all tensors, in the order of :func:`tensors`."""
    contents = hashlib.sha256()
    for leaf in tensors(tree):
        contents.update(leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return contents.hexdigest()


def leaf_names(tree: object, prefix: str = "") -> list[str]:
    """A name for every tensor of a state, such as ``learner.w``, in the order of :func:`tensors`."""
    if isinstance(tree, Tensor):
        return [prefix]
    prefix = f"{prefix}." if prefix else ""
    children = zip(_child_names(tree), _children(tree), strict=True)
    return [name for field, child in children for name in leaf_names(child, prefix + field)]


def require_state(state: object, owner: str, place: str = "state") -> None:
    """Require a tree of tensors: hosts copy tensors only, and would lose any other change of a state.

    The message names the rule or learner that owns it, and the place of the part that is at fault.

    >>> require_state({"x": torch.zeros(2), "updates": 0}, "MyRule")
    Traceback (most recent call last):
    ...
    ValueError: the state of MyRule must be made of tensors, ... state.updates is the int 0; keep a number as ...
    """
    if isinstance(state, Tensor) or state is None:
        return
    is_object = dataclasses.is_dataclass(state) and not isinstance(state, type)
    if not is_object and not isinstance(state, tuple) and type(state) not in (list, dict):
        number = isinstance(state, int | float)
        remedy = "; keep a number as a tensor of shape (*runs, 1), such as per_run(x, 0)" if number else ""
        raise ValueError(f"the state of {owner} must be made of tensors, in tuples, lists, dicts or dataclasses: "
                         f"{place} is the {type(state).__name__} {state!r}{remedy}")  # fmt: skip
    for name, child in zip(_child_names(state), _children(state), strict=True):
        require_state(child, owner, f"{place}.{name}")


def tree_structure(tree: object) -> Any:
    """The types and names in a tree, without its tensors: equal for two states of the same form."""
    if isinstance(tree, Tensor):
        return "tensor"
    return type(tree).__name__, _child_names(tree), [tree_structure(child) for child in _children(tree)]


def owned(tree: Tree) -> Tree:
    """A copy of the tree in which every tensor has its own memory."""
    return map_tensors(lambda leaf: leaf.clone(memory_format=torch.contiguous_format), tree)


def runs_shape(tree: object) -> torch.Size:
    """The run dimensions that the tensors inside a rule, learner or set span together.

    >>> import lategrad as lg
    >>> runs_shape(lg.OGD(lr=torch.tensor([[0.1], [0.3], [1.0]])))
    torch.Size([3])
    """
    return torch.Size(torch.broadcast_shapes(*(leaf.shape[:-1] for leaf in tensors(tree))))


def spread(tree: object, x0: Tensor) -> Tensor:
    """A fresh copy of ``x0`` with a row for every run of ``tree``, so that states keep their shape."""
    domain = getattr(tree, "domain", None)
    if isinstance(domain, str):
        raise ValueError(f"domain must be a set such as lategrad.Ball(5.0), got {domain!r}: parse_set makes one")
    shape = torch.broadcast_shapes(x0.shape, (*runs_shape(tree), 1))
    return x0.detach().expand(shape).clone(memory_format=torch.contiguous_format)


def per_run(x: Tensor, value: float) -> Tensor:
    """A float64 scalar for every run of ``x``: shape ``(*runs, 1)``."""
    return torch.full((*x.shape[:-1], 1), value, dtype=torch.float64, device=x.device)


def wide_zeros(x: Tensor) -> Tensor:
    """float64 zeros of the shape of ``x``, for sums that grow without bound."""
    return torch.zeros_like(x, dtype=torch.float64)
