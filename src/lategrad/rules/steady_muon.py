"""SteadyMuon: orthogonalised momentum, averaged, with a query that predicts the server's point one delay ahead."""

import warnings
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lategrad.learners.learner import decayed
from lategrad.rules._common import OutputsX, next_mean_delay, root_mean_square
from lategrad.rules._orthogonalize import matrix_steps
from lategrad.rules.blocks import Blocks, per_entry, start_delays
from lategrad.rules.rule import Delay, as_dtype, average_in, first_query
from lategrad.sets import ConvexSet, WholeSpace
from lategrad.support.runs import per_run
from lategrad.support.validation import NonNegative, Scalar, require

_POWER = 3  # of t, in the weights of the average
_THETA, _THETA_IN_TIME = 0.2, 0.3  # weight of the iterate in the query, and how much more without delay
_MEMORY = 10.0  # gradients that the momentum averages without delay
_BETA2, _EPS = 0.999, 1e-8
_OTHER = 0.3  # step of entries outside matrices; entries of matrices move by about 0.2


class SteadyMuonState(NamedTuple):
    z: Tensor  # z_{t+1}, the iterate
    x: Tensor  # x_{t+1}, the average of z_2 .. z_{t+1} with weights 6, 24, 60, ..., s (s + 1) (s + 2)
    m: Tensor  # momentum
    q: Tensor  # q_{t+1}, the query
    v: Tensor  # the running mean of squared gradients of the entries that are in no matrix
    mean_delay: Tensor
    t: Tensor  # updates so far


@dataclass(frozen=True, eq=False)
class SteadyMuon(OutputsX):
    r"""Muon's orthogonalised momentum over about one round, and a query that looks one delay ahead.

    Update t receives a gradient g of the query of time :math:`s = t - \tau_t \ge 1`. With the running mean
    :math:`\bar\tau` of the delays, :math:`\beta = 1 - 1/(10 + \bar\tau)` and :math:`\ell = \min(\bar\tau, t)`,

    .. math:: m_t &= \beta\, m_{t-1} + (1 - \beta)\, g, \qquad n = \beta\, m_t + (1 - \beta)\, g, \\
        d &= 0.2 \sqrt{\max(r, c)}\; \mathrm{orthogonalise}(n) \text{ on a matrix of r rows and c columns,} \quad
        0.3\, \frac{n}{\sqrt{\hat v_t} + 10^{-8}} \text{ elsewhere}, \\
        \mathrm{lr}_t &= \mathrm{lr}\, \frac{s}{t}\, \frac{1}{\sqrt{1 + \max(\tau_t, \bar\tau)}}, \qquad
        z_{t+1} = \Pi_K\big((1 - \mathrm{lr}_t\, \mathrm{decay})\, z_t - \mathrm{lr}_t\, d\big), \qquad
        x_{t+1} = x_t + \tfrac{4}{t + 3} (z_{t+1} - x_t), \\
        \hat z &= \Pi_K\big(z_{t+1} + \ell\, (z_{t+1} - z_t)\big), \qquad
        \hat x = x_{t+1} + \Big(1 - \frac{t^4}{(t + \ell)^4}\Big)
            \Big(\frac{z_{t+1} + \hat z}{2} - x_{t+1}\Big), \qquad
        q_{t+1} = \hat x + \Big(0.2 + \frac{3}{10 + \bar\tau}\Big) (\hat z - \hat x)

    The query is q, the output x; :math:`\hat v` is Adam's mean of squared gradients. Where a matrix has a row for each
    token (kind "tokens"), rows of d whose entries have a root mean square above 0.2 are scaled down to it.

    Why. All gradients of a round of :math:`1 + \tau` updates come from nearly the same point, as in a large batch: they
    are averaged before they are orthogonalised, so the momentum spans a round. Such a momentum predicts where the
    iterate will be when the gradient returns, so the query is put there. That matters: with a delay of one round,
    momentum is stable for learning rates of about 1 over the curvature, however long the momentum; with the look-ahead,
    to first order, for :math:`\sqrt{3 W}` times as much with a momentum of W rounds. The average stands for a decaying
    learning rate: the last quarter of the run has most of the weight, and without delay gradients are taken half-way
    to the iterate. The factor s/t is that of :class:`~lategrad.SteadyAdam`. None of these reasons is a proof for deep
    models: they are measured.

    Args:
        lr: as for Muon with its steps scaled to Adam's; the best value without delay is meant to work with delay.
        domain: K.
        weight_decay: decoupled, on the iterate: z is first multiplied by 1 - lr_t * weight_decay (never below 0).
        blocks: which entries are matrices; filled in by the host, which knows the tensors.
        delay_blocks: tensors with a delay each, as in a pipeline; filled in by the host, which then tells
            ``(*runs, blocks)`` delays. Everything above that has a :math:`\tau` is then each tensor's own.

    >>> import torch, lategrad as lg
    >>> blocks = lg.Blocks.of_module(torch.nn.Linear(3, 2))
    >>> rule = lg.SteadyMuon(lr=0.1, blocks=blocks)
    >>> target, state = torch.linspace(-1, 1, 8), rule.init(torch.zeros(8))
    >>> queries = [rule.query(state)]
    >>> for t in range(1000):
    ...     tau = min(20, t)
    ...     state = rule.update(state, queries[t - tau] - target, delay=torch.tensor(tau))
    ...     queries.append(rule.query(state))
    >>> bool((rule.output(state) - target).norm() < 0.1)
    True

    Must know: the delay of every gradient, and which entries are matrices.

    Guarantee: if all parameters are matrices, none of tokens, f is smooth, weight decay is 0, there is no constraint
    and delays are independent of the samples, a bound at z, not at its output, with a measured distance
    (docs/theory-deep.md).

    Reference: this rule is ours; measurements, and on what the constants were chosen, in docs/deep.md.
    """

    lr: NonNegative[Scalar] = 0.01
    domain: ConvexSet = WholeSpace()
    weight_decay: NonNegative[Scalar] = 0.0
    blocks: Blocks | None = None
    delay_blocks: Blocks | None = None

    def init(self, x0: Tensor) -> SteadyMuonState:
        if self.blocks is None:
            warnings.warn("SteadyMuon without blocks knows no matrices: it uses Adam's direction", stacklevel=2)
        else:
            fits = x0.shape[-1] == self.blocks.size
            require("x0", tuple(x0.shape), fits, f"of shape (*runs, {self.blocks.size}), as {self.blocks} says")
        z = first_query(self, x0)
        others, mean_delay = torch.zeros_like(self._others(z)), start_delays(self.delay_blocks, z)
        return SteadyMuonState(
            z=z, x=z.clone(), m=torch.zeros_like(z), q=z.clone(), v=others, mean_delay=mean_delay, t=per_run(z, 0)
        )

    def query(self, state: SteadyMuonState) -> Tensor:
        """Where the average and the iterate are expected to be when the gradient returns."""
        return state.q

    def update(self, state: SteadyMuonState, grad: Tensor, delay: Delay) -> SteadyMuonState:
        return self.advance(state, grad, delay, self._matrix_direction(self.momentum(state, grad, delay)))

    def momentum(self, state: SteadyMuonState, grad: Tensor, delay: Delay) -> Tensor:
        """n, which is orthogonalised where it is a matrix."""
        return self._momenta(state, grad, delay)[1]

    def advance(
        self, state: SteadyMuonState, grad: Tensor, delay: Delay, direction: Tensor | None = None
    ) -> SteadyMuonState:
        """The update along ``direction``; None where there is no matrix, and every entry has Adam's direction."""
        t = state.t + 1
        mean_delay = next_mean_delay(state.mean_delay, delay, t)
        m, n = self._momenta(state, grad, delay)
        v = torch.lerp(state.v, self._others(grad) ** 2, 1 - _BETA2)
        adam = _OTHER * self._others(n) / root_mean_square(v, t, _BETA2, _EPS)
        d = adam if direction is None else self._join(direction, adam)

        lr = self.lr * (t - delay).clamp_min(1) / t / (1 + torch.maximum(mean_delay, delay + 0 * t)).sqrt()
        lr = per_entry(self.delay_blocks, lr, grad)
        z = self.domain.project(decayed(state.z, lr, self.weight_decay) - as_dtype(lr, grad) * d)
        x, q = self._average_and_query(state, z, mean_delay, t)
        return SteadyMuonState(z=z, x=x, m=m, q=q, v=v, mean_delay=mean_delay, t=t)

    def _average_and_query(
        self, state: SteadyMuonState, z: Tensor, mean_delay: Tensor, t: Tensor
    ) -> tuple[Tensor, Tensor]:
        x = average_in(state.x, z, (1 + _POWER) / (t + _POWER))
        ahead = torch.minimum(mean_delay, t)
        z_ahead = self.domain.project(z + self._spread(ahead, z) * (z - state.z))
        x_ahead = average_in(x, (z + z_ahead) / 2, self._spread(1 - (t / (t + ahead)) ** (1 + _POWER), z))
        theta = _THETA + _THETA_IN_TIME * _MEMORY / (_MEMORY + mean_delay)
        return x, torch.lerp(x_ahead, z_ahead, self._spread(theta, z))

    def _momenta(self, state: SteadyMuonState, grad: Tensor, delay: Delay) -> tuple[Tensor, Tensor]:
        mean_delay = next_mean_delay(state.mean_delay, delay, state.t + 1)
        beta = self._spread(1 - 1 / (_MEMORY + mean_delay), grad)
        m = torch.lerp(grad, state.m, beta)
        return m, torch.lerp(grad, m, beta)

    def _spread(self, values: Tensor, like: Tensor) -> Tensor:
        return per_entry(self.delay_blocks, values.to(like.dtype), like)

    def _others(self, x: Tensor) -> Tensor:
        """The entries that are in no matrix, in one piece."""
        if self.blocks is None or not any(block.is_matrix for block in self.blocks.parts):
            return x
        parts = zip(x.split([block.size for block in self.blocks.parts], dim=-1), self.blocks.parts, strict=True)
        others = [part for part, block in parts if not block.is_matrix]
        return torch.cat(others, dim=-1) if others else x[..., :0]

    def _matrix_direction(self, n: Tensor) -> Tensor | None:
        """n with the steps of its matrices in their places; None where there is none."""
        if self.blocks is None or not any(block.is_matrix for block in self.blocks.parts):
            return None
        return self.blocks.join(matrix_steps(self.blocks, self.blocks.split(n)))

    def _join(self, direction: Tensor, adam: Tensor) -> Tensor:
        """The direction with Adam's in the entries that are in no matrix."""
        if not adam.shape[-1] or self.blocks is None:
            return direction
        sizes = [block.size for block in self.blocks.parts]
        others = iter(adam.split([block.size for block in self.blocks.parts if not block.is_matrix], dim=-1))
        pairs = zip(direction.split(sizes, dim=-1), self.blocks.parts, strict=True)
        return torch.cat([part if block.is_matrix else next(others) for part, block in pairs], dim=-1)
