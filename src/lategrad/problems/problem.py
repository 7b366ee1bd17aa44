r"""The contract of a problem: an objective with a stochastic gradient oracle.

The objective is :math:`f(x) = E_z[f(x; z)]`. A *sample* z is what the oracle draws for one gradient: the rows of a
minibatch, or a noise vector. Samples are drawn apart from the gradient by ``samples(seed, first, count)``, a pure
function: the k-th sample of a stream is the same on any device and in any order of access. So the simulator, a worker
process and a replay agree on them.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeGuard, TypeVar, cast, runtime_checkable

import torch
from torch import Tensor

from lategrad.support.validation import require

Self = TypeVar("Self", bound="Problem")


@runtime_checkable
class Problem(Protocol):
    """A stochastic objective over vectors of length ``dim``, for many runs at once.

    A problem may have further members, which hosts use if they exist:

    - ``test_loss(x)``: the loss on test data, which is recorded; shape as ``loss``.
    - ``measure(x)``: all that is recorded, in one call, as ``Measures``.
    - ``samples_of_shard(seed, first, count, shard, shards)``: samples from one shard of the data, for
      ``lg.train(data_shards=...)``.
    - ``blocks``: the place of each tensor of a model in the vector (:class:`~lategrad.Blocks`), for rules with shapes.
    - ``gradient_of_one(x, sample, out)``: the gradient at one vector, written into ``out``; saves workers a copy.
    - ``tensor_shapes``: names and shapes of the tensors in the vector, for ``lategrad export``, where there are no
      blocks.
    - ``module_at(x)``: the trained ``torch.nn.Module`` with the parameters of a vector.
    - ``fingerprint()``: a text that differs between objectives; guards resumed runs and replays.
    - ``gradient_source()``: None, or C++ code of ``gradient(const i64* data, const void* x, const i64* sample, void*
      grad)`` for one run, and the tensors whose addresses are ``data``, the first of them in the dtype of x. A
      simulation on the CPU then makes no calls of torch.
    - ``on_device``: False if a gradient needs more than its device (data on disk, a seeded generator), so that a GPU
      cannot repeat it as a graph, and ``simulate`` does not compile it by default.
    - ``local_steps``, ``init_worker_state``, ``run_job``: workers have state, see
      ``lategrad.problems.problem.StatefulProblem``; with ``seconds``, the target duration of a job, and
      ``jobs_at_once``, the most jobs that a simulation batches.
    """

    @property
    def dim(self) -> int:
        """Length of the parameter vector."""

    def start(self) -> Tensor:
        """The usual first point, shape ``(dim,)``; its dtype and device are the problem's."""

    def samples(self, seed: int, first: int, count: int) -> Tensor:
        """Samples number ``first, ..., first + count - 1`` (from 0) of a stream; on the CPU."""

    def labels(self, samples: Tensor) -> Tensor | None:
        """The classes of the rows in samples, ``(count, batch)``; None where there are no classes."""

    def gradient(self, x: Tensor, sample: Tensor) -> Tensor:
        """Stochastic gradients at ``x`` of shape ``(*streams, *runs, dim)``.

        ``sample`` has shape ``(*streams, ...)``: runs that share a stream share the sample.
        """

    def loss(self, x: Tensor) -> Tensor:
        """The objective f itself (all the training data), float64, shape ``(*runs, 1)``."""

    def accuracy(self, x: Tensor) -> Tensor | None:
        """Share of the test data classified correctly, float64 ``(*runs, 1)``; None where meaningless."""

    @property
    def smoothness(self) -> float | None:
        """The paper's L: a Lipschitz constant of the gradient; None if unknown."""

    @property
    def strong_convexity(self) -> float | None:
        """The paper's H, None if unknown; 0 for a convex objective that is not strongly convex."""

    def to(self: Self, device: torch.device | str) -> Self:
        """The same problem with its data on a device."""


class Measures(NamedTuple):
    """What is recorded at a point: float64 tensors of shape ``(*runs, 1)``."""

    loss: Tensor
    accuracy: Tensor | None = None
    test_loss: Tensor | None = None
    metrics: Mapping[str, Tensor] = MappingProxyType({})  #: The user's own, by name.
    val_loss: Tensor | None = None

    def by_name(self) -> dict[str, Tensor]:
        """All values that are there; the user's own follow."""
        own = {"loss": self.loss, "accuracy": self.accuracy, "test_loss": self.test_loss, "val_loss": self.val_loss}
        return {name: value for name, value in {**own, **self.metrics}.items() if value is not None}


RESERVED_NAMES = ("loss", "test_loss", "val_loss", "accuracy", "step", "steps", "excess_loss", "seed", "delay",
                  "record", "seconds", "workers", "drift", "rule", "refused", "updates_per_second", "delay_mean",
                  "delay_p95", "delay_max", "bytes_up", "bytes_down", "memories_lost", "threads")  # fmt: skip


def require_free_names(metrics: Iterable[object]) -> None:
    """Refuse metrics whose names are columns of traces and logs."""
    for name in metrics:
        free = isinstance(name, str) and name not in RESERVED_NAMES
        require("the name of a metric", name, free, f"a text other than {', '.join(RESERVED_NAMES)}")


def measure(problem: Problem, x: Tensor) -> Measures:
    """All that is recorded of a problem at points ``(*runs, dim)``.

    >>> from lategrad.problems import Quadratic
    >>> measure(Quadratic(dim=4, smoothness=2.0, strong_convexity=1.0), torch.zeros(4)).loss.item()
    0.75
    """
    if hasattr(problem, "measure"):
        measures: Measures = problem.measure(x)
        require_free_names(measures.metrics)
        return measures
    test_loss = problem.test_loss(x) if hasattr(problem, "test_loss") else None
    return Measures(problem.loss(x), problem.accuracy(x), test_loss)


def tensor_shapes(problem: Problem) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that the problem's vector consists of."""
    if hasattr(problem, "blocks"):
        return {block.name: block.shape for block in problem.blocks.parts}
    return getattr(problem, "tensor_shapes", {"output": (problem.dim,)})


_REQUIRED = ("dim", "start", "samples", "gradient", "loss", "accuracy")


def as_problem(problem: Any) -> Problem:
    """The problem itself; anything else raises a ValueError that says what to do."""
    remedy = "lategrad.problems.ModuleProblem(module, data) makes a problem of a module"
    if isinstance(problem, type):
        raise ValueError(f"problem must be a problem, got the class {problem.__name__}: call it, "
                         f"{problem.__name__}(...)")  # fmt: skip
    if isinstance(problem, torch.utils.data.DataLoader | torch.utils.data.Dataset | torch.nn.Module):
        raise ValueError(f"problem must be a problem, got a {type(problem).__name__}: {remedy}")
    if missing := [member for member in _REQUIRED if not hasattr(problem, member)]:
        raise ValueError(f"problem must be a problem, got {type(problem).__name__}, which has no "
                         f"{', '.join(missing)}; {remedy}")  # fmt: skip
    return cast(Problem, problem)


# ---- Workers with a state: a job is more than one gradient, and its worker's optimizer state outlives it
#
# The state, such as the moments of a local optimizer, never travels: the host of a worker holds it, and it is lost with
# the worker. Hosts serve plain problems too with init_worker_state for each worker and run_job for a job.

Count = Tensor | int
"""A number of local steps: one for all runs, or a tensor that broadcasts to ``(*runs, 1)``."""


class JobResult(NamedTuple):
    """The outcome of a job."""

    grad: Tensor  #: The message to the server, in place of a gradient, ``(*runs, dim)``.
    state: Any  #: The worker's state after the job.


@runtime_checkable
class StatefulProblem(Problem, Protocol):
    """A problem whose workers have a state; both methods are pure and serve many runs at once, as ``gradient`` does."""

    @property
    def local_steps(self) -> int:
        """H, the maximum number of local steps in a job."""

    def init_worker_state(self, x: Tensor) -> Any:
        """State of a new worker: a tree of tensors with the run dimensions of ``x``, independent of its values."""

    def run_job(self, x: Tensor, sample: Tensor, state: Any, local_steps: Count | None = None) -> JobResult:
        """One job at ``x`` of 1 to H ``local_steps`` (H by default); shapes as in ``gradient``."""


def is_stateful(problem: Problem) -> TypeGuard[StatefulProblem]:
    """Whether the problem's workers have a state."""
    return hasattr(problem, "run_job")


def init_worker_state(problem: Problem, x: Tensor) -> Any:
    """State of a new worker; empty for a plain problem."""
    return problem.init_worker_state(x) if is_stateful(problem) else ()


def run_job(problem: Problem, x: Tensor, sample: Tensor, state: Any, local_steps: Count | None = None) -> JobResult:
    """One job of a stateful problem, or one gradient of a plain problem.

    >>> import torch
    >>> from lategrad.problems import Quadratic
    >>> plain = Quadratic(dim=2, strong_convexity=1.0, noise=0.0)
    >>> run_job(plain, torch.ones(2), torch.zeros(2), init_worker_state(plain, torch.ones(2)))
    JobResult(grad=tensor([0.2929, 0.2929], dtype=torch.float64), state=())
    """
    if is_stateful(problem):
        return problem.run_job(x, sample, state, local_steps)
    return JobResult(problem.gradient(x, sample), state)
