r"""A parameter vector in K parts, each with the rule's state for its part; it knows nothing of any transport.

A rule whose update works on each coordinate by itself runs on each part as it is. Where it needs a norm (a
:class:`~lategrad.sets.Ball`, an adaptive step), each part has a share :math:`\|v_k\|^2` of :math:`\|v\|^2`, the
shares are added over the parts (one exchange), and all parts go on with the same number. What needs more than that,
such as sorting all coordinates for a simplex, is refused: :func:`require_splittable`.

There is one version of the truth. All parts make the same updates in the same order, so that the query of version v
is made of parts of version v: a consistent snapshot, the same vector as that of one server up to the rounding of the
norms' sums.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from lategrad.execution import in_place
from lategrad.rules.rule import AnyRule, Rule, needs_ticket
from lategrad.sets import Ball, Box, ConvexSet, Product, WholeSpace, summed_norms
from lategrad.support.runs import map_tensors, owned, tensors
from lategrad.support.validation import require

Total = Callable[[Tensor], Tensor]
"""From a part's share of a sum, the sum over all parts; all parts call it in the same order."""

Part = TypeVar("Part")
_PROBE = 12  # coordinates that a rule is tried on
_SPLITTABLE = "WholeSpace, Box, Ball, or a Product of sets that are not cut (or are WholeSpace or Box)"


def bounds(dim: int, shards: int) -> list[tuple[int, int]]:
    """Where each part begins and ends.

    >>> bounds(10, 3)
    [(0, 3), (3, 6), (6, 10)]
    """
    require("shards", shards, 1 <= shards <= max(1, dim // 2), f"at most half the number of parameters, {dim}")
    return [(dim * k // shards, dim * (k + 1) // shards) for k in range(shards)]


@dataclasses.dataclass(frozen=True, eq=False)
class _Whole:
    """A set that lies inside one part: its norms are its own."""

    inner: ConvexSet

    @property
    def diameter(self) -> Any:
        return self.inner.diameter

    def diameter_in(self, dim: int) -> Any:
        return self.inner.diameter_in(dim)

    def project(self, x: Tensor) -> Tensor:
        with summed_norms(None):
            return self.inner.project(x)

    def contains(self, x: Tensor, tol: float = 1e-5) -> Tensor:
        with summed_norms(None):
            return self.inner.contains(x, tol)

    def support(self, direction: Tensor) -> Tensor:
        with summed_norms(None):
            return self.inner.support(direction)


def _cut(tree: Part, begin: int, end: int) -> Part:
    """With every tensor that has an entry for each coordinate cut to the part."""
    return map_tensors(lambda leaf: leaf[..., begin:end] if leaf.shape[-1:] != (1,) and leaf.dim() else leaf, tree)


def split_set(domain: ConvexSet, begin: int, end: int) -> ConvexSet:
    """The set's part for coordinates ``begin, ..., end - 1``.

    >>> import lategrad as lg
    >>> split_set(lg.Product((lg.Simplex(), 3), (lg.WholeSpace(), 5)), 3, 6)
    Product(parts=((WholeSpace(), 3),))
    """
    if isinstance(domain, WholeSpace | Box | Ball):
        return _cut(domain, begin, end)
    if not isinstance(domain, Product):
        require("domain", domain, False, f"{_SPLITTABLE} to be split over shards")
    assert isinstance(domain, Product)
    parts: list[tuple[ConvexSet, int]] = []
    first = 0
    for inner, size in domain.parts:
        low, high = max(begin, first), min(end, first + size)
        simple = isinstance(inner, WholeSpace | Box)
        if high - low == size:
            parts.append((inner if simple else _Whole(inner), size))
        elif low < high:
            cut = low if low > first else high
            require("domain", inner, simple, f"{_SPLITTABLE}; this part would be cut at coordinate {cut}")
            parts.append((_cut(inner, low - first, high - first), high - low))
        first += size
    return Product(*parts)


def _with_sets(part: Any, change: Callable[[ConvexSet], ConvexSet]) -> Any:
    """A rule or learner with its sets changed."""
    if callable(getattr(part, "project", None)):
        return change(part)
    if not dataclasses.is_dataclass(part) or isinstance(part, type):
        return part
    copy = object.__new__(type(part))
    for field in dataclasses.fields(part):
        object.__setattr__(copy, field.name, _with_sets(getattr(part, field.name), change))
    return copy


def split_rule(rule: AnyRule[Any], begin: int, end: int) -> Rule[Any]:
    """The rule for the coordinates ``begin, ..., end - 1``."""
    if needs_ticket(rule):
        require("rule", rule, False, "one without tickets to be split over shards")
    split: Rule[Any] = _with_sets(rule, lambda domain: split_set(domain, begin, end))
    return split


class Shard:
    """The rule's state for one part of the vector, and the gradients that wait for their turn.

    Args:
        rule: for this part (:func:`split_rule`).
        start: this part of the first point.
        total: how norms are added over the parts.
        compile: the update; only for rules that need no norms.
    """

    def __init__(self, rule: Rule[Any], start: Tensor, total: Total, compile: bool = False) -> None:
        self._rule, self._total = rule, total
        with summed_norms(total), torch.no_grad():
            self.state = owned(rule.init(start))
        self._staged: dict[int, tuple[int, Tensor]] = {}
        self._update = in_place(rule, self.state, backend=None if compile else "eager")

    def stage(self, member: int, sequence: int, grad: Tensor) -> bool:
        """Keep a member's gradient until it is committed; whether it is finite."""
        self._staged[member] = (sequence, grad)
        return bool(torch.isfinite(grad).all())

    def drop(self, member: int) -> None:
        """Forget what a member has staged."""
        self._staged.pop(member, None)

    def commit(self, member: int, sequence: int, delay: int) -> Tensor:
        """Apply what a member has staged; returns this part of the next query."""
        staged, grad = self._staged.pop(member)
        if staged != sequence:
            raise RuntimeError(f"gradient {sequence} of member {member} is not here, but {staged}")
        with summed_norms(self._total), torch.no_grad():
            self._update(grad, delay)
        return self.query()

    def query(self) -> Tensor:
        """This part of the query."""
        with summed_norms(self._total), torch.no_grad():
            return self._rule.query(self.state)

    def output(self) -> Tensor:
        """This part of the output."""
        with summed_norms(self._total), torch.no_grad():
            return self._rule.output(self.state)

    def leaves(self) -> list[Tensor]:
        """The tensors of the state, in the rule's order."""
        return tensors(self.state)

    def load(self, leaves: Sequence[Tensor]) -> None:
        """Take over a state."""
        for own, leaf in zip(self.leaves(), leaves, strict=True):
            own.copy_(leaf)


def join_leaves(parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The tensors of the whole state: vectors end to end, numbers (equal in all parts) from the first part."""
    return [leaves[0] if len(leaves[0]) < 2 else torch.cat(list(leaves)) for leaves in zip(*parts, strict=True)]


def split_leaves(leaves: Sequence[Tensor], dim: int, begin: int, end: int) -> list[Tensor]:
    """One part of the tensors of a whole state."""
    return [leaf[begin:end] if len(leaf) == dim else leaf for leaf in leaves]


class Lockstep:
    """All shards of a rule in this process, a thread for each: what a cluster does, to try and to test it.

    >>> import lategrad as lg
    >>> rule = lg.Anytime(lg.OGD(lr=1.0, domain=lg.Ball(0.5)))
    >>> with_shards = Lockstep(rule, torch.zeros(5), shards=2)
    >>> with_shards.update(torch.full((5,), -2.0), delay=0)
    >>> state = rule.update(rule.init(torch.zeros(5)), torch.full((5,), -2.0), torch.tensor(0))
    >>> torch.allclose(with_shards.query(), rule.query(state))
    True
    """

    def __init__(self, rule: AnyRule[Any], start: Tensor, shards: int) -> None:
        self._bounds = bounds(len(start), shards)
        self._barrier = threading.Barrier(shards)
        self._position = threading.local()
        self._shares = [torch.zeros(1)] * shards
        self.norms = 0
        rules = [split_rule(rule, begin, end) for begin, end in self._bounds]
        self.shards: list[Shard] = self._all(lambda k, begin, end: Shard(rules[k], start[begin:end], self._total))

    def _as(self, k: int, action: Callable[[], Part]) -> Part:
        self._position.k = k
        try:
            return action()
        except Exception:
            self._barrier.abort()  # nobody is to wait for this one
            raise

    def _total(self, share: Tensor) -> Tensor:
        self._shares[self._position.k] = share
        self.norms += self._position.k == 0
        self._barrier.wait(timeout=60)
        total: Tensor = torch.stack(self._shares).sum(0)
        self._barrier.wait(timeout=60)
        return total

    def _all(self, action: Callable[[int, int, int], Part]) -> list[Part]:
        """``action(k, begin, end)`` of every part k, at the same time."""
        with ThreadPoolExecutor(len(self._bounds)) as pool, summed_norms(self._total):
            parts = [partial(action, k, begin, end) for k, (begin, end) in enumerate(self._bounds)]
            futures = [pool.submit(self._as, k, part) for k, part in enumerate(parts)]
            return [future.result() for future in futures]

    def update(self, grad: Tensor, delay: int) -> None:
        """One update of all parts."""

        def one(k: int, begin: int, end: int) -> None:
            self.shards[k].stage(0, 0, grad[begin:end])
            self.shards[k].commit(0, 0, delay)

        self._all(one)

    def query(self) -> Tensor:
        """The whole query."""
        return torch.cat(self._all(lambda k, *_: self.shards[k].query()))

    def output(self) -> Tensor:
        """The whole output."""
        return torch.cat(self._all(lambda k, *_: self.shards[k].output()))


def require_splittable(rule: AnyRule[Any], dim: int, shards: int) -> bool:
    """Require that the rule runs in parts; returns whether it needs norms of the whole.

    Sets are judged by their kind. The rule and its learner are tried: a few random updates, whole and in parts.
    """
    for begin, end in bounds(dim, shards):
        split_rule(rule, begin, end)
    free: Rule[Any] = _with_sets(rule, lambda domain: WholeSpace())
    rng = torch.Generator().manual_seed(0)
    start = torch.randn(_PROBE, generator=rng, dtype=torch.float64)
    try:
        whole, parts = free.init(start), Lockstep(free, start, 2)
        for delay in range(3):
            grad = torch.randn(_PROBE, generator=rng, dtype=torch.float64)
            whole = free.update(whole, grad, torch.tensor(delay))
            parts.update(grad, delay)
        answers = ((free.query(whole), parts.query()), (free.output(whole), parts.output()))
    except Exception as error:  # a user's rule may fail in any way on a part of a vector
        raise ValueError(f"rule cannot be split over shards: {type(error).__name__}: {error}") from error
    same = all(torch.allclose(*pair) for pair in answers)
    require("rule", rule, same, "one that needs no more of the whole vector than norms to be split over shards")
    return parts.norms > 0 or isinstance(getattr(rule, "domain", None), Ball)
