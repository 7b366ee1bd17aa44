"""Algorithms 3 and 4 of the paper: optimistic OGD for strongly convex objectives."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from lategrad.learners.learner import decayed
from lategrad.rules.rule import Delay, average_in, first_query
from lategrad.sets import ConvexSet, OnDomain, WholeSpace
from lategrad.support.runs import per_run
from lategrad.support.validation import NonNegative, Positive, Scalar


class StronglyConvexState(NamedTuple):
    x: Tensor  # x_{t+1}, the query
    y: Tensor  # y_t
    mean: Tensor  # the weighted average of x_1 .. x_t
    t: Tensor  # updates so far


def weight_share(t: Tensor) -> Tensor:
    r""":math:`\alpha_t / \alpha_{1:t} = 6t / ((t+1)(2t+1))` for :math:`\alpha_t = t^2`."""
    return 6 * t / ((t + 1) * (2 * t + 1))


@dataclass(frozen=True, eq=False)
class StronglyConvexOGD(OnDomain):
    r"""Optimistic OGD for H-strongly convex objectives: Algorithm 3, and 4 when gradients are delayed.

    .. math:: x_t = \Pi_K(y_{t-1} - \tilde\eta_t M_t), \qquad
        y_t = \Pi_K(y_{t-1} - \tilde\eta_t g_{t-\tau_t}), \qquad
        \tilde\eta_t = \frac{8 \alpha_t}{H \alpha_{1:t}}, \quad \alpha_t = t^2

    The hint :math:`M_t` is the last gradient received (0 at t = 1). Gradients are taken at
    :math:`x_t` itself; the output is the :math:`\alpha`-weighted average of :math:`x_1, \dots, x_T`.
    Theorem 4: the excess loss is :math:`O((\sigma_\tau^2 + \mu_\tau^2)/T^2 + \sigma^2/T)`; neither
    smoothness nor noise nor delays need to be known, and ``delay`` is not used.

    Args:
        strong_convexity: H > 0.
        domain: K.
        weight_decay: decoupled: before each step y is multiplied by 1 - eta * weight_decay (never below 0).

    >>> import torch, lategrad as lg
    >>> rule = lg.StronglyConvexOGD(strong_convexity=2.0, domain=lg.Ball(1.0))
    >>> state = rule.init(torch.zeros(2))
    >>> for t in range(100):
    ...     grad = 2 * (rule.query(state) - torch.tensor([0.5, 0.0]))
    ...     state = rule.update(state, grad, delay=torch.tensor(0))
    >>> rule.output(state)
    tensor([0.4987, 0.0000])

    Must know: the strong convexity H; nothing of the smoothness, the noise or the delays.

    Guarantee: on H-strongly convex, smooth objectives an excess loss of :math:`O((\sigma_\tau^2 + \mu_\tau^2)/T^2 +
    \sigma^2/T)` (Theorem 4).

    Reference: R. Aviv, I. Hakimi, A. Schuster and K. Levy, Learning under delayed feedback: implicitly
    adapting to gradient delays, 2021, Algorithms 3 and 4.
    """

    strong_convexity: Positive[Scalar]
    domain: ConvexSet = WholeSpace()
    weight_decay: NonNegative[Scalar] = 0.0

    def init(self, x0: Tensor) -> StronglyConvexState:
        """:math:`x_1 = y_0`: there is no hint yet."""
        x = first_query(self, x0)
        return StronglyConvexState(x=x, y=x.clone(), mean=x.clone(), t=per_run(x, 0))

    def query(self, state: StronglyConvexState) -> Tensor:
        return state.x

    def _step(self, y: Tensor, grad: Tensor, t: Tensor) -> Tensor:
        eta = 8 * weight_share(t) / self.strong_convexity
        return self.domain.project(decayed(y, eta, self.weight_decay) - eta.to(y.dtype) * grad)

    def update(self, state: StronglyConvexState, grad: Tensor, delay: Delay) -> StronglyConvexState:
        """Move y with the gradient, then step ahead with it as the next hint."""
        t = state.t + 1
        y = self._step(state.y, grad, t)
        mean = average_in(state.mean, state.x, weight_share(t))
        return StronglyConvexState(x=self._step(y, grad, t + 1), y=y, mean=mean, t=t)

    def output(self, state: StronglyConvexState) -> Tensor:
        """The weighted average of :math:`x_1, \\dots, x_T`."""
        return state.mean
