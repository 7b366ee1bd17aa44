"""Replay: what was recorded of a real run, through the simulator, with its own rule or with another."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from lategrad.delays import Recorded
from lategrad.problems.problem import Problem, as_problem
from lategrad.problems.worker_state import Count, Work, init_worker_state, is_stateful, run_job
from lategrad.registry import as_rule
from lategrad.rules.blocks import fill_in
from lategrad.rules.rule import AnyRule
from lategrad.rules.scheduled import Scheduled, has_step, with_schedule
from lategrad.serve.checkpoints.identity import require_same
from lategrad.serve.compression import Compression
from lategrad.serve.settings import FUNCTION
from lategrad.serve.worker import Streams
from lategrad.simulator import simulate
from lategrad.support.runs import map_tensors
from lategrad.support.threads import torch_threads
from lategrad.support.validation import require
from lategrad.trace import Trace

_NEIGHBOURS = 256  # as many as the simulator asks for at once


class RecordedSamples:
    """A problem whose samples are those that the workers of a recorded run drew, in the order of its updates."""

    def __init__(self, problem: Problem, trace: Trace) -> None:
        self._problem, self._trace = problem, trace
        settings = trace.config["settings"]
        self._streams = Streams(settings["seed"], settings.get("data_shards"))
        self._compression = settings.get("compression", "none")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._problem, name)  # the rest is the problem's own

    def __repr__(self) -> str:
        return repr(self._problem)

    def samples(self, seed: int, first: int, count: int) -> Tensor:
        """The samples of updates number ``first, ...`` of the run, whatever the seed."""
        everyone, numbers = cast(Tensor, self._trace.worker), cast(Tensor, self._trace.sequence)
        worker, sequence = everyone[first : first + count], numbers[first : first + count]
        drawn: Tensor | None = None
        for number in worker.unique().tolist():
            mine = worker == number
            used = self._of_stream(number, sequence[mine])
            if drawn is None:
                drawn = used.new_empty(count, *used.shape[1:])
            drawn[mine] = used
        assert drawn is not None
        return drawn

    def _of_stream(self, worker: int, positions: Tensor) -> Tensor:
        """Samples of one worker's stream, which are mostly neighbours, and drawn together then."""
        low, high = int(positions.min()), int(positions.max())
        if high - low > 10 * _NEIGHBOURS:  # one that came very late
            return torch.cat([self._streams.draw(self._problem, worker, k, 1) for k in positions.tolist()])
        return self._streams.draw(self._problem, worker, low, high - low + 1)[positions - low]

    def to(self, device: torch.device | str) -> RecordedSamples:
        """The same with the problem's data on a device."""
        return type(self)(self._problem.to(device), self._trace)


class _Kept(NamedTuple):
    """What a worker keeps from job to job."""

    memory: Any
    remainder: Tensor
    """What its last gradient left out; no entries where nothing is left out."""


class RecordedWork(RecordedSamples):
    """The same where workers kept something from job to job: what each of them did, and what the server got of it."""

    jobs_at_once = 1  # as a worker does them: several in one product round differently
    on_device = False  # how many steps a job has is looked up

    @property
    def steps(self) -> int:
        """The most of a job."""
        return self._problem.steps if is_stateful(self._problem) else 1

    def memory(self, x: Tensor) -> _Kept:
        """What a fresh worker has."""
        return _Kept(
            init_worker_state(self._problem, x), torch.zeros_like(x if self._compression != "none" else x[..., :0])
        )

    def work(self, x: Tensor, sample: Tensor, memory: _Kept, steps: Count | None = None) -> Work:
        """A job, and its gradient as the server got it; in the first dimension, it is one."""
        one, kept = x[0], map_tensors(lambda leaf: leaf[0], memory)
        work = run_job(self._problem, one, sample[0], kept.memory, None if steps is None else int(steps))
        received, remainder = work.grad, kept.remainder
        if self._compression != "none":
            _, received, remainder = Compression(self._compression, x.shape[-1], x.dtype).send(received, remainder)
        after = _Kept(work.memory, remainder)
        return Work(received.unsqueeze(0), map_tensors(lambda leaf: leaf.unsqueeze(0), after))


def memory_of(trace: Trace) -> Tensor:
    """A number for the memory that the worker of each update had, a new one wherever a worker began without any."""
    assert trace.worker is not None
    assert trace.sequence is not None
    assert trace.parent_job is not None
    numbers: list[int] = []
    unused = itertools.count()
    after: dict[tuple[int, int], int] = {}
    jobs = zip(trace.worker.tolist(), trace.sequence.tolist(), trace.parent_job.tolist(), strict=True)
    for update, (worker, sequence, parent_job) in enumerate(jobs, start=1):
        number = after.pop((worker, parent_job), -1) if parent_job >= 0 else next(unused)
        what = f"one whose update {update} builds on job {parent_job} of worker {worker}, which was not applied"
        require("trace", what, number >= 0,
                "one in which every job that changed what a worker kept is an update: of those that were refused, "
                "dropped or lost nobody knows where they began")  # fmt: skip
        after[worker, sequence] = number
        numbers.append(number)
    return torch.tensor(numbers)


def replay(
    trace: Trace,
    problem: Problem,
    rule: AnyRule[Any] | str,
    *,
    record_every: int | None = None,
    device: torch.device | str = "cpu",
    progress: bool | None = None,
) -> Trace:
    """Simulate a rule on the delays and samples that a real training recorded.

    With the run's own rule the final parameters are those of the run, to the bit, if both were computed on a CPU
    of the same kind and the rule's update was not compiled; compiled, kernels may round sums differently, and the
    vectors agree to a few units in the last place, which the run then amplifies as it does any rounding. With
    another rule: what it would have done on that night's delays.

    What workers keep from job to job (with local steps, or fewer bits on the wire) is computed again, worker by worker.
    A run in which a job that changed it was not applied (refused, too late, lost with the server) cannot be replayed:
    nothing tells where that job began.

    Args:
        trace: of :func:`~lategrad.train`.
        problem: the one that was trained on.
        rule: the run's own, or another, also as a text such as ``"sgd:lr=0.1|1"``; hyper-parameters of shape
            ``(*runs, 1)`` try several at once. If the run had a ``schedule``, a rule that has an lr and is not
            :class:`~lategrad.Scheduled` itself gets the same.
        record_every: updates between two records; by default ten records.
        device: "cpu" or "cuda".
        progress: show a progress bar; by default on a terminal.

    >>> import lategrad as lg
    >>> from lategrad.problems import Quadratic
    >>> problem, rule = Quadratic(), lg.Anytime(lg.OGD(lr=0.5))
    >>> trace = lg.train(problem, rule, steps=200, workers=3, engine="threads")
    >>> torch.equal(replay(trace, problem, rule).output, trace.output)
    True
    >>> replay(trace, problem, lg.SGD(lr=0.05)).delay_summary().mean == trace.delay_summary().mean
    True
    """
    require("trace", trace.config.get("problem"), trace.sequence is not None and trace.worker is not None,
            "of a real training: a simulated one can be simulated again")  # fmt: skip
    lost = int((cast(Tensor, trace.worker) < 0).sum())
    require("trace", f"one that has lost {lost} updates' rows", lost == 0, "whole: its log of updates was damaged")
    problem = as_problem(problem)
    require_same(problem, trace.config, "that was trained on", same_start=True)
    settings = trace.config["settings"]
    rule = _scheduled(fill_in(as_rule(rule), getattr(problem, "blocks", None)), settings.get("schedule"))
    kept = trace.parent_job is not None
    recorded = cast(Problem, (RecordedWork if kept else RecordedSamples)(problem, trace))
    arrivals = Recorded(trace.delays, trace.time, memory_of(trace) if kept else trace.worker, trace.local_steps)
    with torch_threads(1):  # as many as the workers had: sums over several threads round differently
        replayed = simulate(
            recorded, rule, arrivals, len(trace.delays), record_every=record_every, device=device, progress=progress,
            compile="rule" if trace.config["compiled"] else False, clip=settings.get("clip"),
        )  # fmt: skip
    return replace(replayed, worker=trace.worker)


def _scheduled(rule: AnyRule[Any], schedule: str | None) -> AnyRule[Any]:
    """The rule with the run's schedule, if it has none of its own and has a step."""
    if schedule is None or isinstance(rule, Scheduled) or not has_step(rule):
        return rule
    valid = f"a Scheduled(rule, shape=f): the run's schedule was a {schedule}"
    require("rule", type(rule).__name__, not schedule.startswith(FUNCTION), valid)
    return with_schedule(rule, schedule)
