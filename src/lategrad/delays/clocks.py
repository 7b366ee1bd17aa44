r"""Cluster clocks: delays that come out of workers with speeds of their own, in virtual time.

A worker fetches the current query (the server has made v updates), computes for a while, and returns the
gradient, which the server applies as update t with :math:`\tau_t = (t - 1) - v`; the worker fetches again
at once. Events at the same time happen in the order of the workers' positions in the cluster.

Where a worker takes local steps (:class:`~lategrad.problems.LocalSteps`), a job is as many gradients one after another.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lategrad.delays.base import Arrivals, check_draw, require_count
from lategrad.support.seeds import Stream, generator
from lategrad.support.validation import require, require_number

__all__ = ["Barrier", "Cluster", "ComputeTime", "ConstantTime", "ExponentialTime", "LinearDrift", "LogNormalTime",
           "ParetoTime", "SineDrift", "Worker"]  # fmt: skip

_BLOCK = 32  # random numbers drawn at a time: 10,000 workers of which most return a few times
_PATIENCE = 100_000  # fetches in a row without any arrival before a cluster is said to be stuck


@runtime_checkable
class ComputeTime(Protocol):
    """A distribution of computing times with mean 1."""

    def sample(self, rng: np.random.Generator, size: int) -> NDArray[np.float64]:
        """``size`` independent times, finite and >= 0."""
        ...


@dataclass(frozen=True, eq=False)
class ConstantTime:
    """Every gradient takes the same time.

    >>> ConstantTime().sample(np.random.default_rng(0), 3)
    array([1., 1., 1.])
    """

    def sample(self, rng: np.random.Generator, size: int) -> NDArray[np.float64]:
        return np.ones(size)


@dataclass(frozen=True, eq=False)
class ExponentialTime:
    """Exponential times: a gradient is as likely to be finished in the next instant as ever."""

    def sample(self, rng: np.random.Generator, size: int) -> NDArray[np.float64]:
        return rng.standard_exponential(size)


@dataclass(frozen=True, eq=False)
class LogNormalTime:
    r"""Log-normal times :math:`e^{s z - s^2/2}` with z standard normal and s = ``spread``."""

    spread: float

    def __post_init__(self) -> None:
        require_number("spread", self.spread, low=0)

    def sample(self, rng: np.random.Generator, size: int) -> NDArray[np.float64]:
        return np.exp(self.spread * rng.standard_normal(size) - self.spread**2 / 2)


@dataclass(frozen=True, eq=False)
class ParetoTime:
    r"""Heavy-tailed times :math:`\frac{a-1}{a} U^{-1/a}` with a = ``shape`` > 1.

    The variance is infinite for shape <= 2.
    """

    shape: float

    def __post_init__(self) -> None:
        require_number("shape", self.shape, low=1, strict=True)

    def sample(self, rng: np.random.Generator, size: int) -> NDArray[np.float64]:
        return (self.shape - 1) / self.shape * (1 - rng.random(size)) ** (-1 / self.shape)


@dataclass(frozen=True, eq=False)
class LinearDrift:
    """Computing takes 1 + rate · s times as long when it starts at virtual second s.

    >>> LinearDrift(0.5)(4.0)
    3.0
    """

    rate: float

    def __post_init__(self) -> None:
        require_number("rate", self.rate, low=0)

    def __call__(self, now: float) -> float:
        return 1 + self.rate * now


@dataclass(frozen=True, eq=False)
class SineDrift:
    r"""Computing takes :math:`1 + \mathrm{amplitude} \cdot \sin(2\pi s / \mathrm{period})` times as long.

    >>> SineDrift(amplitude=0.5, period=24.0)(6.0)
    1.5
    """

    amplitude: float
    period: float

    def __post_init__(self) -> None:
        require_number("amplitude", self.amplitude, low=0)
        require("amplitude", self.amplitude, self.amplitude < 1, "< 1")
        require_number("period", self.period, low=0, strict=True)

    def __call__(self, now: float) -> float:
        return 1 + self.amplitude * math.sin(2 * math.pi * (now % self.period) / self.period)


@dataclass(frozen=True, eq=False)
class Worker:
    """One worker; all times are virtual seconds.

    Args:
        mean: mean time for a gradient, before any drift.
        law: how the time varies about its mean.
        start: when the worker joins and fetches for the first time.
        up: mean time, exponentially distributed, from joining or returning to the next preemption, which
            loses the gradient in flight; ``inf`` for a worker that is never preempted.
        down: mean time, exponentially distributed, away after a preemption, at the end of which the worker
            fetches anew; ``inf`` for a worker that never returns.
        drift: factor on the computing times, a function of the virtual second at which computing starts.
    """

    mean: float = 1.0
    law: ComputeTime = ConstantTime()
    start: float = 0.0
    up: float = math.inf
    down: float = 0.0
    drift: Callable[[float], float] | None = None

    def __post_init__(self) -> None:
        require_number("mean", self.mean, low=0, strict=True)
        is_law = isinstance(self.law, ComputeTime)
        require("law", self.law, is_law, "a distribution such as ExponentialTime()")
        require_number("start", self.start, low=0)
        if self.up != math.inf:
            require_number("up", self.up, low=0, strict=True)
        if self.down != math.inf:
            require_number("down", self.down, low=0)
        is_function = self.drift is None or callable(self.drift)
        require("drift", self.drift, is_function, "a function of the time such as LinearDrift(0.1), or None")


def _numbers(law: ComputeTime, *key: int) -> Iterator[float]:
    """An endless stream of random times."""
    rng = generator(*key)
    while True:
        block = law.sample(rng, _BLOCK)
        require("times of the law", law, bool((np.isfinite(block) & (block >= 0)).all()), "finite and >= 0")
        yield from block.tolist()


def _factor(worker: Worker, now: float) -> float:
    if worker.drift is None:
        return 1.0
    factor = worker.drift(now)
    if not factor > 0:
        raise ValueError(f"drift must be > 0, got {factor!r} at virtual second {now!r}")
    return factor


def _job(worker: Worker, units: Iterator[float], gradients: int, now: float) -> float:
    return now + worker.mean * sum(islice(units, gradients)) * _factor(worker, now)


def _life(worker: Worker, seed: int, position: int, gradients: int) -> Iterator[tuple[float, bool]]:
    """After the first fetch: every (time, whether a job arrives) at which the worker fetches again.

    It does not depend on the other workers, and ends when the worker is gone for good.
    """
    units = _numbers(worker.law, seed, Stream.COMPUTING, position)
    spells = _numbers(ExponentialTime(), seed, Stream.PREEMPTION, position)
    preemptible = worker.up < math.inf
    now = worker.start
    preempted = now + worker.up * next(spells) if preemptible else math.inf
    while True:
        finished = _job(worker, units, gradients, now)
        if finished < preempted:
            now = finished
            yield now, True
        elif preemptible and worker.down < math.inf:
            now = preempted + worker.down * next(spells)
            preempted = now + worker.up * next(spells)
            yield now, False
        else:
            return


@dataclass(frozen=True, eq=False)
class Cluster:
    r"""Workers around one server; a delay model whose arrivals carry their time and worker.

    A worker's successive updates t' < t have :math:`\tau_t = t - 1 - t'` (unless it was preempted in
    between), so the delays add up: if all W workers are there from second 0 and never preempted,

    .. math:: \frac1T \sum_{t=1}^T \tau_t = W - 1 - \frac1T \sum_{w=1}^W (T - T_w),

    where :math:`T_w` is worker w's last update (0 if none): W - 1 whatever the speeds, less the updates that
    the gradients in flight at the end have missed so far. With late joiners and preemption it is at most
    that. Equal workers of constant speed have :math:`\tau_t = \min(W - 1, t - 1)`.

    The k-th computing time of a worker depends on the seed, its position and k only, so more workers at the
    end change nothing for those before them. A worker that is preempted has lost its memory (``fresh``).

    Args:
        workers: who is there.
        local_steps: H, the gradients that a worker takes before it sends what they led to; by default the problem's
            in a simulation, else 1. Drift is that of the second at which the first of them starts.
        adapt: slower workers take fewer: as many of the H as they do in the time that the fastest takes for all, at
            least 1 (dynamic local updates). Arrivals then say how many.

    >>> fast, slow = Worker(mean=1.0), Worker(mean=3.5)
    >>> arrivals = Cluster((fast, fast, slow)).draw(steps=8, seed=0)
    >>> arrivals.delays
    tensor([0, 1, 1, 1, 1, 1, 6, 2])
    >>> arrivals.worker
    tensor([0, 1, 0, 1, 0, 1, 2, 0])
    """

    workers: Sequence[Worker]
    local_steps: int | None = None
    adapt: bool = False
    needs_labels: ClassVar[bool] = False
    largest: ClassVar[None] = None

    def __post_init__(self) -> None:
        require("workers", self.workers, len(self.workers) > 0, "at least one Worker")
        for worker in self.workers:
            require("each of workers", worker, isinstance(worker, Worker), "a Worker")
        if self.local_steps is not None:
            require_count("local_steps", self.local_steps, low=1)
        require("adapt", self.adapt, isinstance(self.adapt, bool), "True or False")

    def with_local_steps(self, steps: int) -> Cluster:
        """The same with jobs of so many gradients; if it has a number of its own, that must be it."""
        require("local_steps", self.local_steps, self.local_steps in (None, steps), f"the problem's {steps}, or None")
        return replace(self, local_steps=steps)

    def steps_of_workers(self) -> list[int]:
        """How many gradients each worker takes for a job.

        >>> workers = Worker(mean=1.0), Worker(mean=2.0), Worker(mean=6.0)
        >>> Cluster(workers, local_steps=20, adapt=True).steps_of_workers()
        [20, 10, 3]
        """
        most, fastest = self.local_steps or 1, min(worker.mean for worker in self.workers)
        return [max(1, round(most * fastest / worker.mean)) if self.adapt else most for worker in self.workers]

    def draw(self, steps: int, seed: int, labels: Tensor | None = None) -> Arrivals:
        """Run the clock until ``steps`` gradients have arrived; O(log W) for each and for each preemption."""
        check_draw(steps, seed)
        counts = self.steps_of_workers()
        lives = [_life(worker, seed, position, counts[position]) for position, worker in enumerate(self.workers)]
        events = [(worker.start, position, False) for position, worker in enumerate(self.workers)]
        heapq.heapify(events)
        version = [0] * len(lives)  # of the query that each worker computes on
        delays: list[int] = []
        times: list[float] = []
        senders: list[int] = []
        fresh: list[bool] = []
        knows = [True] * len(lives)  # False for who was preempted since its last arrival
        joined = [False] * len(lives)
        fruitless = -len(lives)  # the first fetch of each worker is no sign of being stuck
        while len(delays) < steps:
            _require_alive(events, fruitless, len(delays), steps)
            time, position, arrives = events[0]
            fruitless = 0 if arrives else fruitless + 1
            if arrives:
                delays.append(len(delays) - version[position])
                times.append(time)
                senders.append(position)
                fresh.append(not knows[position])
            knows[position], joined[position] = arrives or not joined[position], True
            version[position] = len(delays)
            following = next(lives[position], None)
            if following is None:
                heapq.heappop(events)
            else:
                heapq.heapreplace(events, (following[0], position, following[1]))
        worker = torch.tensor(senders)
        return Arrivals(
            delays=torch.tensor(delays),
            time=torch.tensor(times, dtype=torch.float64),
            worker=worker,
            local_steps=torch.tensor(counts)[worker] if self.adapt else None,
            fresh=torch.tensor(fresh) if any(fresh) else None,
        )


@dataclass(frozen=True, eq=False)
class Barrier:
    """Workers who wait for each other: a round ends when the slowest has finished, and nothing is late.

    An arrival stands for a round: for what all workers have computed from one query
    (:class:`~lategrad.problems.Synchronous`).

    Args:
        workers: who is there, from the start and always.
        local_steps: the gradients that each takes for a round, as in a :class:`Cluster`.

    >>> arrivals = Barrier((Worker(mean=1.0), Worker(mean=3.5))).draw(steps=3, seed=0)
    >>> arrivals.delays, arrivals.time
    (tensor([0, 0, 0]), tensor([ 3.5000,  7.0000, 10.5000], dtype=torch.float64))
    """

    workers: Sequence[Worker]
    local_steps: int | None = None
    needs_labels: ClassVar[bool] = False
    largest: ClassVar[int] = 0

    def __post_init__(self) -> None:
        Cluster(self.workers, self.local_steps)  # which checks them
        for worker in self.workers:
            always = worker.start == 0 and worker.up == math.inf
            require("each of workers", worker, always, "there from second 0 and never preempted")

    def with_local_steps(self, steps: int) -> Barrier:
        return replace(self, local_steps=Cluster(self.workers, self.local_steps).with_local_steps(steps).local_steps)

    def draw(self, steps: int, seed: int, labels: Tensor | None = None) -> Arrivals:
        check_draw(steps, seed)
        units = [_numbers(worker.law, seed, Stream.COMPUTING, i) for i, worker in enumerate(self.workers)]
        now, times = 0.0, []
        for _ in range(steps):
            pairs = zip(self.workers, units, strict=True)
            now = max(_job(worker, own, self.local_steps or 1, now) for worker, own in pairs)
            times.append(now)
        return Arrivals(torch.zeros(steps, dtype=torch.int64), torch.tensor(times, dtype=torch.float64))


def _require_alive(events: list[tuple[float, int, bool]], fruitless: int, updates: int, steps: int) -> None:
    if events and fruitless <= _PATIENCE:
        return
    lost = f"{_PATIENCE} fetches in a row were preempted" if events else "every worker is gone for good"
    raise ValueError(f"steps must be at most {updates} for this cluster and seed ({lost}), got {steps}")
