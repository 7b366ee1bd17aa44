r"""The contract of an online learner, the paper's :math:`\mathcal{A}`.

In round t = 1, 2, ... a learner plays :math:`w_t \in K`, receives the weighted linear loss
:math:`u \mapsto \alpha_t \langle g_t, u \rangle` and moves to :math:`w_{t+1}`. An optimistic learner
is also given a hint, a guess of the next round's loss, before it moves.
"""

from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor

from lategrad.sets import ConvexSet, OnDomain, norm
from lategrad.support.runs import per_run, spread
from lategrad.support.validation import Scalar

State = TypeVar("State")


class Linear(NamedTuple):
    r"""The loss :math:`u \mapsto \alpha \langle g, u \rangle`: a float64 weight ``(*runs, 1)`` and g ``(*runs, d)``."""

    weight: Tensor
    grad: Tensor


class Learner(Protocol[State]):
    """An online learner: a frozen dataclass of hyper-parameters, whose state is a separate object."""

    @property
    def domain(self) -> ConvexSet:
        """The constraint set K, which contains every play."""

    def init(self, w1: Tensor) -> State:
        """The state before round 1; the first play is the projection of ``w1``."""

    def predict(self, state: State) -> Tensor:
        """The play :math:`w_t` of the coming round."""

    def update(self, state: State, loss: Linear, hint: Linear | None = None) -> State:
        """Round t's loss, and the hint for round t + 1 (no hint: zero); the new state plays w_{t+1}."""


class PlaysIterate(OnDomain):
    """A learner that plays ``state.w``."""

    def predict(self, state: Any) -> Tensor:
        return cast(Tensor, state.w)


def first_play(learner: Learner[State], w1: Tensor) -> Tensor:
    """:math:`w_1`: the start, projected, with a row for every run of the learner."""
    return learner.domain.project(spread(learner, w1))


def weighted(loss: Linear) -> Tensor:
    r"""The gradient of the weighted loss, :math:`\alpha g`."""
    return loss.weight.to(loss.grad.dtype) * loss.grad


def owned_hint(hint: Linear | None, like: Tensor) -> Linear:
    """A copy of the hint for the state to keep (the caller may reuse its gradient); no hint is zero."""
    if hint is None:
        return Linear(per_run(like, 0), torch.zeros_like(like))
    return Linear(hint.weight, hint.grad.clone())


def squared_norm(v: Tensor) -> Tensor:
    """Squared Euclidean norm over the last dimension, kept, in float64."""
    return norm(v) ** 2


def safe_ratio(numerator: float | Tensor, denominator: Tensor) -> Tensor:
    """``numerator / denominator``, and 0 where the denominator is 0 (before any gradient)."""
    positive = denominator > 0
    return torch.where(positive, numerator / torch.where(positive, denominator, 1.0), 0.0)


def decayed(point: Tensor, lr: Scalar, weight_decay: Scalar) -> Tensor:
    """Decoupled weight decay: max(0, 1 - lr * weight_decay) times the point; without decay, the point itself.

    >>> decayed(torch.tensor([2.0, 4.0]), lr=0.5, weight_decay=0.5)
    tensor([1.5000, 3.0000])
    """
    if not isinstance(weight_decay, Tensor) and weight_decay == 0:
        return point
    share = 1 - lr * weight_decay
    return (share.clamp_min(0).to(point.dtype) if isinstance(share, Tensor) else max(share, 0.0)) * point
