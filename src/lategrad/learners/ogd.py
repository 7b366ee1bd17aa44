"""Online gradient descent (Zinkevich 2003), the learner of the paper's experiments, and its optimistic form."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from lategrad.learners.learner import Linear, PlaysIterate, decayed, first_play, owned_hint, squared_norm, weighted
from lategrad.sets import ConvexSet, WholeSpace
from lategrad.support.runs import per_run
from lategrad.support.validation import NonNegative, Scalar


class OGDState(NamedTuple):
    w: Tensor
    t: Tensor  # rounds played


@dataclass(frozen=True, eq=False)
class OGD(PlaysIterate):
    r"""Online gradient descent, :math:`w_{t+1} = \Pi_K(w_t - \eta_t \alpha_t g_t)`.

    ``lr`` is the effective learning rate, :math:`\eta_t \alpha_t = \mathrm{lr}/\sqrt{t}`, which does not
    depend on the weights. With :math:`\mathrm{lr} = D/G` and :math:`\|g_t\| \le G` the weighted
    regret is at most :math:`D G\, T^{3/2}` for :math:`\alpha_t = t` and :math:`\tfrac32 D G \sqrt{T}`
    for :math:`\alpha_t = 1` (the paper's lemma on SGD, with :math:`G^2` for :math:`2G^2 + 2\sigma^2`).

    Args:
        lr: the effective learning rate at t = 1.
        domain: K.
        schedule: "sqrt" for :math:`\mathrm{lr}/\sqrt{t}`, "constant" for lr.
        weight_decay: decoupled: w is first multiplied by 1 - lr_t * weight_decay (never below 0).

    >>> import torch, lategrad as lg
    >>> learner = lg.OGD(lr=1.0, domain=lg.Ball(1.0))
    >>> state = learner.init(torch.zeros(2))
    >>> state = learner.update(state, Linear(torch.ones(1), torch.tensor([0.5, 0.0])))
    >>> learner.predict(state)
    tensor([-0.5000,  0.0000])

    Reference: M. Zinkevich, Online convex programming and generalized infinitesimal gradient ascent, 2003.
    """

    lr: NonNegative[Scalar]
    domain: ConvexSet = WholeSpace()
    schedule: Literal["sqrt", "constant"] = "sqrt"
    weight_decay: NonNegative[Scalar] = 0.0

    def init(self, w1: Tensor) -> OGDState:
        w = first_play(self, w1)
        return OGDState(w=w, t=per_run(w, 0))

    def update(self, state: OGDState, loss: Linear, hint: Linear | None = None) -> OGDState:
        t = state.t + 1
        lr = self.lr / (t.sqrt() if self.schedule == "sqrt" else t**0)
        w = decayed(state.w, lr, self.weight_decay)
        return OGDState(w=self.domain.project(w - lr.to(w.dtype) * loss.grad), t=t)


class OptimisticState(NamedTuple):
    w: Tensor
    y: Tensor  # y_{t-1}, the point that the true losses have led to
    hint: Linear  # alpha_t M_t, the hint given for the coming round
    surprise: Tensor  # the sum over i < t of alpha_i^2 |g_i - M_i|^2


@dataclass(frozen=True, eq=False)
class OptimisticOGD(PlaysIterate):
    r"""Adaptive optimistic OGD, the paper's remark after Algorithm 2.

    .. math:: w_t &= \Pi_K(y_{t-1} - \eta_t \alpha_t M_t), \qquad
        y_t = \Pi_K(y_{t-1} - \eta_t \alpha_t g_t), \\
        \eta_t &= D / \sqrt{1 + \textstyle\sum_{i<t} \alpha_i^2 \|g_i - M_i\|^2}

    The remark starts at t = 2; here :math:`y_0 = w_1` and :math:`M_1 = 0`, so that the first gradient
    is used. On a set of diameter D the regret is at most
    :math:`2 D \sqrt{1 + \sum_t \alpha_t^2 \|g_t - M_t\|^2}` (derived in docs/theory.md).

    Args:
        diameter: D; without a bounded set, the distance one expects to travel.
        domain: K.
        weight_decay: decoupled: before each step y is multiplied by 1 - eta * weight_decay (never below 0).

    >>> import torch, lategrad as lg
    >>> learner = lg.OptimisticOGD(diameter=1.0)
    >>> state = learner.init(torch.zeros(1))
    >>> loss = Linear(torch.ones(1), torch.tensor([0.75]))
    >>> state = learner.update(state, loss, hint=loss)
    >>> state.y, learner.predict(state)  # y_1 = -0.75, and from there a step of 1/1.25 on the hint
    (tensor([-0.7500]), tensor([-1.3500]))

    Reference: A. Rakhlin and K. Sridharan, Optimization, learning, and games with predictable sequences, 2013.
    """

    diameter: NonNegative[Scalar]
    domain: ConvexSet = WholeSpace()
    weight_decay: NonNegative[Scalar] = 0.0

    def init(self, w1: Tensor) -> OptimisticState:
        w = first_play(self, w1)
        return OptimisticState(w=w, y=w.clone(), hint=owned_hint(None, w), surprise=per_run(w, 0))

    def _step(self, y: Tensor, loss: Linear, surprise: Tensor) -> Tensor:
        lr = self.diameter / (1 + surprise).sqrt() * loss.weight
        return self.domain.project(decayed(y, lr, self.weight_decay) - lr.to(y.dtype) * loss.grad)

    def update(self, state: OptimisticState, loss: Linear, hint: Linear | None = None) -> OptimisticState:
        """Move y with the true loss, then play one step ahead with the hint for the next round."""
        hint = owned_hint(hint, loss.grad)
        y = self._step(state.y, loss, state.surprise)
        surprise = state.surprise + squared_norm(weighted(loss) - weighted(state.hint))
        return OptimisticState(w=self._step(y, hint, surprise), y=y, hint=hint, surprise=surprise)
