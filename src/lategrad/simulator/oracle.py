r"""The delayed oracle: any rule under any delays, many runs at once.

The semantics, exactly. Before update t = 1, 2, ..., T the server's query is :math:`x_t`. Update t receives
:math:`g_t = \nabla f(x_{t - \tau_t}; z_t)` with the t-th sample :math:`z_t` and :math:`0 \le \tau_t \le t-1`. With
:math:`\tau = 2`:

====== ========= ================ =======================
update delay     gradient at      after it
====== ========= ================ =======================
t = 1  0 (capped) x_1, sample z_1  the query becomes x_2
t = 2  1 (capped) x_1, sample z_2  the query becomes x_3
t = 3  2          x_1, sample z_3  the query becomes x_4
t = 4  2          x_2, sample z_4  the query becomes x_5
====== ========= ================ =======================

Where the problem's workers remember something from job to job (:class:`~lategrad.problems.LocalSteps`), every simulated
worker has a memory of its own: those of a cluster, or the fewest that could have sent gradients so late.

With ``clip`` and ``max_norm_ratio`` a gradient is shortened, or refused, as by a real server. A refused one has its
place in the sequence of the delays, but makes no update: the state, and the rule's own count, stay as they are.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lategrad.delays import Arrivals, Constant, DelayModel, as_delay_model
from lategrad.delays.clocks import Barrier, Cluster
from lategrad.delays.stages import StageDelays
from lategrad.execution import OneCall, in_place
from lategrad.execution.eager import eager_run
from lategrad.execution.pays import compiling_pays
from lategrad.gates import NormGate, clip_norm, require_norm_options
from lategrad.problems.problem import Problem, as_problem
from lategrad.problems.worker_state import is_stateful
from lategrad.registry import as_rule
from lategrad.rules.blocks import fill_in
from lategrad.rules.rule import AnyRule, first_state, issue_ticket, weigh_ticket
from lategrad.sets import norm
from lategrad.simulator.history import History, SlotPlan, check_memory, plan_slots
from lategrad.simulator.progress import progress_bar
from lategrad.simulator.recorder import Recorder
from lategrad.simulator.workers import Workers
from lategrad.support.runs import map_tensors, runs_shape, tensors
from lategrad.support.seeds import Stream, derived_seed
from lategrad.support.validation import require, require_device
from lategrad.trace import Axis, Trace, describe

_CHUNK = 256  # updates whose samples and slots are loaded at once
_RECORDING = threading.Lock()

Delays = DelayModel | StageDelays | int | str


def simulate(
    problem: Problem,
    rule: AnyRule[Any] | str,
    delays: Delays | Sequence[Delays],
    steps: int,
    *,
    seed: int | Sequence[int] = 0,
    record_every: int | None = None,
    device: torch.device | str = "cpu",
    share_samples: bool = True,
    compile: bool | Literal["rule"] | None = None,
    progress: bool | None = None,
    save_to: str | Path | None = None,
    axes: Sequence[str] | None = None,
    clip: float | None = None,
    max_norm_ratio: float | None = None,
) -> Trace:
    """Run a rule under late gradients; all combinations of seeds, delays and the rule's own runs at once.

    Args:
        problem: the objective and its oracle.
        rule: the server rule; hyper-parameters of shape ``(*runs, 1)`` make it a sweep. Or a text such as
            ``"steady:lr=0.1|1|10"`` (see :func:`lategrad.registry.parse_rule`).
        delays: a delay model, an integer for a constant delay, a specification such as
            ``"lognormal:7,0.4"``, delays by stage, or a list of those, which adds an axis of runs. By stage
            (:func:`~lategrad.delays.by_stage`) each block of the query is that of its own past version; the rule,
            and the trace, are told the longest delay (a ticket that is no vector of entries is that of the longest).
        steps: T, the number of updates.
        seed: of samples and delays; a list adds an axis of runs.
        record_every: updates between two records of loss and accuracy (they look at all the data); by
            default ten records. The start and the end are always recorded.
        device: "cpu", "cuda", ...; the samples are the same on all.
        share_samples: runs with the same seed see the same samples, which makes them comparable and fast;
            False gives every run samples of its own.
        compile: through ``torch.compile``, gradient and update as one, or the rule's update alone ("rule", as a
            real server does it); by default where it pays (``lategrad.execution.pays``). The steps of workers that
            remember are not compiled.
        progress: show a progress bar; by default on a terminal.
        save_to: keep the trace in this file, up to date with every record, so that a killed run is not
            lost.
        axes: a name for every run dimension of the rule (and of the start); by default that of the one
            hyper-parameter that varies along it, or ``run0``, ``run1``, ... where there is not one.
        clip: shorten gradients to this norm.
        max_norm_ratio: refuse gradients whose norm is more than so many times the median of the last hundred of their
            run, and the first twenty, which tell how long they are; ``trace.config["refused"]`` says how many.

    Ctrl-C ends the run early and returns what was recorded (``trace.complete`` is then False).

    >>> import lategrad as lg
    >>> from lategrad.problems import Quadratic
    >>> rule = lg.Anytime(lg.OGD(lr=torch.tensor([[0.1], [1.0]]), domain=lg.Ball(1.0)))
    >>> trace = simulate(Quadratic(noise=0.1), rule, delays=[0, 50], steps=400, seed=[0, 1, 2])
    >>> [(axis.name, axis.values) for axis in trace.axes]
    [('seed', (0, 1, 2)), ('delay', (0, 50)), ('lr', (0.1..., 1.0))]
    >>> trace.loss.shape  # eleven records
    torch.Size([11, 3, 2, 2])
    """
    require("steps", steps, isinstance(steps, int) and steps >= 1, "an integer >= 1")
    valid_record = record_every is None or (isinstance(record_every, int) and record_every >= 1)
    require("record_every", record_every, valid_record, "an integer >= 1, or None")
    seeds, models = _as_tuple(seed), _as_tuple(delays)
    require("seed", seed, all(isinstance(s, int) and s >= 0 for s in seeds) and len(seeds) > 0, "integers >= 0")
    require("delays", delays, len(models) > 0, "at least one delay model")
    require_norm_options(clip, max_norm_ratio)
    problem, rule = as_problem(problem), as_rule(rule)
    parsed = tuple(_with_local_steps(_as_model(model), problem) for model in models)
    arrivals = [[_draw(model, problem, steps, s, share_samples) for model in parsed] for s in seeds]
    profiles = [model if isinstance(model, StageDelays) else None for model in parsed]
    _warn_of_late_starts([_label(model) for model in models], arrivals, steps)

    rule = fill_in(rule, getattr(problem, "blocks", None))
    device = require_device("device", device)
    simulation = Simulation(problem.to(device), map_tensors(lambda leaf: leaf.to(device), rule), arrivals, seeds,
                             share_samples, compile, profiles, clip, max_norm_ratio)  # fmt: skip
    single = (isinstance(seed, int), not isinstance(delays, Sequence) or isinstance(delays, str))
    own = rule_axes(rule, simulation.shape[2:-1], axes)
    all_axes = [Axis("seed", seeds), Axis("delay", tuple(_label(m) for m in models)), *own]
    config = {
        "problem": repr(problem),
        "rule": describe(rule),
        "delays": [repr(model) if isinstance(model, StageDelays) else describe(model) for model in parsed],
        "seeds": list(seeds),
        "steps": steps,
        "share_samples": share_samples,
        "clip": clip,
        "max_norm_ratio": max_norm_ratio,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
    }
    recorder = Recorder(simulation, all_axes, single, config, save_to)
    every = record_every or max(1, steps // 10)
    show = sys.stderr.isatty() if progress is None else progress
    recorder.record(0)
    try:
        with progress_bar(show, steps) as advance:
            for t in range(0, steps, every):
                until = min(t + every, steps)
                simulation.run(t, until, advance)
                recorder.record(until)
    except KeyboardInterrupt:
        warnings.warn(f"interrupted: the trace ends after {recorder.steps[-1]} updates", stacklevel=2)
    return recorder.trace()


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,)


def _as_model(value: Delays) -> DelayModel | StageDelays:
    if not isinstance(value, StageDelays):
        return as_delay_model(value)
    require("delays", value, value.stashing, "with stashing: a problem takes its gradient at one point")
    return value


def _with_local_steps(model: DelayModel | StageDelays, problem: Problem) -> DelayModel | StageDelays:
    """A clock is told how many gradients a job takes; other models leave no time to fit steps into."""
    if not is_stateful(problem):
        return model
    timed = getattr(problem, "seconds", None) is not None and getattr(model, "local_steps", None) is None
    require("problem", problem, not timed, "one without seconds: simulated workers have clocks of their own")
    return model.with_local_steps(problem.local_steps) if isinstance(model, Cluster | Barrier) else model


def _label(value: Delays) -> int | str:
    if isinstance(value, Constant):
        return value.delay
    return value if isinstance(value, int | str) else repr(value)


def _draw(model: DelayModel | StageDelays, problem: Problem, steps: int, seed: int, share_samples: bool) -> Arrivals:
    if isinstance(model, StageDelays):
        require("delays", model, model.blocks.size == problem.dim, f"of the problem's {problem.dim} entries")
        return Constant(model.largest).draw(steps, seed)
    if not model.needs_labels:
        return model.draw(steps, seed)
    require("share_samples", share_samples, share_samples, "True when delays depend on the samples")
    labels = problem.labels(problem.samples(seed, 0, steps))
    require("problem", problem, labels is not None, "one with classes when delays depend on them")
    return model.draw(steps, seed, labels)


def _warn_of_late_starts(labels: list[int | str], arrivals: list[list[Arrivals]], steps: int) -> None:
    for i, label in enumerate(labels):
        if steps > 1 and all(bool((row[i].delays == torch.arange(steps)).all()) for row in arrivals):
            warnings.warn(f"delay {label} is too long for {steps} steps: every gradient is taken at the start",
                          stacklevel=3)  # fmt: skip


class Simulation:
    """The state of all runs, shape ``(seeds, delays, *rule's runs, dim)``, and how to advance it."""

    def __init__(
        self,
        problem: Problem,
        rule: AnyRule[Any],
        arrivals: list[list[Arrivals]],
        seeds: tuple[int, ...],
        share_samples: bool,
        compile: bool | Literal["rule"] | None,
        profiles: Sequence[StageDelays | None] | None = None,
        clip: float | None = None,
        max_norm_ratio: float | None = None,
    ) -> None:
        self.problem, self.rule, self.arrivals = problem, rule, arrivals
        x0 = problem.start()
        inner = torch.broadcast_shapes(x0.shape[:-1], runs_shape(rule))  # the run dimensions of both
        self.state = first_state(rule, x0.expand(len(seeds), len(arrivals[0]), *inner, -1))
        query = rule.query(self.state)
        self.shape = query.shape
        self.sequences = len(seeds) * len(arrivals[0])
        self.delays = torch.stack([torch.stack([a.delays for a in row], dim=-1) for row in arrivals], dim=1)

        profiles = profiles or [None] * len(arrivals[0])
        plans, stage_of = _plans(arrivals, profiles), _stage_of(profiles, len(seeds), self.shape[-1])
        width = query.numel() // self.sequences
        ticket = issue_ticket(rule, self.state)
        ticket_width = ticket.numel() // self.sequences
        needed = History.bytes_needed(plans, width, query.element_size())
        needed += History.bytes_needed(plans, ticket_width, ticket.element_size())
        check_memory("the queries that late gradients wait for", needed, query.device)
        self.queries = History(plans, self.shape[2:], query, stage_of)
        if stage_of is not None and ticket_width != width:  # not by entries: that of the longest delay, which is told
            stage_of = torch.zeros(self.sequences, ticket.shape[-1], dtype=torch.int64)
        self.tickets = History(plans, ticket.shape[2:], ticket, stage_of) if ticket_width else None

        streams = self.shape[:-1] if not share_samples else self.shape[:1]
        self.streams = torch.Size(streams)
        self.stream_seeds = seeds if share_samples else _own_seeds(seeds, streams.numel() // len(seeds))
        # After an update its next query is stored; the one after the last, which nobody reads, in the last one's place.
        self.following = torch.cat([self.queries.write[1:], self.queries.write[-1:]])
        self.chunk = _Chunk.empty()
        self.at = torch.zeros(1, dtype=torch.int64, device=query.device)

        self.workers: Workers | None = None
        if is_stateful(problem):
            require("delays", "by stage", stage_of is None, "of whole queries: the workers of this problem remember")
            self.workers = Workers(problem, arrivals, self.delays, query)
            compile = compile or False  # many steps one after another would compile for minutes
        if compile is None:
            compile = compiling_pays(len(self.delays), query.numel())
        update = eager_run(rule) if compile != "rule" else _through_the_door(rule, self.state)
        self.refused = torch.zeros(*self.shape[:-1], 1, dtype=torch.int64, device=query.device)
        """Gradients of each run that were refused for their norm."""
        update = _guarded(update, clip, max_norm_ratio, self.refused)
        advance = _one_update(self.workers or problem, rule, update, self.queries, self.tickets, self.shape)
        self.advance = OneCall(advance, query.device) if compile is True else advance
        _store(rule, self.state, self.queries, self.tickets, self.queries.write[0].to(query.device))
        recorded = query.device.type == "cuda" and getattr(problem, "on_device", True)
        self.update, self.do_jobs = _Repeated(recorded), _Repeated(recorded, warm=1)

    def run(self, first: int, until: int, advance: Any) -> None:
        """Updates ``first + 1, ..., until``."""
        while first < until:
            last = min(until, first + _CHUNK)
            self._load(first, last)
            if self.workers is None:
                for _ in range(first, last):
                    self.update(self._step)
            else:
                for length in self.workers.waves(first, last):
                    self.workers.expect(length)
                    self.do_jobs(self._jobs)
                    for _ in range(length):
                        self.update(self._step)
            first = last
            advance(last)

    def _load(self, first: int, last: int) -> None:
        """Samples, slots and delays of the updates of a chunk, into buffers that stay where they are."""
        samples = torch.stack([self.problem.samples(s, first, last - first) for s in self.stream_seeds], dim=1)
        samples = samples.unflatten(1, self.streams)
        scalars = [1] * (len(self.shape) - 2)
        loaded = _Chunk(
            samples=samples,
            write=self.following[first:last],
            read=self.queries.read[first:last],
            delays=self.delays[first:last].reshape(last - first, *self.shape[:2], *scalars),
            jobs=torch.empty(last - first, 0) if self.workers is None else self.workers.jobs[first:last],
        )
        self.chunk = self.chunk.refill(loaded, self.at.device)
        self.at.zero_()

    def _step(self) -> None:
        self.advance(self.state, *vars(self.chunk).values(), self.at)

    def _jobs(self) -> None:
        assert self.workers is not None
        self.workers.do_jobs(self.queries, self.chunk.samples, self.chunk.read, self.chunk.jobs, self.at)


class _Repeated:
    """Work on fixed buffers; a GPU records it as a graph once it has run, and replaying that costs one launch.

    Other threads may simulate beside this one; of their calls only another recording would disturb it.
    """

    def __init__(self, recorded: bool, warm: int = 3) -> None:
        self.recorded, self.warm = recorded, warm  # calls before it is recorded
        self.graph: torch.cuda.CUDAGraph | None = None
        self.calls = 0

    def __call__(self, work: Callable[[], None]) -> None:
        if self.graph is not None:
            self.graph.replay()
            return
        work()
        self.calls += 1
        if self.recorded and self.calls == self.warm:
            graph = torch.cuda.CUDAGraph()
            with _RECORDING:
                torch.cuda.synchronize()
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # records without executing
                    work()
            self.graph = graph


@dataclass
class _Chunk:
    """Buffers for what a chunk of updates needs; they keep their addresses when refilled."""

    samples: Tensor
    write: Tensor
    read: Tensor
    delays: Tensor
    jobs: Tensor

    @staticmethod
    def empty() -> _Chunk:
        return _Chunk(*[torch.empty(0)] * 5)

    def refill(self, loaded: _Chunk, device: torch.device) -> _Chunk:
        if not len(self.samples):  # whole chunks, whatever the first one is: compiled code is for one size
            empty = (value.new_zeros(_CHUNK, *value.shape[1:], device=device) for value in vars(loaded).values())
            self = _Chunk(*empty)
        for name, value in vars(loaded).items():
            getattr(self, name)[: len(value)].copy_(value)
        return self


def _through_the_door(rule: AnyRule[Any], state: Any) -> Callable[..., None]:
    """The rule's update alone, as a real server makes it."""
    step = in_place(rule, state)
    return lambda state, grad, delay, ticket, query_out: step(grad, delay, ticket)


def _guarded(
    update: Callable[..., None], clip: float | None, max_norm_ratio: float | None, refused: Tensor
) -> Callable[..., None]:
    """An update on gradients that are not too long: ``refused`` counts those that were, which change nothing."""
    gate = None if max_norm_ratio is None else NormGate(max_norm_ratio, refused.shape[:-1], refused.device)

    def guarded(state: Any, grad: Tensor, *others: Any) -> None:
        before, admitted = [], None
        if gate is not None:
            before, admitted = [leaf.clone() for leaf in tensors(state)], gate.admits(norm(grad))
        update(state, grad if clip is None else clip_norm(grad, clip), *others)
        if admitted is not None:
            for leaf, old in zip(tensors(state), before, strict=True):
                leaf.copy_(torch.where(admitted, leaf, old))
            refused.add_(~admitted)

    return update if clip is None and gate is None else guarded


def _one_update(
    source: Problem | Workers,
    rule: AnyRule[Any],
    update: Callable[..., None],
    queries: History,
    tickets: History | None,
    shape: torch.Size,
) -> Callable[..., None]:
    """One update of every run; everything that changes is read from and written to fixed buffers.

    The gradient is the problem's, or one that workers have computed before.

    It ends with storing the next query, so that compiled it is one call, and the query is stored as it is made.
    """

    def advance(
        state: Any, samples: Tensor, write: Tensor, read: Tensor, delays: Tensor, jobs: Tensor, at: Tensor
    ) -> None:
        reading = read.index_select(0, at)[0]
        if isinstance(source, Workers):
            grad, weight = source.next_gradient(), source.weight(jobs.index_select(0, at)[0])
        else:
            stale = queries.fetch(reading).view(shape)
            grad, weight = source.gradient(stale, samples.index_select(0, at)[0]), None
        ticket = grad[..., :0] if tickets is None else tickets.fetch(reading).unflatten(0, shape[:2])
        if weight is not None:
            ticket = weigh_ticket(rule, ticket, weight.to(ticket.dtype))
        update(state, grad, delays.index_select(0, at)[0], ticket, None)
        _store(rule, state, queries, tickets, write.index_select(0, at)[0])
        at += 1

    return advance


def _store(rule: AnyRule[Any], state: Any, queries: History, tickets: History | None, slots: Tensor) -> None:
    """Keep the query of a state, and its ticket, for the updates that will need them."""
    queries.store(slots, rule.query(state).flatten(0, 1))
    if tickets is not None:
        tickets.store(slots, issue_ticket(rule, state).flatten(0, 1))


def _plans(arrivals: list[list[Arrivals]], profiles: Sequence[StageDelays | None]) -> list[SlotPlan]:
    """A plan for every sequence of delays; equal sequences (constant delays of several seeds) share one."""
    plans: dict[tuple[object, bytes], SlotPlan] = {}
    ordered = []
    for one, profile in ((one, profile) for row in arrivals for one, profile in zip(row, profiles, strict=True)):
        delays = one.delays if profile is None else torch.minimum(one.delays[:, None], torch.tensor(profile.distinct))
        key = delays.shape, delays.numpy().tobytes()
        if key not in plans:
            plans[key] = plan_slots(delays)
        ordered.append(plans[key])
    return ordered


def _stage_of(profiles: Sequence[StageDelays | None], seeds: int, dim: int) -> Tensor | None:
    """For each sequence and each entry the position of its delay among those of its profile."""
    if not any(profiles):
        return None
    whole = torch.zeros(dim, dtype=torch.int64)
    of_models = [whole if profile is None else profile.of_entries() for profile in profiles]
    return torch.stack(of_models).repeat(seeds, 1)


def _own_seeds(seeds: tuple[int, ...], runs: int) -> tuple[int, ...]:
    """A seed for every run of every seed."""
    return tuple(derived_seed(seed, Stream.OWN_SAMPLES, run) for seed in seeds for run in range(runs))


def rule_axes(rule: AnyRule[Any], runs: torch.Size, names: Sequence[str] | None) -> list[Axis]:
    """An axis for each run dimension of a rule: a name, and the values of the hyper-parameter of that name.

    >>> import lategrad as lg
    >>> rule = lg.Steady(lr=torch.tensor([[[0.5]], [[2.0]]]), c=torch.tensor([[10.0], [20.0], [30.0]]))
    >>> rule_axes(rule, torch.Size([2, 3]), names=None)
    [Axis(name='lr', values=(0.5, 2.0)), Axis(name='c', values=(10.0, 20.0, 30.0))]
    """
    if names is not None:
        require("axes", names, len(names) == len(runs) == len(set(names)),
                f"{len(runs)} different names, one for each run dimension of the rule")  # fmt: skip
    return [
        _rule_axis(rule, runs, position, None if names is None else names[position]) for position in range(len(runs))
    ]


def _rule_axis(rule: AnyRule[Any], runs: torch.Size, position: int, given: str | None) -> Axis:
    varying = {}
    for name, value in _named_tensors(rule):
        shape = (1,) * (len(runs) + 1 - value.dim()) + tuple(value.shape)
        if shape[position] == runs[position]:
            alone = all(length == 1 for i, length in enumerate(shape) if i != position)
            varying[name] = tuple(value.flatten().tolist()) if alone else None
    counted = tuple(range(runs[position]))
    if given is not None:
        return Axis(given, varying.get(given) or counted)
    ((name, values),) = varying.items() if len(varying) == 1 else [(f"run{position}", None)]
    return Axis(name if values else f"run{position}", values or counted)


def _named_tensors(part: Any) -> Iterator[tuple[str, Tensor]]:
    for name, value in getattr(part, "__dict__", {}).items():
        if isinstance(value, Tensor):
            yield name, value
        else:
            yield from _named_tensors(value)
