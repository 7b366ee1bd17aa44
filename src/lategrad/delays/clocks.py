r"""Cluster clocks: delays that result from the speeds of workers, in virtual time.

A worker fetches the current query (the server has made v updates), computes, and returns the gradient, which the server
applies as update t with :math:`\tau_t = (t - 1) - v`; the worker fetches again at once. Events at the same time happen
in the order of the workers' positions in the cluster.

Where workers take local steps (:class:`~lategrad.problems.LocalSteps`), a job is that number of successive gradients.
"""

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Annotated, ClassVar, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lategrad.delays.base import Arrivals, check_draw
from lategrad.support.seeds import Stream, generator
from lategrad.support.validation import BelowOne, NonNegative, Positive, PositiveCount, Range, Validated, require

__all__ = ["Barrier", "Cluster", "ComputeTime", "ConstantTime", "ExponentialTime", "LinearDrift", "LogNormalTime",
           "ParetoTime", "SineDrift", "Worker"]  # fmt: skip

_BLOCK = 32  # random numbers drawn at a time: most of 10,000 workers return a few times only
_MAX_FETCHES = 100_000  # in a row without any arrival, before a cluster is considered stuck


@runtime_checkable
class ComputeTime(Protocol):
    """A distribution of computing times with mean 1."""

    def sample(self, rng: np.random.Generator, size: int) -> NDArray[np.float64]:
        """``size`` independent times, finite and >= 0."""


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
    """Exponential times: memoryless."""

    def sample(self, rng: np.random.Generator, size: int) -> NDArray[np.float64]:
        return rng.standard_exponential(size)


@dataclass(frozen=True, eq=False)
class LogNormalTime(Validated):
    r"""Log-normal times :math:`e^{s z - s^2/2}` with z standard normal and s = ``spread``."""

    spread: NonNegative[float]

    def sample(self, rng: np.random.Generator, size: int) -> NDArray[np.float64]:
        return np.exp(self.spread * rng.standard_normal(size) - self.spread**2 / 2)


@dataclass(frozen=True, eq=False)
class ParetoTime(Validated):
    r"""Heavy-tailed times :math:`\frac{a-1}{a} U^{-1/a}`, a = ``shape`` > 1; their variance is infinite for a <= 2."""

    shape: Annotated[float, Range(1, ends="()")]

    def sample(self, rng: np.random.Generator, size: int) -> NDArray[np.float64]:
        return (self.shape - 1) / self.shape * (1 - rng.random(size)) ** (-1 / self.shape)


@dataclass(frozen=True, eq=False)
class LinearDrift(Validated):
    """Computing takes 1 + rate · s times as long when it starts at virtual second s.

    >>> LinearDrift(0.5)(4.0)
    3.0
    """

    rate: NonNegative[float]

    def __call__(self, now: float) -> float:
        return 1 + self.rate * now


@dataclass(frozen=True, eq=False)
class SineDrift(Validated):
    r"""Computing takes :math:`1 + \mathrm{amplitude} \cdot \sin(2\pi s / \mathrm{period})` times as long.

    >>> SineDrift(amplitude=0.5, period=24.0)(6.0)
    1.5
    """

    amplitude: BelowOne[float]
    period: Positive[float]

    def __call__(self, now: float) -> float:
        return 1 + self.amplitude * math.sin(2 * math.pi * (now % self.period) / self.period)


@dataclass(frozen=True, eq=False)
class Worker(Validated):
    """One worker; all times are virtual seconds.

    Args:
        mean: mean time for a gradient, before any drift.
        distribution: of the time, relative to its mean.
        start: when the worker joins and fetches for the first time.
        up: mean time, exponentially distributed, from joining or returning to the next preemption, which loses the
            gradient in flight; ``inf`` for a worker that is never preempted.
        down: mean downtime, exponentially distributed, after a preemption, before the worker fetches again; ``inf`` for
            a worker that never returns.
        drift: factor on the computing times, a function of the virtual second at which computing starts.
    """

    mean: Positive[float] = 1.0
    distribution: ComputeTime = ConstantTime()
    start: NonNegative[float] = 0.0
    up: Annotated[float, Range(0, math.inf, "(]")] = math.inf
    down: Annotated[float, Range(0, math.inf, "[]")] = 0.0
    drift: Callable[[float], float] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        is_valid = isinstance(self.distribution, ComputeTime)
        require("distribution", self.distribution, is_valid, "a distribution of times, such as ExponentialTime()")
        is_function = self.drift is None or callable(self.drift)
        require("drift", self.drift, is_function, "a function of the time such as LinearDrift(0.1), or None")


def random_times(distribution: ComputeTime, *key: int) -> Iterator[float]:
    """An endless stream of random times."""
    rng = generator(*key)
    while True:
        block = distribution.sample(rng, _BLOCK)
        is_valid = bool((np.isfinite(block) & (block >= 0)).all())
        require("times of the distribution", distribution, is_valid, "finite and >= 0")
        yield from block.tolist()


def _job_end(worker: Worker, times: Iterator[float], gradients: int, now: float) -> float:
    factor = 1.0 if worker.drift is None else worker.drift(now)
    if not factor > 0:
        raise ValueError(f"drift must be > 0, got {factor!r} at virtual second {now!r}")
    return now + worker.mean * sum(islice(times, gradients)) * factor


def _fetches(worker: Worker, seed: int, position: int, gradients: int) -> Iterator[tuple[float, int, bool]]:
    """Every (time, position, whether a job arrives) at which a worker fetches, until it leaves for good."""
    times = random_times(worker.distribution, seed, Stream.COMPUTING, position)
    periods = random_times(ExponentialTime(), seed, Stream.PREEMPTION, position)
    is_preemptible = worker.up < math.inf
    now = worker.start
    yield now, position, False
    preemption = now + worker.up * next(periods) if is_preemptible else math.inf
    while True:
        end = _job_end(worker, times, gradients, now)
        if end < preemption:
            now = end
            yield now, position, True
        elif is_preemptible and worker.down < math.inf:
            now = preemption + worker.down * next(periods)
            preemption = now + worker.up * next(periods)
            yield now, position, False
        else:
            return


@dataclass(frozen=True, eq=False)
class Cluster(Validated):
    r"""Workers around one server; a delay model whose arrivals carry their time and worker.

    A worker's successive updates t' < t have :math:`\tau_t = t - 1 - t'` (unless it was preempted in between), so the
    delays add up: if all W workers join at second 0 and are never preempted,

    .. math:: \frac1T \sum_{t=1}^T \tau_t = W - 1 - \frac1T \sum_{w=1}^W (T - T_w),

    where :math:`T_w` is worker w's last update (0 if none): W - 1 whatever the speeds, less the updates that the
    gradients in flight at the end have missed so far. With late joiners and preemption it is at most that. Equal
    workers of constant speed have :math:`\tau_t = \min(W - 1, t - 1)`.

    The k-th computing time of a worker depends on the seed, its position and k only, so appending workers changes
    nothing for those before them. A worker that is preempted loses its state (``fresh``).

    Args:
        workers: the workers.
        local_steps: H, the gradients of a job; by default the problem's in a simulation, else 1. Drift is that of the
            second at which the first of them starts.
        adapt: slower workers take fewer: as many of the H as they finish in the time that the fastest takes for all,
            at least 1 (dynamic local updates). Arrivals then carry the numbers.

    >>> fast, slow = Worker(mean=1.0), Worker(mean=3.5)
    >>> arrivals = Cluster((fast, fast, slow)).draw(steps=8, seed=0)
    >>> arrivals.delays
    tensor([0, 1, 1, 1, 1, 1, 6, 2])
    >>> arrivals.worker
    tensor([0, 1, 0, 1, 0, 1, 2, 0])
    """

    workers: Sequence[Worker]
    local_steps: PositiveCount | None = None
    adapt: bool = False
    needs_labels: ClassVar[bool] = False
    largest: ClassVar[None] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require("workers", self.workers, len(self.workers) > 0, "at least one Worker")
        for worker in self.workers:
            require("each of workers", worker, isinstance(worker, Worker), "a Worker")

    def with_local_steps(self, steps: int) -> "Cluster":
        """The same with jobs of ``steps`` gradients, which must agree with its own number, if it has one."""
        require("local_steps", self.local_steps, self.local_steps in (None, steps), f"the problem's {steps}, or None")
        return replace(self, local_steps=steps)

    def steps_of_workers(self) -> list[int]:
        """The number of gradients in a job of each worker.

        >>> workers = Worker(mean=1.0), Worker(mean=2.0), Worker(mean=6.0)
        >>> Cluster(workers, local_steps=20, adapt=True).steps_of_workers()
        [20, 10, 3]
        """
        most, fastest = self.local_steps or 1, min(worker.mean for worker in self.workers)
        return [max(1, round(most * fastest / worker.mean)) if self.adapt else most for worker in self.workers]

    def draw(self, steps: int, seed: int, labels: Tensor | None = None) -> Arrivals:
        """Run the clock until ``steps`` gradients have arrived; O(log W) for each and for each preemption."""
        check_draw(steps, seed)
        counts, size = self.steps_of_workers(), len(self.workers)
        arrived: list[tuple[int, float, int, bool]] = []  # delay, time, sender, whether the sender lost its state
        version = [0] * size  # of the query that each worker computes on
        lost_state, joined = [False] * size, [False] * size  # whether it was preempted since its last arrival
        fruitless = -size  # the first fetch of each worker is no sign of being stuck
        for time, position, arrives in heapq.merge(
            *(_fetches(worker, seed, i, counts[i]) for i, worker in enumerate(self.workers))
        ):
            fruitless = 0 if arrives else fruitless + 1
            if arrives:
                arrived.append((len(arrived) - version[position], time, position, lost_state[position]))
            lost_state[position], joined[position] = joined[position] and not arrives, True
            version[position] = len(arrived)
            if len(arrived) == steps or fruitless > _MAX_FETCHES:
                break
        stuck = fruitless > _MAX_FETCHES
        why = f"{_MAX_FETCHES} fetches in a row were preempted" if stuck else "every worker has left for good"
        require("steps", steps, len(arrived) == steps, f"at most {len(arrived)} for this cluster and seed ({why})")
        delays, times, senders, fresh = zip(*arrived, strict=True)
        worker, seconds = torch.tensor(senders), torch.tensor(times, dtype=torch.float64)
        local_steps = torch.tensor(counts)[worker] if self.adapt else None
        return Arrivals(torch.tensor(delays), seconds, worker, local_steps, torch.tensor(fresh) if any(fresh) else None)


@dataclass(frozen=True, eq=False)
class Barrier:
    """Synchronous workers: a round ends when the slowest has finished, and there is no delay.

    An arrival is a round: the work of all workers from one query (:class:`~lategrad.problems.Synchronous`).

    Args:
        workers: the workers, none of which joins late or is preempted.
        local_steps: the gradients of each worker in a round, as in a :class:`Cluster`.

    >>> arrivals = Barrier((Worker(mean=1.0), Worker(mean=3.5))).draw(steps=3, seed=0)
    >>> arrivals.delays, arrivals.time
    (tensor([0, 0, 0]), tensor([ 3.5000,  7.0000, 10.5000], dtype=torch.float64))
    """

    workers: Sequence[Worker]
    local_steps: int | None = None
    needs_labels: ClassVar[bool] = False
    largest: ClassVar[int] = 0

    def __post_init__(self) -> None:
        Cluster(self.workers, self.local_steps)  # checks them
        for worker in self.workers:
            is_permanent = worker.start == 0 and worker.up == math.inf
            require("each of workers", worker, is_permanent, "present from second 0 and never preempted")

    def with_local_steps(self, steps: int) -> "Barrier":
        return replace(self, local_steps=Cluster(self.workers, self.local_steps).with_local_steps(steps).local_steps)

    def draw(self, steps: int, seed: int, labels: Tensor | None = None) -> Arrivals:
        check_draw(steps, seed)
        pairs = [(worker, random_times(worker.distribution, seed, Stream.COMPUTING, position))
                 for position, worker in enumerate(self.workers)]  # fmt: skip
        now, times = 0.0, []
        for _ in range(steps):
            now = max(_job_end(worker, stream, self.local_steps or 1, now) for worker, stream in pairs)
            times.append(now)
        return Arrivals(torch.zeros(steps, dtype=torch.int64), torch.tensor(times, dtype=torch.float64))
