"""Adam as papers on asynchronous pipelines change it: NAdam with much momentum (Ajanthan et al. 2025), PipeMare's
learning rates (Yang et al. 2021), and weight prediction (SpecTrain, XPipe)."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from lategrad.rules._common import LastIterate, Moments, OutputsX, geometric, root_mean_square
from lategrad.rules.blocks import Blocks, per_entry, start_delays
from lategrad.rules.rule import Delay, as_dtype, as_number, first_query
from lategrad.sets import ConvexSet, WholeSpace
from lategrad.support.runs import per_run
from lategrad.support.validation import BelowOne, NonNegative, Positive, Scalar


class NAdamState(NamedTuple):
    x: Tensor  # x_{t+1}, the iterate
    moments: Moments
    product: Tensor  # mu_1 .. mu_t, float64
    t: Tensor  # updates so far


@dataclass(frozen=True, eq=False)
class NAdam(LastIterate):
    r"""NAdam with decoupled weight decay, in the form of ``torch.optim.NAdam``.

    .. math:: \mu_t = \beta_1 (1 - \tfrac12\, 0.96^{\psi t}), \qquad
        x_{t+1} = \Pi_K\Big((1 - \mathrm{lr}\,\lambda) x_t - \frac{\mathrm{lr}}{\sqrt{v_t / (1 - \beta_2^t)} + \epsilon}
            \Big(\frac{(1 - \mu_t)\, g}{1 - \mu_1 \cdots \mu_t}
            + \frac{\mu_{t+1}\, m_t}{1 - \mu_1 \cdots \mu_{t+1}}\Big)\Big)

    with Adam's m and v. For asynchronous pipelines Ajanthan et al. raise :math:`\beta_1` to 0.99: the look-ahead
    along a long memory then stands in for where the weights will be.

    Source: checked against the authors' code (PluralisResearch/AsyncPP, ``run.bash`` and ``main_with_runtime.py``),
    which runs ``torch.optim.NAdam`` with the constants below; equal to that optimizer. Ours: the projection.

    Args:
        lr: learning rate.
        domain: K, the constraint set.
        beta1, beta2, weight_decay, momentum_decay: the authors' 0.99, 0.999, 0.01 and :math:`\psi` = 0.004.
        eps: torch's 1e-8.

    >>> import torch, lategrad as lg
    >>> rule = lg.baselines.NAdam(lr=0.1)
    >>> state = rule.init(torch.zeros(2))
    >>> rule.output(rule.update(state, torch.tensor([5.0, -0.2]), delay=torch.tensor(0)))
    tensor([-0.1007,  0.1007])

    Must know: nothing.

    Guarantee: none for this form; its authors prove a rate for Nesterov's method under a fixed delay.

    References: T. Dozat, Incorporating Nesterov momentum into Adam, 2016; T. Ajanthan et al., Nesterov method for
    asynchronous pipeline parallel optimization, 2025.
    """

    lr: NonNegative[Scalar]
    domain: ConvexSet = WholeSpace()
    beta1: BelowOne[float] = 0.99
    beta2: BelowOne[float] = 0.999
    eps: Positive[float] = 1e-8
    weight_decay: NonNegative[float] = 0.01
    momentum_decay: NonNegative[float] = 4e-3

    def init(self, x0: Tensor) -> NAdamState:
        x = first_query(self, x0)
        return NAdamState(x=x, moments=Moments.start(x), product=per_run(x, 1), t=per_run(x, 0))

    def _momentum(self, t: Tensor) -> Tensor:
        return self.beta1 * (1 - 0.5 * geometric(0.96, self.momentum_decay * t))

    def update(self, state: NAdamState, grad: Tensor, delay: Delay) -> NAdamState:
        t = state.t + 1
        now, ahead = self._momentum(t), self._momentum(t + 1)
        product = state.product * now
        moments = state.moments.next(grad, self.beta1, self.beta2)
        of_grad = ((1 - now) / (1 - product)).to(grad.dtype)
        of_momentum = (ahead / (1 - product * ahead)).to(grad.dtype)
        numerator = of_grad * grad + of_momentum * moments.first
        direction = numerator / root_mean_square(moments.second, t, self.beta2, self.eps)
        move = as_dtype(self.lr, grad) * (direction + self.weight_decay * state.x)
        return NAdamState(x=self.domain.project(state.x - move), moments=moments, product=product, t=t)


class PipeMareState(NamedTuple):
    x: Tensor  # x_{t+1}, the iterate
    moments: Moments
    t: Tensor  # updates so far


@dataclass(frozen=True, eq=False)
class PipeMare(LastIterate):
    r"""AdamW with PipeMare's first technique, the rescheduled learning rate.

    .. math:: \mathrm{lr}_t = \frac{\mathrm{lr}}{\max(1, \tau_t)^{p_t}}, \qquad p_t = 1 - \min(t / K, 1)

    PipeMare's second technique, which corrects the weights of the backward pass of a pipeline, has nothing to correct
    here: forward and backward use the same weights.

    Source: checked second hand, against the baseline of PluralisResearch/AsyncPP (``--lr_correction``), which has the
    formula above and anneals over 7 epochs; the paper, as we remember it, over a quarter of the first phase of its
    schedule, or five times its warm-up. Ours: K = 5000, a quarter of a run of 20,000 updates, and the projection.

    Args:
        lr: learning rate.
        domain: K, the constraint set.
        annealing: K, in updates.
        beta1, beta2, eps, weight_decay: as in :class:`AdamW`.
        delay_blocks: tensors with a delay each, as in a pipeline; filled in by the host.

    >>> import torch, lategrad as lg
    >>> rule = lg.baselines.PipeMare(lr=0.1, annealing=1e9, weight_decay=0.0)
    >>> state = rule.init(torch.zeros(1))
    >>> rule.output(rule.update(state, torch.tensor([5.0]), delay=torch.tensor(4)))
    tensor([-0.0250])

    Must know: the delay of every gradient.

    Guarantee: none beyond its authors' analysis of the stability of quadratics.

    Reference: B. Yang, J. Zhang, J. Li, C. Ré, C. Aberger and C. De Sa, PipeMare: asynchronous pipeline parallel DNN
    training, 2021.
    """

    lr: NonNegative[Scalar]
    domain: ConvexSet = WholeSpace()
    annealing: Positive[Scalar] = 5000
    beta1: BelowOne[float] = 0.9
    beta2: BelowOne[float] = 0.999
    eps: Positive[float] = 1e-8
    weight_decay: NonNegative[float] = 0.01
    delay_blocks: Blocks | None = None

    def init(self, x0: Tensor) -> PipeMareState:
        x = first_query(self, x0)
        return PipeMareState(x=x, moments=Moments.start(x), t=per_run(x, 0))

    def update(self, state: PipeMareState, grad: Tensor, delay: Delay) -> PipeMareState:
        t = state.t + 1
        power = 1 - (t / self.annealing).clamp_max(1)
        lr = self.lr * (-power * as_number(delay).clamp_min(1).log()).exp()  # lr / max(1, tau)^p
        moments = state.moments.next(grad, self.beta1, self.beta2)
        direction = moments.direction(t, self.beta1, self.beta2, self.eps) + self.weight_decay * state.x
        move = per_entry(self.delay_blocks, lr.to(grad.dtype), grad) * direction
        return PipeMareState(x=self.domain.project(state.x - move), moments=moments, t=t)


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
        return WeightPredictionState(x=x, moments=Moments.start(x), delay=delay, t=per_run(x, 0))

    def query(self, state: WeightPredictionState) -> Tensor:
        t = state.t.clamp_min(1)  # before any update the direction is zero
        direction = state.moments.direction(t, self.beta1, self.beta2, self.eps)
        ahead = per_entry(self.delay_blocks, (self.lr * state.delay).to(state.x.dtype), state.x)
        return self.domain.project(state.x - ahead * direction)

    def update(self, state: WeightPredictionState, grad: Tensor, delay: Delay) -> WeightPredictionState:
        t = state.t + 1
        moments = state.moments.next(grad, self.beta1, self.beta2)
        direction = moments.direction(t, self.beta1, self.beta2, self.eps) + self.weight_decay * state.x
        x = self.domain.project(state.x - as_dtype(self.lr, grad) * direction)
        return WeightPredictionState(x=x, moments=moments, delay=0 * state.delay + delay, t=t)
