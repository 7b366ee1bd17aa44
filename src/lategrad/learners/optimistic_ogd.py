"""Optimistic OGD with an adaptive learning rate (Rakhlin & Sridharan 2013), the learner of Algorithm 2."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from lategrad.learners.learner import Linear, PlaysIterate, decayed, first_play, owned_hint, squared_norm, weighted
from lategrad.sets import ConvexSet, WholeSpace
from lategrad.support.runs import per_run
from lategrad.support.validation import NonNegative, Scalar


class OptimisticState(NamedTuple):
    w: Tensor
    y: Tensor  # y_{t-1}, the point that the true losses have led to
    hint: Linear  # alpha_t M_t, the hint given for the coming round
    surprise: Tensor  # the sum over i < t of alpha_i^2 |g_i - M_i|^2


@dataclass(frozen=True, eq=False)
class OptimisticOGD(PlaysIterate):
    r"""Adaptive optimistic OGD, the paper's remark after Algorithm 2.

    .. math:: w_t &= \Pi_K(y_{t-1} - \eta_t \alpha_t M_t), \qquad
        y_t = \Pi_K(y_{t-1} - \eta_t \alpha_t g_t), \\
        \eta_t &= D / \sqrt{1 + \textstyle\sum_{i<t} \alpha_i^2 \|g_i - M_i\|^2}

    The remark starts at t = 2; here :math:`y_0 = w_1` and :math:`M_1 = 0`, so that the first gradient
    is used. On a set of diameter D the regret is at most
    :math:`2 D \sqrt{1 + \sum_t \alpha_t^2 \|g_t - M_t\|^2}` (derived in docs/theory.md).

    Args:
        diameter: D; without a bounded set, the distance one expects to travel.
        domain: K.
        weight_decay: decoupled: before each step y is multiplied by 1 - eta * weight_decay (never below 0).

    >>> import torch, lategrad as lg
    >>> learner = lg.OptimisticOGD(diameter=1.0)
    >>> state = learner.init(torch.zeros(1))
    >>> loss = Linear(torch.ones(1), torch.tensor([0.75]))
    >>> state = learner.update(state, loss, hint=loss)
    >>> state.y, learner.predict(state)  # y_1 = -0.75, and from there a step of 1/1.25 on the hint
    (tensor([-0.7500]), tensor([-1.3500]))

    Reference: A. Rakhlin and K. Sridharan, Optimization, learning, and games with predictable sequences, 2013.
    """

    diameter: NonNegative[Scalar]
    domain: ConvexSet = WholeSpace()
    weight_decay: NonNegative[Scalar] = 0.0

    def init(self, w1: Tensor) -> OptimisticState:
        w = first_play(self, w1)
        return OptimisticState(w=w, y=w.clone(), hint=owned_hint(None, w), surprise=per_run(w, 0))

    def _step(self, y: Tensor, loss: Linear, surprise: Tensor) -> Tensor:
        lr = self.diameter / (1 + surprise).sqrt() * loss.weight
        return self.domain.project(decayed(y, lr, self.weight_decay) - lr.to(y.dtype) * loss.grad)

    def update(self, state: OptimisticState, loss: Linear, hint: Linear | None = None) -> OptimisticState:
        """Move y with the true loss, then play one step ahead with the hint for the next round."""
        hint = owned_hint(hint, loss.grad)
        y = self._step(state.y, loss, state.surprise)
        surprise = state.surprise + squared_norm(weighted(loss) - weighted(state.hint))
        return OptimisticState(w=self._step(y, hint, surprise), y=y, hint=hint, surprise=surprise)
