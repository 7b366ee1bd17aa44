"""Algorithms 1 and 2 of the paper: any online learner, queried at the average of its plays."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lategrad.learners.learner import Learner, Linear
from lategrad.rules.rule import Delay, average_in
from lategrad.sets import ConvexSet
from lategrad.support.runs import per_run, spread
from lategrad.support.validation import NonNegative, Scalar, UpToOne, Validated, require


class AnytimeState(NamedTuple):
    learner: Any
    x: Tensor  # x_{t+1}, the weighted average of the plays w_1 .. w_{t+1}
    t: Tensor  # updates so far
    total_weight: Tensor  # alpha_{1:t+1}


@dataclass(frozen=True, eq=False)
class Anytime(Validated):
    r"""Anytime online-to-batch with late gradients: Algorithm 1, and 2 when the learner is optimistic.

    .. math:: x_t = \frac{\sum_{i \le t} \alpha_i w_i}{\alpha_{1:t}}, \qquad
        \text{send } \alpha_t \langle g_{t - \tau_t}, \cdot \rangle \text{ to the learner, get } w_{t+1}

    Workers compute gradients at the average :math:`x_t`, which moves by O(1/t) at each update however
    wildly the plays :math:`w_t` move, so that a gradient with a delay of :math:`\tau` was taken nearby:
    :math:`\|x_t - x_{t-\tau}\| \le 2 \tau D / (t + 1)`. With :math:`\alpha_t = t` on a set of diameter D and
    an L-smooth objective (Theorem 1, constants in docs/theory.md),

    .. math:: E[f(x_T) - f^*] \le 2 \mathrm{Reg}_T / T^2 + 4 L D^2 \mu_\tau / (T + 1).

    The delays enter through their mean :math:`\mu_\tau` only, and nothing is tuned to them: ``delay`` is
    not used. An optimistic learner gets the last gradient received as its hint for the next round.

    Args:
        learner: the paper's :math:`\mathcal{A}`, with its own domain.
        power: the weights are :math:`\alpha_t = t^{\mathrm{power}}`; the paper: 1.
        interpolation: the query is (1 - interpolation) w_t + interpolation x_t; the paper: 1. The
            output is x_t whatever the interpolation.
        weights: any other :math:`\alpha_t \ge 0` instead of a power: a function of t, which is a float64 tensor of
            shape ``(*runs, 1)``; or a tensor ``(T,)`` or ``(*runs, T)`` of :math:`\alpha_1, \dots, \alpha_T`, whose
            last entry is used after its end. :math:`\alpha_1 > 0`.

    >>> import torch, lategrad as lg
    >>> rule = lg.Anytime(lg.OGD(lr=0.5, domain=lg.Ball(1.0)))
    >>> state = rule.init(torch.zeros(3))
    >>> for t in range(100):
    ...     grad = 2 * (rule.query(state) - torch.tensor([2.0, 0.0, 0.0]))
    ...     state = rule.update(state, grad, delay=torch.tensor(0))
    >>> rule.output(state)
    tensor([0.9998, 0.0000, 0.0000])

    Must know: nothing of the delays, the smoothness or the noise; some learners need a diameter.

    Guarantee: on convex, L-smooth objectives and a set of diameter D, for any delays: their mean costs :math:`O(L D^2
    \mu_\tau / T)` in addition to the learner's regret (Theorems 1 and 2).

    Reference: R. Aviv, I. Hakimi, A. Schuster and K. Levy, Learning under delayed feedback: implicitly
    adapting to gradient delays, 2021, Algorithms 1 and 2.
    """

    learner: Learner[Any]
    power: NonNegative[Scalar] = 1
    interpolation: UpToOne[Scalar] = 1.0
    weights: Callable[[Tensor], Tensor] | Tensor | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weights is not None:
            is_default = isinstance(self.power, float | int) and self.power == 1
            require("power", self.power, is_default, "left out (1) where weights are given")
            valid = "None, a function of t, or a tensor of weights"
            require("weights", self.weights, callable(self.weights) or isinstance(self.weights, Tensor), valid)
        if isinstance(self.weights, Tensor):
            require("weights", tuple(self.weights.shape), self.weights.dim() > 0, "of shape (T,) or (*runs, T)")
            valid = "finite numbers >= 0, the first > 0"
            require("weights", self.weights, self.weights.isfinite() & (self.weights >= 0), valid)
            require("weights", self.weights, self.weights[..., 0] > 0, valid)

    @property
    def domain(self) -> ConvexSet:
        return self.learner.domain

    def weight(self, t: Tensor) -> Tensor:
        r""":math:`\alpha_t`."""
        if self.weights is None:
            return t**self.power
        if not isinstance(self.weights, Tensor):
            return self.weights(t)
        last = self.weights.shape[-1]
        table = self.weights.to(t.dtype).expand(*t.shape[:-1], last)
        return table.gather(-1, (t.long() - 1).clamp(0, last - 1))

    def init(self, x0: Tensor) -> AnytimeState:
        r""":math:`x_1 = w_1`, with :math:`\alpha_{1:1} = \alpha_1`."""
        learner = self.learner.init(spread(self, x0))
        x = self.learner.predict(learner).clone()
        return AnytimeState(learner=learner, x=x, t=per_run(x, 0), total_weight=self.weight(per_run(x, 1)))

    def query(self, state: AnytimeState) -> Tensor:
        if isinstance(self.interpolation, float | int) and self.interpolation == 1:
            return state.x
        share = torch.as_tensor(self.interpolation, dtype=state.x.dtype, device=state.x.device)
        return torch.lerp(self.learner.predict(state.learner), state.x, share)

    def update(self, state: AnytimeState, grad: Tensor, delay: Delay) -> AnytimeState:
        t = state.t + 1
        next_weight = self.weight(t + 1)
        learner = self.learner.update(state.learner, Linear(self.weight(t), grad), hint=Linear(next_weight, grad))
        total_weight = state.total_weight + next_weight
        x = average_in(state.x, self.learner.predict(learner), next_weight / total_weight)
        return AnytimeState(learner=learner, x=x, t=t, total_weight=total_weight)

    def output(self, state: AnytimeState) -> Tensor:
        r"""After T updates, :math:`x_{T+1}`."""
        return state.x
