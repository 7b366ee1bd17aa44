"""Weight prediction (SpecTrain, XPipe): gradients where the weights are expected to be when they arrive."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from lategrad.rules._common import Moments, OutputsX, adam_direction, next_moments, start_moments
from lategrad.rules.blocks import Blocks, per_entry, start_delays
from lategrad.rules.rule import Delay, as_dtype, first_query
from lategrad.sets import ConvexSet, WholeSpace
from lategrad.support.runs import per_run
from lategrad.support.validation import BelowOne, NonNegative, Positive, Scalar


class WeightPredictionState(NamedTuple):
    x: Tensor  # x_{t+1}, the iterate
    moments: Moments
    delay: Tensor  # the delay of the last gradient, which the next is expected to have, float64
    t: Tensor  # updates so far


@dataclass(frozen=True, eq=False)
class WeightPrediction(OutputsX):
    r"""AdamW whose queries run ahead along its own direction, as in XPipe.

    .. math:: y_t = \Pi_K(x_t - \tau\, \mathrm{lr}\, d_{t-1}), \qquad x_{t+1} = x_t - \mathrm{lr}\,(d_t + \lambda x_t)

    d is Adam's direction, :math:`\tau` the delay of the gradient that came last: if the direction does not change, the
    gradient is taken where the weights are when it arrives. SpecTrain does the same along the momentum of SGD.

    Source: checked against the code of XPipe's first author for its successor (guanleics/PipeOptim, ``optimizer.py``):
    bias-corrected d, no weight decay in the prediction. A pipeline knows its delays, one for each stage; that the last
    delay is the guess for the next is ours, and so is the projection.

    Args:
        lr: learning rate.
        domain: K, the constraint set.
        beta1, beta2, eps, weight_decay: as in :class:`AdamW`.
        delay_blocks: tensors with a delay each, as in a pipeline; filled in by the host.

    >>> import torch, lategrad as lg
    >>> rule = lg.baselines.WeightPrediction(lr=0.1, weight_decay=0.0)
    >>> state = rule.update(rule.init(torch.zeros(1)), torch.tensor([5.0]), delay=torch.tensor(3))
    >>> rule.output(state), rule.query(state)
    (tensor([-0.1000]), tensor([-0.4000]))

    Must know: the delay of every gradient.

    Guarantee: none.

    References: C.-C. Chen, C.-L. Yang and H.-Y. Cheng, Efficient and robust parallel DNN training through model
    parallelism on multi-GPU platform (SpecTrain), 2018; L. Guan, W. Yin, D. Li and X. Lu, XPipe: efficient pipeline
    model parallelism for multi-GPU DNN training, 2019.
    """

    lr: NonNegative[Scalar]
    domain: ConvexSet = WholeSpace()
    beta1: BelowOne[float] = 0.9
    beta2: BelowOne[float] = 0.999
    eps: Positive[float] = 1e-8
    weight_decay: NonNegative[float] = 0.01
    delay_blocks: Blocks | None = None

    def init(self, x0: Tensor) -> WeightPredictionState:
        x = first_query(self, x0)
        delay = start_delays(self.delay_blocks, x)
        return WeightPredictionState(x=x, moments=start_moments(x), delay=delay, t=per_run(x, 0))

    def _direction(self, moments: Moments, t: Tensor) -> Tensor:
        return adam_direction(moments, t, self.beta1, self.beta2, self.eps)

    def query(self, state: WeightPredictionState) -> Tensor:
        direction = self._direction(state.moments, state.t.clamp_min(1))  # zero before any update
        ahead = per_entry(self.delay_blocks, (self.lr * state.delay).to(state.x.dtype), state.x)
        return self.domain.project(state.x - ahead * direction)

    def update(self, state: WeightPredictionState, grad: Tensor, delay: Delay) -> WeightPredictionState:
        t = state.t + 1
        moments = next_moments(state.moments, grad, self.beta1, self.beta2)
        move = as_dtype(self.lr, grad) * (self._direction(moments, t) + self.weight_decay * state.x)
        x = self.domain.project(state.x - move)
        return WeightPredictionState(x=x, moments=moments, delay=0 * state.delay + delay, t=t)
