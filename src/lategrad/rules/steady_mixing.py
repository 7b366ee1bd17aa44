"""SteadyMixing: an outer rule that mixes workers' models in along a momentum, with a query that looks ahead."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lategrad.rules._common import OutputsX, next_mean_delay
from lategrad.rules.rule import Delay, as_number, first_query
from lategrad.sets import ConvexSet, WholeSpace
from lategrad.support.runs import per_run
from lategrad.support.validation import NonNegative, Scalar

_FADE = 2.0  # the delay at which a worker's model has half of the weight
_WINDOW, _AHEAD = 0.5, 0.9  # of the mean delay: what the momentum averages over, and how far the query looks ahead


class SteadyMixingState(NamedTuple):
    x: Tensor  # x_{t+1}, the iterate
    v: Tensor  # v_t, how far it has moved in update t
    mean_delay: Tensor
    t: Tensor  # updates so far


@dataclass(frozen=True, eq=False)
class SteadyMixing(OutputsX):
    r"""Mixes each worker's model in, along a short momentum, and hands out queries where x is about to be.

    Update t receives a pseudo-gradient g of the query q of time :math:`t - \tau_t`, so that :math:`q - g` is the
    worker's model; a query therefore carries itself. With the running mean :math:`\bar\tau` of the delays,

    .. math:: a_t = \frac{2\, \mathrm{mixing}}{2 + \tau_t}, \qquad
        v_t = v_{t-1} + \frac{1}{1 + \bar\tau/2} \big(a_t (q_{t-\tau_t} - g - x_t) - v_{t-1}\big), \qquad
        x_{t+1} = \Pi_K(x_t + v_t), \qquad
        q_{t+1} = \Pi_K(x_{t+1} + 0.9\, \bar\tau\, v_t)

    The query is q, the output x. Without delay and with ``mixing=1``, x is the worker's model.

    Why. Where a worker ends is a model that has been trained: mixing, as :class:`~lategrad.baselines.FedAsync` does it,
    keeps the length of its step, which rules that normalise pseudo-gradients lose. But FedAsync mixes in models that
    began where x was one delay ago, and so holds x back: on a constant g and at a constant delay it moves by
    :math:`a/(1 + a \tau)` times g per update. Here the query is put to where x will be when the worker is done, so that
    x moves by almost a times g. The momentum, a mean over half a round, makes that motion smooth enough to be
    extrapolated. The constants 2, 1/2 and 0.9 keep x from oscillating: where a job goes a fixed share of the way to the
    optimum, all errors decay, as far as computed, for every share, ``mixing=1`` and constant delays up to 80. With
    weights of :math:`(1 + \tau)^{-1/2}`, or a momentum half as long, they grow at longer delays.

    Args:
        mixing: the share of the way to the model of a worker without delay. 1 needs no tuning.
        domain: K.

    >>> import torch, lategrad as lg
    >>> problem = lg.problems.LocalSteps(lg.problems.Quadratic(noise=0.1), 20, inner="sgd:lr=0.01")
    >>> late = lg.simulate(problem, "steady-mixing", delays=15, steps=200)
    >>> held_back = lg.simulate(problem, "fed-async:mixing=1", delays=15, steps=200)
    >>> bool(late.loss[-1] < 0.5 * held_back.loss[-1])
    True

    Must know: the delay of every gradient.

    Guarantee: none.

    Reference: this rule is ours; measurements, and on what the constants were chosen, in docs/results/local.md.
    """

    mixing: NonNegative[Scalar] = 1.0
    domain: ConvexSet = WholeSpace()

    def init(self, x0: Tensor) -> SteadyMixingState:
        x = first_query(self, x0)
        return SteadyMixingState(x=x, v=torch.zeros_like(x), mean_delay=per_run(x, 0), t=per_run(x, 0))

    def query(self, state: SteadyMixingState) -> Tensor:
        """Where the iterate is expected to be when the pseudo-gradient returns."""
        return self.domain.project(state.x + (_AHEAD * state.mean_delay).to(state.x.dtype) * state.v)

    def ticket(self, state: SteadyMixingState) -> Tensor:
        return self.query(state)

    def update(self, state: SteadyMixingState, grad: Tensor, delay: Delay, ticket: Tensor) -> SteadyMixingState:
        t = state.t + 1
        mean_delay = next_mean_delay(state.mean_delay, delay, t)
        share = self.mixing * _FADE / (_FADE + as_number(delay))
        step = share.to(grad.dtype) * (ticket - grad - state.x)
        v = torch.lerp(state.v, step, (1 / (1 + _WINDOW * mean_delay)).to(grad.dtype))
        return SteadyMixingState(x=self.domain.project(state.x + v), v=v, mean_delay=mean_delay, t=t)
