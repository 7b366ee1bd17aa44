r"""The minimum of a convex problem over a constraint set, with a proven error bound; computed once and cached.

The solver is SciPy's L-BFGS-B on balls, boxes and the whole space, and accelerated projected gradient descent on any
other set. Its answer is verified: for a convex f and any x in K,

.. math:: f(x) - \min_K f \le \max_{u \in K} \langle \nabla f(x), x - u \rangle,

and the right-hand side (the Frank-Wolfe gap) is :math:`\langle \nabla f(x), x \rangle` plus the support function of K
at :math:`-\nabla f(x)`. Where that is infinite, strong convexity gives the bound

.. math:: \max_{u \in K} \langle \nabla f(x), x - u \rangle - \tfrac{H}{2} \|x - u\|^2
          = \frac{\|\nabla f(x)\|^2}{2H} - \frac{H}{2} \mathrm{dist}\Big(x - \frac{\nabla f(x)}{H}, K\Big)^2 .
"""

import hashlib
import json
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from lategrad.problems.data import cache_folder
from lategrad.problems.linear import LinearModel
from lategrad.problems.quadratic import Quadratic
from lategrad.sets import Ball, Box, ConvexSet, WholeSpace
from lategrad.support.files import replacing
from lategrad.support.runs import tensors
from lategrad.support.validation import require

_ITERATIONS = 3000

ConvexProblem = LinearModel | Quadratic


class Optimum(NamedTuple):
    """A minimiser and its error bound."""

    x: Tensor  #: The point, float64.
    value: float  #: f at the point; the true minimum lies in [value - gap, value].
    gap: float  #: A proven bound on f(x) - min f.


def optimality_gap(x: Tensor, gradient: Tensor, domain: ConvexSet, strong_convexity: float) -> float:
    """A proven bound on f(x) - min f from the gradient at a feasible x.

    >>> optimality_gap(torch.tensor([1.0, 0.0]), torch.tensor([-2.0, 0.0]), Ball(1.0), 0.0)
    0.0
    """
    support = float(domain.support(-gradient))
    if math.isfinite(support):
        return float(gradient @ x) + support
    require("domain", domain, strong_convexity > 0,
            "bounded, or the problem strongly convex (l2 > 0): else no gap can be proven")  # fmt: skip
    best = x - gradient / strong_convexity  # of the parabola below f; f is above it on all of K
    below = float(gradient @ gradient) / (2 * strong_convexity)
    return below - strong_convexity / 2 * float((best - domain.project(best)).square().sum())


def minimum(
    problem: ConvexProblem, domain: ConvexSet | None = None, *, tolerance: float = 1e-6, cache: bool = True
) -> Optimum:
    """The minimum of a convex problem over a constraint set.

    Args:
        problem: a linear model or a quadratic.
        domain: the constraint set, custom ones included; by default the whole space, which needs l2 > 0.
        tolerance: the largest gap to accept; a larger one raises.
        cache: look in the user's cache first, and store the answer there.

    >>> from lategrad.problems import Quadratic
    >>> minimum(Quadratic(dim=4, strong_convexity=0.5), Ball(0.5), cache=False).x.norm().item()
    0.5...
    """
    domain = WholeSpace() if domain is None else domain
    exact = [hashlib.sha256(part.cpu().double().numpy().tobytes()).hexdigest() for part in tensors(domain)]
    key = json.dumps([problem.fingerprint(), repr(domain), exact])  # a tensor's repr leaves digits and entries out
    path = cache_folder().parent / "optima" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.safetensors"
    if cache and (found := _read(path)) is not None and found.gap <= tolerance:
        return found
    best = _solve(problem, domain, tolerance)
    if best.gap > tolerance:
        raise RuntimeError(f"the minimum is only known up to {best.gap:.2g}, not {tolerance:.2g}: raise tolerance, "
                           "or add l2")  # fmt: skip
    if cache:
        numbers = {name: torch.tensor(getattr(best, name), dtype=torch.float64) for name in ("value", "gap")}
        with replacing(path) as part:
            save_file({"x": best.x, **numbers}, part)
    return best


def _solve(problem: ConvexProblem, domain: ConvexSet, tolerance: float) -> Optimum:
    """Search in float32, which is twice as fast, then in float64 if that was not enough."""
    from scipy import optimize

    z = domain.project(torch.zeros(problem.dim, dtype=torch.float64))
    if not isinstance(domain, Ball | Box | WholeSpace):
        return _descend(problem, domain, z, tolerance)
    bounds = None
    if isinstance(domain, Box):
        limits = (torch.as_tensor(b).double().expand(problem.dim).numpy() for b in (domain.low, domain.high))
        bounds = optimize.Bounds(*limits)
    best = Optimum(z, math.inf, math.inf)
    for dtype in (torch.float32, torch.float64, torch.float64):
        search = _Search(problem, domain, dtype, tolerance / 2)
        options = {"maxiter": _ITERATIONS, "maxfun": 2 * _ITERATIONS, "maxcor": 30, "ftol": 0, "gtol": 0}
        optimize.minimize(search, z.numpy(), jac=True, method="L-BFGS-B", bounds=bounds, options=options,
                          callback=search.stop_if_enough)  # fmt: skip
        z = x = domain.project(search.best_z)  # outside of the set, the next search would have no gradient
        value, gradient = problem.value_and_gradient(x)
        gap = optimality_gap(x, gradient, domain, problem.strong_convexity)
        best = min(best, Optimum(x, value, gap), key=lambda optimum: optimum.gap)
        if best.gap <= tolerance:
            break
    return best


def _descend(problem: ConvexProblem, domain: ConvexSet, x: Tensor, tolerance: float) -> Optimum:
    """Accelerated projected gradient descent, for sets of which only the projection is known.

    The learning rate is halved until the bound of smoothness holds; the momentum restarts where it would lead uphill.
    """
    best = Optimum(x, math.inf, math.inf)
    y, momentum, step = x, 1.0, 1.0
    for _ in range(_ITERATIONS):
        value, gradient = problem.value_and_gradient(y)
        while True:
            new = domain.project(y - step * gradient)
            moved = new - y
            new_value, at_new = problem.value_and_gradient(new)
            bound = value + float(gradient @ moved) + float(moved @ moved) / (2 * step)
            if new_value <= bound + 1e-15 * abs(value) or step < 1e-12:
                break
            step /= 2
        gap = optimality_gap(new, at_new, domain, problem.strong_convexity)
        best = min(best, Optimum(new, new_value, gap), key=lambda optimum: optimum.gap)
        if gap <= tolerance:
            break
        uphill = float(gradient @ (new - x)) > 0
        longer = 1.0 if uphill else (1 + math.sqrt(1 + 4 * momentum**2)) / 2
        y = new if uphill else new + (momentum - 1) / longer * (new - x)
        x, momentum, step = new, longer, step * 1.1
    return best


class _Search:
    """The function z -> f(P(z)) and its gradient: over a ball it has no constraint and the same minimum."""

    def __init__(self, problem: ConvexProblem, domain: ConvexSet, dtype: torch.dtype, enough: float) -> None:
        self.problem, self.domain, self.dtype, self.enough = problem, domain, dtype, enough
        self.best_gap, self.best_z = math.inf, torch.empty(0)

    def __call__(self, z: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        point = torch.from_numpy(z.copy())
        x = self.domain.project(point)
        value, gradient = self.problem.value_and_gradient(x.to(self.dtype))
        gap = optimality_gap(x, gradient, self.domain, self.problem.strong_convexity)
        if gap < self.best_gap:
            self.best_gap, self.best_z = gap, point
        if isinstance(self.domain, Ball):
            offset = point if self.domain.center is None else point - self.domain.center
            length = offset.norm()
            if length > self.domain.radius:  # P(z) = c + r u, u = (z - c)/|z - c|: Jacobian (r/|z - c|)(I - u u')
                direction = offset / length
                gradient = self.domain.radius / length * (gradient - (gradient @ direction) * direction)
        return value, gradient.numpy()

    def stop_if_enough(self, _: object) -> None:
        if self.best_gap <= self.enough:
            raise StopIteration  # which ends SciPy's search


def _read(path: Path) -> Optimum | None:
    try:
        stored = load_file(path)
    except (FileNotFoundError, SafetensorError):
        return None  # missing or damaged: computed again
    return Optimum(stored["x"], stored["value"].item(), stored["gap"].item())
