"""AdaDelay (Sra, Yu, Li & Smola 2015): steps that shrink with the time and with the delay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from lategrad.rules.rule import Delay, average_in, first_query
from lategrad.sets import ConvexSet, WholeSpace, resolve_domain
from lategrad.support.runs import per_run, wide_zeros
from lategrad.support.validation import Scalar, require_number


class AdaDelayState(NamedTuple):
    """State of :class:`AdaDelay`."""

    x: Tensor
    """:math:`x_{t+1}`, the iterate."""
    mean: Tensor
    """The average of :math:`x_2, \\dots, x_{t+1}`."""
    squares: Tensor
    """:math:`\\sum_s \\frac{s}{s + \\tau_s} g_s^2` for every coordinate, float64."""
    t: Tensor
    """Updates so far."""


@dataclass(frozen=True, eq=False)
class AdaDelay:
    r"""AdaDelay, per coordinate, with the average of the iterates as its output.

    .. math::

        x_{t+1,j} = \Pi_K\Big(x_{t,j} - \frac{g_j}{L + (c_j/R) \sqrt{t + \tau_t}}\Big), \qquad
        c_j^2 = \frac1t \sum_{s \le t} \frac{s}{s + \tau_s}\, g_{s,j}^2

    The form above is the one of its experiments. The scale R is ours (the paper: 1), the
    number to tune; the algorithm is written from memory of the paper.

    Args:
        diameter: R, the distance that a coordinate may have to travel.
        domain: K.
        smoothness: L > 0.

    >>> import torch, lategrad as lg
    >>> rule = lg.baselines.AdaDelay(diameter=1.0, smoothness=1.0)
    >>> state = rule.init(torch.zeros(1))
    >>> rule.output(rule.update(state, torch.tensor([2.0]), delay=torch.tensor(0)))  # 2 / (1 + 2 sqrt(1))
    tensor([-0.6667])

    Must know: the smoothness L and the delay of every gradient.

    Guarantee: in its paper, on convex, smooth objectives and a bounded K, with one step for all coordinates; none for
    the form above.

    Reference: S. Sra, A. W. Yu, M. Li and A. Smola, AdaDelay: delay adaptive distributed stochastic convex
    optimization, 2015.
    """

    diameter: Scalar
    domain: ConvexSet = WholeSpace()
    smoothness: Scalar = 1.0

    def __post_init__(self) -> None:
        resolve_domain(self)
        require_number("diameter", self.diameter, low=0, strict=True)
        require_number("smoothness", self.smoothness, low=0, strict=True)

    def init(self, x0: Tensor) -> AdaDelayState:
        """Start at the projection of ``x0``."""
        x = first_query(self, x0)
        return AdaDelayState(x=x, mean=x.clone(), squares=wide_zeros(x), t=per_run(x, 0))

    def query(self, state: AdaDelayState) -> Tensor:
        """The iterate."""
        return state.x

    def update(self, state: AdaDelayState, grad: Tensor, delay: Delay) -> AdaDelayState:
        """One projected step; the new iterate joins the average."""
        t = state.t + 1
        squares = state.squares + t / (t + delay) * grad.double() ** 2
        c = (squares / t).sqrt()
        move = grad / (self.smoothness + c / self.diameter * (t + delay).sqrt())
        x = self.domain.project(state.x - move.to(state.x.dtype))
        return AdaDelayState(x=x, mean=average_in(state.mean, x, 1 / t), squares=squares, t=t)

    def output(self, state: AdaDelayState) -> Tensor:
        r"""The average of :math:`x_2, \dots, x_{T+1}`; before any update, the start."""
        return state.mean
