"""SteadyShort: Steady for runs that are short relative to the delay."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lategrad.learners.learner import safe_ratio, squared_norm
from lategrad.rules.rule import Delay, average_in, first_query
from lategrad.rules.steady import reach
from lategrad.sets import ConvexSet, OnDomain, WholeSpace
from lategrad.support.runs import per_run
from lategrad.support.validation import NonNegative, Scalar

_LONG_ROUNDS = 3.0  # the rounds in which learning rates exceed Steady's


class SteadyShortState(NamedTuple):
    w: Tensor  # w_{t+1}, the iterate
    x: Tensor  # x_{t+1}, the average; x_1 as long as there is none
    squares: Tensor  # S_t = the sum over i of i^2 |g_i|^2, float64
    t: Tensor  # updates so far
    weight: Tensor  # total weight of the average: 0 in the first round


@dataclass(frozen=True, eq=False)
class SteadyShort(OnDomain):
    r"""Steady for T of a few times :math:`\tau`: gradients of the start are summed, and delayed ones have full weight.

    Update t receives a gradient g of the query of time :math:`s = t - \tau_t \ge 1`. With
    :math:`S_t = S_{t-1} + t^2 \|g\|^2` and the diameter D of K, in the first round, as long as every gradient has come
    from :math:`x_1`,

    .. math:: w_{t+1} = \Pi_K\Big(x_1 - r_t \sum_{i \le t} i\, g_i\Big), \qquad
        r_t = \min\Big(\mathrm{lr}, \frac{\min(30\,\mathrm{lr}, D/2)}{\sqrt t}\Big) \Big/ \sqrt{S_t}

    (where the projection has cut, what is left of the sum), and from the first :math:`s \ge 2` on

    .. math:: w_{t+1} = \Pi_K\Big(w_t - \mathrm{lr}_t\, \frac{t}{\sqrt{S_t}}\, g\Big), \quad
        \mathrm{lr}_t = \min\Big(\mathrm{lr},\; \min\big(2\,\mathrm{lr}, \tfrac{D}{10}\big)
            \max\Big(\frac{\sqrt t}{1 + \tau_t}, \frac{3}{\sqrt t}\Big)\Big).

    :math:`x_t` is the average, with weights t, of the iterates that depend on gradients of other points than the start;
    before there is one it is :math:`w_t`. Query :math:`q_t = x_t + \theta_t (w_t - x_t)`,
    :math:`\theta_t = \min(1, c/\sqrt t)`, output :math:`x_t`, as for :class:`~lategrad.Steady`, from which it differs
    in three ways: one step along the mean of the gradients of the start, not a noisy one along the first few of them;
    the weight t, not s; and larger learning rates in the first three rounds.

    Proved (docs/steady.md): the first round moves w by at most 30 lr and D/2, on any gradients; in a constant delay, on
    a bounded set, for a convex L-smooth objective, the rate of :class:`~lategrad.Steady`
    (:func:`~lategrad.theory.steady_short_in_constant_delay`). For varying delays nothing is proved. Only measured: that
    it is better than Steady for few rounds, :math:`T/(1 + \tau)` up to about 10, and the constants 30, 1/2 and 3.

    Args:
        lr: about the distance to travel.
        domain: K.
        c: the query is the iterate itself for :math:`t \le c^2` updates.

    >>> import torch, lategrad as lg
    >>> rule = lg.SteadyShort()
    >>> state = rule.init(torch.zeros(2))
    >>> for t in range(100):  # all from the start, and only their mean is a descent direction
    ...     grad = torch.tensor([-1.0, 5.0 * (-1) ** t])
    ...     state = rule.update(state, grad, delay=torch.tensor(t))
    >>> rule.output(state)
    tensor([1.7026, 0.0843])

    Must know: the delay of every gradient; nothing of the smoothness or the noise, and no bound on the delays.

    Guarantee: in a constant delay that of :class:`~lategrad.Steady`; for varying delays, none.

    Reference: this rule is ours; proofs and comparisons in docs/steady.md.
    """

    lr: NonNegative[Scalar] = 1.0
    domain: ConvexSet = WholeSpace()
    c: NonNegative[Scalar] = 30.0

    def init(self, x0: Tensor) -> SteadyShortState:
        w = first_query(self, x0)
        return SteadyShortState(w=w, x=w.clone(), squares=per_run(w, 0), t=per_run(w, 0), weight=per_run(w, 0))

    def query(self, state: SteadyShortState) -> Tensor:
        """Between the average and the iterate, nearer to the average as t grows."""
        theta = (self.c / (state.t + 1).sqrt()).clamp_max(1)
        theta = torch.where(state.weight > 0, theta, 1.0)
        return torch.lerp(state.x, state.w, theta.to(state.x.dtype))

    def _first_lr(self, w: Tensor, t: Tensor) -> Tensor:
        r""":math:`r_t \sqrt{S_t}`."""
        far = reach(self.lr, self.domain, w, t, multiple=30.0, share=0.5)
        return torch.minimum(self.lr + 0 * t, far / t.clamp_min(1).sqrt())

    def update(self, state: SteadyShortState, grad: Tensor, delay: Delay) -> SteadyShortState:
        t = state.t + 1
        squares = state.squares + t**2 * squared_norm(grad)
        first_round = (state.weight == 0) & (delay >= t - 1)
        first_lr = self._first_lr(state.w, t)
        share_kept = safe_ratio(first_lr * state.squares.sqrt(), self._first_lr(state.w, state.t) * squares.sqrt())
        start = torch.lerp(state.x, state.w, torch.where(first_round, share_kept, 1.0).to(state.w.dtype))
        factor = torch.maximum(t.sqrt() / (1 + delay), _LONG_ROUNDS / t.sqrt())
        lr = torch.minimum(self.lr + 0 * t, reach(self.lr, self.domain, state.w, t) * factor)
        rate = safe_ratio(torch.where(first_round, first_lr, lr) * t, squares.sqrt())
        w = self.domain.project(start - (rate.to(grad.dtype) * grad).to(state.w.dtype))
        weight = torch.where(first_round, 0.0, state.weight + t + 1)
        x = average_in(state.x, w, safe_ratio(t + 1 + 0 * weight, weight))
        return SteadyShortState(w=w, x=x, squares=squares, t=t, weight=weight)

    def output(self, state: SteadyShortState) -> Tensor:
        r"""After T updates, :math:`x_{T+1}`; in the first round :math:`w_{T+1}`."""
        return torch.where(state.weight > 0, state.x, state.w)
