"""Steady: anytime averaging for delays that are long from the first update on."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lategrad.learners.learner import decayed, safe_ratio, squared_norm
from lategrad.rules._common import OutputsX
from lategrad.rules.rule import Delay, average_in, first_query
from lategrad.sets import ConvexSet, WholeSpace
from lategrad.support.runs import per_run, wide_zeros
from lategrad.support.validation import NonNegative, Scalar


def reach(lr: Scalar, domain: ConvexSet, w: Tensor, t: Tensor, multiple: float = 2.0, share: float = 0.1) -> Tensor:
    """m: how far the updates of one delay may move the iterate, a multiple of lr and a share of the set's diameter."""
    diameter = domain.diameter_in(w.shape[-1])
    diameter = diameter.to(t.device) if isinstance(diameter, Tensor) else diameter
    return torch.minimum(multiple * lr + 0 * t, share * diameter + 0 * t)


class SteadyState(NamedTuple):
    w: Tensor  # w_{t+1}, the iterate
    x: Tensor  # x_{t+1}, the average of w_1 .. w_{t+1} with weights 1, 2, ...
    squares: Tensor  # S_t = the sum over i of i^2 |g_i|^2, or one such sum for every coordinate, float64
    t: Tensor  # updates so far


@dataclass(frozen=True, eq=False)
class Steady(OutputsX):
    r"""Anytime averaging with gradients weighted by the time of their query, and a query close to the iterate at first.

    Update t receives a gradient g of the query of time :math:`s = t - \tau_t \ge 1`. With the diameter D of K,

    .. math:: S_t &= S_{t-1} + t^2 \|g\|^2, \qquad
        w_{t+1} = \Pi_K\Big(w_t - \mathrm{lr}_t\, \frac{s}{\sqrt{S_t}}\, g\Big), \quad
        \mathrm{lr}_t = \min\Big(\mathrm{lr},\;
            \min\big(2\,\mathrm{lr}, \tfrac{D}{10}\big) \frac{\sqrt t}{1 + \tau_t}\Big), \\
        x_t &= \frac{\sum_{i \le t} i\, w_i}{\sum_{i \le t} i}, \qquad
        q_t = x_t + \theta_t (w_t - x_t), \quad \theta_t = \min(1, c/\sqrt{t})

    The query is :math:`q_t`, the output :math:`x_t`. Algorithm 1 with four changes: the weight of a gradient is s and
    not t; the learning rate is AdaGrad's, but its normaliser uses t; it is reduced where :math:`\tau_t` such updates
    would move the iterate further than 2 lr or a tenth of the set; and the query starts at the iterate and
    fades into the average. With ``per_coordinate`` every coordinate has its own sum S, the weight is
    :math:`s^2/t`, and the learning rate :math:`\mathrm{lr}_t/\sqrt d` in d dimensions, so that lr means the same.

    Proved (docs/steady.md), on any gradients and any delays: an update moves w by at most
    :math:`\mathrm{lr}_t\, s/t`, so that the first :math:`\tau` gradients, which all come from :math:`x_1`, move
    it by less than 4 lr, whatever :math:`\tau`; on a set of diameter D, with s for :math:`t - \tau`,

    .. math:: \|q_t - q_s\| \le (1 - \theta_t) \frac{2 \tau D}{t + 1} + (\theta_s - \theta_t) D
        + \theta_t \|w_t - w_s\|,

    where, for :math:`\tau \le t/2`, the first two parts are :math:`O(\tau D/t)`; the third is too, on the whole:
    weighted with s and summed over T updates it is at most :math:`c\, \mathrm{lr}\, \tau\, T \sqrt{A}` for delays of at
    most :math:`\tau`, with an A of the order of ln T. On a bounded set, for a convex L-smooth objective, this
    gives the rate of Theorem 1 in a constant delay, up to the root of a logarithm; varying delays up to
    :math:`T^{3/8}` do not change the rate (:mod:`lategrad.theory`). The same holds per coordinate on a cube. Only
    measured: that it does better than Algorithm 1 under long delays, that lr hardly matters, and the constants 2, 1/10
    and c. It is not for runs of few rounds: where T is a few times :math:`\tau`, take :class:`~lategrad.SteadyShort`.

    Args:
        lr: about the distance to travel.
        domain: K.
        c: the query is the iterate itself for :math:`t \le c^2` updates.
        per_coordinate: a learning rate for every coordinate; on sets other than boxes the Euclidean projection
            keeps it feasible, no more.
        weight_decay: decoupled: w is first multiplied by 1 - rate * weight_decay (never below 0), where rate is the
            factor of the gradient, :math:`\mathrm{lr}_t\, s/\sqrt{S_t}`; S does not include it.

    >>> import torch, lategrad as lg
    >>> rule = lg.Steady()
    >>> state = rule.init(torch.zeros(2))
    >>> queries = [rule.query(state)]
    >>> for t in range(2000):
    ...     tau = min(50, t)
    ...     grad = 2 * (queries[t - tau] - torch.tensor([3.0, 0.0]))
    ...     state = rule.update(state, grad, delay=torch.tensor(tau))
    ...     queries.append(rule.query(state))
    >>> rule.output(state)
    tensor([3.0167, 0.0000])

    Must know: the delay of every gradient; nothing of the smoothness or the noise, and no bound on the delays.

    Guarantee: on convex, smooth objectives and a bounded set the rate of Theorem 1 in a constant delay, up to the
    root of a logarithm; varying delays up to :math:`T^{3/8}` do not change it.

    Reference: this rule is ours; proofs in docs/steady.md, comparisons in docs/baselines.md.
    """

    lr: NonNegative[Scalar] = 1.0
    domain: ConvexSet = WholeSpace()
    c: NonNegative[Scalar] = 30.0
    per_coordinate: bool = False
    weight_decay: NonNegative[Scalar] = 0.0

    def init(self, x0: Tensor) -> SteadyState:
        w = first_query(self, x0)
        squares = wide_zeros(w) if self.per_coordinate else per_run(w, 0)
        return SteadyState(w=w, x=w.clone(), squares=squares, t=per_run(w, 0))

    def query(self, state: SteadyState) -> Tensor:
        """Between the average and the iterate, nearer to the average as t grows."""
        theta = (self.c / (state.t + 1).sqrt()).clamp_max(1)
        return torch.lerp(state.x, state.w, theta.to(state.x.dtype))

    def update(self, state: SteadyState, grad: Tensor, delay: Delay) -> SteadyState:
        t = state.t + 1
        s = (t - delay).clamp_min(1)
        lr = torch.minimum(self.lr + 0 * t, reach(self.lr, self.domain, state.w, t) * t.sqrt() / (1 + delay))
        if self.per_coordinate:
            squares = state.squares + (t * grad) ** 2
            rate = safe_ratio(lr / math.sqrt(grad.shape[-1]) * s**2 / t, squares.sqrt())
            move = rate * grad
        else:
            squares = state.squares + t**2 * squared_norm(grad)
            rate = safe_ratio(lr * s, squares.sqrt())
            move = rate.to(grad.dtype) * grad
        w = self.domain.project(decayed(state.w, rate, self.weight_decay) - move.to(state.w.dtype))
        return SteadyState(w=w, x=average_in(state.x, w, 2 / (t + 2)), squares=squares, t=t)
