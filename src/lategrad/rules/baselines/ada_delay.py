"""AdaDelay (Sra, Yu, Li & Smola 2016): learning rates that shrink with the time and with the delay."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from lategrad.rules.rule import Delay, average_in, first_query
from lategrad.sets import ConvexSet, OnDomain, WholeSpace
from lategrad.support.runs import per_run, wide_zeros
from lategrad.support.validation import Positive, Scalar


class AdaDelayState(NamedTuple):
    x: Tensor  # x_{t+1}, the iterate
    mean: Tensor  # the average of x_2 .. x_{t+1}
    squares: Tensor  # sum_s s/(s + tau_s) g_s^2 for every coordinate, float64
    t: Tensor  # updates so far


@dataclass(frozen=True, eq=False)
class AdaDelay(OnDomain):
    r"""AdaDelay, per coordinate, with the average of the iterates as its output.

    .. math:: x_{t+1,j} = \Pi_K\Big(x_{t,j} - \frac{g_j}{L + (c_j/R) \sqrt{t + \tau_t}}\Big), \qquad
        c_j^2 = \frac1t \sum_{s \le t} \frac{s}{s + \tau_s}\, g_{s,j}^2

    Without delays and with L = 0 this is AdaGrad with learning rate R.

    Source: checked against the code of one of its authors (M. Li, dmlc/wormhole, ``delay_tol_handle.h``, with its
    ``lr_theta`` = 1/2). There the learning rate is :math:`\alpha / (\beta + c_j \sqrt{t + \tau_t})`: R is
    :math:`\alpha`, L is :math:`\beta / \alpha`, and :math:`\beta` = 1 by default. Ours: the default L = 1, and the
    average as the output, as in the paper's theorem.

    Args:
        diameter: R, the distance that a coordinate may have to travel; the number to tune.
        domain: K, the constraint set.
        smoothness: L > 0.

    >>> import torch, lategrad as lg
    >>> rule = lg.baselines.AdaDelay(diameter=1.0, smoothness=1.0)
    >>> state = rule.init(torch.zeros(1))
    >>> rule.output(rule.update(state, torch.tensor([2.0]), delay=torch.tensor(0)))  # 2 / (1 + 2 sqrt(1))
    tensor([-0.6667])

    Must know: the smoothness L and the delay of every gradient.

    Guarantee: in its paper, on convex, smooth objectives and a bounded K, with one learning rate for all coordinates;
    none for the form above.

    Reference: S. Sra, A. W. Yu, M. Li and A. Smola, AdaDelay: delay adaptive distributed stochastic optimization, 2016.
    """

    diameter: Positive[Scalar]
    domain: ConvexSet = WholeSpace()
    smoothness: Positive[Scalar] = 1.0

    def init(self, x0: Tensor) -> AdaDelayState:
        x = first_query(self, x0)
        return AdaDelayState(x=x, mean=x.clone(), squares=wide_zeros(x), t=per_run(x, 0))

    def query(self, state: AdaDelayState) -> Tensor:
        return state.x

    def update(self, state: AdaDelayState, grad: Tensor, delay: Delay) -> AdaDelayState:
        t = state.t + 1
        squares = state.squares + t / (t + delay) * grad.double() ** 2
        c = (squares / t).sqrt()
        move = grad / (self.smoothness + c / self.diameter * (t + delay).sqrt())
        x = self.domain.project(state.x - move.to(state.x.dtype))
        return AdaDelayState(x=x, mean=average_in(state.mean, x, 1 / t), squares=squares, t=t)

    def output(self, state: AdaDelayState) -> Tensor:
        return state.mean
