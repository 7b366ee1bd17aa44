"""The server and its workers as actors of a Ray cluster: one call for each update, and no driver in between.

A worker sends its gradient and gets its next query as the reply; :mod:`lategrad.serve.engines.ray.messages` says how.
The server runs one call at a time: when the next update overwrites a query, Ray has copied it into its reply.

Ray is told to repeat nothing: a call that fails may have been carried out. A worker that has lost the server
asks for a new job. A server that was restarted from a checkpoint voids all gradients that an earlier one had asked
for, even if their numbers would fit.
"""

from __future__ import annotations

import math
import os
import random
import time
import warnings
from typing import Any, NamedTuple

import ray
import torch
from ray.exceptions import RayError, RayTaskError
from ray.util import metrics
from torch import Tensor

from lategrad.problems.problem import Problem
from lategrad.rules.rule import AnyRule
from lategrad.serve.checkpoints.checkpoint import Checkpoint
from lategrad.serve.compression import Compression
from lategrad.serve.desk import Desk, Location
from lategrad.serve.engines.engine import Report
from lategrad.serve.engines.ray.messages import (
    INLINE,
    REJOIN,
    WAIT,
    Header,
    Reply,
    Segment,
    SegmentAddress,
    pack,
    pack_header,
    unpack,
)
from lategrad.serve.messages import PLAIN, Answer, Job, Made, malformed
from lategrad.serve.observe.telemetry import Telemetry
from lategrad.serve.server import Server
from lategrad.serve.settings import Settings
from lategrad.serve.worker import Oracle, work
from lategrad.trace import Trace

_RECONNECT = 0.2  # seconds between two attempts to reach a server that is away
_DELAY_BUCKETS = [b * 10.0**e for e in range(5) for b in (1, 2, 5)]


def here() -> Location:
    """Where this process runs."""
    return Location(os.getpid(), ray.get_runtime_context().get_node_id())


class Recorded(NamedTuple):
    """A record for the driver to look at."""

    step: int
    values: dict[str, float]
    telemetry: Telemetry
    output: Tensor


class Status(NamedTuple):
    """What the driver wants to know several times a second."""

    server_start: int
    location: Location
    report: Report
    telemetry: Telemetry
    delays: Tensor
    """Of the updates that the driver has not seen yet."""
    messages: list[str]
    """Warnings since the last status."""
    poisoned: bool
    """Whether its state is not finite any more."""
    evaluating: bool
    """Whether records are to come."""
    recorded: list[Recorded]
    """The records that the driver has not seen yet, where it looks at them."""


class Metrics:
    """The run in Ray's own metrics: delays, speed, refusals."""

    def __init__(self, run: str) -> None:
        tags: dict[str, Any] = {"tag_keys": ("run",)}
        self._delays = metrics.Histogram("lategrad_delay", "Delay of each update, in updates", _DELAY_BUCKETS, **tags)
        self._updates = metrics.Counter("lategrad_updates", "Updates made", **tags)
        self._rate = metrics.Gauge("lategrad_updates_per_second", "Over the last thousand updates", **tags)
        self._refused = metrics.Counter("lategrad_refused_gradients", "Gradients that were not applied", **tags)
        for metric in (self._delays, self._updates, self._rate, self._refused):
            metric.set_default_tags({"run": run})
        self._seen_refused = 0

    def note(self, telemetry: Telemetry, delays: Tensor) -> None:
        """Add what has happened since the last time."""
        for delay in delays.tolist():
            self._delays.observe(delay)
        self._rate.set(telemetry.updates_per_second)
        if len(delays):
            self._updates.inc(len(delays))
        if telemetry.refused > self._seen_refused:
            self._refused.inc(telemetry.refused - self._seen_refused)
        self._seen_refused = telemetry.refused


class ServerActor:
    """A :class:`~lategrad.serve.server.Server` and its desk, which Ray calls, one call at a time.

    It writes no files: the driver asks for checkpoints and keeps them, so that a machine that is taken away takes
    nothing with it that the driver has. After a restart the driver brings the newest back.
    """

    def __init__(self, run: str) -> None:
        self._messages: list[str] = []
        warnings.showwarning = lambda message, *_, **__: self._messages.append(str(message))
        warnings.simplefilter("always", UserWarning)
        self._run = run
        self._start = random.SystemRandom().getrandbits(62)
        self._location = here()
        self._server: Server | None = None
        self._segments: dict[int, Segment] = {}
        self._recorded: dict[int, Recorded] = {}
        """By its position among the records."""
        self._room: dict[str, Tensor] | None = None
        self._is_over = False
        """Whether the trace was asked for: what happened later would be in the records, and not in the trace."""

    def begin(
        self,
        problem: Problem,
        rule: AnyRule[Any],
        settings: Settings,
        checkpoint: Checkpoint | None,
        watched: bool = False,
    ) -> Checkpoint:
        """Go on from a checkpoint, or begin where there is none; returns a first checkpoint of its own."""
        torch.set_num_threads(settings.threads)
        server = Server(problem, rule, settings, query_in_place=True)
        if watched:
            server.records.listener = self._keep_record
        if checkpoint is not None:
            server.restore(checkpoint)
        self._out = torch.empty(server.dim, dtype=server.dtype)
        self._deadline = settings.deadline
        self._metrics = Metrics(self._run)
        self._server, self._desk = server, Desk(server)
        return server.checkpoint(logged=server.version if checkpoint is not None else 0)

    def _keep_record(self, output: Tensor) -> None:
        """Until the driver has seen it."""
        assert self._server is not None
        records, telemetry = self._server.records, self._server.telemetry()
        self._recorded[len(records.steps) - 1] = Recorded(records.steps[-1], records.last(), telemetry, output.clone())

    # ---- For workers

    def join(self, member: int, worker: int, location: Location) -> Reply:
        """A job for a worker that has none: it has just started, or has lost the server for a while."""
        if self._server is None:
            return WAIT
        if self._is_over:
            return None
        self._segments.pop(member, None)
        self._desk.void_jobs(member, worker)
        return self._reply(member, self._desk.join(member, worker, location, self._room_for_query(member)))

    def attach(self, member: int, node: str, address: SegmentAddress) -> bool:
        """Share a worker's segment from now on, if it is on this machine and the system allows it."""
        if self._server is None or node != self._location.node:
            return False
        try:
            self._segments[member] = Segment.attach(address)
        except OSError as error:
            self._messages.append(f"vectors of worker process {address.pid} go through the object store: {error}")
            return False
        return True

    def exchange(self, *parts: Any) -> Reply:
        """Take in a gradient and hand out the next job."""
        header, grad = unpack(*parts)
        member = header.member
        if self._server is None:
            return WAIT
        if header.server_start != self._start:
            return REJOIN
        if self._is_over:
            return None
        if grad is None:
            if member not in self._segments:
                return REJOIN
            grad = self._segments[member].grad
        out = self._room_for_query(member)
        job = self._desk.deliver(member, header.worker, header.version, header.sequence, grad, out, made=header.made)
        return self._reply(member, job)

    def fail(self, header: Header, reason: str) -> Reply:
        """Note that a gradient will not come, and hand out the next job."""
        if self._server is None:
            return WAIT
        if header.server_start != self._start:
            return REJOIN
        out = self._room_for_query(header.member)
        return self._reply(header.member, self._desk.fail(header.member, header.worker, header.sequence, reason, out))

    def _room_for_query(self, member: int) -> Tensor:
        return self._segments[member].query if member in self._segments else self._out

    def _reply(self, member: int, job: Job | None) -> Reply:
        if job is None:
            return None
        if self._server is not None and self._server.records.are_behind:  # it asks again in a moment
            self._desk.void_jobs(member, job.worker)
            return WAIT
        header = Header(self._start, member, job.worker, job.sequence, job.version)
        if (segment := self._segments.get(member)) is not None:
            if job.query is not segment.query:  # it is the state's own
                segment.query.copy_(job.query)
            return pack_header(header)
        parts = pack(header, job.query)
        return parts[0] if len(parts) == 1 else parts

    # ---- For the driver

    def status(self, seen: int, replaced: dict[str, int], records_seen: int = 0) -> Status | None:
        """How the run is doing, of which the driver has ``seen`` so many updates and records; None before it begins."""
        server = self._server
        if server is None:
            return None
        server.config["replaced"] = replaced
        server.records.collect()
        self._recorded = {position: kept for position, kept in self._recorded.items() if position >= records_seen}
        self._segments = {member: self._segments[member] for member in self._segments.keys() & self._desk.expected()}
        delays = server.log.column("delay", max(0, server.version - seen))
        telemetry = server.telemetry()
        self._metrics.note(telemetry, delays)
        messages, self._messages = self._messages, []
        report = Report(server.version, server.done, self._desk.activities(), server.all_dropped(),
                        server.last_refusal)  # fmt: skip
        return Status(self._start, self._location, report, telemetry, delays, messages, server.poisoned,
                      bool(server.records.waiting()), list(self._recorded.values()))  # fmt: skip

    def let_go(self, member: int) -> None:
        """A member's next gradient is its last."""
        if self._server is not None:
            self._desk.let_go(member)

    def bury(self, member: int, worker: int) -> None:
        """A member is dead. A gradient that it sent before may still be on its way: it is used if it arrives."""
        if self._server is not None:
            self._desk.bury(member, worker, wait=self._deadline)

    def checkpoint(self, logged: int) -> Checkpoint | None:
        """A checkpoint, with the log after so many updates; None if the state is not finite any more."""
        assert self._server is not None
        if not self._server.is_sound():
            return None
        made = self._server.checkpoint(logged, self._room)
        self._room = made.tensors  # Ray has copied them into its reply when the next one is asked for
        return made

    def go_back(self, checkpoint: Checkpoint) -> int:
        """Give up a state that is not finite; how often in a row that was done."""
        assert self._server is not None
        self._server.go_back(checkpoint)
        self._recorded.clear()
        self._desk.void_all_jobs()
        return self._server.returns_in_a_row

    def trace(self, patience: float = math.inf) -> Trace | None:
        """What happened, evaluations of so many seconds waited for; None before it begins. It is the end."""
        self._is_over = True
        return None if self._server is None else self._server.trace(patience)


class RayLink:
    """The worker's end: what it sends is a call, what it receives is the reply."""

    def __init__(self, server: Any, member: int, worker: int, patience: float, compression: str) -> None:
        self._server, self._member, self._worker = server, member, worker
        self._patience, self._compression = patience, compression
        self._location, self._start = here(), 0
        self._segment: Segment | None = None
        self._reply = self._join()

    def _join(self) -> Any:
        self._start = 0  # the server forgets the segment of a worker that joins: it is offered again
        return self._server.join.remote(self._member, self._worker, self._location)

    def receive(self) -> Job | None:
        """The reply to what was sent last; if the server is away, or silent for long, a new job when it is back."""
        while True:
            try:
                reply = ray.get(self._reply, timeout=self._patience)
                if reply is None:
                    return None
                if reply != WAIT and reply != REJOIN:
                    return self._read(reply)
            except RayTaskError:
                raise  # the server would not have what this worker sent
            except RayError:
                reply = WAIT  # it may be back soon; if not, the driver ends this worker
            if reply == WAIT:
                time.sleep(_RECONNECT)
            self._reply = self._join()

    def room(self) -> None:
        """Nowhere: a gradient may still be on its way when the next one is made."""
        return None

    def _read(self, reply: Any) -> Job:
        header, query = unpack(*reply) if isinstance(reply, tuple) else unpack(reply)
        if query is None:
            assert self._segment is not None
            query = self._segment.query
        elif header.server_start != self._start and query.nbytes > INLINE:
            self._share(query)
        self._start = header.server_start
        return Job(header.worker, header.sequence, header.version, query)

    def _share(self, query: Tensor) -> None:
        """Offer a segment to a server that has just started, or that is new to this worker."""
        segment = self._segment or Segment.create(Compression(self._compression, len(query), query.dtype))
        answer = self._server.attach.remote(self._member, self._location.node, segment.address)
        attached = ray.get(answer, timeout=self._patience)
        self._segment = segment if attached else None

    def _header(self, job: Job, made: Made = PLAIN) -> Header:
        return Header(self._start, self._member, job.worker, job.sequence, job.version, *made)

    def send(self, job: Job, answer: Answer) -> None:
        """Call the server with the gradient of a job."""
        grad, header = answer.message, self._header(job, answer.made)
        compression = Compression(self._compression, len(job.query), job.query.dtype)
        if form := malformed(grad, compression.message_length, compression.message_dtype):
            self._fail(job, form)
        elif self._segment is not None:
            self._segment.grad.copy_(grad)
            self._reply = self._server.exchange.remote(pack_header(header))
        else:
            self._reply = self._server.exchange.remote(*pack(header, grad))

    def fail(self, job: Job, error: Exception) -> None:
        """Call the server with the reason why there is none."""
        self._fail(job, f"{type(error).__name__}: {error}")

    def _fail(self, job: Job, reason: str) -> None:
        self._reply = self._server.fail.remote(self._header(job), reason)


class WorkerActor:
    """A worker: the same loop as on one machine, at the end of another link."""

    def __init__(self, server: Any, member: int, worker: int, problem: Problem, settings: Settings) -> None:
        torch.set_num_threads(1)  # the workers are the parallelism
        device = torch.device(settings.device)
        self._oracle = Oracle(problem, settings.streams, settings.slowness(), device, settings.compression)
        patience = settings.deadline / 2  # it helps itself before it is taken for hung
        self._whom = (server, member, worker, patience, settings.compression)

    def run(self) -> None:
        """Work until there is no more work."""
        work(self._oracle, RayLink(*self._whom), time.sleep)
