"""Follow the regularised leader with a quadratic regulariser (dual averaging), and its optimistic form."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from lategrad.learners.learner import Linear, PlaysIterate, first_play, owned_hint, safe_ratio, squared_norm, weighted
from lategrad.sets import ConvexSet, WholeSpace
from lategrad.support.runs import per_run, wide_zeros
from lategrad.support.validation import NonNegative, Scalar


class FTRLState(NamedTuple):
    w: Tensor
    start: Tensor  # w_1, the centre of the regulariser
    grad_sum: Tensor  # the sum over i of alpha_i g_i, float64: it grows without bound
    squared_weights: Tensor  # the sum over i of alpha_i^2


@dataclass(frozen=True, eq=False)
class FTRL(PlaysIterate):
    r"""Follow the regularised leader, :math:`w_{t+1} = \Pi_K(w_1 - \eta_t \sum_{i \le t} \alpha_i g_i)`.

    This is the minimiser over K of :math:`\langle \sum_i \alpha_i g_i, w \rangle + \|w - w_1\|^2 / (2 \eta_t)` with
    :math:`\eta_t = \mathrm{lr} / \sqrt{\sum_{i \le t} \alpha_i^2}`, at unit weights :math:`\mathrm{lr}/\sqrt{t}` as for
    OGD. No gradient is forgotten: the part that a projection cuts off is still in the sum.

    Args:
        lr: learning rate at t = 1; D/G minimises the order of the regret bound (:func:`lategrad.theory.ftrl_regret`).
        domain: K.

    >>> import torch, lategrad as lg
    >>> learner = lg.FTRL(lr=1.0, domain=lg.Ball(1.0))
    >>> state = learner.init(torch.zeros(2))
    >>> state = learner.update(state, Linear(torch.ones(1), torch.tensor([3.0, 4.0])))
    >>> learner.predict(state)
    tensor([-0.6000, -0.8000])

    Reference: S. Shalev-Shwartz, Online learning and online convex optimization, 2011.
    """

    lr: NonNegative[Scalar]
    domain: ConvexSet = WholeSpace()

    def init(self, w1: Tensor) -> FTRLState:
        w = first_play(self, w1)
        return FTRLState(w=w, start=w.clone(), grad_sum=wide_zeros(w), squared_weights=per_run(w, 0))

    def update(self, state: FTRLState, loss: Linear, hint: Linear | None = None) -> FTRLState:
        grad_sum = state.grad_sum + loss.weight * loss.grad
        squared_weights = state.squared_weights + loss.weight**2
        eta = safe_ratio(self.lr, squared_weights.sqrt())
        w = self.domain.project(state.start - (eta * grad_sum).to(state.w.dtype))
        return FTRLState(w=w, start=state.start, grad_sum=grad_sum, squared_weights=squared_weights)


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
