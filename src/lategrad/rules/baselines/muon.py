"""Muon (Jordan et al. 2024): updates along the orthogonal factor of the momentum of every matrix."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lategrad.rules._common import AveragedIterate, Moments
from lategrad.rules._orthogonalize import matrix_steps
from lategrad.rules.blocks import Blocks, per_entry
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
    q: Tensor  # q_{t+1}, the query, if weights are predicted; else it has no entries


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

    With ``prediction`` gradients are taken at :math:`q = \Pi_K(X - \tau\, \mathrm{lr}\, d)`, d the last direction
    without weight decay and :math:`\tau` the delay of the gradient that came last: where X is when the gradient
    arrives, if d stays. So does marin-community/marin (pull request 6423), with the delay of each stage.

    Args:
        lr: learning rate.
        domain: K, the constraint set.
        momentum, weight_decay: of the matrices, torch's 0.95 and 0.1.
        beta1, beta2, eps, other_decay: of the rest, AdamW's 0.9, 0.999, 1e-8 and 0.01.
        average: of the queries as the output: "none", "uniform" or "linear", as in :class:`~lategrad.SGD`.
        prediction: whether the queries run ahead of the iterate.
        blocks: where the matrices are; hosts fill it in.
        delay_blocks: tensors with a delay each, as in a pipeline; filled in by the host.

    >>> import torch, lategrad as lg
    >>> rule = lg.baselines.Muon(lr=1.0, blocks=lg.rules.Blocks.of_tensors([torch.zeros(3, 4)]))
    >>> state = rule.init(torch.zeros(12))
    >>> step = rule.output(rule.update(state, torch.arange(12.0), delay=torch.tensor(0))).view(3, 4)
    >>> (torch.linalg.svdvals(step) / (0.2 * 2)).round()  # of the gradient: 22, 1.5 and 0
    tensor([1., 1., 0.])

    Must know: which entries are matrices; with ``prediction`` the delay of every gradient.

    Guarantee: without ``prediction``, if all parameters are matrices, f is smooth, weight decay is 0 and there is no
    constraint, for the average over its iterates, under any delays that are independent of the samples
    (docs/theory-deep.md).

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
    prediction: bool = False
    blocks: Blocks | None = None
    delay_blocks: Blocks | None = None

    def init(self, x0: Tensor) -> MuonState:
        x = first_query(self, x0)
        mean, q = start_mean(x, self.average), x.clone() if self.prediction else x[..., :0]
        return MuonState(x=x, momentum=torch.zeros_like(x), moments=Moments.start(x), mean=mean, t=per_run(x, 0), q=q)

    def query(self, state: Any) -> Tensor:
        x: Tensor = state.q if self.prediction else state.x
        return x

    def update(self, state: MuonState, grad: Tensor, delay: Delay) -> MuonState:
        t = state.t + 1
        momentum = self.momentum * state.momentum + (1 - self.momentum) * grad
        nesterov = self.momentum * momentum + (1 - self.momentum) * grad
        moments = state.moments.next(grad, self.beta1, self.beta2)
        direction = moments.direction(t, self.beta1, self.beta2, self.eps)
        decay = self.other_decay * state.x
        if self.blocks is not None:
            blocks = self.blocks.without_tokens()
            matrices = {i for i, block in enumerate(blocks.parts) if block.is_matrix}

            def choose(of_matrices: list[Tensor], others: Tensor) -> Tensor:
                pairs = zip(of_matrices, blocks.split(others), strict=True)
                return blocks.join([one if i in matrices else other for i, (one, other) in enumerate(pairs)])

            direction = choose(matrix_steps(blocks, blocks.split(nesterov)), direction)
            decay = choose(blocks.split(self.weight_decay * state.x), decay)
        x = self.domain.project(state.x - as_dtype(self.lr, grad) * (direction + decay))
        q = state.q
        if self.prediction:
            ahead = per_entry(self.delay_blocks, (self.lr * (0 * t + delay)).to(x.dtype), x)
            q = self.domain.project(x - ahead * direction)
        mean = next_mean(state.mean, state.x, t, self.average)
        return MuonState(x=x, momentum=momentum, moments=moments, mean=mean, t=t, q=q)
