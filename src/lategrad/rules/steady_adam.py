"""SteadyAdam: Adam's normalised gradients, averaged, with a learning rate that depends on the delay."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lategrad.learners.learner import decayed
from lategrad.rules._common import next_mean_delay, root_mean_square
from lategrad.rules.blocks import Blocks, per_entry, start_delays
from lategrad.rules.rule import Delay, as_dtype, average_in, first_query
from lategrad.sets import ConvexSet, OnDomain, WholeSpace
from lategrad.support.runs import per_run
from lategrad.support.validation import NonNegative, Scalar

_THETA = 0.2  # weight of the iterate in the query; the rest is the average
_BETA2, _EPS = 0.999, 1e-8
_FREE, _ROUNDS = 3.0, 10.0  # delays below 3 reduce lr little; the reduction fades after 10 rounds


class SteadyAdamState(NamedTuple):
    z: Tensor  # z_{t+1}, the iterate
    q: Tensor  # q_{t+1}, the query; z and q determine the average, which therefore costs no memory
    v: Tensor  # the running mean of squared gradients
    mean_delay: Tensor
    t: Tensor  # updates so far


@dataclass(frozen=True, eq=False)
class SteadyAdam(OnDomain):
    r"""Adam without momentum, whose query is mostly the average of its iterates; delay reduces the learning rate.

    Update t receives a gradient g of the query of time :math:`s = t - \tau_t \ge 1`. With the running mean
    :math:`\bar\tau` of the delays and :math:`\tau = \max(\tau_t, \bar\tau_t)`, entry by entry but for rms,

    .. math:: v_t &= 0.999\, v_{t-1} + 0.001\, g^2, \qquad
        a = \frac{g}{\sqrt{v_t / (1 - 0.999^t)} + 10^{-8}}, \qquad d = \frac{a}{\max(1, \mathrm{rms}(a))}, \\
        \mathrm{lr}_t &= \mathrm{lr}\, \frac{s}{t} \min\Big(1, \frac{3}{3 + \tau}
            \sqrt{\max\big(1, \tfrac{t}{10 (1 + \tau)}\big)}\Big), \\
        z_{t+1} &= \Pi_K\big((1 - \mathrm{lr}_t\, \mathrm{decay})\, z_t - \mathrm{lr}_t\, d\big), \qquad
        x_{t+1} = x_t + \tfrac{2}{t + 1} (z_{t+1} - x_t), \qquad
        q_{t+1} = x_{t+1} + 0.2\, (z_{t+1} - x_{t+1})

    The query is q, the output x. The average moves by O(1/t) per update, so that a delayed gradient was taken
    nearby; s/t limits the first gradients, which all come from the start; the factor of :math:`\tau` keeps the feedback
    through the delay stable, and fades with the rounds :math:`t/(1 + \tau)`. Nothing of this is proved for deep models:
    it is measured (docs/deep.md, which also says on what the constants were chosen).

    Args:
        lr: as for Adam; the best value without delay is meant to work with delay.
        domain: K.
        weight_decay: decoupled, on the iterate: z is first multiplied by 1 - lr_t * weight_decay (never below 0).
        delay_blocks: tensors with a delay each, as in a pipeline; filled in by the host. The learning rate is then each
            tensor's own; rms is over all.

    >>> import torch, lategrad as lg
    >>> rule = lg.SteadyAdam(lr=0.1)
    >>> state = rule.init(torch.zeros(2))
    >>> queries = [rule.query(state)]
    >>> for t in range(2000):
    ...     tau = min(20, t)
    ...     grad = 2 * (queries[t - tau] - torch.tensor([3.0, 0.0]))
    ...     state = rule.update(state, grad, delay=torch.tensor(tau))
    ...     queries.append(rule.query(state))
    >>> bool((rule.output(state) - torch.tensor([3.0, 0.0])).norm() < 0.05)
    True

    Must know: the delay of every gradient.

    Guarantee: none; it is measured.

    Reference: this rule is ours; measurements in docs/deep.md.
    """

    lr: NonNegative[Scalar] = 0.003
    domain: ConvexSet = WholeSpace()
    weight_decay: NonNegative[Scalar] = 0.0
    delay_blocks: Blocks | None = None

    def init(self, x0: Tensor) -> SteadyAdamState:
        z = first_query(self, x0)
        mean_delay = start_delays(self.delay_blocks, z)
        return SteadyAdamState(z=z, q=z.clone(), v=torch.zeros_like(z), mean_delay=mean_delay, t=per_run(z, 0))

    def query(self, state: SteadyAdamState) -> Tensor:
        return state.q

    def update(self, state: SteadyAdamState, grad: Tensor, delay: Delay) -> SteadyAdamState:
        t = state.t + 1
        mean_delay = next_mean_delay(state.mean_delay, delay, t)
        tau = torch.maximum(mean_delay, delay + 0 * t)
        damping = _FREE / (_FREE + tau) * (t / (_ROUNDS * (1 + tau))).clamp_min(1).sqrt()
        lr = per_entry(self.delay_blocks, self.lr * (t - delay).clamp_min(1) / t * damping.clamp_max(1), grad)

        v = torch.lerp(state.v, grad**2, 1 - _BETA2)
        a = grad / root_mean_square(v, t, _BETA2, _EPS)
        d = a / (a**2).mean(-1, keepdim=True).sqrt().clamp_min(1)
        z = self.domain.project(decayed(state.z, lr, self.weight_decay) - as_dtype(lr, grad) * d)
        x = average_in(self.output(state), z, 2 / (t + 1))
        return SteadyAdamState(z=z, q=torch.lerp(x, z, _THETA), v=v, mean_delay=mean_delay, t=t)

    def output(self, state: SteadyAdamState) -> Tensor:
        r"""After T updates, :math:`x_{T+1}`, from :math:`q = x + \theta (z - x)`."""
        return state.q + _THETA / (1 - _THETA) * (state.q - state.z)
