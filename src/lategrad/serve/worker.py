"""The worker's side: take a job, draw the sample, compute the gradient, send it back; the same in every engine.

A worker's state, of its local optimizer and the remainder of its last compressed gradient, never leaves it and is lost
with it: every answer names the job that left the state which the answer was computed from.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from lategrad.delays import Distribution
from lategrad.problems.problem import JobResult, Problem, init_worker_state, is_stateful, run_job
from lategrad.serve.compression import Compression
from lategrad.serve.messages import STATELESS, Answer, Job, JobInfo, is_finite, unusable
from lategrad.support.seeds import Stream, derived_seed

_BLOCK = 256  # samples drawn at once


class Link(Protocol):
    """A worker's end of the transport."""

    def receive(self) -> Job | None:
        """Wait for the next job; None when there is no more work."""

    def room(self) -> Tensor | None:
        """Memory that the gradient of the last job may be written to; None if it needs its own."""

    def deliver(self, job: Job, answer: Answer) -> None: ...

    def fail(self, job: Job, reason: str) -> None:
        """Report that the gradient of a job could not be computed."""


def stream_seed(seed: int, worker: int) -> int:
    """The seed of a worker's own stream of samples.

    >>> stream_seed(0, 1) == stream_seed(0, 1) != stream_seed(0, 2)
    True
    """
    return derived_seed(seed, Stream.WORKER, worker)


@dataclass(frozen=True)
class Streams:
    """The samples that worker w draws: a stream of its own, from all the data or from shard w modulo ``shards``."""

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
        return cast(Tensor, problem.samples_of_shard(stream, first, count, worker % self.shards, self.shards))


Slowness = Mapping[int | None, Distribution]
"""Pauses of workers, in milliseconds before each gradient is sent, that slow them down on purpose; under None those of
all workers that have none of their own."""


class Pace:
    """How many local steps a worker takes for a job: all of them, or as many as fit into a time.

    The time of a step is that of the last job, pauses included; the first job has one step.

    >>> pace = Pace(most=100, seconds=30.0)
    >>> pace.local_steps
    1
    >>> pace.adapt(0.5)
    >>> pace.local_steps
    60
    """

    def __init__(self, most: int, seconds: float | None) -> None:
        self._most, self._seconds = most, seconds
        self.local_steps = most if seconds is None else 1

    def adapt(self, seconds: float) -> None:
        """Choose the next number of steps from the seconds that the last job took."""
        if self._seconds is not None and seconds > 0:
            self.local_steps = min(self._most, max(1, int(self._seconds * self.local_steps / seconds)))


class Oracle:
    """Computes the gradients of one worker: its problem on its device, its stream of samples, its pauses, its state."""

    def __init__(self, problem: Problem, streams: Streams, slowness: Slowness, device: torch.device,
                 compression: str = "none") -> None:  # fmt: skip
        self.problem, self.streams, self.slowness, self.device = problem.to(device), streams, slowness, device
        most, seconds = 1, None
        if is_stateful(self.problem):
            most, seconds = self.problem.local_steps, getattr(self.problem, "seconds", None)
        self.pace = Pace(most, seconds)
        self._block = max(1, _BLOCK // most)
        self._samples = (-1, -1, torch.empty(0))  # a block of samples: of which worker, its number, and what was drawn
        self._compression = compression
        self._keeps_state = keeps_state(self.problem, compression)
        self._memory: Any = None
        self._remainder: Tensor | None = None
        self._parent_job = -1

    def answer(self, job: Job, room: Tensor | None = None) -> Answer:
        """What to send back for a job, perhaps in ``room``; the worker's state changes only if that is usable."""
        if not self._keeps_state:
            return Answer(self._gradient(job, room), STATELESS)
        work = self._work(job)
        grad = work.grad.reshape(-1).to(job.query.device)
        if objection := unusable(grad, len(job.query), job.query.dtype):
            raise ValueError(objection)
        message = grad if self._compression == "none" else self._compress(grad)
        info = JobInfo(self.pace.local_steps if is_stateful(self.problem) else 0, self._parent_job)
        self._memory, self._parent_job = work.state, job.sequence
        return Answer(message, info)

    def _compress(self, grad: Tensor) -> Tensor:
        """A gradient as it travels; the next one includes what rounding leaves out."""
        remainder = torch.zeros_like(grad) if self._remainder is None else self._remainder
        sent = Compression(self._compression, len(grad), grad.dtype).send(grad, remainder)
        if not is_finite(sent.received):
            raise ValueError(f"its largest entry, {grad.abs().max().item():.3g}, cannot be sent as {self._compression}")
        self._remainder = sent.remainder
        return sent.message

    def _gradient(self, job: Job, room: Tensor | None) -> Tensor:
        """The gradient of a job, on the device of its query. The simulator computes it the same way, to the bit."""
        if room is not None and hasattr(self.problem, "gradient_of_one") and self.device == job.query.device:
            with torch.no_grad():
                return cast(Tensor, self.problem.gradient_of_one(job.query, self._sample(job)[0], room))
        return self._work(job).grad.reshape(-1).to(job.query.device)

    def _work(self, job: Job) -> JobResult:
        point = job.query.to(self.device).view(1, 1, -1)
        with torch.no_grad():
            memory = init_worker_state(self.problem, point) if self._memory is None else self._memory
            return run_job(self.problem, point, self._sample(job), memory, self.pace.local_steps)

    def _sample(self, job: Job) -> Tensor:
        block = job.sequence // self._block
        if self._samples[:2] != (job.worker, block):
            drawn = self.streams.draw(self.problem, job.worker, block * self._block, self._block)
            self._samples = (job.worker, block, drawn)
        position = job.sequence % self._block
        return self._samples[2][position : position + 1].to(self.device)

    def pause(self, job: Job) -> float:
        if (distribution := self.slowness.get(job.worker, self.slowness.get(None))) is None:
            return 0.0
        seed = derived_seed(self.streams.seed, Stream.PAUSES, job.worker, job.sequence)
        return float(distribution.raw(1, seed)[0]) / 1000


def keeps_state(problem: Problem, compression: str) -> bool:
    return is_stateful(problem) or compression != "none"


def work(oracle: Oracle, link: Link, sleep: Callable[[float], object]) -> None:
    while (job := link.receive()) is not None:
        begin = time.monotonic()
        try:
            answer = oracle.answer(job, link.room())
        except Exception as error:  # a user's problem may raise anything; the server decides what follows
            link.fail(job, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
            continue
        if (pause := oracle.pause(job)) > 0:
            sleep(pause)
        oracle.pace.adapt(time.monotonic() - begin)
        link.deliver(job, answer)
