"""The engine protocol: run the server and its workers, carry what they exchange, and report which have ended."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from lategrad.serve.checkpoints.checkpoint import Checkpoint
from lategrad.serve.jobs import Activity, Location
from lategrad.serve.observe.records import Look, Records, Telemetry
from lategrad.trace import Trace

LAST_EVALUATIONS = 5.0  # seconds after which evaluations time out when a run is stopped before its end
_MAX_RETURNS = 3  # times in a row that a run goes back to its last checkpoint because its state is not finite


class TrainingError(RuntimeError):
    """A run that cannot continue; its last checkpoint has been made."""


def check_returns(in_a_row: int, version: int) -> None:
    """Give up a run that has gone back to ``version`` too often without getting any further."""
    if in_a_row > _MAX_RETURNS:
        raise TrainingError(f"after update {version} the state became infinite or NaN {in_a_row} times in a row; the "
                            "last checkpoint is sound: resume from it with clip=..., max_norm_ratio=... or a smaller "
                            "lr")  # fmt: skip


class Ended(NamedTuple):
    """A member has ended."""

    member: int
    reason: str | None  # how it died; None if it had no more work
    delivered: bool = False  # whether a gradient came from it, as far as the engine knows


class Report(NamedTuple):
    """How the server and its workers are doing."""

    version: int
    done: bool
    activities: dict[int, Activity]  # of each member that has joined
    dropped: frozenset[int]  # workers that get no more work, because too many of their gradients in a row were refused
    last_refusal: str | None


class Engine(Protocol):
    """Runs a server and its workers; what it knows of ``version`` and ``records`` may be a moment old."""

    start_deadline: float  # seconds that a worker may take to start

    @property
    def version(self) -> int: ...

    @property
    def records(self) -> Records: ...

    def watch(self, look: Look) -> None:
        """Call ``look`` for every record from now on; before :meth:`begin`."""

    def request_stop(self) -> None:
        """Wait no longer for evaluations, nor for what may not come; may be called by a signal handler."""

    def begin(self, checkpoint: Checkpoint | None, check: Callable[[], None]) -> bool:
        """Start, and return whether a first checkpoint could be saved; ``check`` is called after the first record."""

    def start(self, member: int, worker: int) -> None: ...

    def location(self, member: int) -> Location | None:
        """Where a member runs; None before it has joined. May be called from another thread."""

    def release(self, member: int) -> None:
        """Issue no more jobs to a member; it ends after its present ones."""

    def kill(self, member: int) -> bool:
        """End a member by force; False if that is not possible, so that its end will not be reported."""

    def wait(self, timeout: float) -> list[Ended]:
        """Carry messages for about ``timeout`` seconds; returns which members have ended meanwhile."""

    def report(self, now: float, replaced: dict[str, int]) -> Report | None:
        """The report of that time; None while the server is away. ``replaced`` goes into the run's configuration."""

    def telemetry(self) -> tuple[Telemetry, Tensor]:
        """What monitors show, and the delays of all updates since the last call."""

    def room(self) -> float:
        """How many workers can run at once."""

    def save(self) -> None: ...

    def finish(self, at_once: bool) -> Trace | None:
        """The trace, or one up to the newest checkpoint if ``at_once``; None while a lost server is restarted."""

    def close(self) -> None: ...
