"""Clipped asynchronous SGD (Erickson & Johansson 2026): a constant learning rate on gradients of bounded norm."""

from dataclasses import dataclass

from torch import Tensor

from lategrad.rules._common import IterateOnly, IterateState
from lategrad.rules.rule import Delay
from lategrad.sets import ConvexSet, WholeSpace, norm
from lategrad.support.validation import NonNegative, Positive, Scalar


@dataclass(frozen=True, eq=False)
class ClippedSGD(IterateOnly):
    r"""Clipped asynchronous SGD, :math:`x_{t+1} = \Pi_K(x_t - \mathrm{lr}\, \min(1, c/\|g\|)\, g)`.

    However late a gradient is, the iterate has moved by at most :math:`\mathrm{lr}\, c\, \tau` since its query.

    Source: checked second hand, against an audit of the paper's theorems, which have a constant learning rate and a
    constant clipping radius that depend on smoothness, noise, concurrency and accuracy. Ours: c = 1 and the projection.

    Args:
        lr: learning rate.
        domain: K, the constraint set.
        clip: c > 0, the largest norm of a gradient (of the whole vector).

    >>> import torch, lategrad as lg
    >>> rule = lg.baselines.ClippedSGD(lr=1.0, clip=1.0)
    >>> state = rule.init(torch.zeros(2))
    >>> rule.query(rule.update(state, torch.tensor([3.0, 4.0]), delay=torch.tensor(0)))
    tensor([-0.6000, -0.8000])

    Must know: nothing of the delays; for the guarantee, smoothness and noise.

    Guarantee: the query of a gradient is at most :math:`\mathrm{lr}\, c\, \tau` away, on any input; rates in its
    paper, without a projection.

    Reference: S. Erickson and M. Johansson, Clipping makes distributed and federated asynchronous SGD robust
    to stragglers, 2026.
    """

    lr: NonNegative[Scalar]
    domain: ConvexSet = WholeSpace()
    clip: Positive[Scalar] = 1.0

    def update(self, state: IterateState, grad: Tensor, delay: Delay) -> IterateState:
        lr = self.lr * (self.clip / norm(grad)).clamp_max(1.0)  # a zero gradient: c/0 = inf, clamped to 1
        return IterateState(x=self.domain.project(state.x - lr.to(grad.dtype) * grad))
