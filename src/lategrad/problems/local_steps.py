"""Local steps: a worker takes several steps of an optimizer of its own, and sends where they led (as in DiLoCo)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lategrad.problems.inner import InnerOptimizer
from lategrad.problems.problem import Problem, as_problem
from lategrad.problems.worker_state import Count, Work, is_stateful
from lategrad.registry import as_rule
from lategrad.rules.blocks import fill_in
from lategrad.rules.rule import AnyRule, as_dtype
from lategrad.support.runs import map_tensors, spread, tensors
from lategrad.support.validation import require, require_number

_PASSED_ON = ("blocks", "fingerprint", "measure", "module_at", "name", "on_device", "test_loss")
"""What else a problem may have that means the same with local steps."""


class LocalSteps:
    r"""Any problem, with a job of H steps: its "gradient" at x is x minus the point that they lead to.

    The worker starts at the query, :math:`y_0 = x`, and takes the steps of its own optimizer on one sample of the
    problem each. What it sends, the *pseudo-gradient*, points from where it came to to where it began:

    .. math:: y_h = \mathrm{inner}(y_{h-1}, \nabla f(y_{h-1}; z_h)), \quad h = 1, \dots, H; \qquad
        \Delta = x - y_H \quad\text{or, scaled,}\quad \frac{x - y_H}{H\, \mathrm{lr}}

    A server rule is then the outer optimizer: with ``lategrad.SGD(lr=1.0)`` it goes where the worker went. The inner
    optimizer's state (its moments, its step count) stays with the worker from job to job; its iterate is the query.

    Samples: job k uses the problem's samples number kH, ..., kH + H - 1; one with fewer steps the first ones of those.
    Loss, accuracy and the other measures are the problem's own.

    Args:
        problem: the problem whose gradients the worker takes.
        steps: H, the steps of a job; the most of them where hosts let slow workers take fewer.
        inner: the worker's optimizer, as a rule or as a text such as "sgd:lr=0.1", "sgd-momentum:lr=0.1",
            "adamw:lr=0.001" or "muon:lr=0.01". Any rule that has no averages and no tickets will do: its query must be
            its iterate, and nothing else in its state may depend on where it starts.
        scaled: divide by the number of steps and by the inner ``lr``: for inner SGD this is the mean of the gradients
            along the way, so that the server's step keeps the size that it has for plain gradients.
        seconds: in a real training, how long a job is to take: a worker takes as many steps as fit, by the speed of its
            last job, from 1 to H; the server is told how many. By default every job has H steps. Simulated workers have
            clocks of their own.

    >>> import lategrad as lg
    >>> problem = lg.problems.LocalSteps(lg.problems.Quadratic(noise=0.1), steps=20, inner="adamw:lr=0.01")
    >>> trace = lg.simulate(problem, lg.SGD(lr=0.2), delays=3, steps=200)
    >>> bool(trace.loss[-1] < 0.1 * trace.loss[0])
    True

    Reference: A. Douillard et al., DiLoCo: distributed low-communication training of language models, 2023.
    """

    def __init__(
        self,
        problem: Problem,
        steps: int,
        inner: AnyRule[Any] | str = "adamw:lr=0.001",
        scaled: bool = False,
        seconds: float | None = None,
    ) -> None:
        self.problem = as_problem(problem)
        require("problem", problem, not is_stateful(self.problem), "a plain problem: this one has local steps already")
        is_count = isinstance(steps, int) and not isinstance(steps, bool)
        require("steps", steps, is_count and steps >= 1, "an integer >= 1")
        require("scaled", scaled, isinstance(scaled, bool), "True or False")
        if seconds is not None:
            require_number("seconds", seconds, low=0, strict=True)
        self.steps, self.scaled, self.seconds = steps, scaled, seconds
        self.inner = fill_in(as_rule(inner), getattr(problem, "blocks", None))
        self._inner = InnerOptimizer(self.inner, self.start())
        require("inner", inner, hasattr(self.inner, "lr") or not scaled, "a rule with an lr, to be scaled by it")
        self.dim = problem.dim
        self._of_one_sample = problem.samples(0, 0, 1).dim() - 1  # dimensions

    def __getattr__(self, name: str) -> Any:
        if name in _PASSED_ON:
            return getattr(self.problem, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def smoothness(self) -> float | None:
        """The problem's."""
        return self.problem.smoothness

    @property
    def strong_convexity(self) -> float | None:
        """The problem's."""
        return self.problem.strong_convexity

    def start(self) -> Tensor:
        """The problem's, for every run that the inner rule has a hyper-parameter for."""
        return spread(self.inner, self.problem.start())

    def samples(self, seed: int, first: int, count: int) -> Tensor:
        """H samples of the problem for each job, ``(count, H, ...)``."""
        of_steps = self.problem.samples(seed, first * self.steps, count * self.steps)
        jobs: Tensor = of_steps.unflatten(0, (count, self.steps))
        return jobs

    @property
    def samples_of_shard(self) -> Callable[[int, int, int, int, int], Tensor]:
        """The same from a part of the data, if the problem has parts."""
        of_problem: Callable[[int, int, int, int, int], Tensor] = self.problem.samples_of_shard  # type: ignore[attr-defined]

        def of_jobs(seed: int, first: int, count: int, shard: int, shards: int) -> Tensor:
            of_steps = of_problem(seed, first * self.steps, count * self.steps, shard, shards)
            jobs: Tensor = of_steps.unflatten(0, (count, self.steps))
            return jobs

        return of_jobs

    def labels(self, samples: Tensor) -> Tensor | None:
        """The classes of all rows of a job, ``(count, H * batch)``."""
        of_steps = self.problem.labels(samples.flatten(0, 1))
        return None if of_steps is None else of_steps.unflatten(0, (len(samples), self.steps)).flatten(1)

    def memory(self, x: Tensor) -> Any:
        """The inner optimizer's first state, without its iterate."""
        return self._inner.memory(x)

    def work(self, x: Tensor, sample: Tensor, memory: Any, steps: Count | None = None) -> Work:
        """The inner steps; the number of them may be a tensor with one for each run."""
        taken = self.steps if steps is None else steps

        def gradient(y: Tensor, h: int) -> Tensor:
            return self.problem.gradient(y, sample.select(sample.dim() - self._of_one_sample - 1, h))

        if isinstance(taken, int):
            require("steps", taken, 1 <= taken <= self.steps, f"from 1 to {self.steps}")
            end, kept = self._inner.walk(x, memory, gradient, taken)
        else:
            end, kept = self._walk_as_far(x, memory, gradient, taken)
        moved = x - end
        if self.scaled:
            exactly = taken.double() if isinstance(taken, Tensor) else taken
            moved = moved / as_dtype(exactly * self.inner.lr, moved)  # type: ignore[union-attr]
        return Work(moved, kept)

    def _walk_as_far(
        self, x: Tensor, memory: Any, gradient: Callable[[Tensor, int], Tensor], taken: Tensor
    ) -> tuple[Tensor, Any]:
        """Each run takes as many steps as its count says, and then stays where it is."""
        inner, state = self._inner, self._inner.start(x, memory)
        for h in range(self.steps):
            state = _where(taken > h, inner.step(state, gradient(inner.at(state), h)), state)
        return inner.at(state), inner.kept(state)

    def gradient(self, x: Tensor, sample: Tensor) -> Tensor:
        """What a fresh worker sends after all H steps."""
        return self.work(x, sample, self.memory(x)).grad

    def loss(self, x: Tensor) -> Tensor:
        """The problem's."""
        return self.problem.loss(x)

    def accuracy(self, x: Tensor) -> Tensor | None:
        """The problem's."""
        return self.problem.accuracy(x)

    def to(self, device: torch.device | str) -> LocalSteps:
        """The same with the problem's data, and the inner rule's numbers, on a device."""
        inner = map_tensors(lambda leaf: leaf.to(device), self.inner)
        return LocalSteps(self.problem.to(device), self.steps, inner, self.scaled, self.seconds)

    def __repr__(self) -> str:
        timed = "" if self.seconds is None else f", seconds={self.seconds:g}"
        return f"LocalSteps({self.problem!r}, steps={self.steps}, inner={self.inner!r}, scaled={self.scaled}{timed})"


def _where(condition: Tensor, then: Any, otherwise: Any) -> Any:
    """The one state or the other, for each run."""
    others = iter(tensors(otherwise))
    return map_tensors(lambda leaf: torch.where(condition, leaf, next(others)), then)
