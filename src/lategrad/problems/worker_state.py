"""Problems whose workers have state: a job is more than one gradient, and its worker's optimizer state outlives it.

The state, such as the moments of a local optimizer, never travels: the host of a worker holds it, and it is lost with
the worker. Hosts serve plain problems too with :func:`init_worker_state` for each worker and :func:`run_job` for a job.
"""

from typing import Any, NamedTuple, Protocol, TypeGuard, runtime_checkable

from torch import Tensor

from lategrad.problems.problem import Problem

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
