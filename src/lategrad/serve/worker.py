"""The worker's side: take a job, draw the sample, compute the gradient, hand it back; the same in every engine.

A worker may keep something from job to job: the state of its own optimizer, where the problem has local steps, and what
rounding left out of its last gradient, where gradients travel in fewer bits. That never leaves the worker, and is gone
with it: with every gradient it says which of its jobs what it had kept was from.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lategrad.delays import Distribution
from lategrad.problems.problem import Problem
from lategrad.problems.worker_state import JobResult, init_worker_state, is_stateful, run_job
from lategrad.serve.compression import Compression
from lategrad.serve.messages import PLAIN, Answer, Job, Made, is_finite, unusable
from lategrad.support.seeds import Stream, derived_seed

_BLOCK = 256  # samples drawn at once


class Link(Protocol):
    """A worker's end of the transport."""

    def receive(self) -> Job | None:
        """The next job, waited for; None when there is no more work."""
        ...

    def room(self) -> Tensor | None:
        """Where the gradient of the last job received may be written, if it need not be in memory of its own."""
        ...

    def send(self, job: Job, answer: Answer) -> None:
        """Hand back the gradient of a job."""
        ...

    def fail(self, job: Job, error: Exception) -> None:
        """Say that the gradient of a job could not be computed."""
        ...


def stream_seed(seed: int, worker: int) -> int:
    """The seed of a worker's own stream of samples.

    >>> stream_seed(0, 1) == stream_seed(0, 1) != stream_seed(0, 2)
    True
    """
    return derived_seed(seed, Stream.WORKER, worker)


@dataclass(frozen=True)
class Streams:
    """What samples each worker draws: a stream of its own, from all the data or from its shard.

    Args:
        seed: of the run.
        shards: parts of the data; worker w draws from part w modulo so many. None for all workers from all the data.
    """

    seed: int
    shards: int | None = None

    def draw(self, problem: Problem, worker: int, first: int, count: int) -> Tensor:
        """Samples number ``first, ...`` of a worker's stream."""
        stream = stream_seed(self.seed, worker)
        if self.shards is None:
            return problem.samples(stream, first, count)
        if not hasattr(problem, "samples_of_shard"):
            raise ValueError(f"data_shards must be None, got {self.shards}: {type(problem).__name__} has no "
                             "samples_of_shard(seed, first, count, shard, shards)")  # fmt: skip
        drawn: Tensor = problem.samples_of_shard(stream, first, count, worker % self.shards, self.shards)
        return drawn


@dataclass(frozen=True)
class Slowness:
    """Pauses that make workers late on purpose, in milliseconds before each gradient is handed back.

    Args:
        everyone: the law of all workers' pauses; None for none.
        one: laws of single workers, instead of that.
    """

    everyone: Distribution | None = None
    one: tuple[tuple[int, Distribution], ...] = ()

    def of(self, worker: int) -> Distribution | None:
        """The law of a worker's pauses."""
        return dict(self.one).get(worker, self.everyone)


class Pace:
    """How many steps of its own a worker takes for a job: all of them, or as many as fit into a time.

    The time that a step takes is that of the last job, pauses counted in; the first job has one step.

    >>> pace = Pace(most=100, seconds=30.0)
    >>> pace.steps
    1
    >>> pace.note(0.5)
    >>> pace.steps
    60
    """

    def __init__(self, most: int, seconds: float | None) -> None:
        self._most, self._seconds = most, seconds
        self.steps = most if seconds is None else 1

    def note(self, spent: float) -> None:
        """The last job took so many seconds."""
        if self._seconds is not None and spent > 0:
            self.steps = min(self._most, max(1, int(self._seconds * self.steps / spent)))


class Oracle:
    """The gradients of one worker: its stream of samples, its problem on its device, its pauses, and what it keeps."""

    def __init__(
        self, problem: Problem, streams: Streams, slowness: Slowness, device: torch.device, compression: str = "none"
    ) -> None:
        self.problem, self.streams, self.slowness, self.device = problem.to(device), streams, slowness, device
        most, seconds = 1, None
        if is_stateful(self.problem):
            most, seconds = self.problem.local_steps, getattr(self.problem, "seconds", None)
        self.pace = Pace(most, seconds)
        self._block = max(1, _BLOCK // most)
        self._samples: tuple[int, int, Tensor] = (-1, -1, torch.empty(0))
        self._compression = compression
        self._keeps = keeps_something(self.problem, compression)
        self._memory: Any = None
        self._remainder: Tensor | None = None
        self._previous = -1

    def answer(self, job: Job, room: Tensor | None = None) -> Answer:
        """What to send back for a job; what the worker keeps changes only if that is worth sending.

        Args:
            job: what to do.
            room: memory that a plain gradient may be written to; problems that have ``gradient_of_one`` do.
        """
        if not self._keeps:
            return Answer(self._gradient(job, room), PLAIN)
        work = self._work(job)
        grad = work.grad.reshape(-1).to(job.query.device)
        if objection := unusable(grad, len(job.query), job.query.dtype):
            raise ValueError(objection)
        message = grad if self._compression == "none" else self._send(grad)
        made = Made(self.pace.steps if is_stateful(self.problem) else 0, self._previous)
        self._memory, self._previous = work.state, job.sequence
        return Answer(message, made)

    def _send(self, grad: Tensor) -> Tensor:
        """A gradient as it travels; what rounding leaves out is kept."""
        remainder = torch.zeros_like(grad) if self._remainder is None else self._remainder
        sent = Compression(self._compression, len(grad), grad.dtype).send(grad, remainder)
        if not is_finite(sent.received):
            raise ValueError(f"its largest entry, {grad.abs().max().item():.3g}, cannot travel as {self._compression}")
        self._remainder = sent.remainder
        return sent.message

    def _gradient(self, job: Job, room: Tensor | None) -> Tensor:
        """The gradient of a job, where its query lies. The simulator computes it the same way, to the bit."""
        if room is not None and hasattr(self.problem, "gradient_of_one") and self.device == job.query.device:
            with torch.no_grad():
                result: Tensor = self.problem.gradient_of_one(job.query, self._sample(job)[0], room)
                return result
        return self._work(job).grad.reshape(-1).to(job.query.device)

    def _work(self, job: Job) -> JobResult:
        point = job.query.to(self.device).view(1, 1, -1)
        with torch.no_grad():
            memory = init_worker_state(self.problem, point) if self._memory is None else self._memory
            return run_job(self.problem, point, self._sample(job), memory, self.pace.steps)

    def _sample(self, job: Job) -> Tensor:
        block = job.sequence // self._block
        if self._samples[:2] != (job.worker, block):
            drawn = self.streams.draw(self.problem, job.worker, block * self._block, self._block)
            self._samples = (job.worker, block, drawn)
        position = job.sequence % self._block
        return self._samples[2][position : position + 1].to(self.device)

    def pause(self, job: Job) -> float:
        """How many seconds to hold a job's gradient back."""
        law = self.slowness.of(job.worker)
        if law is None:
            return 0.0
        seed = derived_seed(self.streams.seed, Stream.PAUSES, job.worker, job.sequence)
        return float(law.raw(1, seed)[0]) / 1000


def keeps_something(problem: Problem, compression: str) -> bool:
    """Whether workers keep something from job to job."""
    return is_stateful(problem) or compression != "none"


def work(oracle: Oracle, link: Link, sleep: Callable[[float], object]) -> None:
    """Serve jobs until there are no more."""
    while (job := link.receive()) is not None:
        begin = time.monotonic()
        try:
            answer = oracle.answer(job, link.room())
        except Exception as error:  # a user's problem may raise anything; the server decides what follows
            link.fail(job, error)
            continue
        if (pause := oracle.pause(job)) > 0:
            sleep(pause)
        oracle.pace.note(time.monotonic() - begin)
        link.send(job, answer)
