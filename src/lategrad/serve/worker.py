"""The worker's side: take a job, draw the sample, compute the gradient, hand it back; the same in every engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lategrad.delays import Law
from lategrad.problems.problem import Problem
from lategrad.serve.job import Job
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

    def send(self, job: Job, grad: Tensor) -> None:
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

    everyone: Law | None = None
    one: tuple[tuple[int, Law], ...] = ()

    def of(self, worker: int) -> Law | None:
        """The law of a worker's pauses."""
        return dict(self.one).get(worker, self.everyone)


class Oracle:
    """The gradients of one worker: its stream of samples, its problem on its device, its pauses."""

    def __init__(self, problem: Problem, streams: Streams, slowness: Slowness, device: torch.device) -> None:
        self.problem, self.streams, self.slowness, self.device = problem.to(device), streams, slowness, device
        self._samples: tuple[int, int, Tensor] = (-1, -1, torch.empty(0))

    def gradient(self, job: Job, room: Tensor | None = None) -> Tensor:
        """The gradient of a job, where its query lies. The simulator computes it the same way, to the bit.

        Args:
            job: what to do.
            room: memory that the result may be written to; problems that have ``gradient_of_one`` do.
        """
        sample = self._sample(job.worker, job.sequence).to(self.device)
        if room is not None and hasattr(self.problem, "gradient_of_one") and self.device == job.query.device:
            with torch.no_grad():
                result: Tensor = self.problem.gradient_of_one(job.query, sample[0], room)
                return result
        point = job.query.to(self.device).view(1, 1, -1)
        with torch.no_grad():
            return self.problem.gradient(point, sample).reshape(-1).to(job.query.device)

    def _sample(self, worker: int, sequence: int) -> Tensor:
        block = sequence // _BLOCK
        if self._samples[:2] != (worker, block):
            drawn = self.streams.draw(self.problem, worker, block * _BLOCK, _BLOCK)
            self._samples = (worker, block, drawn)
        position = sequence % _BLOCK
        return self._samples[2][position : position + 1]

    def pause(self, job: Job) -> float:
        """How many seconds to hold a job's gradient back."""
        law = self.slowness.of(job.worker)
        if law is None:
            return 0.0
        seed = derived_seed(self.streams.seed, Stream.PAUSES, job.worker, job.sequence)
        return float(law.raw(1, seed)[0]) / 1000


def work(oracle: Oracle, link: Link, sleep: Callable[[float], object]) -> None:
    """Serve jobs until there are no more."""
    while (job := link.receive()) is not None:
        try:
            grad = oracle.gradient(job, link.room())
        except Exception as error:  # a user's problem may raise anything; the server decides what follows
            link.fail(job, error)
            continue
        if (pause := oracle.pause(job)) > 0:
            sleep(pause)
        link.send(job, grad)
