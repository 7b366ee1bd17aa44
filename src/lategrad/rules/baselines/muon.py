"""Muon (Jordan et al. 2024): updates along the orthogonal factor of the momentum of every matrix."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lategrad.rules._common import AveragedIterate, Moments
from lategrad.rules._orthogonalize import matrix_steps
from lategrad.rules.blocks import Blocks
from lategrad.rules.rule import Average, Delay, as_dtype, first_query, next_mean, start_mean
from lategrad.sets import ConvexSet, WholeSpace
from lategrad.support.runs import per_run
from lategrad.support.validation import BelowOne, NonNegative, Positive, Scalar


class MuonState(NamedTuple):
    x: Tensor  # x_{t+1}, the iterate
    momentum: Tensor  # M, the moving average of the gradients that matrices use
    moments: Moments  # Adam's, for all that is not a matrix
    mean: Tensor  # the average of x_1 .. x_t; without averaging it has no entries
    t: Tensor  # updates so far


@dataclass(frozen=True, eq=False)
class Muon(AveragedIterate):
    r"""Muon on the matrices, AdamW on the rest, with one learning rate for both.

    For a matrix of r rows and c columns, as ``torch.optim.Muon(adjust_lr_fn="match_rms_adamw")`` does it:

    .. math:: M \leftarrow \mu M + (1 - \mu) G, \qquad N = \mu M + (1 - \mu) G, \qquad
        X \leftarrow (1 - \mathrm{lr}\,\lambda) X - \mathrm{lr} \cdot 0.2 \sqrt{\max(r, c)}\; \mathrm{orth}(N)

    where orth makes all singular values about 1 (``rules/_orthogonalize.py``). The factor gives the update the size
    that AdamW's has. Convolutions are matrices with a row for every output channel. Everything else takes the update of
    :class:`AdamW`. Without blocks the vector is one piece without matrices, and the rule is AdamW.

    Source: equal to ``torch.optim.Muon(adjust_lr_fn="match_rms_adamw")`` and ``torch.optim.AdamW``, whose defaults
    these are, but for orth: torch's takes five fixed steps in bfloat16, ours comes nearer to the orthogonal factor.
    Muon's author scales by :math:`\sqrt{\max(1, r/c)}` instead. Ours: the projection and the averages.

    Args:
        lr: learning rate.
        domain: K, the constraint set.
        momentum, weight_decay: of the matrices, torch's 0.95 and 0.1.
        beta1, beta2, eps, other_decay: of the rest, AdamW's 0.9, 0.999, 1e-8 and 0.01.
        average: of the queries as the output: "none", "uniform" or "linear", as in :class:`~lategrad.SGD`.
        blocks: where the matrices are; hosts fill it in.

    >>> import torch, lategrad as lg
    >>> rule = lg.baselines.Muon(lr=1.0, blocks=lg.rules.Blocks.of_tensors([torch.zeros(3, 4)]))
    >>> state = rule.init(torch.zeros(12))
    >>> step = rule.output(rule.update(state, torch.arange(12.0), delay=torch.tensor(0))).view(3, 4)
    >>> (torch.linalg.svdvals(step) / (0.2 * 2)).round()  # of the gradient: 22, 1.5 and 0
    tensor([1., 1., 0.])

    Must know: which entries are matrices.

    Guarantee: if all parameters are matrices, f is smooth, weight decay is 0 and there is no constraint, for the
    average over its iterates, under any delays that are independent of the samples (docs/theory-deep.md).

    Reference: K. Jordan et al., Muon: an optimizer for hidden layers in neural networks, 2024.
    """

    lr: NonNegative[Scalar]
    domain: ConvexSet = WholeSpace()
    momentum: BelowOne[float] = 0.95
    weight_decay: NonNegative[float] = 0.1
    beta1: BelowOne[float] = 0.9
    beta2: BelowOne[float] = 0.999
    eps: Positive[float] = 1e-8
    other_decay: NonNegative[float] = 0.01
    average: Average = "none"
    blocks: Blocks | None = None

    def init(self, x0: Tensor) -> MuonState:
        x = first_query(self, x0)
        mean = start_mean(x, self.average)
        return MuonState(x=x, momentum=torch.zeros_like(x), moments=Moments.start(x), mean=mean, t=per_run(x, 0))

    def update(self, state: MuonState, grad: Tensor, delay: Delay) -> MuonState:
        t = state.t + 1
        momentum = self.momentum * state.momentum + (1 - self.momentum) * grad
        nesterov = self.momentum * momentum + (1 - self.momentum) * grad
        moments = state.moments.next(grad, self.beta1, self.beta2)
        direction = moments.direction(t, self.beta1, self.beta2, self.eps) + self.other_decay * state.x
        if self.blocks is not None:
            blocks, parts = self.blocks.without_tokens(), self.blocks.split(direction)
            steps = matrix_steps(blocks, blocks.split(nesterov))
            decays = self.blocks.split(self.weight_decay * state.x)
            matrices = [i for i, block in enumerate(blocks.parts) if block.is_matrix]
            direction = self.blocks.join([steps[i] + decays[i] if i in matrices else p for i, p in enumerate(parts)])
        x = self.domain.project(state.x - as_dtype(self.lr, grad) * direction)
        mean = next_mean(state.mean, state.x, t, self.average)
        return MuonState(x=x, momentum=momentum, moments=moments, mean=mean, t=t)
