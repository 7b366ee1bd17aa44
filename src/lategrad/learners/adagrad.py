"""AdaGrad: a learning rate from past gradients, for every coordinate or for the whole vector."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from lategrad.learners.learner import Linear, PlaysIterate, first_play, safe_ratio, squared_norm
from lategrad.sets import ConvexSet, WholeSpace
from lategrad.support.runs import per_run, wide_zeros
from lategrad.support.validation import NonNegative, Scalar


class AdaGradState(NamedTuple):
    w: Tensor
    squares: Tensor  # the sum over i of alpha_i^2 g_i^2 for every coordinate, or of alpha_i^2 |g_i|^2; float64


@dataclass(frozen=True, eq=False)
class AdaGrad(PlaysIterate):
    r"""Diagonal AdaGrad, :math:`w_{t+1,j} = \Pi_K(w_{t,j} - \eta_{t,j} \alpha_t g_{t,j})`.

    .. math:: \eta_{t,j} = D_\infty / \sqrt{2 \textstyle\sum_{i \le t} \alpha_i^2 g_{i,j}^2}

    On a box of widths at most :math:`D_\infty` the regret is at most
    :math:`D_\infty \sum_j \sqrt{2 \sum_t \alpha_t^2 g_{t,j}^2}`. The guarantee needs a projection that
    works coordinate by coordinate (WholeSpace, Box and their products). On other sets the Euclidean
    projection used here keeps the plays feasible, but the guarantee is lost.

    Args:
        diameter: :math:`D_\infty`, the largest width of a coordinate.
        domain: K.

    >>> import torch, lategrad as lg
    >>> learner = lg.AdaGrad(diameter=2.0)
    >>> state = learner.init(torch.zeros(2))
    >>> state = learner.update(state, Linear(torch.ones(1), torch.tensor([3.0, -0.1])))
    >>> learner.predict(state)  # every coordinate moves by the same amount, whatever its scale
    tensor([-1.4142,  1.4142])

    Reference: J. Duchi, E. Hazan and Y. Singer, Adaptive subgradient methods, 2011.
    """

    diameter: NonNegative[Scalar]
    domain: ConvexSet = WholeSpace()

    def init(self, w1: Tensor) -> AdaGradState:
        w = first_play(self, w1)
        return AdaGradState(w=w, squares=wide_zeros(w))

    def update(self, state: AdaGradState, loss: Linear, hint: Linear | None = None) -> AdaGradState:
        """One projected step; coordinates whose gradients were all zero do not move."""
        weighted_grad = loss.weight * loss.grad
        squares = state.squares + weighted_grad**2
        move = safe_ratio(self.diameter * weighted_grad, (2 * squares).sqrt())
        return AdaGradState(w=self.domain.project(state.w - move.to(state.w.dtype)), squares=squares)


@dataclass(frozen=True, eq=False)
class AdaGradNorm(PlaysIterate):
    r"""AdaGrad-norm, :math:`w_{t+1} = \Pi_K(w_t - \eta_t \alpha_t g_t)` with a learning rate from past gradients.

    .. math:: \eta_t = D / \sqrt{2 \textstyle\sum_{i \le t} \alpha_i^2 \|g_i\|^2}

    Its regret is at most :math:`D \sqrt{2 \sum_t \alpha_t^2 \|g_t\|^2}` on a set of diameter D, without
    knowing a bound on the gradients.

    Args:
        diameter: D; without a bounded set, the distance one expects to travel.
        domain: K.

    >>> import torch, lategrad as lg
    >>> learner = lg.AdaGradNorm(diameter=2.0)
    >>> state = learner.init(torch.zeros(2))
    >>> state = learner.update(state, Linear(torch.ones(1), torch.tensor([3.0, 4.0])))
    >>> learner.predict(state)  # 2 / sqrt(2 * 25) times the gradient
    tensor([-0.8485, -1.1314])

    Reference: M. Streeter and H. B. McMahan, Less regret via online conditioning, 2010.
    """

    diameter: NonNegative[Scalar]
    domain: ConvexSet = WholeSpace()

    def init(self, w1: Tensor) -> AdaGradState:
        w = first_play(self, w1)
        return AdaGradState(w=w, squares=per_run(w, 0))

    def update(self, state: AdaGradState, loss: Linear, hint: Linear | None = None) -> AdaGradState:
        """One projected step; none while all gradients were zero."""
        squares = state.squares + loss.weight**2 * squared_norm(loss.grad)
        lr = safe_ratio(self.diameter * loss.weight, (2 * squares).sqrt())
        return AdaGradState(w=self.domain.project(state.w - lr.to(state.w.dtype) * loss.grad), squares=squares)
