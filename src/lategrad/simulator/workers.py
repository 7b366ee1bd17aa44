"""Simulated workers that keep a state: each has its own, and jobs that overlap in time are run as one batch.

Jobs of several local steps take long, one after another. But the job of update t needs only its query, and several
updates in a row often have queries that were all handed out before the first of them: those are a *wave*, and their
jobs are run at once. No worker has two jobs in a wave: the second starts from the state that the first leaves.
"""

from bisect import bisect_right, insort
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lategrad.delays import Arrivals
from lategrad.problems.problem import StatefulProblem
from lategrad.simulator.history import History, check_memory
from lategrad.support.runs import map_tensors, tensors

_MAX_JOBS = 8  # at once: their vectors and activations are in memory together, and a GPU pads shorter waves


def fewest_workers(delays: Tensor) -> Tensor:
    r"""Assign delays to the fewest possible workers, each of which sends its gradients one after another.

    The sender of update t fetched its query after :math:`v = t - 1 - \tau_t` updates, so its own last update is number
    v or an earlier one. The worker with the latest such update is chosen, or a new one if there is none. At a
    constant delay :math:`\tau` that is :math:`\tau + 1` workers in turn.

    >>> fewest_workers(torch.tensor([0, 1, 2, 2, 2, 2, 2]))  # a constant delay of 2
    tensor([0, 1, 2, 0, 1, 2, 0])
    >>> fewest_workers(torch.tensor([0, 0, 2, 0, 1]))  # the third update is from a worker that was there from the start
    tensor([0, 0, 1, 1, 0])
    """
    last: list[tuple[int, int]] = []  # (its last update, worker), in this order
    senders = []
    for t, delay in enumerate(delays.tolist(), start=1):
        place = bisect_right(last, (t - 1 - delay, len(last)))
        worker = last.pop(place - 1)[1] if place else len(last)
        insort(last, (t, worker))
        senders.append(worker)
    return torch.tensor(senders)


def wave_ends(delays: Tensor, workers: Tensor) -> list[int]:
    """For every update (from 0) the end of the wave that starts there: the first update whose query, or whose worker's
    state, does not exist yet. ``delays`` and ``workers``, the senders, have the shape ``(updates, sequences)``.

    >>> delays = torch.tensor([0, 1, 2, 2, 2, 2, 2]).unsqueeze(1)
    >>> wave_ends(delays, torch.tensor([0, 1, 2, 0, 1, 2, 0]).unsqueeze(1))  # three updates at a time
    [3, 4, 5, 6, 7, 7, 7]
    """
    newest = torch.arange(len(delays)) - delays.amin(1)  # of the queries that each update needs
    previous = torch.stack([_previous_update(column) for column in workers.unbind(1)]).amax(0)
    needed = torch.maximum(newest, previous).tolist()
    ends, end = [], 0
    for start in range(len(delays)):
        end = max(end, start + 1)
        while end < len(delays) and needed[end] <= start:
            end += 1
        ends.append(end)
    return ends


def _previous_update(workers: Tensor) -> Tensor:
    """For every update, the number of its worker's previous update, counted from 1; 0 where there is none."""
    last: dict[int, int] = {}
    previous = []
    for t, worker in enumerate(workers.tolist(), start=1):
        previous.append(last.get(worker, 0))
        last[worker] = t
    return torch.tensor(previous)


class Workers:
    """Runs the jobs of all runs, a wave at a time; every sequence of arrivals has its own workers.

    Where arrivals do not name the workers, they are assigned by :func:`fewest_workers`. The problem's ``jobs_at_once``,
    if any, limits the jobs of a wave. ``delays`` are ``(updates, seeds, delays)``, the query of all runs ``(seeds,
    delays, *runs, dim)``.
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
        self._varying_steps, self._loses_state = bool((taken != problem.local_steps).any()), bool(fresh.any())
        self.local_steps = taken.unflatten(1, sequences)
        self.jobs = torch.stack([rows, taken, fresh], dim=-1).unflatten(1, sequences)
        """int64 ``(updates, seeds, delays, 3)``: for every job its worker's row in the states, its number of local
        steps, and whether the worker has lost its state."""

        self._first = problem.init_worker_state(query)
        self._padding = int(counts.sum())  # a row that is never read, for the jobs that pad a wave
        needed = sum(leaf[0, 0].nbytes for leaf in tensors(self._first)) * (self._padding + 1)
        check_memory("the states of workers", needed, query.device)
        self._states = [torch.cat([leaf.flatten(0, 1).repeat_interleave(counts.to(leaf.device), dim=0), leaf[:1, 0]])
                        for leaf in tensors(self._first)]  # fmt: skip
        self._ends = wave_ends(delays.flatten(1), rows)
        longest = max(end - start for start, end in enumerate(self._ends))
        self._width = min(getattr(problem, "jobs_at_once", _MAX_JOBS), longest)
        self._batch = self._width
        self.pads_waves = query.is_cuda  # to the longest, with jobs that are discarded: a GPU replays its graph
        self._positions = torch.arange(self._width, device=query.device)
        self._length, self._next = (torch.zeros(1, dtype=torch.int64, device=query.device) for _ in range(2))
        self._grads = query.new_empty(self._width, *query.shape)

    def waves(self, first: int, last: int) -> Iterator[int]:
        """The lengths of the waves of updates ``first, ..., last - 1``; :meth:`run_jobs` runs the last one given."""
        while first < last:
            length = min(self._ends[first], last, first + self._width) - first
            self._length.fill_(length)
            self._batch = self._width if self.pads_waves else length
            yield length
            first += length

    def run_jobs(self, queries: History, samples: Tensor, read: Tensor, jobs: Tensor, at: Tensor) -> None:
        """Run all jobs of the wave that begins at row ``at`` of a chunk, with the chunk's samples, slots and jobs."""
        width, positions = self._batch, self._positions[: self._batch]
        used = (at + positions).clamp_max(len(read) - 1)
        x = queries.fetch(read.index_select(0, used).flatten()).view(width, *self._shape)
        row, taken, fresh = jobs.index_select(0, used).flatten(1, 2).unbind(-1)
        row = torch.where((positions < self._length).unsqueeze(-1), row, self._padding).flatten()
        lead = (width, *self._shape[:2])
        leaves = [leaf.index_select(0, row).view(*lead, *leaf.shape[1:]) for leaf in self._states]
        state: Any = map_tensors(lambda _, leaf: leaf, self._first, leaves)
        if self._loses_state:
            lost = fresh.view(lead) > 0
            state = map_tensors(lambda leaf, new: torch.where(_unsqueeze_to(lost, leaf), new, leaf), state, self._first)
        steps = _unsqueeze_to(taken.view(lead), x) if self._varying_steps else None
        grad, state = self._problem.run_job(x, samples.index_select(0, used), state, steps)
        for stored, leaf in zip(self._states, tensors(state), strict=True):
            stored.index_copy_(0, row, leaf.flatten(0, 2))
        self._grads[:width].copy_(grad)
        self._next.zero_()

    def next_gradient(self) -> Tensor:
        grad = self._grads.index_select(0, self._next)[0]
        self._next += 1
        return grad

    def share_of_steps(self, job: Tensor) -> Tensor | None:
        """The share of the local steps that each run's worker took, ``(seeds, delays, 1, ...)``; None if always all."""
        if not self._varying_steps:
            return None
        return _unsqueeze_to(job[..., 1].double() / self._problem.local_steps, self._grads[0])


def _unsqueeze_to(values: Tensor, like: Tensor) -> Tensor:
    return values.view(*values.shape, *[1] * (like.dim() - values.dim()))


def _stacked(values: list[Tensor | None], default: int, updates: int) -> Tensor:
    filled = [torch.full((updates,), default) if value is None else value.long() for value in values]
    return torch.stack(filled, dim=1)
