"""UniXGrad (Kavis, Levy, Bach & Cevher 2019): the undelayed relative of Algorithm 2, with two gradients a round."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lategrad.learners.learner import squared_norm
from lategrad.rules.rule import Delay, average_in, first_query
from lategrad.sets import ConvexSet, OnDomain, WholeSpace
from lategrad.support.runs import per_run
from lategrad.support.validation import NonNegative, Scalar


class UniXGradState(NamedTuple):
    y: Tensor  # y_{r-1} of the coming round r, or of the round that is half done
    mean: Tensor  # the weighted average of x_1, x_2, .. so far
    hint: Tensor  # M_r, the first gradient of the round
    surprise: Tensor  # sum_{i<r} alpha_i^2 |g_i - M_i|^2
    t: Tensor  # updates so far, two for every round


@dataclass(frozen=True, eq=False)
class UniXGrad(OnDomain):
    r"""UniXGrad; round r takes two gradients, at :math:`\tilde z_r` and at :math:`\bar x_r`.

    .. math:: \tilde z_r = \frac{\alpha_r y_{r-1} + \sum_{i<r} \alpha_i x_i}{\alpha_{1:r}}, \quad
        M_r = \nabla f(\tilde z_r), \quad x_r &= \Pi_K(y_{r-1} - \eta_r \alpha_r M_r), \\
        \bar x_r = \frac{\sum_{i \le r} \alpha_i x_i}{\alpha_{1:r}}, \quad
        g_r = \nabla f(\bar x_r), \quad y_r &= \Pi_K(y_{r-1} - \eta_r \alpha_r g_r)

    with :math:`\alpha_r = r` and :math:`\eta_r = 2D / \sqrt{1 + \sum_{i<r} \alpha_i^2 \|g_i - M_i\|^2}`. The
    output is :math:`\bar x_r`.

    Its theory is undelayed. As a server rule the two oracle calls of a round are two successive updates
    (odd t: M, even t: g), each with whatever gradient arrives; a late one was asked for by an earlier round
    or by the other call. This reading is ours.

    Source: checked second hand, against an independent implementation (with the same 2D, the same weights and the same
    two points); the paper was read in its introduction.

    Args:
        diameter: D; without a bounded constraint set, the distance one expects to travel.
        domain: K, the constraint set.

    >>> import torch, lategrad as lg
    >>> rule = lg.baselines.UniXGrad(diameter=1.0, domain=lg.Ball(1.0))
    >>> state = rule.init(torch.zeros(2))
    >>> for t in range(200):
    ...     grad = 2 * (rule.query(state) - torch.tensor([0.5, 0.0]))
    ...     state = rule.update(state, grad, delay=torch.tensor(0))
    >>> rule.output(state)
    tensor([0.5000, 0.0000])

    Must know: D; nothing of the smoothness, the noise or the delays.

    Guarantee: none under delay; without, on convex objectives and a bounded set, the best rates, smooth or not.

    Reference: A. Kavis, K. Levy, F. Bach and V. Cevher, UniXGrad: a universal, adaptive algorithm with
    optimal guarantees for constrained optimization, 2019.
    """

    diameter: NonNegative[Scalar]
    domain: ConvexSet = WholeSpace()

    def init(self, x0: Tensor) -> UniXGradState:
        y = first_query(self, x0)
        return UniXGradState(y=y, mean=y.clone(), hint=torch.zeros_like(y), surprise=per_run(y, 0), t=per_run(y, 0))

    def query(self, state: UniXGradState) -> Tensor:
        r""":math:`\tilde z_r` in the first half of a round, :math:`\bar x_r` in the second."""
        r = torch.floor(state.t / 2) + 1
        ahead = average_in(state.mean, state.y, 2 / (r + 1))
        return torch.where(state.t % 2 == 0, ahead, state.mean)

    def update(self, state: UniXGradState, grad: Tensor, delay: Delay) -> UniXGradState:
        r = torch.floor(state.t / 2) + 1
        first = state.t % 2 == 0
        eta = 2 * self.diameter / (1 + state.surprise).sqrt()
        moved = self.domain.project(state.y - (eta * r).to(grad.dtype) * grad)
        surprise = state.surprise + r**2 * squared_norm(grad - state.hint)
        return UniXGradState(
            y=torch.where(first, state.y, moved),
            mean=torch.where(first, average_in(state.mean, moved, 2 / (r + 1)), state.mean),
            hint=torch.where(first, grad, state.hint),
            surprise=torch.where(first, state.surprise, surprise),
            t=state.t + 1,
        )

    def output(self, state: UniXGradState) -> Tensor:
        return state.mean
