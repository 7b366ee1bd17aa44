"""Local steps: a worker takes several steps of its own optimizer and sends their sum (as in DiLoCo)."""

import threading
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from lategrad.execution import StateStep, in_place
from lategrad.execution.backend import EXPECTED_STEPS, compiling_pays
from lategrad.problems.problem import Count, JobResult, Problem, as_problem, is_stateful
from lategrad.registry import as_rule
from lategrad.rules.blocks import fill_in
from lategrad.rules.rule import AnyRule, Rule, as_dtype, needs_ticket
from lategrad.support.runs import map_tensors, owned, spread, tensors
from lategrad.support.validation import require, require_count, require_number, require_switch

_FORWARDED = ("accuracy", "blocks", "fingerprint", "load_best", "loss", "measure", "module_at", "name", "on_device",
              "smoothness", "strong_convexity", "tensor_shapes", "test_loss")  # fmt: skip
"""Members of the inner problem that mean the same with local steps."""

_TRACING = threading.Lock()
"""Workers may be threads of one process, and torch traces one function at a time."""

Gradient = Callable[[Tensor, int], Tensor]
"""The gradient at a point for local step 0, 1, ..."""


class LocalSteps:
    r"""A problem whose jobs take H local steps: its "gradient" at x is x minus the point that they lead to.

    The worker starts at the query, :math:`y_0 = x`, and takes each step of its own optimizer on one sample of the
    problem. It sends the *pseudo-gradient*, which points from its last point back to the first:

    .. math:: y_h = \mathrm{inner}(y_{h-1}, \nabla f(y_{h-1}; z_h)), \quad h = 1, \dots, H; \qquad
        \Delta = x - y_H \quad\text{or, scaled,}\quad \frac{x - y_H}{H\, \mathrm{lr}}

    A server rule is then the outer optimizer: ``lategrad.SGD(lr=1.0)`` moves to the worker's last point. The inner
    optimizer's state (moments, step count) stays with the worker from job to job; its iterate is the query.

    Samples: job k uses samples kH, ..., kH + H - 1 of the problem; one with fewer steps uses the first of those.
    Loss, accuracy and the other measures are the problem's own.

    Args:
        problem: the problem whose gradients the worker takes.
        local_steps: H, the local steps of a job; their maximum where hosts let slow workers take fewer.
        inner: the worker's optimizer, as a rule or as a text such as "sgd:lr=0.1", "sgd-momentum:lr=0.1",
            "adamw:lr=0.001" or "muon:lr=0.01". It must be a rule without averages and tickets: its query is its
            iterate, and nothing else in its state depends on where it starts.
        scaled: divide by the number of local steps and by the inner ``lr``. For inner SGD this is the mean of the
            gradients along the way, so that the server's lr keeps the size that it has for plain gradients.
        seconds: in real training, the target duration of a job: a worker takes 1 to H steps, as many as fit at the
            speed of its last job, and tells the server how many. By default every job has H steps. Simulated workers
            have their own clocks.

    >>> import lategrad as lg
    >>> problem = lg.problems.LocalSteps(lg.problems.Quadratic(noise=0.1), local_steps=20, inner="adamw:lr=0.01")
    >>> trace = lg.simulate(problem, lg.SGD(lr=0.2), delays=3, steps=200)
    >>> bool(trace.loss[-1] < 0.1 * trace.loss[0])
    True

    Reference: A. Douillard et al., DiLoCo: distributed low-communication training of language models, 2023.
    """

    def __init__(
        self, problem: Problem, local_steps: int, inner: AnyRule[Any] | str = "adamw:lr=0.001", scaled: bool = False,
        seconds: float | None = None,
    ) -> None:  # fmt: skip
        self.problem = as_problem(problem)
        require("problem", problem, not is_stateful(self.problem), "a plain problem: this one has local steps already")
        require_count("local_steps", local_steps, low=1)
        require_switch("scaled", scaled)
        if seconds is not None:
            require_number("seconds", seconds, low=0, strict=True)
        self.local_steps, self.scaled, self.seconds = local_steps, scaled, seconds
        self.inner = fill_in(as_rule(inner), getattr(problem, "blocks", None))
        self.optimizer = InnerOptimizer(self.inner, self.start())
        require("inner", inner, hasattr(self.inner, "lr") or not scaled, "a rule with an lr, to be scaled by it")
        self.dim = problem.dim
        self._sample_dims = problem.samples(0, 0, 1).dim() - 1

    def __getattr__(self, name: str) -> Any:
        if name in _FORWARDED:
            return getattr(self.problem, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def start(self) -> Tensor:
        """The problem's start, for every run that the inner rule has a hyper-parameter for."""
        return spread(self.inner, self.problem.start())

    def samples(self, seed: int, first: int, count: int) -> Tensor:
        """H samples of the problem for each job, ``(count, H, ...)``."""
        return self._by_job(self.problem.samples(seed, first * self.local_steps, count * self.local_steps))

    @property
    def samples_of_shard(self) -> Callable[[int, int, int, int, int], Tensor]:
        """The same from one shard of the data, if the problem has shards."""
        draw, steps = self.problem.samples_of_shard, self.local_steps  # type: ignore[attr-defined]
        return lambda seed, first, count, *shard: self._by_job(draw(seed, first * steps, count * steps, *shard))

    def _by_job(self, samples: Tensor) -> Tensor:
        return samples.view(-1, self.local_steps, *samples.shape[1:])

    def labels(self, samples: Tensor) -> Tensor | None:
        """The classes of all rows of a job, ``(count, H * batch)``."""
        labels = self.problem.labels(samples.flatten(0, 1))
        return None if labels is None else self._by_job(labels).flatten(1)

    def init_worker_state(self, x: Tensor) -> Any:
        """The inner optimizer's initial state, without its iterate."""
        return self.optimizer.init(x)

    def run_job(self, x: Tensor, sample: Tensor, state: Any, local_steps: Count | None = None) -> JobResult:
        """Take the local steps; a tensor of ``local_steps`` has one number for each run."""
        steps = self.local_steps if local_steps is None else local_steps

        def gradient(y: Tensor, h: int) -> Tensor:
            return self.problem.gradient(y, sample.select(sample.dim() - self._sample_dims - 1, h))

        if isinstance(steps, int):
            require("local_steps", steps, 1 <= steps <= self.local_steps, f"from 1 to {self.local_steps}")
        end, state = self.optimizer.run(x, state, gradient, steps, self.local_steps)
        grad = x - end
        if self.scaled:
            exact = steps.double() if isinstance(steps, Tensor) else steps
            grad = grad / as_dtype(exact * self.inner.lr, grad)  # type: ignore[union-attr]
        return JobResult(grad, state)

    def gradient(self, x: Tensor, sample: Tensor) -> Tensor:
        """The pseudo-gradient of a new worker after H steps."""
        return self.run_job(x, sample, self.init_worker_state(x)).grad

    def to(self, device: torch.device | str) -> "LocalSteps":
        inner = map_tensors(lambda leaf: leaf.to(device), self.inner)
        return LocalSteps(self.problem.to(device), self.local_steps, inner, self.scaled, self.seconds)

    def __repr__(self) -> str:
        seconds = "" if self.seconds is None else f", seconds={self.seconds:g}"
        return (f"LocalSteps({self.problem!r}, local_steps={self.local_steps}, inner={self.inner!r}, "
                f"scaled={self.scaled}{seconds})")  # fmt: skip


class InnerOptimizer:
    """A rule as a worker's own optimizer: each job starts it at a new point, with the rest of its state carried over.

    One large vector on a CPU is updated in place: fresh memory for every step would cost more than the step.

    Args:
        rule: one whose query and output are its iterate, with nothing else in its state that depends on its start.
        x0: a point at which to check that.

    >>> import lategrad as lg
    >>> inner = InnerOptimizer(lg.baselines.SGDMomentum(lr=0.1), torch.zeros(1))
    >>> x, state = torch.tensor([5.0]), inner.init(torch.zeros(1))
    >>> inner.run(x, state, lambda y, h: torch.ones(1), steps=2)[0]  # -0.1, then -0.19 more
    tensor([4.7100])
    """

    def __init__(self, rule: AnyRule[Any], x0: Tensor) -> None:
        require("inner", rule, not needs_ticket(rule), "a rule without tickets")
        self.rule = cast("Rule[Any]", rule)
        state = rule.init(x0)
        query = rule.query(state)
        places = [i for i, leaf in enumerate(tensors(state)) if leaf is query]
        self._iterate = places[0] if places else -1  # its place among the tensors of the state
        is_output = len(places) == 1 and torch.equal(rule.output(state), query)
        pairs = zip(tensors(state), tensors(rule.init(x0 + 1)), strict=True)
        restarts = all(i == self._iterate or torch.equal(here, there) for i, (here, there) in enumerate(pairs))
        valid = "a rule whose query and output are its iterate, and which can restart at another point, such as AdamW"
        require("inner", rule, is_output and restarts, valid)
        self._step: StateStep | None = None

    @property
    def backend(self) -> str | None:
        """Backend of the in-place step; None before a job has used it."""
        return None if self._step is None else self._step.backend

    def init(self, x: Tensor) -> Any:
        """The state of a new worker, without an iterate."""
        return self.without_iterate(self.rule.init(x))

    def with_iterate(self, state: Any, x: Tensor) -> Any:
        """The state with its iterate at ``x``."""
        leaves = tensors(state)
        leaves[self._iterate] = x
        return map_tensors(lambda _, leaf: leaf, state, leaves)

    def without_iterate(self, state: Any) -> Any:
        """The state with an empty tensor as its iterate."""
        return self.with_iterate(state, self.rule.query(state)[..., :0].clone())

    def run(self, x: Tensor, state: Any, gradient: Gradient, steps: Count, maximum: int = 0) -> tuple[Tensor, Any]:
        """The point after a number of steps from ``x``, and the state to carry over.

        Where ``steps`` is a tensor, each run takes its own number, at most ``maximum``, and then stays where it is.
        """
        if isinstance(steps, int) and self._in_place_pays(x):
            return self._run_in_place(x, state, gradient, steps)
        state = self.with_iterate(state, x)
        for h in range(steps if isinstance(steps, int) else maximum):
            after = self.rule.update(state, gradient(self.rule.query(state), h), 0)
            if isinstance(steps, Tensor):
                after = map_tensors(lambda new, old, go=steps > h: torch.where(go, new, old), after, state)
            state = after
        return self.rule.query(state), self.without_iterate(state)

    def _in_place_pays(self, x: Tensor) -> bool:
        single = x.numel() == x.shape[-1] and x.device.type == "cpu" and not torch.compiler.is_compiling()
        has_blocks = getattr(self.rule, "blocks", None) is not None  # its matrix products gain little
        return single and not has_blocks and compiling_pays(EXPECTED_STEPS, x.numel(), backend="loops")

    def _run_in_place(self, x: Tensor, state: Any, gradient: Gradient, steps: int) -> tuple[Tensor, Any]:
        start = self.with_iterate(state, x)
        if self._step is None:
            with _TRACING:  # for a single run without run dimensions
                self._step = in_place(self.rule, owned(map_tensors(lambda leaf: leaf.reshape(-1), start)))
        step = self._step
        for buffer, value in zip(tensors(step.state), tensors(start), strict=True):
            buffer.copy_(value.reshape(-1))
        y = self.rule.query(step.state)
        for h in range(steps):
            step(gradient(y.view(x.shape), h).reshape(-1), 0)
        end = map_tensors(lambda leaf, after: after.clone().view(leaf.shape), start, step.state)
        return self.rule.query(end), self.without_iterate(end)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_step": None}  # compiled where it is used
