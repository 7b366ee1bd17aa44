"""The engine protocol: run the server and its workers, carry what they exchange, and report which have ended."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from lategrad.serve.checkpoints.checkpoint import Checkpoint
from lategrad.serve.jobs import Activity, Location
from lategrad.serve.observe.records import Records
from lategrad.serve.observe.telemetry import Telemetry
from lategrad.serve.observe.watch import Look
from lategrad.trace import Trace

LAST_EVALUATIONS = 5.0
"""Seconds after which evaluations time out when a run is stopped before its end."""


class TrainingError(RuntimeError):
    """A run that cannot continue; its last checkpoint has been made."""


MOST_RETURNS = 3
"""How often in a row a run goes back to its last checkpoint because its state is not finite."""


def too_many_returns(version: int) -> TrainingError:
    """The error to raise when going back has not helped."""
    return TrainingError(
        f"after update {version} the state became infinite or NaN {MOST_RETURNS + 1} times in a row; the last "
        "checkpoint is sound: resume from it with clip=..., max_norm_ratio=... or a smaller lr"
    )


class Ended(NamedTuple):
    """A member has ended."""

    member: int
    reason: str | None
    """How it died; None if it had no more work."""
    delivered: bool = False
    """Whether a gradient came from it, as far as the engine knows."""


class Report(NamedTuple):
    """How the server and its workers are doing."""

    version: int
    done: bool
    activities: dict[int, Activity]
    """Of each member that has joined."""
    dropped: frozenset[int]
    """Workers that get no more work, because too many of their gradients in a row were refused."""
    last_refusal: str | None


class Engine(Protocol):
    """Runs a server and its workers; the supervisor numbers the members that it starts."""

    start_deadline: float
    """Seconds that a worker may take to start."""

    @property
    def version(self) -> int:
        """Updates made so far, as far as the engine knows."""
        ...

    @property
    def records(self) -> Records:
        """The records so far, as far as the engine knows."""
        ...

    def watch(self, look: Look) -> None:
        """Call ``look`` for every record from now on; before :meth:`begin`."""
        ...

    def request_stop(self) -> None:
        """Wait no longer for evaluations, nor for what may not come; may be called by a signal handler."""
        ...

    def begin(self, checkpoint: Checkpoint | None) -> None:
        """Start the server, from a checkpoint if there is one."""
        ...

    def start(self, member: int, worker: int) -> None: ...

    def location(self, member: int) -> Location | None:
        """Where a member runs; None before it has joined. May be called from another thread."""
        ...

    def release(self, member: int) -> None:
        """Issue no more jobs to a member; it ends after its present ones."""
        ...

    def kill(self, member: int) -> bool:
        """End a member by force; False if that is not possible, so that its end will not be reported."""
        ...

    def wait(self, timeout: float) -> list[Ended]:
        """Carry messages for about ``timeout`` seconds; returns which members have ended meanwhile."""
        ...

    def report(self, now: float, replaced: dict[str, int]) -> Report | None:
        """The report of that time; None while the server is away. ``replaced`` goes into the run's configuration."""
        ...

    def telemetry(self) -> tuple[Telemetry, Tensor]:
        """What monitors show, and the delays of all updates since the last call."""
        ...

    def room(self) -> float:
        """How many workers can run at once."""
        ...

    def save(self) -> None:
        """Make a checkpoint now, if the run has a folder."""
        ...

    def finish(self, at_once: bool) -> Trace | None:
        """The trace; None if the server was lost at that moment and is being restarted.

        Args:
            at_once: do not wait for a restart: a trace up to the newest checkpoint will do.
        """
        ...

    def close(self) -> None:
        """End all workers and release all resources."""
        ...
