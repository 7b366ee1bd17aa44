"""How a server in this process reaches its workers: what it gets from them are events, in turn for jobs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from lategrad.serve.messages import Job, Made


class WorkerHandle(Protocol):
    """The server's end of one worker."""

    member: int
    worker: int
    pid: int | None

    def send(self, job: Job) -> None:
        """Give it a job, whose query lies where the event before it said; if it is dead by now, that is noticed."""
        ...

    def dismiss(self) -> None:
        """Let it go: it has handed back its last gradient."""
        ...

    def kill(self) -> bool:
        """End it by force; whether that is possible (a thread cannot be ended, only abandoned)."""
        ...


class Ready(NamedTuple):
    """A worker has started and waits for its first jobs."""

    handle: WorkerHandle
    queries: Sequence[Tensor | None]
    """Where the queries of its first jobs are to be written, one for each; None for fresh memory."""


class Arrived(NamedTuple):
    """A gradient is back; it may be overwritten once the worker gets its next job."""

    handle: WorkerHandle
    version: int
    sequence: int
    grad: Tensor
    query: Tensor | None
    """Where the query of its next job is to be written; None for fresh memory."""
    checked: bool
    """Whether the worker has found it usable; the worker's own core is the better place for that."""
    made: Made
    """How the worker made it."""


class Failed(NamedTuple):
    """A worker could not deliver a gradient, and says why."""

    handle: WorkerHandle
    sequence: int
    reason: str
    query: Tensor | None
    """Where the query of its next job is to be written; None for fresh memory."""


class Garbled(NamedTuple):
    """A worker has sent something that no worker sends."""

    handle: WorkerHandle
    reason: str


class Lost(NamedTuple):
    """A worker has ended."""

    handle: WorkerHandle
    reason: str


Event = Ready | Arrived | Failed | Garbled | Lost


class Transport(Protocol):
    """Starts workers and carries what they exchange with the server."""

    def start(self, member: int, worker: int) -> WorkerHandle:
        """Start a worker; it reports when it is ready."""
        ...

    def wait(self, timeout: float) -> Iterator[Event]:
        """What has happened, waited for at most so many seconds."""
        ...

    def close(self) -> None:
        """End all workers and give back all that was taken."""
        ...
