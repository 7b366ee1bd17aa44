"""The online-to-nonconvex conversion: an online learner chooses every step of a walk through a non-convex function."""

from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from lategrad.rules.rule import Delay, as_dtype, average_in, first_query
from lategrad.sets import ConvexSet, OnDomain, WholeSpace, norm
from lategrad.support.runs import per_run
from lategrad.support.seeds import Stream, derived_seed
from lategrad.support.validation import Count, Integers, NonNegative, Positive, Scalar

_MODULUS, _FACTOR = 2.0**31 - 1, 48271.0  # Lehmer's generator: products are below 2**47, exact in float64


class OnlineToNonconvexState(NamedTuple):
    x: Tensor  # x_n
    total: Tensor  # the sum of the gradients received since the last restart
    mean: Tensor  # the mean of the queries since the last restart, without the present one
    random: Tensor  # s_n times the modulus, an integer
    t: Tensor  # updates so far, n - 1


@dataclass(frozen=True, eq=False)
class OnlineToNonconvex(OnDomain):
    r"""Steps chosen by online gradient descent on a ball, restarted every few updates; queries at random on each step.

    Before update n, with the sum S of the gradients received since the last restart and :math:`s_n` uniform on (0, 1),

    .. math:: \Delta_n = -\min\Big(\mathrm{lr}, \frac{\mathrm{radius}}{\|S\|}\Big) S, \qquad
        w_n = x_n + s_n \Delta_n, \qquad x_{n+1} = x_n + \Delta_n

    The query is :math:`w_n`; S starts at zero and returns to it after every ``period`` updates. On a constraint set K,
    :math:`\Pi_K(x_n + \Delta_n) - x_n` takes the place of :math:`\Delta_n`. The output is the mean of the queries since
    the last restart; after a multiple of ``period`` updates, that of the last ``period`` queries.

    Args:
        lr: learning rate of the learner.
        radius: the longest step.
        period: updates between restarts, at least 2.
        domain: K.
        seed: of :math:`s_1, s_2, \dots`, which are the same in all runs of a sweep.

    >>> import torch, lategrad as lg
    >>> rule = lg.OnlineToNonconvex(lr=0.1, radius=0.5, period=2)
    >>> state = rule.init(torch.zeros(1))
    >>> for t in range(2):
    ...     state = rule.update(state, torch.tensor([9.0]), delay=torch.tensor(0))
    >>> state.x, bool(-0.25 < rule.output(state) < 0)  # steps of 0 and -0.5; the second query is between
    (tensor([-0.5000]), True)

    Must know: nothing while it runs; for the guarantee, bounds on gradients and noise, the number of gradients in
    flight, and the gap to the infimum (:func:`lategrad.theory.online_plan`).

    Guarantee: Theorem A of docs/theory-online.md: non-smooth, non-convex f on the whole space;
    :math:`(\delta, \epsilon)`-Goldstein stationarity after :math:`O((\sigma^2 + (1 + W) G^2)/(\delta \epsilon^3))`
    updates with W gradients in flight, if every query's gradient is used. Others train better (docs/results/online.md).

    References: A. Cutkosky, H. Mehta and F. Orabona, Optimal stochastic non-smooth non-convex optimization through
    online-to-non-convex conversion, 2023; with late gradients, docs/theory-online.md.
    """

    lr: NonNegative[Scalar]
    radius: Positive[Scalar]
    period: Annotated[int, Integers(2)] = 32
    domain: ConvexSet = WholeSpace()
    seed: Count = 0

    def init(self, x0: Tensor) -> OnlineToNonconvexState:
        x = first_query(self, x0)
        start = 1 + derived_seed(self.seed, Stream.STEPS) % (int(_MODULUS) - 1)
        return OnlineToNonconvexState(
            x=x, total=torch.zeros_like(x), mean=x.clone(), random=per_run(x, start), t=per_run(x, 0)
        )

    def query(self, state: OnlineToNonconvexState) -> Tensor:
        return state.x + (state.random / _MODULUS).to(state.x.dtype) * self._step(state)

    def update(self, state: OnlineToNonconvexState, grad: Tensor, delay: Delay) -> OnlineToNonconvexState:
        place = state.t.remainder(self.period) + 1  # 1 .. period, since the last restart
        return OnlineToNonconvexState(
            x=state.x + self._step(state),
            total=torch.where(place < self.period, state.total + grad, torch.zeros_like(grad)),
            mean=average_in(state.mean, self.query(state), 1 / place),
            random=(_FACTOR * state.random).remainder(_MODULUS),
            t=state.t + 1,
        )

    def _step(self, state: OnlineToNonconvexState) -> Tensor:
        lr = torch.minimum(self.radius / norm(state.total), self.lr + 0 * state.t)
        return self.domain.project(state.x - as_dtype(lr, state.x) * state.total) - state.x

    def output(self, state: OnlineToNonconvexState) -> Tensor:
        return state.mean
