"""Simulated workers that remember: each has a memory of its own, and jobs that are under way together are done at once.

Jobs of several steps take long, one after another. But the job of update t needs no more than its query, and several
updates in a row often have queries that were all handed out before the first of them: those are a *wave*, and their
jobs are done at once. No worker has two jobs in a wave: the second begins with what the first has left.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lategrad.delays import Arrivals
from lategrad.problems.worker_state import StatefulProblem
from lategrad.simulator.history import History, check_memory
from lategrad.simulator.senders import fewest_workers
from lategrad.support.runs import map_tensors, tensors

_MOST = 8  # jobs done at once: their vectors and activations are in memory together, and a GPU fills shorter waves up


def wave_ends(delays: Tensor, workers: Tensor) -> list[int]:
    """For every update (from 0) the end of the wave that starts there: the first update whose query, or whose worker's
    memory, is not there yet.

    Args:
        delays: ``(updates, sequences)``.
        workers: who sends each gradient, likewise.

    >>> delays = torch.tensor([0, 1, 2, 2, 2, 2, 2]).unsqueeze(1)
    >>> wave_ends(delays, torch.tensor([0, 1, 2, 0, 1, 2, 0]).unsqueeze(1))  # three updates at a time
    [3, 4, 5, 6, 7, 7, 7]
    """
    newest = torch.arange(len(delays)) - delays.amin(1)  # of the queries that each update needs
    needed = torch.maximum(newest, torch.stack([_after_last(column) for column in workers.unbind(1)]).amax(0)).tolist()
    ends = [len(delays)] * len(delays)
    end = 0
    for start in range(len(delays)):
        end = max(end, start + 1)
        while end < len(delays) and needed[end] <= start:
            end += 1
        ends[start] = end
    return ends


def _after_last(workers: Tensor) -> Tensor:
    """For every update how many there are up to its worker's last one before; 0 where there is none."""
    last: dict[int, int] = {}
    after = []
    for t, worker in enumerate(workers.tolist(), start=1):
        after.append(last.get(worker, 0))
        last[worker] = t
    return torch.tensor(after)


class Workers:
    """Does the jobs of all runs, a wave at a time; the workers of each sequence of arrivals have their own memories.

    Where arrivals do not say who sent a gradient, it is one of the fewest workers that could have
    (:func:`~lategrad.simulator.senders.fewest_workers`): at a constant delay tau, tau + 1 workers in turn.

    Args:
        problem: whose workers remember; with ``jobs_at_once`` it says how many jobs may be done at once.
        arrivals: for every seed and every delay model.
        delays: all of them, ``(updates, seeds, delays)``.
        query: of all runs, ``(seeds, delays, *runs, dim)``.
    """

    def __init__(self, problem: StatefulProblem, arrivals: list[list[Arrivals]], delays: Tensor, query: Tensor) -> None:
        self._problem, self._shape = problem, query.shape
        every = [one for row in arrivals for one in row]
        senders = [fewest_workers(one.delays) if one.worker is None else one.worker.unique(return_inverse=True)[1]
                   for one in every]  # fmt: skip
        counts = torch.tensor([int(of_sequence.max()) + 1 for of_sequence in senders])
        rows = torch.stack(senders, dim=1) + counts.cumsum(0) - counts
        updates, sequences = len(delays), query.shape[:2]
        taken = _stacked([one.local_steps for one in every], problem.local_steps, updates)
        fresh = _stacked([one.fresh for one in every], 0, updates)
        self._counted, self._renewed = bool((taken != problem.local_steps).any()), bool(fresh.any())
        self.local_steps = taken.unflatten(1, sequences)
        self.jobs = torch.stack([rows, taken, fresh], dim=-1).unflatten(1, sequences)
        """int64 ``(updates, seeds, delays, 3)``: of every job its worker's place, its steps, whether all is lost."""

        self._first = problem.init_worker_state(query)
        self._bin = int(counts.sum())  # a place that nobody reads, for jobs that only fill up a wave
        needed = sum(leaf[0, 0].numel() * leaf.element_size() for leaf in tensors(self._first)) * (self._bin + 1)
        check_memory("what workers remember", needed, query.device)
        self._memory = [
            torch.cat([leaf.flatten(0, 1).repeat_interleave(counts.to(leaf.device), dim=0), leaf[:1, 0]])
            for leaf in tensors(self._first)
        ]
        self._ends = wave_ends(delays.flatten(1), rows)
        longest = max(end - start for start, end in enumerate(self._ends))
        self._width = min(getattr(problem, "jobs_at_once", _MOST), longest)
        self._done = self._width
        self._places = torch.arange(self._width, device=query.device)
        self._length, self._next = (torch.zeros(1, dtype=torch.int64, device=query.device) for _ in range(2))
        self._grads = query.new_empty(self._width, *query.shape)

    def waves(self, first: int, last: int) -> Iterator[int]:
        """The lengths of waves that make up updates ``first, ..., last - 1``."""
        while first < last:
            length = min(self._ends[first], last, first + self._width) - first
            yield length
            first += length

    def expect(self, length: int) -> None:
        """Say how long the next wave is."""
        self._length.fill_(length)
        self._done = self._width if self._grads.is_cuda else length  # a GPU repeats what it has recorded

    def do_jobs(self, queries: History, samples: Tensor, read: Tensor, jobs: Tensor, at: Tensor) -> None:
        """All jobs of the next wave; on a GPU as many as in the longest, of which the rest leaves no trace.

        Args:
            queries: where they are fetched from.
            samples, read, jobs: of a chunk of updates.
            at: where in the chunk the wave begins.
        """
        width, places = self._done, self._places[: self._done]
        used = (at + places).clamp_max(len(read) - 1)
        x = queries.fetch(read.index_select(0, used).flatten()).view(width, *self._shape)
        row, taken, fresh = jobs.index_select(0, used).flatten(1, 2).unbind(-1)
        row = torch.where((places < self._length).unsqueeze(-1), row, self._bin).flatten()
        lead = (width, *self._shape[:2])
        leaves = iter([leaf.index_select(0, row).view(*lead, *leaf.shape[1:]) for leaf in self._memory])
        memory: Any = map_tensors(lambda _: next(leaves), self._first)
        if self._renewed:
            anew, lost = iter(tensors(self._first)), fresh.view(lead) > 0
            memory = map_tensors(lambda leaf: torch.where(_as_deep(lost, leaf), next(anew), leaf), memory)
        steps = _as_deep(taken.view(lead), x) if self._counted else None
        grad, memory = self._problem.run_job(x, samples.index_select(0, used), memory, steps)
        for kept, leaf in zip(self._memory, tensors(memory), strict=True):
            kept.index_copy_(0, row, leaf.flatten(0, 2))
        self._grads[:width].copy_(grad)
        self._next.zero_()

    def next_gradient(self) -> Tensor:
        """Of the wave, in its order, what the worker of each run sends."""
        grad = self._grads.index_select(0, self._next)[0]
        self._next += 1
        return grad

    def weight(self, job: Tensor) -> Tensor | None:
        """The share of its steps that each run's worker took, ``(seeds, delays, 1, ...)``; None where all took all."""
        return _as_deep(job[..., 1].double() / self._problem.local_steps, self._grads[0]) if self._counted else None


def _as_deep(values: Tensor, like: Tensor) -> Tensor:
    """With as many dimensions as another tensor."""
    return values.view(*values.shape, *[1] * (like.dim() - values.dim()))


def _stacked(values: list[Tensor | None], default: int, updates: int) -> Tensor:
    """``(updates, sequences)``."""
    filled = [torch.full((updates,), default) if value is None else value.long() for value in values]
    return torch.stack(filled, dim=1)
