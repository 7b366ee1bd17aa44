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
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lategrad.delays import Arrivals, Constant, DelayModel
from lategrad.delays.specs import parse
from lategrad.inplace import Step, compiled, in_place
from lategrad.problems.problem import Problem
from lategrad.rules.blocks import fill_in
from lategrad.rules.rule import AnyRule, issue_ticket
from lategrad.simulate.history import History, SlotPlan, plan_slots
from lategrad.simulate.progress import progress_bar
from lategrad.simulate.recorder import Recorder
from lategrad.support.runs import map_tensors, owned
from lategrad.support.validation import require, require_device
from lategrad.trace import Axis, Trace, describe

_CHUNK = 256  # updates whose samples and slots are loaded at once
_COMPILE_FROM = 2_000  # updates from which compiling (seconds) pays on the CPU
_OWN_STREAM = 0x73747265616D  # tag: runs that do not share samples draw from seeds of their own

Delays = DelayModel | int | str


def simulate(
    problem: Problem,
    rule: AnyRule[Any],
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
) -> Trace:
    """Run a rule under late gradients; all combinations of seeds, delays and the rule's own runs at once.

    Args:
        problem: the objective and its oracle.
        rule: the server rule; hyper-parameters of shape ``(*runs, 1)`` make it a sweep.
        delays: a delay model, an integer for a constant delay, a specification such as
            ``"lognormal:7,0.4"``, or a list of those, which adds an axis of runs.
        steps: T, the number of updates.
        seed: of samples and delays; a list adds an axis of runs.
        record_every: updates between two records of loss and accuracy (they look at all the data); by
            default ten records. The start and the end are always recorded.
        device: "cpu", "cuda", ...; the samples are the same on all.
        share_samples: runs with the same seed see the same samples, which makes them comparable and fast;
            False gives every run samples of its own.
        compile: through ``torch.compile``, gradient and update as one, or the rule's update alone ("rule", as a
            real server does it); by default for long runs.
        progress: show a progress bar; by default on a terminal.
        save_to: keep the trace in this file, up to date with every record, so that a killed run is not
            lost.

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
    parsed = tuple(_as_model(model) for model in models)
    arrivals = [[_draw(model, problem, steps, s, share_samples) for model in parsed] for s in seeds]

    rule = fill_in(rule, getattr(problem, "blocks", None))
    device = require_device("device", device)
    simulation = Simulation(problem.to(device), map_tensors(lambda leaf: leaf.to(device), rule), arrivals, seeds,
                             share_samples, compile if compile is not None else steps >= _COMPILE_FROM)  # fmt: skip
    single = (isinstance(seed, int), not isinstance(delays, Sequence) or isinstance(delays, str))
    axes = [Axis("seed", seeds), Axis("delay", tuple(_label(m) for m in models)), *simulation.rule_axes(rule)]
    config = {
        "problem": repr(problem),
        "rule": describe(rule),
        "delays": [describe(model) for model in parsed],
        "seeds": list(seeds),
        "steps": steps,
        "share_samples": share_samples,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
    }
    recorder = Recorder(simulation, axes, single, config, save_to)
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


def _as_model(value: Delays) -> DelayModel:
    if isinstance(value, str):
        return parse(value)
    if isinstance(value, int):
        return Constant(value)
    require("delays", value, isinstance(value, DelayModel), "a delay model, an integer or a specification")
    return value


def _label(value: Delays) -> int | str:
    if isinstance(value, Constant):
        return value.delay
    return value if isinstance(value, int | str) else repr(value)


def _draw(model: DelayModel, problem: Problem, steps: int, seed: int, share_samples: bool) -> Arrivals:
    if not model.needs_labels:
        return model.draw(steps, seed)
    require("share_samples", share_samples, share_samples, "True when delays depend on the samples")
    labels = problem.labels(problem.samples(seed, 0, steps))
    require("problem", problem, labels is not None, "one with classes when delays depend on them")
    return model.draw(steps, seed, labels)


class Simulation:
    """The state of all runs, shape ``(seeds, delays, *rule's runs, dim)``, and how to advance it."""

    def __init__(
        self,
        problem: Problem,
        rule: AnyRule[Any],
        arrivals: list[list[Arrivals]],
        seeds: tuple[int, ...],
        share_samples: bool,
        compile: bool | Literal["rule"],
    ) -> None:
        self.problem, self.rule, self.arrivals = problem, rule, arrivals
        x0 = problem.start()
        inner = rule.query(rule.init(x0)).shape[:-1]  # the run dimensions of the rule and of the start
        start = rule.init(x0.expand(len(seeds), len(arrivals[0]), *inner, -1))
        self.state = owned(start)  # every slot is written in place: none may share its memory
        query = rule.query(self.state)
        self.shape = query.shape
        self.sequences = len(seeds) * len(arrivals[0])
        self.delays = torch.stack([torch.stack([a.delays for a in row], dim=-1) for row in arrivals], dim=1)

        plans = _plans(arrivals)
        ticket = issue_ticket(rule, self.state)
        width = (query.numel() + ticket.numel()) // self.sequences
        _check_memory(History.bytes_needed(plans, width, query.element_size()), query.device)
        self.queries = History(plans, self.shape[2:], query)
        self.tickets = History(plans, ticket.shape[2:], ticket) if ticket.numel() else None

        streams = self.shape[:-1] if not share_samples else self.shape[:1]
        self.streams = torch.Size(streams)
        self.stream_seeds = seeds if share_samples else _own_seeds(seeds, streams.numel() // len(seeds))
        self.slots = _slots(self.queries)
        self.chunk = _Chunk.empty()
        self.at = torch.zeros(1, dtype=torch.int64, device=query.device)

        self.buffers = (self.state, self.queries.memory, None if self.tickets is None else self.tickets.memory)
        _remember(rule, *self.buffers, self.slots[0, 0].to(query.device))
        step = in_place(rule, compile=compile == "rule")
        advance = _one_update(problem, rule, step, self.shape, ticket)
        # No guards: the buffers are the same at every call.
        self.advance = compiled(advance, guards=False) if compile is True else advance
        self.graph: torch.cuda.CUDAGraph | None = None
        self.warm_steps = 0

    def rule_axes(self, rule: AnyRule[Any]) -> list[Axis]:
        """A name and values for each of those dimensions."""
        return [_rule_axis(rule, self.shape[2:-1], position) for position in range(len(self.shape) - 3)]

    def run(self, first: int, until: int, advance: Any) -> None:
        """Updates ``first + 1, ..., until``."""
        while first < until:
            last = min(until, first + _CHUNK)
            self._load(first, last)
            for _ in range(first, last):
                if self.graph is not None:
                    self.graph.replay()
                else:
                    self._step()
                    self._capture_when_warm()
            first = last
            advance(last)

    def _load(self, first: int, last: int) -> None:
        """Samples, slots and delays of the updates of a chunk, into buffers that stay where they are."""
        samples = torch.stack([self.problem.samples(s, first, last - first) for s in self.stream_seeds], dim=1)
        scalars = [1] * (len(self.shape) - 2)
        loaded = _Chunk(
            samples=samples.unflatten(1, self.streams),
            slots=self.slots[first:last],
            delays=self.delays[first:last].reshape(last - first, *self.shape[:2], *scalars),
        )
        self.chunk = self.chunk.refill(loaded, self.at.device)
        self.at.zero_()

    def _step(self) -> None:
        self.advance(*self.buffers, self.chunk.samples, self.chunk.slots, self.chunk.delays, self.at)

    def _capture_when_warm(self) -> None:
        """On a GPU, record the step as a graph once it has run: replaying it costs one launch."""
        self.warm_steps += 1
        if self.at.device.type != "cuda" or self.warm_steps != 3:
            return
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # records without executing
            self._step()
        self.graph = graph


@dataclass
class _Chunk:
    """Buffers for what a chunk of updates needs; they keep their addresses when refilled."""

    samples: Tensor
    slots: Tensor
    """int64 ``(updates, 2, sequences)``: where an update reads its query, and where it leaves the next one."""
    delays: Tensor

    @staticmethod
    def empty() -> _Chunk:
        return _Chunk(*[torch.empty(0)] * 3)

    def refill(self, loaded: _Chunk, device: torch.device) -> _Chunk:
        if not len(self.samples):
            empty = (value.new_zeros(_CHUNK, *value.shape[1:], device=device) for value in vars(loaded).values())
            self = _Chunk(*empty)
        for name, value in vars(loaded).items():
            getattr(self, name)[: len(value)].copy_(value)
        return self


def _one_update(
    problem: Problem, rule: AnyRule[Any], step: Step, shape: torch.Size, ticket_like: Tensor
) -> Callable[..., None]:
    """One update of every run; everything that changes is read from and written to fixed buffers.

    It ends with storing the next query, so that compiled it is one call, and the query is stored as it is made.
    """
    ticket_shape, no_ticket = ticket_like.shape, ticket_like[..., :0].clone()

    def advance(
        state: Any, queries: Tensor, tickets: Tensor | None, samples: Tensor, slots: Tensor, delays: Tensor, at: Tensor
    ) -> None:
        read, write = slots.index_select(0, at)[0].unbind()
        stale = queries.index_select(0, read).view(shape)
        ticket = no_ticket if tickets is None else tickets.index_select(0, read).view(ticket_shape)
        grad = problem.gradient(stale, samples.index_select(0, at)[0])
        step(state, grad, delays.index_select(0, at)[0], ticket)
        _remember(rule, state, queries, tickets, write)
        at += 1

    return advance


def _remember(rule: AnyRule[Any], state: Any, queries: Tensor, tickets: Tensor | None, slots: Tensor) -> None:
    """Keep the query of a state, and its ticket, for the updates that will need them."""
    queries.index_copy_(0, slots, rule.query(state).flatten(0, 1))
    if tickets is not None:
        tickets.index_copy_(0, slots, issue_ticket(rule, state).flatten(0, 1))


def _slots(history: History) -> Tensor:
    """Of every update, ``(updates, 2, sequences)``: the slots that it reads, and those of the queries after it.

    The query after the last update, which nobody reads, goes where the last one was.
    """
    following = torch.cat([history.write[1:], history.write[-1:]])
    return torch.stack([history.read, following], dim=1)


def _plans(arrivals: list[list[Arrivals]]) -> list[SlotPlan]:
    """A plan for every sequence of delays; equal sequences (constant delays of several seeds) share one."""
    plans: dict[bytes, SlotPlan] = {}
    ordered = []
    for one in (one for row in arrivals for one in row):
        key = one.delays.numpy().tobytes()
        if key not in plans:
            plans[key] = plan_slots(one.delays)
        ordered.append(plans[key])
    return ordered


def _check_memory(needed: int, device: torch.device) -> None:
    if device.type == "cuda":
        available = torch.cuda.mem_get_info(device)[0]
    else:
        try:
            with open("/proc/meminfo") as file:
                fields = dict(line.split(":") for line in file)
        except OSError:
            return  # not Linux: the allocation itself will tell
        available = int(fields["MemAvailable"].split()[0]) * 1024
    if needed > available:
        raise MemoryError(
            f"the queries that late gradients wait for would take {needed / 2**30:.1f} GiB and "
            f"{available / 2**30:.1f} GiB are free: simulate fewer runs in one call, or shorter delays"
        )


def _own_seeds(seeds: tuple[int, ...], runs: int) -> tuple[int, ...]:
    """A seed for every run of every seed."""
    keys = ((seed, _OWN_STREAM, run) for seed in seeds for run in range(runs))
    return tuple(int(np.random.SeedSequence(key).generate_state(1)[0]) for key in keys)


def _rule_axis(rule: AnyRule[Any], runs: torch.Size, position: int) -> Axis:
    """The hyper-parameter that varies along one run dimension of a rule, if there is exactly one such."""
    size = runs[position]
    varying = []
    for name, value in _named_tensors(rule):
        shape = (1,) * (len(runs) + 1 - value.dim()) + tuple(value.shape)
        if shape[position] == size:
            alone = all(length == 1 for i, length in enumerate(shape) if i != position)
            varying.append(Axis(name, tuple(value.flatten().tolist())) if alone else None)
    only = varying[0] if len(varying) == 1 else None
    return only or Axis(f"run{position}", tuple(range(size)))


def _named_tensors(part: Any) -> Iterator[tuple[str, Tensor]]:
    for name, value in getattr(part, "__dict__", {}).items():
        if isinstance(value, Tensor):
            yield name, value
        else:
            yield from _named_tensors(value)
