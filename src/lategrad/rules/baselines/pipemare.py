"""PipeMare's learning rates (Yang et al. 2021): divided by the delay at first, whole at last."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from lategrad.rules._common import LastIterate, Moments, adam_direction, next_moments, start_moments
from lategrad.rules.blocks import Blocks, per_entry
from lategrad.rules.rule import Delay, as_number, first_query
from lategrad.sets import ConvexSet, WholeSpace
from lategrad.support.runs import per_run
from lategrad.support.validation import BelowOne, NonNegative, Positive, Scalar


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
        return PipeMareState(x=x, moments=start_moments(x), t=per_run(x, 0))

    def update(self, state: PipeMareState, grad: Tensor, delay: Delay) -> PipeMareState:
        t = state.t + 1
        power = 1 - (t / self.annealing).clamp_max(1)
        lr = self.lr * (-power * as_number(delay).clamp_min(1).log()).exp()  # lr / max(1, tau)^p
        moments = next_moments(state.moments, grad, self.beta1, self.beta2)
        direction = adam_direction(moments, t, self.beta1, self.beta2, self.eps) + self.weight_decay * state.x
        move = per_entry(self.delay_blocks, lr.to(grad.dtype), grad) * direction
        return PipeMareState(x=self.domain.project(state.x - move), moments=moments, t=t)
