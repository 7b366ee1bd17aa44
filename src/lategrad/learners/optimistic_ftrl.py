"""Optimistic follow the regularised leader with an adaptive learning rate (Mohri & Yang 2016)."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from lategrad.learners.learner import Linear, PlaysIterate, first_play, owned_hint, squared_norm, weighted
from lategrad.sets import ConvexSet, WholeSpace
from lategrad.support.runs import per_run, wide_zeros
from lategrad.support.validation import NonNegative, Scalar


class OptimisticFTRLState(NamedTuple):
    w: Tensor
    start: Tensor  # w_1, the centre of the regulariser
    grad_sum: Tensor  # the sum over i < t of alpha_i g_i, float64: it grows without bound
    hint: Linear  # alpha_t M_t, the hint given for the coming round
    surprise: Tensor  # the sum over i < t of alpha_i^2 |g_i - M_i|^2


@dataclass(frozen=True, eq=False)
class OptimisticFTRL(PlaysIterate):
    r"""Adaptive optimistic FTRL (AO-FTRL) with a quadratic regulariser around the start.

    .. math:: w_t = \Pi_K\Big(w_1 - \eta_t \big(\textstyle\sum_{i<t} \alpha_i g_i + \alpha_t M_t\big)\Big), \qquad
        \eta_t = D / \sqrt{1 + \textstyle\sum_{i<t} \alpha_i^2 \|g_i - M_i\|^2}

    The scheme is Mohri & Yang's; the constants of :math:`\eta_t` are ours, the same as those of
    :class:`OptimisticOGD`, and so is the regret bound (:func:`lategrad.theory.optimistic_ftrl_regret`).

    Args:
        diameter: D; without a bounded set, the distance one expects to travel.
        domain: K.

    >>> import torch, lategrad as lg
    >>> learner = lg.OptimisticFTRL(diameter=1.0)
    >>> state = learner.init(torch.zeros(1))
    >>> loss = Linear(torch.ones(1), torch.tensor([0.75]))
    >>> learner.predict(learner.update(state, loss, hint=loss))  # -(0.75 + 0.75) / 1.25
    tensor([-1.2000])

    Reference: M. Mohri and S. Yang, Accelerating online convex optimization via adaptive prediction, 2016.
    """

    diameter: NonNegative[Scalar]
    domain: ConvexSet = WholeSpace()

    def init(self, w1: Tensor) -> OptimisticFTRLState:
        w = first_play(self, w1)
        hint = owned_hint(None, w)
        return OptimisticFTRLState(w=w, start=w.clone(), grad_sum=wide_zeros(w), hint=hint, surprise=per_run(w, 0))

    def update(self, state: OptimisticFTRLState, loss: Linear, hint: Linear | None = None) -> OptimisticFTRLState:
        """Add the loss to the sum and solve again as if the hint were the next loss."""
        hint = owned_hint(hint, loss.grad)
        grad_sum = state.grad_sum + loss.weight * loss.grad
        surprise = state.surprise + squared_norm(weighted(loss) - weighted(state.hint))
        eta = self.diameter / (1 + surprise).sqrt()
        move = (eta * (grad_sum + hint.weight * hint.grad)).to(state.w.dtype)
        w = self.domain.project(state.start - move)
        return OptimisticFTRLState(w=w, start=state.start, grad_sum=grad_sum, hint=hint, surprise=surprise)
