"""Synchronous rounds: all workers start at one query, and their pseudo-gradients are averaged (as in DiLoCo)."""

from typing import Any

import torch
from torch import Tensor

from lategrad.problems.local_steps import LocalSteps
from lategrad.problems.problem import Count, JobResult
from lategrad.support.runs import map_tensors
from lategrad.support.validation import require, require_count


class Synchronous:
    r"""A job is a round of W workers, and its pseudo-gradient the mean of theirs.

    .. math:: \Delta = \frac1W \sum_{w=1}^W \Delta_w

    Each worker has its own inner optimizer; all take their steps at once, and there is no delay. In a simulation,
    :class:`~lategrad.delays.clocks.Barrier` says how long a round takes. Worker w of round k uses job kW + w of the
    problem's stream.

    Args:
        problem: with local steps.
        workers: W.

    >>> import lategrad as lg
    >>> local = LocalSteps(lg.problems.Quadratic(noise=0.1), local_steps=20, inner="adamw:lr=0.01")
    >>> workers = [lg.clocks.Worker(mean=mean) for mean in (1.0, 2.0, 6.0)]
    >>> trace = lg.simulate(Synchronous(local, workers=3), "nesterov", lg.clocks.Barrier(workers), steps=50)
    >>> trace.time[-1].item()  # 50 rounds of 20 steps of the slowest
    6000.0

    Reference: A. Douillard et al., DiLoCo: distributed low-communication training of language models, 2023.
    """

    def __init__(self, problem: LocalSteps, workers: int) -> None:
        require("problem", problem, isinstance(problem, LocalSteps), "a problem with local steps, LocalSteps(...)")
        require_count("workers", workers, low=1)
        self.problem, self.workers = problem, workers
        self._sample_dims = problem.samples(0, 0, 1).dim() - 1

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
        labels = self.problem.labels(samples.flatten(0, 1))
        return None if labels is None else labels.unflatten(0, (len(samples), self.workers)).flatten(1)

    def init_worker_state(self, x: Tensor) -> Any:
        one = self.problem.init_worker_state(x)
        return map_tensors(lambda leaf: leaf.unsqueeze(-2).repeat_interleave(self.workers, dim=-2), one)

    def run_job(self, x: Tensor, sample: Tensor, state: Any, local_steps: Count | None = None) -> JobResult:
        """A round: every worker is a stream of its own, and takes the same number of steps."""
        is_one = local_steps is None or isinstance(local_steps, int)
        require("local_steps", local_steps, is_one, "one number for all workers of a round")
        streams = sample.dim() - self._sample_dims - 1
        start = x.unsqueeze(streams).expand(*x.shape[:streams], self.workers, *x.shape[streams:])
        of_workers = map_tensors(lambda leaf: leaf.movedim(-2, streams), state)
        grad, after = self.problem.run_job(start, sample, of_workers, local_steps)
        return JobResult(grad.mean(streams), map_tensors(lambda leaf: leaf.movedim(streams, -2), after))

    def gradient(self, x: Tensor, sample: Tensor) -> Tensor:
        """The mean pseudo-gradient of a round of new workers."""
        return self.run_job(x, sample, self.init_worker_state(x)).grad

    def to(self, device: torch.device | str) -> "Synchronous":
        return Synchronous(self.problem.to(device), self.workers)

    def __repr__(self) -> str:
        return f"Synchronous({self.problem!r}, workers={self.workers})"
