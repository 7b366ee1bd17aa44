"""SGD with a constant learning rate, the paper's comparison."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from lategrad.learners.learner import decayed
from lategrad.rules._common import AveragedIterate
from lategrad.rules.rule import Average, Delay, as_dtype, first_query, next_mean, start_mean
from lategrad.sets import ConvexSet, WholeSpace
from lategrad.support.runs import per_run
from lategrad.support.validation import NonNegative, Scalar


class SGDState(NamedTuple):
    x: Tensor  # x_{t+1}, the iterate
    mean: Tensor  # the average of x_1 .. x_t; empty without averaging
    t: Tensor  # updates so far


@dataclass(frozen=True, eq=False)
class SGD(AveragedIterate):
    r"""Delayed SGD with a constant learning rate, :math:`x_{t+1} = \Pi_K(x_t - \mathrm{lr}\, g_{t-\tau_t})`.

    Args:
        lr: learning rate.
        domain: K.
        average: the output is the last iterate ("none"), or the average of :math:`x_1, \dots, x_T`
            with weights 1 ("uniform") or t ("linear"). The queries do not change.
        weight_decay: decoupled: x is first multiplied by 1 - lr * weight_decay (never below 0).

    >>> import torch, lategrad as lg
    >>> rule = lg.SGD(lr=0.5, average="uniform")
    >>> state = rule.init(torch.zeros(1))
    >>> for t in range(2):
    ...     state = rule.update(state, torch.tensor([-1.0]), delay=torch.tensor(0))
    >>> rule.query(state), rule.output(state)  # x_3 = 1, and the average of x_1 = 0 and x_2 = 0.5
    (tensor([1.]), tensor([0.2500]))

    Must know: nothing while it runs; for the guarantee, the smoothness and the largest delay.

    Guarantee: with lr of order :math:`1/(L\tau)` for a delay :math:`\tau`, the rates of SGD for T that is large
    relative to :math:`\tau` (see the reference); none for longer delays.

    Reference: S. Stich and S. Karimireddy, The error-feedback framework, 2020 (delayed SGD).
    """

    lr: NonNegative[Scalar]
    domain: ConvexSet = WholeSpace()
    average: Average = "none"
    weight_decay: NonNegative[Scalar] = 0.0

    def init(self, x0: Tensor) -> SGDState:
        x = first_query(self, x0)
        return SGDState(x=x, mean=start_mean(x, self.average), t=per_run(x, 0))

    def update(self, state: SGDState, grad: Tensor, delay: Delay) -> SGDState:
        t = state.t + 1
        mean = next_mean(state.mean, state.x, t, self.average)
        x = decayed(state.x, self.lr, self.weight_decay) - as_dtype(self.lr, grad) * grad
        return SGDState(x=self.domain.project(x), mean=mean, t=t)
