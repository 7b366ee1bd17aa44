"""The server and its workers as actors of a Ray cluster: one call for each update, without the driver.

A worker sends its gradient and gets its next query as the reply; :mod:`lategrad.serve.engines.ray.messages` says how.
The server runs one call at a time: when the next update overwrites a query, Ray has copied it into its reply.

Ray retries nothing: a call that fails may have been carried out. A worker that has lost the server asks for a new job.
A server that was restarted from a checkpoint discards all gradients for an earlier one, even if their numbers fit.
"""

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
from lategrad.serve.engines.engine import Report
from lategrad.serve.engines.ray.messages import INLINE, REJOIN, WAIT, Reply, pack, unpack
from lategrad.serve.engines.segment import FAILED, JOB, RESULT, Header, Segment, SegmentAddress
from lategrad.serve.jobs import Location
from lategrad.serve.messages import STATELESS, Answer, Job, JobInfo, malformed
from lategrad.serve.observe.records import Telemetry
from lategrad.serve.server import Server
from lategrad.serve.settings import Settings
from lategrad.serve.worker import Oracle, work
from lategrad.trace import Trace

_RECONNECT_INTERVAL = 0.2  # seconds between two attempts to reach a server that is away
_DELAY_BUCKETS = [b * 10.0**e for e in range(5) for b in (1, 2, 5)]


def here() -> Location:
    return Location(os.getpid(), ray.get_runtime_context().get_node_id())


class Recorded(NamedTuple):
    """A record for the driver."""

    step: int
    values: dict[str, float]
    telemetry: Telemetry
    output: Tensor


class Status(NamedTuple):
    """What the server tells the driver several times a second."""

    server_start: int
    location: Location
    report: Report
    telemetry: Telemetry
    delays: Tensor  # of the updates that the driver has not seen yet
    messages: list[str]  # warnings since the last status
    poisoned: bool  # whether its state is not finite
    evaluating: bool  # whether records are to come
    recorded: list[Recorded]  # the records that the driver has not seen yet, if it watches them


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

    def record(self, telemetry: Telemetry, delays: Tensor) -> None:
        for delay in delays.tolist():
            self._delays.observe(delay)
        self._rate.set(telemetry.updates_per_second)
        if len(delays):
            self._updates.inc(len(delays))
        if telemetry.refused > self._seen_refused:
            self._refused.inc(telemetry.refused - self._seen_refused)
        self._seen_refused = telemetry.refused


class ServerActor:
    """A server that Ray calls, one call at a time; it writes no files, its checkpoints are the driver's to save."""

    def __init__(self, run: str) -> None:
        self._messages: list[str] = []
        warnings.showwarning = lambda message, *_, **__: self._messages.append(str(message))
        warnings.simplefilter("always", UserWarning)
        self._run = run
        self._start = random.SystemRandom().getrandbits(62)
        self._location = here()
        self.server: Server | None = None
        self.segments: dict[int, Segment] = {}
        self._recorded: dict[int, Recorded] = {}  # by its position among the records
        self._room: dict[str, Tensor] | None = None
        self._is_over = False  # whether the trace was fetched, in which later updates would be missing

    def begin(self, problem: Problem, rule: AnyRule[Any], settings: Settings, checkpoint: Checkpoint | None,
              watched: bool = False) -> Checkpoint:  # fmt: skip
        """Start, from a checkpoint if there is one; returns a first checkpoint of its own."""
        server = Server(problem, rule, settings, query_in_place=True)
        torch.set_num_threads(server.threads)
        if watched:
            server.records.listener = self._keep_record
        if checkpoint is not None:
            server.restore(checkpoint)
        self._out = torch.empty(server.dim, dtype=server.dtype)
        self._deadline = settings.deadline
        self._metrics = Metrics(self._run)
        self.server = server
        return server.checkpoint(logged=server.version if checkpoint is not None else 0)

    def _keep_record(self, output: Tensor) -> None:
        assert self.server is not None
        records, telemetry = self.server.records, self.server.telemetry()
        self._recorded[len(records.steps) - 1] = Recorded(records.steps[-1], records.last(), telemetry, output.clone())

    def join(self, member: int, worker: int, location: Location) -> Reply:
        """A job for a worker that has none: it has just started, or has lost the server for a while."""
        if self.server is None:
            return WAIT
        if self._is_over:
            return None
        self.segments.pop(member, None)
        self.server.jobs.cancel(member)
        return self._reply(member, self.server.join(member, worker, location, self._room_for_query(member)))

    def attach(self, member: int, node: str, address: SegmentAddress) -> bool:
        """Share a worker's segment from now on, if it is on this machine and the system allows it."""
        if self.server is None or node != self._location.node:
            return False
        try:
            self.segments[member] = Segment.attach(address)
        except OSError as error:
            self._messages.append(f"vectors of worker process {address.pid} go through the object store: {error}")
            return False
        return True

    def exchange(self, *parts: Any, reason: str = "") -> Reply:
        """Take the gradient of a job, or the reason why there is none, and reply with the next job."""
        header, grad = unpack(*parts)
        member = header.member
        if self.server is None:
            return WAIT
        if header.server_start != self._start:
            return REJOIN
        if self._is_over:
            return None
        out = self._room_for_query(member)
        if header.kind == FAILED:
            return self._reply(member, self.server.fail(member, header.sequence, reason, out))
        if grad is None:
            if member not in self.segments:
                return REJOIN
            grad = self.segments[member].grads[0]
        job = self.server.deliver(member, header.version, header.sequence, grad, out, info=header.info)
        return self._reply(member, job)

    def _room_for_query(self, member: int) -> Tensor:
        return self.segments[member].queries[0] if member in self.segments else self._out

    def _reply(self, member: int, job: Job | None) -> Reply:
        if job is None or self.server is None:
            return None
        if self.server.records.are_behind:  # it asks again in a moment
            self.server.jobs.cancel(member)
            return WAIT
        header = Header(JOB, sequence=job.sequence, version=job.version, member=member, server_start=self._start)
        if (segment := self.segments.get(member)) is not None:
            if job.query is not segment.queries[0]:  # it is the state's own
                segment.queries[0].copy_(job.query)
            return header.pack()
        parts = pack(header, job.query)
        return parts[0] if len(parts) == 1 else parts

    def status(self, seen: int, replaced: dict[str, int], records_seen: int = 0) -> Status | None:
        """The status, without the updates and records that the driver has seen; None before the server begins."""
        if (server := self.server) is None:
            return None
        server.config["replaced"] = replaced
        server.records.collect()
        self._recorded = {position: kept for position, kept in self._recorded.items() if position >= records_seen}
        self.segments = {member: self.segments[member] for member in self.segments.keys() & server.jobs.expected()}
        delays = server.log.column("delay", max(0, server.version - seen))
        telemetry = server.telemetry()
        self._metrics.record(telemetry, delays)
        messages, self._messages = self._messages, []
        report = Report(server.version, server.done, server.jobs.activities(), frozenset(server.dropped),
                        server.last_refusal)  # fmt: skip
        return Status(self._start, self._location, report, telemetry, delays, messages, server.poisoned,
                      bool(server.records.waiting()), list(self._recorded.values()))  # fmt: skip

    def release(self, member: int) -> None:
        if self.server is not None:
            self.server.jobs.release(member)

    def remove(self, member: int) -> None:
        """A member is dead; a gradient that it sent before is used if it arrives in time."""
        if self.server is not None:
            self.server.jobs.remove(member, wait=self._deadline)

    def checkpoint(self, logged: int) -> Checkpoint | None:
        """A checkpoint, whose log leaves out the first ``logged`` updates; None if the state is not finite."""
        assert self.server is not None
        if not self.server.is_sound():
            return None
        checkpoint = self.server.checkpoint(logged, self._room)
        self._room = checkpoint.tensors  # Ray has copied them into its reply by the next call
        return checkpoint

    def go_back(self, checkpoint: Checkpoint) -> int:
        """Replace a state that is not finite by that of a checkpoint; returns how often in a row that was done."""
        assert self.server is not None
        self.server.go_back(checkpoint)
        self._recorded.clear()
        return self.server.returns_in_a_row

    def trace(self, patience: float = math.inf) -> Trace | None:
        """The trace, for which evaluations may take ``patience`` seconds; None before it begins. It ends the run."""
        self._is_over = True
        return None if self.server is None else self.server.trace(patience)


class RayLink:
    """The worker's end: what it sends is a call, what it receives is the reply."""

    def __init__(self, server: Any, member: int, worker: int, timeout: float, compression: str) -> None:
        self._server, self._member, self._worker = server, member, worker
        self._timeout, self._compression = timeout, compression
        self._location, self._start = here(), 0
        self._segment: Segment | None = None
        self._reply = self._join()

    def _join(self) -> Any:
        self._start = 0  # the server drops the segment of a worker that joins: it is offered again
        return self._server.join.remote(self._member, self._worker, self._location)

    def receive(self) -> Job | None:
        """The reply to the last call; if the server is away, or silent for long, a new job when it is back."""
        while True:
            try:
                if (reply := ray.get(self._reply, timeout=self._timeout)) is None:
                    return None
                if reply != WAIT and reply != REJOIN:
                    return self._read(reply)
            except RayTaskError:
                raise  # the server did not accept what this worker sent
            except RayError:
                reply = WAIT  # it may be back soon; if not, the driver ends this worker
            if reply == WAIT:
                time.sleep(_RECONNECT_INTERVAL)
            self._reply = self._join()

    def room(self) -> None:
        return None  # a gradient may still be on its way when the worker computes the next one

    def _read(self, reply: Any) -> Job:
        header, query = unpack(*reply) if isinstance(reply, tuple) else unpack(reply)
        if query is None:
            assert self._segment is not None
            query = self._segment.queries[0]
        elif header.server_start != self._start and query.nbytes > INLINE:
            self._share(query)
        self._start = header.server_start
        return Job(self._worker, header.sequence, header.version, query)

    def _share(self, query: Tensor) -> None:
        """Offer a segment to a server that has just started, or that is new to this worker."""
        segment = self._segment or Segment.create(Compression(self._compression, len(query), query.dtype))
        answer = self._server.attach.remote(self._member, self._location.node, segment.address)
        self._segment = segment if ray.get(answer, timeout=self._timeout) else None

    def _header(self, kind: int, job: Job, info: JobInfo = STATELESS) -> Header:
        return Header(kind, 0, -1, job.sequence, job.version, *info, self._member, self._start)

    def deliver(self, job: Job, answer: Answer) -> None:
        grad, header = answer.message, self._header(RESULT, job, answer.info)
        compression = Compression(self._compression, len(job.query), job.query.dtype)
        if form := malformed(grad, compression.message_length, compression.message_dtype):
            self.fail(job, form)
        elif self._segment is not None:
            self._segment.grads[0].copy_(grad)
            self._reply = self._server.exchange.remote(header.pack())
        else:
            self._reply = self._server.exchange.remote(*pack(header, grad))

    def fail(self, job: Job, reason: str) -> None:
        self._reply = self._server.exchange.remote(self._header(FAILED, job).pack(), reason=reason)


class WorkerActor:
    """A worker: the same loop as on one machine, at the end of another link."""

    def __init__(self, server: Any, member: int, worker: int, problem: Problem, settings: Settings) -> None:
        torch.set_num_threads(1)  # the workers are the parallelism
        device = torch.device(settings.device)
        self._oracle = Oracle(problem, settings.streams, settings.slowness(), device, settings.compression)
        timeout = settings.deadline / 2  # it joins again before it is considered hung
        self._connection = (server, member, worker, timeout, settings.compression)

    def run(self) -> None:
        work(self._oracle, RayLink(*self._connection), time.sleep)
