"""Workers as processes of this machine; vectors travel through shared memory, a few bytes through a socket.

Each worker has memory of its own with two vectors for each job that it may hold: the server writes the query
and the worker reads it, the worker writes the gradient, as it travels, and the server reads it. Whose turn it is
follows from messages on a socket pair: the gradient's message is sent after the gradient is written, so that a worker
that dies while it writes has sent nothing, and no torn gradient can be applied. A replacement gets new memory. It has
no name (it is unlinked as soon as it is made), so that nothing is left behind however a process ends, and nobody else
can open it. Nothing listens on a network.

The server waits for no process without a limit: it reads where there is something to read, does not wait for a worker
that takes nothing, and starts and buries workers within given times. A worker may wait for ever for the server, which
ends those that are silent for long, and without which it cannot live.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import select
import selectors
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.multiprocessing  # shared tensors travel by reference
from torch import Tensor

from lategrad.problems.problem import Problem
from lategrad.serve.compression import Compression
from lategrad.serve.engines.transport import Arrived, Event, Failed, Garbled, Lost, Ready
from lategrad.serve.messages import PLAIN, Answer, Job, Made, unusable
from lategrad.serve.settings import Settings
from lategrad.serve.shared_pickle import Packed
from lategrad.serve.worker import Oracle, Slowness, Streams, work
from lategrad.support.timeouts import limited

fork_server = f"{__package__}.fork_server"  # not imported here: it is for the fork server alone
_MESSAGE = struct.Struct("<BBqqqq")  # kind, slot, sequence, version, steps, previous job; text may follow
_READY, _ARRIVED, _FAILED, _JOB, _END = range(5)
_LARGEST = 16_384  # bytes of a message; longer texts are cut
_START = 120.0  # seconds for the fork server to fork; it has to import torch first
_LAST_MOMENT = 1.0  # seconds that a worker whose socket is closed has to end by itself; the server waits for it
_LAST_MOMENTS = 5.0  # seconds for all of them, at the end of a run


class _Message(NamedTuple):
    kind: int
    slot: int
    sequence: int
    version: int
    made: Made
    text: str


def _pack(kind: int, slot: int = 0, sequence: int = 0, version: int = 0, text: str = "", made: Made = PLAIN) -> bytes:
    return (_MESSAGE.pack(kind, slot, sequence, version, *made) + text.encode())[:_LARGEST]


def _unpack(message: bytes) -> _Message:
    kind, slot, sequence, version, *made = _MESSAGE.unpack_from(message)
    text = message[_MESSAGE.size :].decode(errors="replace")
    return _Message(kind, slot, sequence, version, Made(*made), text)


class _Segment(NamedTuple):
    """Memory that a worker and the server share, a place for each job that the worker may hold."""

    queries: Tensor
    grads: Tensor
    """As they travel."""

    @classmethod
    def create(cls, jobs: int, compression: Compression) -> _Segment:
        queries = torch.empty(jobs, compression.dim, dtype=compression.dtype)
        grads = torch.empty(jobs, compression.message_length, dtype=compression.message_dtype)
        return cls(queries.share_memory_(), grads.share_memory_())


class _ProcessHandle:
    """The server's end of one worker process."""

    def __init__(self, member: int, worker: int, process: Any, channel: socket.socket, segment: _Segment) -> None:
        self.member, self.worker = member, worker
        self.process, self.channel, self.pid = process, channel, process.pid
        self.queries, self.grads = segment.queries.unbind(), segment.grads.unbind()
        self._slots = {query.data_ptr(): slot for slot, query in enumerate(self.queries)}
        self._job_in: dict[int, int] = {}  # slot to sequence number

    def send(self, job: Job) -> None:
        slot = self._slots[job.query.data_ptr()]
        self._job_in[slot] = job.sequence
        self._tell(_pack(_JOB, slot, job.sequence, job.version))

    def dismiss(self) -> None:
        self._tell(_pack(_END))

    def _tell(self, message: bytes) -> None:
        with contextlib.suppress(OSError):  # it is dead, as its closed socket tells, or takes nothing: it is late then
            self.channel.send(message, socket.MSG_DONTWAIT)

    def kill(self) -> bool:
        self.process.kill()
        return True

    def read(self) -> Event | None:
        """The event in the next message; None at the end of the stream."""
        try:
            message, _, flags, _ = self.channel.recvmsg(_LARGEST)
        except ConnectionResetError:
            return None
        if not message:
            return None
        if len(message) < _MESSAGE.size or flags & socket.MSG_TRUNC:
            return Garbled(self, f"its message of {len(message)} bytes is no message of a worker")
        kind, slot, sequence, version, made, text = _unpack(message)
        if kind == _READY and not text:
            return Ready(self, self.queries)
        if self._job_in.get(slot) != sequence:
            return Garbled(self, f"its message is about job {sequence} in place {slot}, where that job is not")
        if kind == _ARRIVED and not text:
            return Arrived(self, version, sequence, self.grads[slot], self.queries[slot], True, made)
        if kind == _FAILED:
            return Failed(self, sequence, text, self.queries[slot])
        return Garbled(self, f"its message of kind {kind} and {len(message)} bytes is none of a worker")

    def end(self, patience: float = _LAST_MOMENT) -> str:
        """Give back what the worker held; returns how it ended."""
        self.channel.close()
        self.process.join(timeout=patience)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(timeout=patience)
        code = self.process.exitcode
        if code is None:  # the system does not let go of it, or the fork server does not tell
            return "killed, and not seen to end"
        self.process.close()
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


class Processes:
    """An engine of processes.

    They are forked from a server process that has imported this library but done nothing else, which takes
    milliseconds and is safe with threads; the problem is pickled once, and its tensors are shared by all.
    """

    def __init__(
        self, problem: Problem, settings: Settings, compression: Compression, is_stopping: Callable[[], bool]
    ) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__, fork_server])
        device = torch.device(settings.device)
        self._parts = (_packed(problem), settings.streams, settings.slowness(), device, settings.compression)
        self._form = 1 + settings.prefetch, compression
        self._stopping = is_stopping
        self._selector = selectors.DefaultSelector()
        self._handles: set[_ProcessHandle] = set()

    def start(self, member: int, worker: int) -> _ProcessHandle:
        """Fork a worker with a new segment; ``OSError`` if that cannot be done, or takes too long."""
        segment = _Segment.create(*self._form)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        process = self._context.Process(
            target=_run, args=(worker, theirs, segment, *self._parts), name=f"lategrad-worker-{worker}", daemon=True
        )

        def fork() -> None:
            with theirs:
                process.start()

        try:
            limited(fork, lambda: 0.0 if self._stopping() else _START, "the fork server has not forked a worker")
        except BaseException:
            ours.close()  # if it ever starts, it ends at once
            raise
        handle = _ProcessHandle(member, worker, process, ours, segment)
        self._handles.add(handle)
        self._selector.register(ours, selectors.EVENT_READ, handle)
        return handle

    def wait(self, timeout: float) -> Iterator[Event]:
        """At most one event of each worker, so that none is served twice before another once."""
        for key, _ in self._selector.select(timeout):
            handle: _ProcessHandle = key.data
            event = handle.read()
            if event is None:
                self._selector.unregister(handle.channel)
                self._handles.discard(handle)
                yield Lost(handle, handle.end())
            else:
                yield event

    def close(self) -> None:
        """Kill all workers and wait for them."""
        for handle in self._handles:
            handle.kill()
        deadline = time.monotonic() + _LAST_MOMENTS
        for handle in self._handles:
            handle.end(max(0.0, deadline - time.monotonic()))
        self._handles.clear()
        self._selector.close()


def _packed(problem: Problem) -> Packed:
    try:
        return Packed(problem)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        remedy = 'define it in a module, or use engine="threads"'
        raise ValueError(f"the problem cannot be sent to worker processes ({error}): {remedy}") from None


class _ProcessLink:
    """The worker's end."""

    def __init__(self, worker: int, channel: socket.socket, segment: _Segment) -> None:
        self.worker, self.channel, self.slot = worker, channel, 0
        self.queries, self.grads = segment.queries.unbind(), segment.grads.unbind()

    def receive(self) -> Job | None:
        message = self.channel.recv(_LARGEST)
        if not message:
            return None
        job = _unpack(message)
        self.slot = job.slot
        return Job(self.worker, job.sequence, job.version, self.queries[self.slot]) if job.kind == _JOB else None

    def room(self) -> Tensor:
        return self.grads[self.slot]  # the server has read what it held: a new job came for this slot

    def send(self, job: Job, answer: Answer) -> None:
        grad, target = answer.message, self.grads[self.slot]
        if objection := unusable(grad, len(target), target.dtype):
            self._fail(job, objection)
            return
        if grad.data_ptr() != target.data_ptr():
            target.copy_(grad)
        self.channel.send(_pack(_ARRIVED, self.slot, job.sequence, job.version, made=answer.made))

    def fail(self, job: Job, error: Exception) -> None:
        self._fail(job, f"{type(error).__name__}: {error}")

    def _fail(self, job: Job, reason: str) -> None:
        self.channel.send(_pack(_FAILED, self.slot, job.sequence, job.version, reason))


def _run(
    worker: int,
    channel: socket.socket,
    segment: _Segment,
    problem: Packed,
    streams: Streams,
    slowness: Slowness,
    device: torch.device,
    compression: str,
) -> None:
    """The life of a worker process."""
    for ours in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(ours, signal.SIG_IGN)  # Ctrl-C is the server's: it ends its workers itself
    _die_with_parent()
    torch.set_num_threads(1)  # the workers are the parallelism
    threading.Thread(target=_end_with_server, args=(channel.dup(),), daemon=True).start()
    try:
        oracle = Oracle(problem.unpack(), streams, slowness, device, compression)
        channel.send(_pack(_READY))
        work(oracle, _ProcessLink(worker, channel, segment), time.sleep)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the server has gone


def _die_with_parent() -> None:
    """Let the system kill this process when the fork server ends, which ends with the server.

    A thread of this process cannot do that while a gradient is stuck in C code that holds the interpreter's lock. The
    fork server lives as long as anybody holds the other end of a pipe, which all workers get: they let go of it.
    """
    os.close(multiprocessing.forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    set_death_signal = 1  # PR_SET_PDEATHSIG
    if ctypes.CDLL(None, use_errno=True).prctl(set_death_signal, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def _end_with_server(channel: socket.socket) -> None:
    """End this process when the server is dead, even in the middle of a gradient that never ends."""
    hang_up = select.poll()
    hang_up.register(channel, 0)  # no event is asked for; a hang-up is always reported
    hang_up.poll()
    os._exit(1)
