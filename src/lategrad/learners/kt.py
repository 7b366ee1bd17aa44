"""KT coin betting (Orabona & Pál 2016), made free of the scale of the gradients. Experimental."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from lategrad.learners.learner import Linear, first_play, safe_ratio
from lategrad.sets import ConvexSet, WholeSpace, norm
from lategrad.support.runs import per_run, wide_zeros
from lategrad.support.validation import Scalar, require_number


class KTState(NamedTuple):
    """State of :class:`KT`."""

    bet: Tensor
    r""":math:`v_t`; the play is its projection."""
    start: Tensor
    """:math:`w_1`."""
    grad_sum: Tensor
    r""":math:`\sum_i c_i`, float64: it grows without bound."""
    norm_sum: Tensor
    r""":math:`\sum_i \|c_i\|`."""
    scale: Tensor
    r""":math:`L_t`, the largest norm of a weighted gradient so far."""
    reward: Tensor
    r""":math:`R_t = -\sum_i \langle c_i, v_i - w_1 \rangle`, what the bets have won."""


def _inner(a: Tensor, b: Tensor) -> Tensor:
    """Inner product over the last dimension, kept, in float64."""
    return (a.double() * b).sum(-1, keepdim=True)


@dataclass(frozen=True, eq=False)
class KT:
    r"""Krichevsky-Trofimov coin betting: plays are bets of a fraction of the wealth. Experimental.

    The bettor starts with a wealth of :math:`\epsilon L` and stakes, on the sum of the gradients so far,

    .. math::

        v_{t+1} = w_1 - \frac{\sum_{i \le t} c_i}{L_t (L_t + \sum_{i \le t} \|c_i\|)}
        \Big(\epsilon L_t - \sum_{i \le t} \langle c_i, v_i - w_1 \rangle\Big), \qquad w_t = \Pi_K(v_t).

    Here :math:`c_t` is the weighted gradient :math:`\alpha_t g_t`, cut to the scale :math:`L_{t-1}`, the
    largest norm seen before (the first is not cut), and :math:`L_t` the largest norm up to now. Where the play
    is a projection, the part of :math:`c_t` that points back to K is dropped first, which only makes the
    bettor's losses larger than the learner's (proved in a comment in the code). There is no step to tune,
    and plays do not change when all gradients are multiplied by a number.

    What holds on any gradients, weights and delays: the bet is always less than the wealth, so the wealth
    stays positive and the bets never lose more than :math:`\epsilon L_T`. With unit weights and gradients of one
    norm these are exactly the bets of Orabona and Pál; with the sum of the norms in place of the number of
    rounds, and L known in advance, their regret is that of Orabona and Tommasi. The running scale and the
    cut are ours, without a proof of regret, so that no guarantee is claimed inside Anytime, except that on
    a bounded set its queries move by at most :math:`8 \tau D / t`. Without a bounded set, late gradients make it
    diverge even on a quadratic (tested).

    Args:
        wealth: :math:`\epsilon > 0`, a distance: what may be lost in units of the largest gradient.
        domain: K.

    >>> import torch, lategrad as lg
    >>> learner = lg.KT(wealth=1.0)
    >>> state = learner.init(torch.zeros(1))
    >>> for t in range(3):  # bet 0, then 1/2 of 1, then 2/3 of 1 + 1/2, then 3/4 of 1 + 1/2 + 1
    ...     state = learner.update(state, Linear(torch.ones(1), torch.tensor([-5.0])))
    >>> learner.predict(state)
    tensor([1.8750])

    References: F. Orabona and D. Pál, Coin betting and parameter-free online learning, 2016; F. Orabona and
    T. Tommasi, Training deep networks without learning rates through coin betting, 2017; for the
    projection, A. Cutkosky, Parameter-free, dynamic, and strongly-adaptive online learning, 2020.
    """

    wealth: Scalar = 1.0
    domain: ConvexSet = WholeSpace()
    optimistic: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require_number("wealth", self.wealth, low=0, strict=True)

    def init(self, w1: Tensor) -> KTState:
        """Start at the projection of ``w1``, where the first bet is nothing."""
        w = first_play(self, w1)
        zero = per_run(w, 0)
        return KTState(bet=w, start=w.clone(), grad_sum=wide_zeros(w), norm_sum=zero, scale=zero.clone(),
                       reward=zero.clone())  # fmt: skip

    def predict(self, state: KTState) -> Tensor:
        """The bet, projected."""
        return self.domain.project(state.bet)

    def _grad_of_bet(self, bet: Tensor, grad: Tensor) -> Tensor:
        """The gradient that the bettor is told: without its part that points from a bet outside K back to K."""
        # With n the unit vector from the play p to the bet v, replace g by g - min(0, <g, n>) n. Then for u in K
        # <g, p - u> <= <g', v - u>: if <g, n> >= 0 because v - p points along n; else because the difference is
        # -<g, n> <n, p - u>, and <n, p - u> >= 0 is the theorem of the projection. Norms do not grow. A bet outside
        # by no more than rounding counts as inside: its n would be noise.
        play = self.domain.project(bet)
        if play is bet:  # the whole space gives back what it gets, and has no outside
            return grad
        outside = bet - play
        rounding = 16 * torch.finfo(bet.dtype).eps * (1 + norm(bet))
        distance = torch.where(norm(outside) > rounding, norm(outside), 0.0)
        inward = safe_ratio(_inner(grad, outside).clamp_max(0), distance**2)
        return grad - inward.to(grad.dtype) * outside

    def update(self, state: KTState, loss: Linear, hint: Linear | None = None) -> KTState:
        """Settle the bet and place the next one."""
        grad = self._grad_of_bet(state.bet, loss.grad)
        size = loss.weight * norm(grad)
        limit = torch.where(state.scale > 0, state.scale, size)
        weight = loss.weight * safe_ratio(limit, size).clamp_max(1)
        reward = state.reward - weight * _inner(grad, state.bet - state.start)
        grad_sum = state.grad_sum + weight * grad
        norm_sum = state.norm_sum + weight * norm(grad)
        scale = torch.maximum(state.scale, size)
        fraction = safe_ratio(self.wealth * scale + reward, scale * (scale + norm_sum))
        return KTState(
            bet=state.start - (fraction * grad_sum).to(state.bet.dtype),
            start=state.start,
            grad_sum=grad_sum,
            norm_sum=norm_sum,
            scale=scale,
            reward=reward,
        )
