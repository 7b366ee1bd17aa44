"""The simulated workers: what each of them remembers from job to job, where a problem's workers remember anything."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lategrad.delays import Arrivals
from lategrad.delays.senders import fewest_workers
from lategrad.problems.problem import Problem
from lategrad.problems.work import first_memory, remembers
from lategrad.support.runs import map_tensors, tensors


class Workers:
    """Does the jobs of all runs; the workers of each sequence of arrivals have memories of their own.

    Where arrivals do not say who sent a gradient, it is one of the fewest workers that could have
    (:func:`~lategrad.delays.senders.fewest_workers`): at a constant delay tau, tau + 1 workers in turn.

    Args:
        problem: plain, and then there is nothing to remember, or with a memory.
        arrivals: for every seed and every delay model.
        query: any point of all runs, ``(seeds, delays, *runs, dim)``.
    """

    def __init__(self, problem: Problem, arrivals: list[list[Arrivals]], query: Tensor) -> None:
        self._problem, self._runs = problem, query.dim() - 3
        self.memory: list[Tensor] = []
        updates, shape = len(arrivals[0][0].delays), query.shape[:2]
        self.local_steps: list[list[Tensor | None]] = [[None] * len(row) for row in arrivals]
        """Of every update, where the problem has local steps."""
        if not remembers(problem):
            self.jobs = torch.empty(updates, *shape, 0, dtype=torch.int64)
            return
        every = [one for row in arrivals for one in row]
        senders = [fewest_workers(one.delays) if one.worker is None else one.worker.unique(return_inverse=True)[1]
                   for one in every]  # fmt: skip
        counts = torch.tensor([int(of_sequence.max()) + 1 for of_sequence in senders])
        rows = torch.stack(senders, dim=1) + counts.cumsum(0) - counts
        taken = _stacked([one.local_steps for one in every], problem.steps, updates)
        fresh = _stacked([one.fresh for one in every], 0, updates)
        self._counted, self._renewed = bool((taken != problem.steps).any()), bool(fresh.any())
        self.local_steps = [list(row.unbind(-1)) for row in taken.unflatten(1, shape).unbind(1)]
        self.jobs = torch.stack([rows, taken, fresh], dim=-1).unflatten(1, shape)
        self._first = first_memory(problem, query)
        self.memory = [leaf.flatten(0, 1).repeat_interleave(counts.to(leaf.device), dim=0)
                       for leaf in tensors(self._first)]  # fmt: skip

    def work(self, x: Tensor, sample: Tensor, job: Tensor) -> tuple[Tensor, Tensor | None]:
        """What the worker of each run sends, and its weight where not all have the same; it remembers its job.

        Args:
            x: the queries, ``(seeds, delays, *runs, dim)``.
            sample: of the update.
            job: the update's row of ``jobs``.
        """
        problem = self._problem
        if not remembers(problem):
            return problem.gradient(x, sample), None
        row, taken, fresh = job.flatten(0, 1).unbind(-1)
        leaves = iter([leaf.index_select(0, row).view(*x.shape[:2], *leaf.shape[1:]) for leaf in self.memory])
        memory: Any = map_tensors(lambda _: next(leaves), self._first)
        if self._renewed:
            anew = iter(tensors(self._first))
            lost = fresh.view(x.shape[:2]) > 0
            memory = map_tensors(lambda leaf: torch.where(_as_wide(lost, leaf), next(anew), leaf), memory)
        steps = taken.view(*x.shape[:2], *[1] * (self._runs + 1)) if self._counted else None
        grad, memory = problem.work(x, sample, memory, steps)
        for kept, leaf in zip(self.memory, tensors(memory), strict=True):
            kept.index_copy_(0, row, leaf.flatten(0, 1))
        return grad, None if steps is None else steps.double() / problem.steps


def _as_wide(mask: Tensor, leaf: Tensor) -> Tensor:
    return mask.view(*mask.shape, *[1] * (leaf.dim() - mask.dim()))


def _stacked(values: list[Tensor | None], default: int, updates: int) -> Tensor:
    """``(updates, sequences)``."""
    filled = [torch.full((updates,), default) if value is None else value.long() for value in values]
    return torch.stack(filled, dim=1)
