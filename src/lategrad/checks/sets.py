"""Checks for convex sets, by the theorem that characterises a projection."""

import torch
from torch import Tensor

from lategrad.checks.comparing import assert_close, assert_true, gradients, pickled_copy
from lategrad.execution.backend import Compiled
from lategrad.sets import ConvexSet, norm


def check_set(domain: ConvexSet, *, dim: int = 6, seed: int = 0, compile: bool = True) -> None:
    r"""Run all generic checks on a constraint set.

    The main check is the theorem that characterises the projection: :math:`p = \Pi_K(z)` if and only if p is in
    K and :math:`\langle z - p, u - p \rangle \le 0` for all u in K. The diameter D and the support function h
    must agree with it: :math:`\|u - v\| \le D` and :math:`\langle g, u \rangle \le h(g)` for all u, v in K,
    :math:`h(g) + h(-g) \le D \|g\|`, and, from the characterisation at :math:`p = \Pi_K(s g)`,
    :math:`h(g) \le \langle g, p \rangle + D \|p\| / s` for every s > 0.

    Args:
        domain: the set.
        dim: dimension of the test vectors; must fit the set.
        seed: of the random vectors.
        compile: also compare with ``torch.compile``; takes seconds.

    >>> import lategrad as lg
    >>> check_set(lg.Ball(2.0), compile=False)
    """
    name = f"set {type(domain).__name__}"
    project = domain.project
    for dtype, tol in ((torch.float32, 1e-4), (torch.float64, 1e-9)):
        z = gradients(1, (40, dim), seed, dtype)[0]
        z = z * torch.logspace(-3, 6, 40, dtype=dtype).unsqueeze(-1)  # from well inside to far outside
        before = z.clone()
        p = project(z)
        assert_close(z, before, f"{name}: project changes its input")
        assert_close(project(z), p, f"{name}: the same input gives two outputs")
        assert_true(p.dtype == dtype and p.shape == z.shape, f"{name}: project changes the dtype or the shape")
        assert_true(domain.contains(p), f"{name}: a projection is not in the set")

        feasible = project(gradients(1, (30, dim), seed + 1, dtype)[0])
        inner = ((z - p).double().unsqueeze(1) * (feasible.unsqueeze(0) - p.unsqueeze(1))).sum(-1)
        slack = tol * norm(z) * (norm(z) + norm(feasible).T)
        assert_true(inner <= slack, f"{name}: the variational inequality fails")

        assert_close(project(p), p, f"{name}: projecting twice differs from once", tol, tol)
        assert_close(project(feasible), feasible, f"{name}: a point inside is moved", tol, tol)
        apart = norm(p.unsqueeze(0) - p.unsqueeze(1))
        limit = norm(z.unsqueeze(0) - z.unsqueeze(1)) + tol * (norm(z).unsqueeze(0) + norm(z).unsqueeze(1))
        assert_true(apart <= limit, f"{name}: two points are further apart after projection")

        single = torch.stack([project(row) for row in z])
        assert_close(single, p, f"{name}: projecting one by one differs from a batch", tol, tol)
        folded = project(z.reshape(8, 5, dim)).reshape(40, dim)
        assert_close(folded, p, f"{name}: two run dimensions differ from one", tol, tol)

        for extreme in (torch.zeros(dim, dtype=dtype), torch.full((dim,), 1e30, dtype=dtype), z[0] * 1e33):
            point = project(extreme)
            assert_true(torch.isfinite(point), f"{name}: not finite at {extreme.tolist()}")
            assert_true(domain.contains(point), f"{name}: not in the set at {extreme.tolist()}")

        _check_size(name, domain, p, feasible, tol)
        assert_close(pickled_copy(domain, name).project(z), p, f"{name}: a pickled copy behaves differently")
        if compile and dtype == torch.float32:  # where fused operations round most differently
            assert_close(Compiled(project)(z), p, f"{name}: the compiled projection differs", tol, tol)


def _check_size(name: str, domain: ConvexSet, points: Tensor, feasible: Tensor, tol: float) -> None:
    for member in ("diameter_in", "support"):
        assert_true(hasattr(domain, member), f"{name}: has no {member}")
    dim = points.shape[-1]
    diameter = torch.as_tensor(domain.diameter_in(dim), dtype=torch.float64)
    apart = norm(points.unsqueeze(1) - feasible)
    assert_true(apart <= diameter * (1 + tol) + tol, f"{name}: two points are further apart than the diameter")

    directions = gradients(1, (20, dim), 7, points.dtype)[0]
    far = domain.support(directions)
    assert_true(far.dtype == torch.float64 and far.shape == (20, 1),
                f"{name}: support gives {far.dtype} {tuple(far.shape)}, not float64 (20, 1)")  # fmt: skip
    zero, twice = domain.support(torch.zeros_like(directions)), domain.support(2 * directions)
    assert_close(zero, torch.zeros_like(zero), f"{name}: the support function is not 0 at 0", 0.0, tol)
    assert_close(twice, 2 * far, f"{name}: the support function of twice a direction is not twice", tol, tol)
    size = norm(directions)
    reached = directions.double() @ feasible.double().T
    assert_true(reached <= far + tol * size * (1 + norm(feasible).T), f"{name}: support is too small")
    if bool(torch.isfinite(diameter).all()):
        width = far + domain.support(-directions)
        slack = tol * size * (1 + diameter + far.abs() / size)
        assert_true(width <= diameter * size + slack, f"{name}: wider than its diameter")
        scale = 1e3
        p = domain.project(scale * directions.double())
        reach = (directions.double() * p).sum(-1, keepdim=True) + diameter * norm(p) / scale
        assert_true(far <= reach + slack, f"{name}: support is larger than any point of the set reaches")
