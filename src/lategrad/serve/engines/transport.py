"""How a server in this process reaches its workers: it receives events from them and sends them jobs."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from lategrad.serve.messages import Job, JobInfo


class WorkerHandle(Protocol):
    """The server's end of one worker."""

    member: int
    worker: int
    pid: int | None

    def send(self, job: Job) -> None:
        """Send a job, whose query lies where the event before it said; a dead worker is noticed later."""

    def dismiss(self) -> None: ...

    def kill(self) -> bool:
        """End the worker by force; whether that is possible (a thread can only be abandoned)."""


class Ready(NamedTuple):
    """A worker has started and waits for its first jobs."""

    handle: WorkerHandle
    queries: Sequence[Tensor | None]  # where to write the queries of its first jobs, one for each; None for new memory


class Result(NamedTuple):
    """A gradient has arrived; it may be overwritten once the worker gets its next job."""

    handle: WorkerHandle
    version: int
    sequence: int
    grad: Tensor
    query: Tensor | None  # where to write the query of its next job; None for new memory
    checked: bool  # whether the worker has found it usable, which costs the server nothing
    info: JobInfo


class Failed(NamedTuple):
    """A worker could not compute a gradient."""

    handle: WorkerHandle
    sequence: int
    reason: str
    query: Tensor | None


class Malformed(NamedTuple):
    """A worker has sent a message that cannot be read."""

    handle: WorkerHandle
    reason: str


class Disconnected(NamedTuple):
    """A worker has ended."""

    handle: WorkerHandle
    reason: str


Event = Ready | Result | Failed | Malformed | Disconnected


class Transport(Protocol):
    """Starts workers and carries what they exchange with the server."""

    def start(self, member: int, worker: int) -> WorkerHandle: ...

    def wait(self, timeout: float) -> Iterator[Event]:
        """The events of at most ``timeout`` seconds."""

    def close(self) -> None: ...
