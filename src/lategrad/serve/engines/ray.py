"""The server and its workers as actors of a Ray cluster: one call for each update, and no driver in between.

A worker sends its gradient and gets its next query as the reply. Up to a few kilobytes, header and vector
travel as one string of bytes inside the call, which Ray neither pickles nor stores. Longer vectors go through the
object store: written there once by the sender, read in place by the receiver, also from another machine's copy.
The server runs one call at a time: when the next update overwrites a query, Ray has copied it into its reply.

Ray is told to repeat nothing: a call that fails may have been carried out. A worker that has lost the server
asks for a new job. A server that was restarted from a checkpoint has a new *life*, and void are all gradients
that belong to an earlier one, even if their numbers would fit.
"""

from __future__ import annotations

import os
import random
import shutil
import struct
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ray
import torch
from numpy.typing import NDArray
from ray.exceptions import ObjectLostError, RayActorError
from ray.util import metrics
from torch import Tensor

from lategrad.problems.problem import Problem
from lategrad.rules.rule import AnyRule
from lategrad.serve.mirror import Files, read_checkpoint, write_checkpoint
from lategrad.serve.server import Job, Server, Telemetry, malformed
from lategrad.serve.settings import Settings
from lategrad.serve.worker import Oracle, work
from lategrad.trace import Trace

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_HEADER = struct.Struct("<6q")  # the five numbers of a Header, and the vector's dtype
_INLINE = 65_536  # bytes; Ray itself keeps up to 100 KiB of a call out of the object store
_WAIT = b""  # the reply of a server that does not know yet where to go on
_RECONNECT = 0.2  # seconds between two attempts to reach a server that is away
_DELAY_BUCKETS = [b * 10.0**e for e in range(5) for b in (1, 2, 5)]

Parts = tuple[bytes] | tuple[bytes, NDArray[Any]]
Reply = bytes | tuple[bytes, NDArray[Any]] | None
"""A job; or nothing, when there is no more work for this worker; or the request to wait."""


class Header(NamedTuple):
    """What travels with every vector."""

    life: int
    member: int
    """Which worker actor; a replacement under the same worker's number is another member."""
    worker: int
    sequence: int
    version: int


def pack(header: Header, vector: Tensor) -> Parts:
    """The arguments of a call, or a reply.

    >>> header = Header(life=7, member=0, worker=0, sequence=1, version=2)
    >>> unpack(*pack(header, torch.tensor([1.0, 2.0])))
    (Header(life=7, member=0, worker=0, sequence=1, version=2), tensor([1., 2.]))
    """
    head = _HEADER.pack(*header, _DTYPES.index(vector.dtype))
    array = vector.contiguous().view(torch.uint8).numpy()
    return (head + array.tobytes(),) if len(array) <= _INLINE else (head, array)


def unpack(head: bytes, array: NDArray[Any] | None = None) -> tuple[Header, Tensor]:
    """What :func:`pack` packed; the vector is a view, not to be written to."""
    *numbers, kind = _HEADER.unpack_from(head)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable")
        if array is None:
            return Header(*numbers), torch.frombuffer(head, dtype=_DTYPES[kind], offset=_HEADER.size)
        return Header(*numbers), torch.from_numpy(array).view(_DTYPES[kind])


class Place(NamedTuple):
    """Where an actor runs."""

    pid: int
    node: str

    @staticmethod
    def here() -> Place:
        """Of this process."""
        return Place(os.getpid(), ray.get_runtime_context().get_node_id())


class Status(NamedTuple):
    """What the driver wants to know several times a second."""

    life: int
    place: Place
    done: bool
    telemetry: Telemetry
    delays: Tensor
    """Of the updates that the driver has not seen yet."""
    checkpointed: int
    """The version of the newest checkpoint on the server's machine."""
    at_work: dict[int, tuple[Place, float]]
    """For each member that has a job: where it is, and for how many seconds it has been at it."""
    dropped: list[int]
    """Workers that get no more work, because too many of their gradients in a row were refused."""
    last_refusal: str | None
    messages: list[str]
    """Warnings since the last status."""


class _Duty(NamedTuple):
    """The job that a member is at."""

    worker: int
    sequence: int
    since: float


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
    """A :class:`~lategrad.serve.server.Server` that Ray calls, one call at a time.

    Its checkpoints are made in a folder of its machine, from where the driver fetches them: a machine that is
    taken away takes nothing with it that the driver has. After a restart the driver brings the newest back.
    """

    def __init__(self, run: str) -> None:
        self._messages: list[str] = []
        warnings.showwarning = lambda message, *_, **__: self._messages.append(str(message))
        warnings.simplefilter("always", UserWarning)
        self._run = run
        self._life = random.SystemRandom().getrandbits(62)
        self._place = Place.here()
        self._folder = Path(tempfile.gettempdir()) / f"lategrad-{run}"
        shutil.rmtree(self._folder, ignore_errors=True)  # of this run's server, if it was on this machine before
        self._folder.mkdir(mode=0o700)
        self._server: Server | None = None
        self._replaced: dict[str, int] = {}
        self._places: dict[int, Place] = {}
        self._duties: dict[int, _Duty] = {}
        self._leaving: set[int] = set()
        self._departed: list[_Duty] = []

    def begin(self, problem: Problem, rule: AnyRule[Any], settings: Settings, files: Files | None) -> int:
        """Go on from a checkpoint, or begin where there is none; returns the version."""
        torch.set_num_threads(settings.threads)
        options = {
            "steps": settings.steps, "record_every": settings.record_every, "compile": settings.compile,
            "folder": self._folder, "checkpoint_every": settings.checkpoint_every, "keep": 1,
            "max_refusals": settings.max_refusals, "max_delay": settings.max_delay,
            "config": {"settings": asdict(settings)},
        }  # fmt: skip
        server = self._make_server(problem, rule, settings, options)
        if files is not None:
            write_checkpoint(self._folder, files, keep=1)
            self._replaced = server.restore().get("replaced", {})
        server.checkpoint()
        self._out = torch.empty(server.dim, dtype=server.dtype)
        self._patience = settings.deadline
        self._metrics = Metrics(self._run)
        self._server = server
        return server.version

    def _make_server(self, problem: Problem, rule: AnyRule[Any], settings: Settings, options: dict[str, Any]) -> Server:
        return Server(problem, rule, lend=True, **options)

    # ---- For workers

    def join(self, member: int, worker: int, place: Place) -> Reply:
        """A job for a worker that has none: it has just started, or has lost the server for a while."""
        self._places[member] = place
        return self._issue(member, worker)

    def exchange(self, *parts: Any) -> Reply:
        """Take in a gradient and hand out the next job."""
        header, grad = unpack(*parts)
        server = self._server
        if server is None or header.life != self._life or server.done:
            return self._issue(header.member, header.worker)
        job = server.exchange(header.worker, header.version, header.sequence, grad, self._out)
        return self._reply(header.member, job)

    def fail(self, header: Header, reason: str) -> Reply:
        """Note that a gradient will not come, and hand out the next job."""
        if self._server is not None and header.life == self._life:
            self._server.refuse(header.worker, header.sequence, reason)
        return self._issue(header.member, header.worker)

    def _issue(self, member: int, worker: int) -> Reply:
        return _WAIT if self._server is None else self._reply(member, self._server.issue(worker, self._out))

    def _reply(self, member: int, job: Job | None) -> Reply:
        self._duties.pop(member, None)
        if job is None:
            return None
        if member in self._leaving:
            assert self._server is not None
            self._server.forget(job.worker, job.sequence)
            return None
        self._duties[member] = _Duty(job.worker, job.sequence, time.monotonic())
        return self._answer(Header(self._life, member, job.worker, job.sequence, job.version), job.query)

    def _answer(self, header: Header, query: Tensor) -> Reply:
        parts = pack(header, query)
        return parts[0] if len(parts) == 1 else parts

    # ---- For the driver

    def status(self, seen: int) -> Status | None:
        """How the run is doing, of which the driver has ``seen`` so many updates; None before it begins."""
        now, server = time.monotonic(), self._server
        if server is None:
            return None
        for duty in [duty for duty in self._departed if now - duty.since > self._patience]:
            self._departed.remove(duty)
            server.forget(duty.worker, duty.sequence)
        delays = server.log.column("delay", max(0, server.version - seen))
        telemetry = server.telemetry()
        self._metrics.note(telemetry, delays)
        messages, self._messages = self._messages, []
        return Status(
            life=self._life,
            place=self._place,
            done=server.done,
            telemetry=telemetry,
            delays=delays,
            checkpointed=server.checkpointed_version,
            at_work={member: (self._places[member], now - duty.since) for member, duty in self._duties.items()},
            dropped=[int(name.split()[1]) for name in server.refusals if server.dropped(int(name.split()[1]))],
            last_refusal=server.last_refusal,
            messages=messages,
        )

    def let_go(self, member: int) -> None:
        """A member's next gradient is its last."""
        self._leaving.add(member)

    def bury(self, member: int) -> None:
        """A member is dead. A gradient that it sent before may still be on its way: it is used if it arrives."""
        self._leaving.add(member)
        if duty := self._duties.pop(member, None):
            self._departed.append(duty._replace(since=time.monotonic()))

    def files(self) -> Files | None:
        """The newest checkpoint."""
        return read_checkpoint(self._folder)

    def finish(self, replaced: dict[str, int]) -> tuple[Trace, Files | None]:
        """A last checkpoint, and what happened."""
        assert self._server is not None
        total = Counter(self._replaced) + Counter(replaced)
        self._server.config["replaced"] = dict(total)
        self._server.checkpoint()
        return self._server.trace(), self.files()

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)


class RayLink:
    """The worker's end: what it sends is a call, what it receives is the reply."""

    def __init__(self, server: Any, member: int, worker: int) -> None:
        self._server, self._member, self._worker = server, member, worker
        self._place, self._life = Place.here(), 0
        self._reply = self._join()

    def _join(self) -> Any:
        return self._server.join.remote(self._member, self._worker, self._place)

    def receive(self) -> Job | None:
        """The reply to what was sent last; if the server is away, a new job when it is back."""
        while True:
            try:
                reply = ray.get(self._reply)
                if reply is None:
                    return None
                if reply != _WAIT:
                    header, query = self._read(reply)
                    self._life = header.life
                    return Job(header.worker, header.sequence, header.version, query)
            except (RayActorError, ObjectLostError):
                pass  # it may be back soon; if not, the driver ends this worker
            time.sleep(_RECONNECT)
            self._reply = self._join()

    def _read(self, reply: Any) -> tuple[Header, Tensor]:
        return unpack(*reply) if isinstance(reply, tuple) else unpack(reply)

    def _header(self, job: Job) -> Header:
        return Header(self._life, self._member, job.worker, job.sequence, job.version)

    def send(self, job: Job, grad: Tensor) -> None:
        """Call the server with the gradient of a job."""
        if form := malformed(grad, len(job.query), job.query.dtype):
            self._fail(job, form)
            return
        self._send(self._header(job), grad)

    def _send(self, header: Header, grad: Tensor) -> None:
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
        self._oracle = Oracle(problem, settings.seed, settings.slowness(), torch.device(settings.device))
        self._link = partial(self._make_link, server, member, worker)

    _make_link: Callable[..., RayLink] = RayLink

    def run(self) -> None:
        """Work until there is no more work."""
        work(self._oracle, self._link(), time.sleep)
