"""The state of a simulation, and one update of it."""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lategrad.delays import Arrivals
from lategrad.delays.stages import StageDelays
from lategrad.execution import UnsupportedError, compiling_pays, in_place
from lategrad.execution.backend import Backend, Compiled
from lategrad.gates import NormGate, clip_norm
from lategrad.problems.problem import Problem, is_stateful
from lategrad.rules.rule import AnyRule, first_state, issue_ticket, needs_ticket, weigh_ticket
from lategrad.sets import norm
from lategrad.simulator.history import History, SlotPlan, check_memory, plan_slots
from lategrad.simulator.loops import RunLoops
from lategrad.simulator.workers import Workers
from lategrad.support.runs import runs_shape, tensors
from lategrad.support.seeds import Stream, derived_seed
from lategrad.support.validation import require

_CHUNK = 256  # updates whose samples and slots are loaded at once
_CAPTURE_LOCK = threading.Lock()


class Chunk(NamedTuple):
    """What a chunk of updates needs, one row per update, in buffers that keep their addresses."""

    samples: Tensor
    write: Tensor  # the slots that the next queries are stored in
    read: Tensor  # the slots that the delayed queries are fetched from
    now: Tensor  # the slots of the present queries
    delays: Tensor
    jobs: Tensor


class Simulation:
    """The state of all runs, of shape ``(seeds, delays, *rule's runs, dim)``, and its updates.

    Args:
        problem, rule: on the device of the simulation.
        arrivals: for every seed and every delay model.
        seeds: of the samples.
        share_samples, compile, clip, max_norm_ratio, drift: as for :func:`lategrad.simulate`.
        profiles: the stages of each delay model, for those by stage.
    """

    def __init__(
        self, problem: Problem, rule: AnyRule[Any], arrivals: list[list[Arrivals]], seeds: tuple[int, ...],
        share_samples: bool, compile: bool | Literal["rule"] | None,
        profiles: Sequence[StageDelays | None] | None = None, clip: float | None = None,
        max_norm_ratio: float | None = None, drift: bool = False,
    ) -> None:  # fmt: skip
        self.problem, self.rule, self.arrivals, self.clip = problem, rule, arrivals, clip
        x0 = problem.start()
        runs = torch.broadcast_shapes(x0.shape[:-1], runs_shape(rule))
        self.state = first_state(rule, x0.expand(len(seeds), len(arrivals[0]), *runs, -1))
        query = rule.query(self.state)
        self.shape, device = query.shape, query.device
        self.delays = torch.stack([torch.stack([a.delays.long() for a in row], dim=-1) for row in arrivals], dim=1)

        profiles = profiles or [None] * len(arrivals[0])
        self.longest = _longest_delays(rule, profiles)
        plans, stage_of = _plans(arrivals, profiles), _stage_of(profiles, len(seeds), self.shape[-1])
        ticket = issue_ticket(rule, self.state)
        needed = History.bytes_needed(plans, query) + History.bytes_needed(plans, ticket)
        check_memory("the queries that late gradients wait for", needed, device)
        self.queries = History(plans, query, stage_of)
        if stage_of is not None and ticket.numel() != query.numel():  # not a vector: that of the longest delay
            stage_of = torch.zeros(len(plans), ticket.shape[-1], dtype=torch.int64)
        self.tickets = History(plans, ticket, stage_of) if needs_ticket(rule) else None

        self.streams = self.shape[:1] if share_samples else self.shape[:-1]
        per_seed = range(self.streams.numel() // len(seeds))
        own = [derived_seed(seed, Stream.OWN_SAMPLES, run) for seed in seeds for run in per_seed]
        self.stream_seeds = seeds if share_samples else own
        # An update stores the query after it; the last one, which is never read, overwrites the one before.
        self.following = torch.cat([self.queries.write[1:], self.queries.write[-1:]])
        self.chunk: Chunk | None = None
        self.row = torch.zeros(1, dtype=torch.int64, device=device)  # the row of the chunk that the next update uses
        self.gate = None if max_norm_ratio is None else NormGate(max_norm_ratio, tuple(self.shape[:-1]), device)
        self.refused = torch.zeros(*self.shape[:-1], 1, dtype=torch.int64, device=device)  # gradients, for their norm
        self.drift = torch.zeros_like(self.refused, dtype=torch.float64) if drift else None  # sum of distances so far
        self.workers: Workers | None = None
        if is_stateful(problem):
            require("delays", "by stage", stage_of is None, "of whole queries: this problem's workers keep a state")
            self.workers = Workers(problem, arrivals, self.delays, query)
            compile = compile or False  # many local steps would compile for minutes

        pays = partial(compiling_pays, len(self.delays), query.numel())
        self._loops: RunLoops | None = None
        if compile is True or (compile is None and pays(backend="loops")):
            with suppress(UnsupportedError):
                self._loops = RunLoops(self)
        if compile is None:
            compile = getattr(problem, "on_device", True) and pays()
        if self._loops is not None:
            compile = False
        self.step = in_place(rule, self.state, backend=None if compile == "rule" else "eager")
        self._update = Backend({"compile": lambda: Compiled(Simulation.update, device),
                                "eager": lambda: Simulation.update}, None if compile is True else "eager")  # fmt: skip
        on_gpu = device.type == "cuda" and getattr(problem, "on_device", True)
        self._update_graph, self._jobs_graph = _Graph(on_gpu, warm_up=3), _Graph(on_gpu, warm_up=1)
        self._store_query(self.queries.write[0].to(device))

    @property
    def backend(self) -> str:
        """What runs the updates: "loops", "compile" or "eager"."""
        return self._update.name if self._loops is None else "loops"

    def run(self, first: int, until: int, show_progress: Callable[[int], None]) -> None:
        """Make updates ``first + 1, ..., until``."""
        while first < until:
            last = min(until, first + _CHUNK)
            self._load(first, last)
            for length in [last - first] if self.workers is None else self.workers.waves(first, last):
                if self.workers is not None:
                    self._jobs_graph(self._run_jobs)
                if self._loops is not None and self.chunk is not None:
                    self._loops(self.chunk, length)
                else:
                    for _ in range(length):
                        self._update_graph(lambda: self._update.run(self))
            first = last
            show_progress(last)

    def update(self) -> None:
        """One update of every run. It reads and writes fixed buffers, so that it can be compiled and recorded."""
        assert self.chunk is not None
        row, chunk = self.row, self.chunk
        slots = chunk.read.index_select(0, row)[0]
        if self.drift is not None:
            self.drift.add_(norm(self.queries.fetch(slots).view(self.shape) - self.rule.query(self.state)))
        ticket = None if self.tickets is None else self.tickets.fetch(slots).unflatten(0, self.shape[:2])
        if self.workers is None:
            query = self.queries.fetch(slots).view(self.shape)
            grad = self.problem.gradient(query, chunk.samples.index_select(0, row)[0])
            require("shape of a gradient", tuple(grad.shape), grad.shape == query.shape, f"x's {tuple(query.shape)}")
        else:
            grad, share = self.workers.next_gradient(), self.workers.share_of_steps(chunk.jobs.index_select(0, row)[0])
            if ticket is not None and share is not None:
                ticket = weigh_ticket(self.rule, ticket, share.to(ticket.dtype))
        accepted, before = None, []
        if self.gate is not None:
            accepted, before = self.gate.admits(norm(grad)), [leaf.clone() for leaf in tensors(self.state)]
        grad = grad if self.clip is None else clip_norm(grad, self.clip)
        self.step(grad, chunk.delays.index_select(0, row)[0], ticket)
        if accepted is not None:
            for leaf, old in zip(tensors(self.state), before, strict=True):
                leaf.copy_(torch.where(accepted, leaf, old))
            self.refused.add_(~accepted)
        self._store_query(chunk.write.index_select(0, row)[0])
        row.add_(1)

    def _run_jobs(self) -> None:
        assert self.workers is not None
        assert self.chunk is not None
        self.workers.run_jobs(self.queries, self.chunk.samples, self.chunk.read, self.chunk.jobs, self.row)

    def _store_query(self, slots: Tensor) -> None:
        """Store the present query, and its ticket, for the updates that will need them."""
        self.queries.memory.index_copy_(0, slots, self.rule.query(self.state).flatten(0, 1))
        if self.tickets is not None:
            self.tickets.memory.index_copy_(0, slots, issue_ticket(self.rule, self.state).flatten(0, 1))

    def _load(self, first: int, last: int) -> None:
        count, device = last - first, self.row.device
        samples = torch.stack([self.problem.samples(s, first, count) for s in self.stream_seeds], dim=1)
        delays = torch.minimum(self.delays[first:last].unsqueeze(-1), self.longest)
        delays = delays.reshape(count, *self.shape[:2], *[1] * (len(self.shape) - 3), -1)
        jobs = torch.empty(count, 0) if self.workers is None else self.workers.jobs[first:last]
        loaded = Chunk(samples.unflatten(1, self.streams), write=self.following[first:last], delays=delays, jobs=jobs,
                       read=self.queries.read[first:last], now=self.queries.write[first:last])  # fmt: skip
        if self.chunk is None:  # always of full size: compiled code is for one size
            self.chunk = Chunk(*(value.new_zeros(_CHUNK, *value.shape[1:], device=device) for value in loaded))
        for buffer, value in zip(self.chunk, loaded, strict=True):
            buffer[:count].copy_(value)
        self.row.zero_()


class _Graph:
    """Calls a function on fixed buffers; a GPU records it after some calls, and replaying it costs one launch.

    Other threads may simulate at the same time; of their calls only another recording would interfere.
    """

    def __init__(self, records: bool, warm_up: int) -> None:
        self.records, self.warm_up = records, warm_up
        self.graph: torch.cuda.CUDAGraph | None = None
        self.calls = 0

    def __call__(self, function: Callable[[], None]) -> None:
        if self.graph is not None:
            self.graph.replay()
            return
        function()
        self.calls += 1
        if self.records and self.calls == self.warm_up:
            graph = torch.cuda.CUDAGraph()
            with _CAPTURE_LOCK:
                torch.cuda.synchronize()
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # records without executing
                    function()
            self.graph = graph


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


def _longest_delays(rule: AnyRule[Any], profiles: Sequence[StageDelays | None]) -> Tensor:
    """``(delays, blocks)``: the longest delay of each block; one, without a limit, where a rule is told one delay."""
    blocks, unlimited = getattr(rule, "delay_blocks", None), torch.iinfo(torch.int64).max
    count = 1 if blocks is None else len(blocks.parts)
    return torch.tensor([profile.delays if profile is not None and blocks is not None else [unlimited] * count
                         for profile in profiles])  # fmt: skip


def _stage_of(profiles: Sequence[StageDelays | None], seeds: int, dim: int) -> Tensor | None:
    """For each sequence and each entry the position of its delay among those of its profile."""
    if not any(profiles):
        return None
    whole = torch.zeros(dim, dtype=torch.int64)
    of_models = [whole if profile is None else profile.of_entries() for profile in profiles]
    return torch.stack(of_models).repeat(seeds, 1)
