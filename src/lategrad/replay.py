"""Replay: what was recorded of a real run, through the simulator, with its own rule or with another."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from lategrad.delays import Recorded
from lategrad.problems.problem import Problem, as_problem
from lategrad.problems.work import do_work, first_memory
from lategrad.rules.blocks import fill_in
from lategrad.rules.rule import AnyRule
from lategrad.serve.gradient_norms import clipped
from lategrad.serve.identity import require_same
from lategrad.serve.wire import Wire
from lategrad.serve.worker import stream_seed
from lategrad.simulate import simulate
from lategrad.support.threads import torch_threads
from lategrad.support.validation import require
from lategrad.trace import Trace

_NEIGHBOURS = 256  # as many as the simulator asks for at once


class RecordedSamples:
    """A problem whose samples are those that the workers of a recorded run drew, in the order of its updates.

    Where workers kept something from job to job, so does this: its gradients are to be asked for in that order, once.
    """

    def __init__(self, problem: Problem, trace: Trace) -> None:
        self._problem, self._trace = problem, trace
        settings = trace.config["settings"]
        self._seed, self._clip, self._wire = settings["seed"], settings.get("clip"), settings.get("wire", "float32")
        self._rows = iter(_rows(trace))
        self._kept: dict[tuple[int, int], tuple[Any, Tensor]] = {}
        if trace.previous is not None:
            self.on_device = False

    def __getattr__(self, name: str) -> Any:
        if name in ("work", "memory"):  # what workers kept is for the recorded ones to know, not for the simulator
            raise AttributeError(name)
        return getattr(self._problem, name)  # the rest is the problem's own

    def __repr__(self) -> str:
        return repr(self._problem)

    def samples(self, seed: int, first: int, count: int) -> Tensor:
        """The samples of updates number ``first, ...`` of the run, whatever the seed."""
        trace = self._trace
        assert trace.worker is not None
        assert trace.sequence is not None
        worker, sequence = trace.worker[first : first + count], trace.sequence[first : first + count]
        drawn: Tensor | None = None
        for number in worker.unique().tolist():
            mine = worker == number
            used = self._of_stream(stream_seed(self._seed, number), sequence[mine])
            if drawn is None:
                drawn = used.new_empty(count, *used.shape[1:])
            drawn[mine] = used
        assert drawn is not None
        return drawn

    def _of_stream(self, seed: int, positions: Tensor) -> Tensor:
        """Samples of one stream; those of a worker are mostly neighbours, and drawn together then."""
        low, high = int(positions.min()), int(positions.max())
        if high - low > 10 * _NEIGHBOURS:  # one that came very late
            return torch.cat([self._problem.samples(seed, k, 1) for k in positions.tolist()])
        return self._problem.samples(seed, low, high - low + 1)[positions - low]

    def gradient(self, x: Tensor, sample: Tensor) -> Tensor:
        """What the run's server got from the worker, as short as it made it."""
        grad = self._problem.gradient(x, sample) if self._trace.previous is None else self._next_answer(x, sample)
        return grad if self._clip is None else clipped(grad, self._clip)

    def _next_answer(self, x: Tensor, sample: Tensor) -> Tensor:
        """What the worker of the next update sent, with what it had kept."""
        worker, sequence, previous, steps = next(self._rows)
        memory, remainder = first_memory(self._problem, x), torch.zeros_like(x)
        if previous >= 0:
            memory, remainder = self._kept.pop((worker, previous))
        work = do_work(self._problem, x, sample, memory, steps or None)
        wire, received = Wire(self._wire, x.shape[-1], x.dtype), work.grad
        if not wire.exact:
            _, received, remainder = wire.send(work.grad, remainder)
        self._kept[worker, sequence] = work.memory, remainder
        return received

    def to(self, device: torch.device | str) -> RecordedSamples:
        """The same with the problem's data on a device."""
        return RecordedSamples(self._problem.to(device), self._trace)


def _rows(trace: Trace) -> list[tuple[int, int, int, int]]:
    """Worker, sequence number, the job before, and the steps of every update; none where workers kept nothing."""
    if trace.previous is None:
        return []
    steps = torch.zeros_like(trace.previous) if trace.local_steps is None else trace.local_steps
    columns = (cast(Tensor, trace.worker), cast(Tensor, trace.sequence), trace.previous, steps)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _require_known_memories(trace: Trace) -> None:
    """Require that all jobs that changed what a worker kept are in the log."""
    known: set[tuple[int, int]] = set()
    for update, (worker, sequence, previous, _) in enumerate(_rows(trace), start=1):
        what = f"one whose update {update} builds on job {previous} of worker {worker}, which was not applied"
        require("trace", what, previous < 0 or (worker, previous) in known,
                "one in which every job that changed what a worker kept is an update: refused, dropped and lost ones "
                "leave no record of where they began")  # fmt: skip
        known.discard((worker, previous))
        known.add((worker, sequence))


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
            ``(*runs, 1)`` try several at once.
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
    rule = fill_in(rule, getattr(problem, "blocks", None))
    _require_known_memories(trace)
    recorded = cast(Problem, RecordedSamples(problem, trace))
    with torch_threads(1):  # as many as the workers had: sums over several threads round differently
        return simulate(
            recorded, rule, Recorded(trace.delays, trace.time, trace.worker), len(trace.delays),
            record_every=record_every, device=device, progress=progress,
            compile="rule" if trace.config["compiled"] else False,
        )  # fmt: skip
