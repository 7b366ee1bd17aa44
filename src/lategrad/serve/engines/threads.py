"""Workers as threads of this process: for notebooks and tests, and for problems that cannot be pickled."""

import queue
import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait

import torch

from lategrad.problems.problem import Problem
from lategrad.serve.engines.transport import Disconnected, Event, Failed, Ready, Result
from lategrad.serve.messages import Answer, Job
from lategrad.serve.settings import Settings
from lategrad.serve.worker import Oracle, work
from lategrad.support.threads import run_in_thread

_SHUTDOWN_TIMEOUT = 1.0  # seconds


class _ThreadHandle:
    """A worker thread: its inbox, the server's end and the worker's end."""

    def __init__(self, member: int, worker: int, events: queue.SimpleQueue[Event]) -> None:
        self.member, self.worker = member, worker
        self.pid: int | None = None
        self._events = events
        self._inbox: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.leaving = threading.Event()

    def send(self, job: Job | None) -> None:
        self._inbox.put(job)

    def dismiss(self) -> None:
        self.leaving.set()
        self._inbox.put(None)

    def kill(self) -> bool:
        self.dismiss()  # if it ever returns, its gradient is used, and then it ends
        return False

    def receive(self) -> Job | None:
        return self._inbox.get()

    def room(self) -> None:
        return None  # the server reads a gradient while the worker computes the next one

    def deliver(self, job: Job, answer: Answer) -> None:
        self._events.put(Result(self, job.version, job.sequence, answer.message, None, False, answer.info))

    def fail(self, job: Job, reason: str) -> None:
        self._events.put(Failed(self, job.sequence, reason, None))


class Threads:
    """A transport to threads; they share the problem, and torch's threads."""

    def __init__(self, problem: Problem, settings: Settings) -> None:
        self._jobs = 1 + settings.prefetch
        device = torch.device(settings.device)
        self._parts = (problem, settings.streams, settings.slowness(), device, settings.compression)
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._all: list[tuple[_ThreadHandle, Future[None]]] = []

    def start(self, member: int, worker: int) -> _ThreadHandle:
        handle = _ThreadHandle(member, worker, self._events)

        def run() -> None:
            oracle = Oracle(*self._parts)
            self._events.put(Ready(handle, [None] * self._jobs))
            work(oracle, handle, handle.leaving.wait)

        def report(ended: Future[None]) -> None:
            error = ended.exception()
            reason = "it has finished" if error is None else f"{type(error).__name__}: {error}"
            if error is not None:
                error.__traceback__ = None  # whose frames would keep the worker's problem in memory
            self._events.put(Disconnected(handle, reason))

        thread = run_in_thread(run, f"lategrad-worker-{worker}")
        thread.add_done_callback(report)
        self._all.append((handle, thread))
        return handle

    def wait(self, timeout: float) -> Iterator[Event]:
        try:
            yield self._events.get(timeout=timeout)
        except queue.Empty:
            return
        for _ in range(self._events.qsize()):  # not those that come while these are handled
            yield self._events.get_nowait()

    def close(self) -> None:
        for handle, _ in self._all:
            handle.dismiss()
        wait([thread for _, thread in self._all], timeout=_SHUTDOWN_TIMEOUT)
