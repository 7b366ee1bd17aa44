"""Online gradient descent (Zinkevich 2003), the learner of the paper's experiments."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from lategrad.learners.learner import Linear, PlaysIterate, decayed, first_play
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
