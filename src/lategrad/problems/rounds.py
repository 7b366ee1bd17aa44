"""Rounds of workers who wait for each other: all start at one query, and what they send is averaged (DiLoCo itself)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lategrad.problems.local_steps import LocalSteps
from lategrad.problems.worker_state import Count, Work
from lategrad.support.runs import map_tensors
from lategrad.support.validation import require


class Synchronous:
    r"""A job is a round of W workers, and its pseudo-gradient the mean of theirs.

    .. math:: \Delta = \frac1W \sum_{w=1}^W \Delta_w

    Each worker keeps the state of its own inner optimizer; their steps are taken at once. With
    :class:`~lategrad.delays.clocks.Barrier` a simulation knows how long a round takes; there is no delay. Worker w of
    round k uses job kW + w of the problem's stream.

    Args:
        problem: with local steps.
        workers: W.

    >>> import lategrad as lg
    >>> local = LocalSteps(lg.problems.Quadratic(noise=0.1), steps=20, inner="adamw:lr=0.01")
    >>> workers = [lg.clocks.Worker(mean=mean) for mean in (1.0, 2.0, 6.0)]
    >>> trace = lg.simulate(Synchronous(local, workers=3), "nesterov", lg.clocks.Barrier(workers), steps=50)
    >>> trace.time[-1].item()  # 50 rounds of 20 steps of the slowest
    6000.0

    Reference: A. Douillard et al., DiLoCo: distributed low-communication training of language models, 2023.
    """

    def __init__(self, problem: LocalSteps, workers: int) -> None:
        require("problem", problem, isinstance(problem, LocalSteps), "a problem with local steps, LocalSteps(...)")
        is_count = isinstance(workers, int) and not isinstance(workers, bool)
        require("workers", workers, is_count and workers >= 1, "an integer >= 1")
        self.problem, self.workers = problem, workers
        self._of_one_sample = problem.samples(0, 0, 1).dim() - 1  # dimensions

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "problem":  # while it is unpickled it has no problem yet
            raise AttributeError(name)
        return getattr(self.problem, name)  # the rest is the problem's own

    def samples(self, seed: int, first: int, count: int) -> Tensor:
        """The jobs of W workers for each round, ``(count, W, H, ...)``."""
        jobs: Tensor = self.problem.samples(seed, first * self.workers, count * self.workers)
        rounds: Tensor = jobs.unflatten(0, (count, self.workers))
        return rounds

    def labels(self, samples: Tensor) -> Tensor | None:
        """The classes of all rows of a round."""
        of_jobs = self.problem.labels(samples.flatten(0, 1))
        return None if of_jobs is None else of_jobs.unflatten(0, (len(samples), self.workers)).flatten(1)

    def memory(self, x: Tensor) -> Any:
        """That of W fresh workers."""
        one = self.problem.memory(x)
        return map_tensors(lambda leaf: leaf.unsqueeze(-2).repeat_interleave(self.workers, dim=-2), one)

    def work(self, x: Tensor, sample: Tensor, memory: Any, steps: Count | None = None) -> Work:
        """A round: every worker is a stream of its own, and takes the same number of steps."""
        require("steps", steps, steps is None or isinstance(steps, int), "one number for all workers of a round")
        streams = sample.dim() - self._of_one_sample - 1
        start = x.unsqueeze(streams).expand(*x.shape[:streams], self.workers, *x.shape[streams:])
        of_workers = map_tensors(lambda leaf: leaf.movedim(-2, streams), memory)
        grad, after = self.problem.work(start, sample, of_workers, steps)
        return Work(grad.mean(streams), map_tensors(lambda leaf: leaf.movedim(streams, -2), after))

    def gradient(self, x: Tensor, sample: Tensor) -> Tensor:
        """What a round of fresh workers gives."""
        return self.work(x, sample, self.memory(x)).grad

    def to(self, device: torch.device | str) -> Synchronous:
        """The same with the problem's data on a device."""
        return Synchronous(self.problem.to(device), self.workers)

    def __repr__(self) -> str:
        return f"Synchronous({self.problem!r}, workers={self.workers})"
