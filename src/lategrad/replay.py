"""Replay: what was recorded of a real run, through the simulator, with its own rule or with another."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from lategrad.delays import Recorded
from lategrad.problems.problem import Problem, as_problem
from lategrad.registry import as_rule
from lategrad.rules.blocks import fill_in
from lategrad.rules.rule import AnyRule
from lategrad.rules.scheduled import Scheduled, has_step, with_schedule
from lategrad.serve.identity import require_same
from lategrad.serve.settings import FUNCTION
from lategrad.serve.worker import Streams
from lategrad.simulate import simulate
from lategrad.support.threads import torch_threads
from lategrad.support.validation import require
from lategrad.trace import Trace

_NEIGHBOURS = 256  # as many as the simulator asks for at once


class RecordedSamples:
    """A problem whose samples are those that the workers of a recorded run drew, in the order of its updates."""

    def __init__(self, problem: Problem, worker: Tensor, sequence: Tensor, streams: Streams) -> None:
        self._problem, self._worker, self._sequence, self._streams = problem, worker, sequence, streams

    def __getattr__(self, name: str) -> Any:
        return getattr(self._problem, name)  # the rest is the problem's own

    def __repr__(self) -> str:
        return repr(self._problem)

    def samples(self, seed: int, first: int, count: int) -> Tensor:
        """The samples of updates number ``first, ...`` of the run, whatever the seed."""
        worker, sequence = self._worker[first : first + count], self._sequence[first : first + count]
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
        return RecordedSamples(self._problem.to(device), self._worker, self._sequence, self._streams)


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
    worker, sequence = cast(Tensor, trace.worker), cast(Tensor, trace.sequence)
    lost = int((worker < 0).sum())
    require("trace", f"one that has lost {lost} updates' rows", lost == 0, "whole: its log of updates was damaged")
    problem = as_problem(problem)
    require_same(problem, trace.config, "that was trained on", same_start=True)
    settings = trace.config["settings"]
    rule = _scheduled(fill_in(as_rule(rule), getattr(problem, "blocks", None)), settings.get("schedule"))
    streams = Streams(settings["seed"], settings.get("data_shards"))
    recorded = cast(Problem, RecordedSamples(problem, worker, sequence, streams))
    with torch_threads(1):  # as many as the workers had: sums over several threads round differently
        return simulate(
            recorded, rule, Recorded(trace.delays, trace.time, trace.worker), len(trace.delays),
            record_every=record_every, device=device, progress=progress,
            compile="rule" if trace.config["compiled"] else False, clip=settings.get("clip"),
        )  # fmt: skip


def _scheduled(rule: AnyRule[Any], schedule: str | None) -> AnyRule[Any]:
    """The rule with the run's schedule, if it has none of its own and has a step."""
    if schedule is None or isinstance(rule, Scheduled) or not has_step(rule):
        return rule
    valid = f"a Scheduled(rule, shape=f): the run's schedule was a {schedule}"
    require("rule", type(rule).__name__, not schedule.startswith(FUNCTION), valid)
    return with_schedule(rule, schedule)
