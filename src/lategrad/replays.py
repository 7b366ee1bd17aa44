"""Replay a recorded training run in the simulator, with its own rule or with another."""

import itertools
from dataclasses import replace
from types import NoneType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from lategrad.delays import Recorded
from lategrad.delays.stages import StageDelays
from lategrad.problems.problem import Count, JobResult, Problem, as_problem, init_worker_state, is_stateful, run_job
from lategrad.registry import as_rule
from lategrad.rules.blocks import fill_in
from lategrad.rules.rule import AnyRule
from lategrad.rules.scheduled import Scheduled, has_lr, with_schedule
from lategrad.serve.checkpoints.identity import require_same
from lategrad.serve.compression import COMPRESSIONS, Compression
from lategrad.serve.settings import FUNCTION
from lategrad.serve.worker import Streams
from lategrad.simulator import simulate
from lategrad.support.runs import map_tensors
from lategrad.support.threads import torch_threads
from lategrad.support.validation import require, require_choice, require_form
from lategrad.trace import Trace

_NEIGHBOURS = 256  # as many as the simulator asks for at once
_FORM = {"problem": str, "contents": str, "compiled": bool,
         "settings": {"seed": int, "data_shards": (int, NoneType), "compression": (str, NoneType),
                      "schedule": (str, NoneType), "clip": (int, float, NoneType)}}  # fmt: skip


class RecordedSamples:
    """A problem whose samples are those that the workers of a recorded run drew, in the order of its updates."""

    def __init__(self, problem: Problem, trace: Trace) -> None:
        self._problem, self._trace = problem, trace
        settings = trace.config["settings"]
        self._streams = Streams(settings["seed"], settings.get("data_shards"))
        self._compression = settings.get("compression", "none")
        require_choice("compression", self._compression, COMPRESSIONS)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._problem, name)  # the rest is the problem's own

    def __repr__(self) -> str:
        return repr(self._problem)

    def samples(self, seed: int, first: int, count: int) -> Tensor:
        """The samples of updates ``first, first + 1, ...`` of the run; the seed is ignored."""
        updates = slice(first, first + count)
        worker, sequence = cast(Tensor, self._trace.worker)[updates], cast(Tensor, self._trace.sequence)[updates]
        by_worker = [self._draw(number, sequence[worker == number]) for number in worker.unique().tolist()]
        return torch.cat(by_worker)[worker.argsort(stable=True).argsort()]

    def _draw(self, worker: int, positions: Tensor) -> Tensor:
        """Samples of one worker's stream; neighbours, as most are, are drawn together."""
        low, high = int(positions.min()), int(positions.max())
        if high - low > 10 * _NEIGHBOURS:  # some gradient came very late
            return torch.cat([self._streams.draw(self._problem, worker, k, 1) for k in positions.tolist()])
        return self._streams.draw(self._problem, worker, low, high - low + 1)[positions - low]

    def to(self, device: torch.device | str) -> "RecordedSamples":
        return type(self)(self._problem.to(device), self._trace)


class _WorkerState(NamedTuple):
    state: Any  # the problem's own
    remainder: Tensor  # what compression left out of the last gradient; without entries where nothing is compressed


class RecordedJobs(RecordedSamples):
    """The same for workers with state: the jobs of each of them, and the gradients as the server received them."""

    jobs_at_once = 1  # as a worker does them: several in one product round differently
    on_device = False  # the number of local steps of a job is looked up

    @property
    def local_steps(self) -> int:
        return self._problem.local_steps if is_stateful(self._problem) else 1

    def init_worker_state(self, x: Tensor) -> _WorkerState:
        remainder = torch.zeros_like(x if self._compression != "none" else x[..., :0])
        return _WorkerState(init_worker_state(self._problem, x), remainder)

    def run_job(self, x: Tensor, sample: Tensor, state: _WorkerState, local_steps: Count | None = None) -> JobResult:
        """A job and its gradient as the server received it; the first dimension has length 1."""
        x, state = x[0], map_tensors(lambda leaf: leaf[0], state)
        steps = None if local_steps is None else int(local_steps)
        grad, after = run_job(self._problem, x, sample[0], state.state, steps)
        remainder = state.remainder
        if self._compression != "none":
            _, grad, remainder = Compression(self._compression, x.shape[-1], x.dtype).send(grad, remainder)
        return JobResult(grad.unsqueeze(0), map_tensors(lambda leaf: leaf.unsqueeze(0), _WorkerState(after, remainder)))


def state_numbers(trace: Trace) -> Tensor:
    """A number for the worker state behind each update, a new one wherever a worker started without state."""
    numbers: list[int] = []
    unused = itertools.count()
    after: dict[tuple[int, int], int] = {}
    columns = [cast(Tensor, column).tolist() for column in (trace.worker, trace.sequence, trace.parent_job)]
    for update, (worker, sequence, parent) in enumerate(zip(*columns, strict=True), start=1):
        number = after.pop((worker, parent), -1) if parent >= 0 else next(unused)
        what = f"one whose update {update} builds on job {parent} of worker {worker}, which was not applied"
        require("trace", what, number >= 0,
                "one in which every job that changed a worker's state is an update: for jobs that were refused, "
                "dropped or lost, the query they started from is not recorded")  # fmt: skip
        after[worker, sequence] = number
        numbers.append(number)
    return torch.tensor(numbers)


def replay(trace: Trace, problem: Problem, rule: AnyRule[Any] | str, *, record_every: int | None = None,
           device: torch.device | str = "cpu", progress: bool | None = None, drift: bool = False) -> Trace:  # fmt: skip
    """Simulate a rule on the delays and samples that a real training recorded.

    With the run's own rule the final parameters are those of the run, to the bit, if both were computed on a CPU
    of the same kind, the server had one thread and the rule's update was not compiled; otherwise sums may round
    differently, and the vectors agree to a few units in the last place, which the run then amplifies as it does any
    rounding. With another rule, the result is what it would have done under the same delays.

    The state of workers (with local steps or compression) is computed again, worker by worker. A run in which a job
    that changed it was not applied (refused, too late, lost with the server) cannot be replayed: the query that the
    job started from is not recorded.

    Args:
        trace: of :func:`~lategrad.train`, or of a pipeline (:meth:`lategrad.pipeline.Pipeline.trace`).
        problem: the one that was trained on.
        rule: the run's own, or another, also as a text such as ``"sgd:lr=0.1|1"``; hyper-parameters of shape
            ``(*runs, 1)`` try several at once. If the run had a ``schedule``, a rule that has an lr and is not
            :class:`~lategrad.Scheduled` itself gets the same.
        record_every: updates between two records; by default ten records.
        device: "cpu" or "cuda".
        progress: show a progress bar; by default on a terminal.
        drift: measure the drift, as :func:`~lategrad.simulate` does.

    >>> import lategrad as lg
    >>> from lategrad.problems import Quadratic
    >>> problem, rule = Quadratic(), lg.Anytime(lg.OGD(lr=0.5))
    >>> trace = lg.train(problem, rule, steps=200, workers=3, engine="threads")
    >>> torch.equal(replay(trace, problem, rule).output, trace.output)
    True
    >>> replay(trace, problem, lg.SGD(lr=0.05)).delay_summary().mean == trace.delay_summary().mean
    True
    """
    shown: dict[str, Any] = {"record_every": record_every, "device": device, "progress": progress, "drift": drift}
    if "pipeline" in trace.config:
        return _replay_pipeline(trace, as_problem(problem), as_rule(rule), shown)
    require("trace", trace.config.get("problem"), trace.sequence is not None and trace.worker is not None,
            "of a real training run: a simulation can be simulated again")  # fmt: skip
    jobs = cast(Tensor, trace.sequence)
    is_valid = jobs.shape == trace.delays.shape and jobs.dtype == torch.int64
    require("sequence", f"{jobs.dtype} of shape {tuple(jobs.shape)}", is_valid, "an int64 for each update")
    lost = int((cast(Tensor, trace.worker) < 0).sum())
    require("trace", f"one that has lost {lost} updates' rows", lost == 0, "whole: its log of updates was damaged")
    problem = as_problem(problem)
    require_form("the trace", trace.config, _FORM)
    require_same(problem, trace.config, "that was trained on", same_start=True)
    settings = trace.config["settings"]
    rule = _scheduled(fill_in(as_rule(rule), getattr(problem, "blocks", None)), settings.get("schedule"))
    stateful = trace.parent_job is not None
    recorded = cast(Problem, (RecordedJobs if stateful else RecordedSamples)(problem, trace))
    workers = state_numbers(trace) if stateful else trace.worker
    arrivals = Recorded(trace.delays, trace.time, workers, trace.local_steps)
    with torch_threads(1):  # as many as the workers had: sums over several threads round differently
        replayed = simulate(recorded, rule, arrivals, len(trace.delays), clip=settings.get("clip"),
                            compile="rule" if trace.config["compiled"] else False, **shown)  # fmt: skip
    return replace(replayed, worker=trace.worker)


def _replay_pipeline(trace: Trace, problem: Problem, rule: AnyRule[Any], shown: dict[str, Any]) -> Trace:
    """Simulate a pipeline's delays by stage, on the samples of its microbatches."""
    form = {"pipeline": {"microbatches": int, "stashing": bool, "delays": [int]}, "seeds": [int]}
    require_form("the trace", trace.config, form)
    options, is_given = trace.config["pipeline"], "contents" in trace.config and hasattr(problem, "blocks")
    require("problem", trace.config.get("problem"), is_given, "a module's, given to Pipeline.trace(problem, seed)")
    require_same(problem, trace.config, "that was trained on", same_start=True)
    require("trace", options, options["microbatches"] == 1 and options["stashing"],
            "of a pipeline with stashed weights, and with one microbatch for each sample")  # fmt: skip
    profile = StageDelays(cast(Any, problem).blocks, tuple(options["delays"]), longest=trace.delays)
    return simulate(problem, rule, profile, len(trace.delays), seed=trace.config["seeds"][0], compile=False, **shown)


def _scheduled(rule: AnyRule[Any], schedule: str | None) -> AnyRule[Any]:
    """The rule with the run's schedule, if it has a learning rate and no schedule of its own."""
    if schedule is None or isinstance(rule, Scheduled) or not has_lr(rule):
        return rule
    valid = f"a Scheduled(rule, shape=f): the run's schedule was a {schedule}"
    require("rule", type(rule).__name__, not schedule.startswith(FUNCTION), valid)
    return with_schedule(rule, schedule)
