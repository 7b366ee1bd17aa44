"""What an engine is: it starts workers, carries jobs to them and gradients back, and notices when they die."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from lategrad.serve.server import Job


class Member(Protocol):
    """One worker that was started; a replacement under the same number is another member."""

    @property
    def worker(self) -> int:
        """Its number, which its stream of samples belongs to."""
        ...

    @property
    def pid(self) -> int | None:
        """Of its process, if it has one of its own."""
        ...

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

    member: Member
    queries: Sequence[Tensor | None]
    """Where the queries of its first jobs are to be written, one for each; None for fresh memory."""


class Arrived(NamedTuple):
    """A gradient is back; it may be overwritten once the member gets its next job."""

    member: Member
    version: int
    sequence: int
    grad: Tensor
    query: Tensor | None
    """Where the query of its next job is to be written; None for fresh memory."""
    checked: bool
    """Whether the worker has found it usable; the worker's own core is the better place for that."""


class Failed(NamedTuple):
    """A worker could not deliver a gradient, and says why."""

    member: Member
    sequence: int
    reason: str
    query: Tensor | None
    """Where the query of its next job is to be written; None for fresh memory."""


class Lost(NamedTuple):
    """A worker is dead."""

    member: Member
    reason: str


Event = Ready | Arrived | Failed | Lost


class Engine(Protocol):
    """Starts workers and carries what they exchange with the server."""

    def start(self, worker: int) -> Member:
        """Start a worker; it reports when it is ready."""
        ...

    def wait(self, timeout: float) -> Iterator[Event]:
        """What has happened, waited for at most so many seconds."""
        ...

    def close(self) -> None:
        """End all workers and give back all that was taken."""
        ...
