"""Workers as processes of this machine; vectors travel through shared memory, headers through a socket.

Each worker has a segment of memory, of the GPU if all compute on one, with a query and a gradient for each job that it
may hold. Messages on a socket pair decide whose turn it is: the header of a gradient is sent after the gradient is
written, so that a worker that dies while it writes has sent nothing, and no torn gradient can be applied. A replacement
gets a new segment, which no other process can open. Nothing listens on a network.

The server waits for no process without a time limit. A worker waits for the server without one: the server kills those
that are silent for long, and a worker ends with its server.
"""

import ast
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
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lategrad.problems.problem import Problem
from lategrad.serve.compression import Compression
from lategrad.serve.engines.segment import END, FAILED, HEADER, JOB, READY, RESULT, GpuSegment, Header, Segment
from lategrad.serve.engines.transport import Disconnected, Event, Failed, Malformed, Ready, Result
from lategrad.serve.messages import Answer, Job, unusable
from lategrad.serve.settings import Settings
from lategrad.serve.shared_pickle import SharedPickle
from lategrad.serve.worker import Oracle, work
from lategrad.support.threads import limited
from lategrad.support.validation import require_device

fork_server = f"{__package__}.fork_server"  # not imported here: it is for the fork server alone
SERVER_SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)  # sent to all processes, and meant for one
_LARGEST = 16_384  # bytes of a message; longer texts are cut
START_TIMEOUT = 120.0  # seconds for the fork server to fork; it has to import torch first
_EXIT_TIMEOUT = 1.0  # seconds that a worker whose socket is closed has to end by itself; the server waits for it
_SHUTDOWN_TIMEOUT = 5.0  # seconds for all of them, at the end of a run
_REMEDY = """worker processes import it, and would start the run again. Put the call into a function, and at the end:

if __name__ == "__main__":
    main()

(or use engine="threads")"""


class _ProcessHandle:
    """The server's end of one worker process."""

    def __init__(self, member: int, worker: int, process: Any, channel: socket.socket,
                 segment: Segment | GpuSegment) -> None:  # fmt: skip
        self.member, self.worker = member, worker
        self.process, self.channel, self.pid, self._segment = process, channel, process.pid, segment
        self._slots = {query.data_ptr(): slot for slot, query in enumerate(segment.queries)}
        self._job_in: dict[int, int] = {}  # slot to sequence number

    def send(self, job: Job) -> None:
        slot = self._slots[job.query.data_ptr()]
        self._job_in[slot] = job.sequence
        self._segment.synchronize()
        self._write(Header(JOB, slot, sequence=job.sequence, version=job.version))

    def dismiss(self) -> None:
        self._write(Header(END))

    def _write(self, header: Header) -> None:
        with contextlib.suppress(OSError):  # it is dead, which its closed socket tells, or reads nothing and times out
            self.channel.send(header.pack(), socket.MSG_DONTWAIT)

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
        if len(message) < HEADER.size or flags & socket.MSG_TRUNC:
            return Malformed(self, f"its message of {len(message)} bytes is no message of a worker")
        header, has_text = Header.unpack(message), len(message) > HEADER.size
        if header.kind == READY and not has_text:
            return Ready(self, self._segment.queries)
        slot, sequence = header.slot, header.sequence
        if self._job_in.get(slot) != sequence:
            return Malformed(self, f"its message is about job {sequence} in slot {slot}, where that job is not")
        query = self._segment.queries[slot]
        if header.kind == RESULT and not has_text:
            return Result(self, header.version, sequence, self._segment.grads[slot], query, True, header.info)
        if header.kind == FAILED:
            return Failed(self, sequence, message[HEADER.size :].decode(errors="replace"), query)
        return Malformed(self, f"its message of kind {header.kind} and {len(message)} bytes is no message of a worker")

    def end(self, timeout: float = _EXIT_TIMEOUT) -> str:
        """Release what the worker held; returns how it ended."""
        self.channel.close()
        self.process.join(timeout=timeout)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(timeout=timeout)
        code = self.process.exitcode
        if code is None:  # the system does not end it, or the fork server does not report it
            return "killed, and not seen to end"
        self.process.close()
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


class Processes:
    """A transport to worker processes, which share the tensors of the problem.

    A fork server that has imported this library and done nothing else forks them: in milliseconds, safe with threads.
    """

    def __init__(self, problem: Problem, settings: Settings, compression: Compression,
                 is_stopping: Callable[[], bool]) -> None:  # fmt: skip
        _require_main_guard()
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__, fork_server])
        device = require_device("device", settings.device)
        server_device = require_device("server_device", settings.server_device)
        try:
            packed = SharedPickle(problem)
        except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:
            remedy = 'define it in a module, or use engine="threads"'
            raise ValueError(f"the problem cannot be sent to worker processes ({error}): {remedy}") from None
        self._parts = (packed, settings.streams, settings.slowness(), device, settings.compression)
        self._form = compression, 1 + settings.prefetch
        self._gpu = device if device.type == "cuda" and device == server_device else None
        self._stopping = is_stopping
        self._selector = selectors.DefaultSelector()
        self._handles: set[_ProcessHandle] = set()

    def start(self, member: int, worker: int) -> _ProcessHandle:
        """Fork a worker with a new segment; ``OSError`` if that cannot be done, or takes too long."""
        segment = Segment.create(*self._form) if self._gpu is None else GpuSegment.create(*self._form, self._gpu)
        name = f"lategrad-worker-{worker}"

        def fork() -> tuple[Any, socket.socket]:
            # A fork server that still imports torch would die of Ctrl-C; it unblocks what it ignores by then.
            resource_tracker.ensure_running()  # which, where it does start one, unblocks them here
            signal.pthread_sigmask(signal.SIG_BLOCK, SERVER_SIGNALS)
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs, contextlib.ExitStack() as undo:
                undo.callback(ours.close)
                parts = (worker, theirs, segment, *self._parts)
                process = self._context.Process(target=_run, args=parts, name=name, daemon=True)
                process.start()
                undo.pop_all()
            return process, ours

        limit = lambda: 0.0 if self._stopping() else START_TIMEOUT  # noqa: E731
        late = lambda forked: forked[1].close()  # noqa: E731 - a worker that starts too late then ends at once
        process, ours = limited(fork, limit, "the fork server has not forked a worker", undo=late)
        handle = _ProcessHandle(member, worker, process, ours, segment)
        self._handles.add(handle)
        self._selector.register(ours, selectors.EVENT_READ, handle)
        return handle

    def wait(self, timeout: float) -> Iterator[Event]:
        """At most one event of each worker, so that none is served twice before another once."""
        for key, _ in self._selector.select(timeout):
            handle: _ProcessHandle = key.data
            if (event := handle.read()) is None:
                self._selector.unregister(handle.channel)
                self._handles.discard(handle)
                yield Disconnected(handle, handle.end())
            else:
                yield event

    def close(self) -> None:
        for handle in self._handles:
            handle.kill()
        deadline = time.monotonic() + _SHUTDOWN_TIMEOUT
        for handle in self._handles:
            handle.end(max(0.0, deadline - time.monotonic()))
        self._handles.clear()
        self._selector.close()


def _require_main_guard() -> None:
    """Raise a ``RuntimeError`` if workers cannot import the main script, or an unguarded line of it starts the run."""
    main = sys.modules["__main__"]
    file, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    if file == "<stdin>":
        raise RuntimeError("the script comes from standard input, where worker processes cannot import it from: "
                           'save it as a file, or use engine="threads"')  # fmt: skip
    is_package = spec is not None and spec.name.endswith("__main__")  # python -m package: workers do not import it
    lines = [line for frame, line in traceback.walk_stack(None)
             if frame.f_code.co_name == "<module>" and frame.f_globals is vars(main)]  # fmt: skip
    if file is None or is_package or not lines:
        return
    try:
        script = ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return  # not the source of what runs
    for statement in script.body:
        if statement.lineno <= lines[0] <= (statement.end_lineno or 0):
            tests = [ast.unparse(node.test) for node in ast.walk(statement) if isinstance(node, ast.If)]
            if not any("__name__" in test for test in tests):
                raise RuntimeError(f"line {lines[0]} of {Path(file).name} starts worker processes: {_REMEDY}")


class ProcessLink:
    """The worker's end."""

    def __init__(self, worker: int, channel: socket.socket, segment: Segment | GpuSegment) -> None:
        self.worker, self.channel, self.slot, self._segment = worker, channel, 0, segment

    def receive(self) -> Job | None:
        if not (message := self.channel.recv(_LARGEST)):
            return None
        header = Header.unpack(message)
        self.slot = header.slot
        query = self._segment.queries[self.slot]
        return Job(self.worker, header.sequence, header.version, query) if header.kind == JOB else None

    def room(self) -> Tensor:
        return self._segment.grads[self.slot]  # the server has read what it held: a new job came for this slot

    def deliver(self, job: Job, answer: Answer) -> None:
        grad, target = answer.message, self.room()
        if objection := unusable(grad, len(target), target.dtype):
            self.fail(job, objection)
            return
        if grad.data_ptr() != target.data_ptr():
            target.copy_(grad)
        self._segment.synchronize()
        self.channel.send(Header(RESULT, self.slot, -1, job.sequence, job.version, *answer.info).pack())

    def fail(self, job: Job, reason: str) -> None:
        header = Header(FAILED, self.slot, sequence=job.sequence, version=job.version)
        self.channel.send((header.pack() + reason.encode())[:_LARGEST])


def _run(worker: int, channel: socket.socket, segment: Segment | GpuSegment, problem: SharedPickle,
         *parts: Any) -> None:  # fmt: skip
    """What a worker process runs; the other parts are those of its :class:`~lategrad.serve.worker.Oracle`."""
    for ours in SERVER_SIGNALS:
        signal.signal(ours, signal.SIG_IGN)  # Ctrl-C is the server's: it ends its workers itself
    _die_with_parent()
    torch.set_num_threads(1)  # the workers are the parallelism
    threading.Thread(target=_end_with_server, args=(channel.dup(),), daemon=True).start()
    try:
        oracle = Oracle(problem.load(), *parts)
        channel.send(Header(READY).pack())
        work(oracle, ProcessLink(worker, channel, segment), time.sleep)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the server has gone


def _die_with_parent() -> None:
    """Let the system kill this process when the fork server ends, which ends with the server.

    A thread of this process cannot do that while a gradient is stuck in C code that holds the interpreter's lock. The
    fork server lives as long as any process holds the other end of a pipe, which workers inherit and therefore close.
    """
    os.close(multiprocessing.forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    if ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL) != 0:  # 1 is PR_SET_PDEATHSIG
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def _end_with_server(channel: socket.socket) -> None:
    """End this process when the server is dead, even in the middle of a gradient that never ends."""
    hang_up = select.poll()
    hang_up.register(channel, 0)  # no event is asked for; a hang-up is always reported
    hang_up.poll()
    os._exit(1)
