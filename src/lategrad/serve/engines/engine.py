"""What an engine is: it runs the server and its workers, carries what they exchange, and tells who has ended."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from lategrad.serve.checkpoints.checkpoint import Checkpoint
from lategrad.serve.desk import Activity, Location
from lategrad.serve.observe.records import Records
from lategrad.serve.observe.telemetry import Telemetry
from lategrad.serve.observe.watch import Look
from lategrad.trace import Trace

LAST_EVALUATIONS = 5.0
"""Seconds that evaluations have when a run is stopped before its end."""


class TrainingError(RuntimeError):
    """A run that cannot go on; its last checkpoint has been made."""


MOST_RETURNS = 3
"""How often in a row a run goes back to its last checkpoint because its state is not finite."""


def poisoned_for_good(version: int) -> TrainingError:
    """What to raise when going back has not helped."""
    return TrainingError(
        f"after update {version} the state became infinite or NaN {MOST_RETURNS + 1} times in a row; the last "
        "checkpoint is sound: resume from it with clip=..., max_norm_ratio=... or smaller steps"
    )


class Ended(NamedTuple):
    """A member has come to its end."""

    member: int
    reason: str | None
    """How it died; None if it had no more work."""
    delivered: bool = False
    """Whether a gradient came from it, as far as that is known here."""


class Report(NamedTuple):
    """How the server and its workers are doing."""

    version: int
    """Updates made so far."""
    done: bool
    activities: dict[int, Activity]
    """Of each member that has joined."""
    dropped: frozenset[int]
    """Workers that get no more work, because too many of their gradients in a row were refused."""
    last_refusal: str | None


class Engine(Protocol):
    """Runs a server and its workers; the supervisor numbers the members that it has started."""

    start_deadline: float
    """Seconds that a worker may take to start."""

    @property
    def version(self) -> int:
        """Updates made so far, as far as is known here."""
        ...

    @property
    def records(self) -> Records:
        """What has been recorded so far, as far as is known here."""
        ...

    def watch(self, look: Look) -> None:
        """Call this for every record from now on; before :meth:`begin`."""
        ...

    def request_stop(self) -> None:
        """The run is to end: wait no longer for evaluations, nor for what may not come. May be called by a signal
        handler."""
        ...

    def begin(self, checkpoint: Checkpoint | None) -> None:
        """Start the server, from a checkpoint if there is one."""
        ...

    def start(self, member: int, worker: int) -> None:
        """Start a worker."""
        ...

    def location(self, member: int) -> Location | None:
        """Where a member runs; None before it has joined. May be called from another thread."""
        ...

    def let_go(self, member: int) -> None:
        """A member's present gradients are its last; it then ends by itself."""
        ...

    def kill(self, member: int) -> bool:
        """End a member by force; False if that is not possible, so that nobody will tell of its end."""
        ...

    def wait(self, timeout: float) -> list[Ended]:
        """Carry what there is to carry, for about so many seconds; who has ended meanwhile."""
        ...

    def report(self, now: float, replaced: dict[str, int]) -> Report | None:
        """How things were at that time; None while the server is away. The run's configuration notes ``replaced``."""
        ...

    def telemetry(self) -> tuple[Telemetry, Tensor]:
        """What monitors show, and the delays of all updates since the last time."""
        ...

    def room(self) -> float:
        """How many workers there is room for."""
        ...

    def save(self) -> None:
        """Make a checkpoint now, if there is where to."""
        ...

    def finish(self, at_once: bool) -> Trace | None:
        """What happened; None if the server was lost at that moment, and is restarted.

        Args:
            at_once: not to wait for a restart: what happened up to the newest checkpoint will do.
        """
        ...

    def close(self) -> None:
        """End all workers and give back all that was taken."""
        ...
