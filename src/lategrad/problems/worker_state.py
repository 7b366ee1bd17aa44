r"""Problems whose workers remember: a job is more than one gradient, and something stays with its worker afterwards.

A plain problem's worker computes one gradient and forgets it. A working problem says what a worker keeps from job to
job (the moments of its own optimizer), and how a job changes it:

========  =============================================================================================
memory    what a fresh worker has: a tree of tensors of shape ``(*runs, k)``, like the state of a rule
work      one job at a point, with a sample and the worker's memory: what it sends, and its memory after
steps     H, the most steps that a job takes; ``work`` may be told to take fewer
========  =============================================================================================

Both functions are pure, for many runs at once, as a gradient is. The memory never travels: whoever hosts a worker
keeps it, and it is gone with the worker. A host serves both kinds of problem with the same lines:
:func:`init_worker_state` when a worker joins and :func:`run_job` for each of its jobs.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, TypeGuard, runtime_checkable

from torch import Tensor

from lategrad.problems.problem import Problem

Count = Tensor | int
"""How many steps a job takes: one number for all runs, or a tensor that broadcasts to ``(*runs, 1)``."""


class Work(NamedTuple):
    """What a job gives."""

    grad: Tensor
    """What is sent to the server, in the place of a gradient, ``(*runs, dim)``."""
    memory: Any
    """What the worker keeps for its next job."""


@runtime_checkable
class StatefulProblem(Problem, Protocol):
    """A problem whose workers take several steps of their own and remember something from job to job."""

    @property
    def steps(self) -> int:
        """H, the most steps that a job takes."""
        ...

    def memory(self, x: Tensor) -> Any:
        """What a fresh worker keeps: a tree of tensors with the run dimensions of ``x``; the same whatever x is."""
        ...

    def work(self, x: Tensor, sample: Tensor, memory: Any, steps: Count | None = None) -> Work:
        """One job at ``x``, of ``steps`` steps (at least 1, at most and by default H); shapes as in ``gradient``."""
        ...


def is_stateful(problem: Problem) -> TypeGuard[StatefulProblem]:
    """Whether the problem's workers keep something from job to job."""
    return hasattr(problem, "work")


def init_worker_state(problem: Problem, x: Tensor) -> Any:
    """What a fresh worker keeps; of a plain problem, nothing."""
    return problem.memory(x) if is_stateful(problem) else ()


def run_job(problem: Problem, x: Tensor, sample: Tensor, memory: Any, steps: Count | None = None) -> Work:
    """One job: that of a working problem, or a plain problem's gradient.

    >>> import torch
    >>> from lategrad.problems import Quadratic
    >>> plain = Quadratic(dim=2, strong_convexity=1.0, noise=0.0)
    >>> run_job(plain, torch.ones(2), torch.zeros(2), init_worker_state(plain, torch.ones(2)))
    Work(grad=tensor([0.2929, 0.2929], dtype=torch.float64), memory=())
    """
    if is_stateful(problem):
        return problem.work(x, sample, memory, steps)
    return Work(problem.gradient(x, sample), memory)
