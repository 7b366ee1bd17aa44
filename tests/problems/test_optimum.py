"""Minima are certified, not believed."""

import math

import pytest
import torch

import lategrad as lg
from lategrad.checks import check_set
from lategrad.problems import LeastSquares, Quadratic, SmoothedSVM, SoftmaxRegression, load, minimum
from lategrad.problems.optimum import optimality_gap


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def quadratic():
    return Quadratic(dim=5, smoothness=3.0, strong_convexity=0.5)


def test_interior_and_boundary_minima_of_a_quadratic():
    inside = minimum(quadratic(), lg.Ball(2.0), tolerance=1e-10)
    torch.testing.assert_close(inside.x, quadratic().optimum, rtol=0, atol=1e-4)
    assert abs(inside.value) <= 1e-10
    on_sphere = minimum(quadratic(), lg.Ball(0.5), tolerance=1e-10)
    assert on_sphere.x.norm().item() == pytest.approx(0.5)
    boxed = minimum(quadratic(), lg.Box(-1.0, 0.2))
    torch.testing.assert_close(boxed.x, torch.full((5,), 0.2, dtype=torch.float64))


@pytest.mark.parametrize("radius", [0.3, 0.8, 3.0])
def test_no_feasible_point_is_better(radius):
    problem, domain = quadratic(), lg.Ball(radius)
    best = minimum(problem, domain, tolerance=1e-8)
    points = domain.project(torch.randn(5000, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    assert (problem.loss(points) >= best.value - best.gap).all()


@pytest.mark.parametrize("domain", [lg.Ball(3.0), lg.Box(-0.3, 0.3), None], ids=["ball", "box", "whole"])
def test_two_ways_to_the_minimum_on_digits_agree(domain):
    """Plain projected gradient descent, run long, ends within the certified gap."""
    problem = SoftmaxRegression(load("digits"), l2=0.05)
    best = minimum(problem, domain, tolerance=1e-6)
    assert best.gap <= 1e-6
    x = torch.zeros(problem.dim, dtype=torch.float64)
    project = (domain or lg.WholeSpace()).project
    for _ in range(1500):
        _, gradient = problem.value_and_gradient(x)
        x = project(x - gradient / problem.smoothness)
    assert problem.value_and_gradient(x)[0] == pytest.approx(best.value, abs=2e-5)
    assert problem.value_and_gradient(x)[0] >= best.value - best.gap
    assert best.value == pytest.approx(problem.loss(best.x.float()).item(), abs=1e-5)


def test_the_gap_bounds_the_true_excess():
    problem = quadratic()
    for domain, h in ((lg.Ball(0.6), 0.0), (lg.Box(-0.2, 0.3), 0.0), (lg.WholeSpace(), 0.5)):
        best = minimum(problem, None if isinstance(domain, lg.WholeSpace) else domain, tolerance=1e-9)
        for seed in range(20):
            z = torch.randn(5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            x = domain.project(z)
            value, gradient = problem.value_and_gradient(x)
            assert optimality_gap(x, gradient, domain, h) >= value - best.value - 1e-9


def test_the_answer_is_cached_and_a_damaged_cache_is_ignored(own_cache):
    problem = SmoothedSVM(load("digits"), l2=0.1)
    first = minimum(problem, lg.Ball(1.0))
    (file,) = own_cache.rglob("*.safetensors")
    again = minimum(problem, lg.Ball(1.0))
    assert torch.equal(again.x, first.x)
    minimum(problem, lg.Ball(2.0))
    minimum(SmoothedSVM(load("digits"), l2=0.2), lg.Ball(1.0))
    assert len(list(own_cache.rglob("*.safetensors"))) == 3
    file.write_bytes(b"damaged")
    assert minimum(problem, lg.Ball(1.0)).value == pytest.approx(first.value, abs=1e-6)


def test_a_minimum_inside_the_ball_is_found_although_the_search_steps_outside():
    data = load("digits", "centre")
    parity = data._replace(y_train=data.y_train % 2, y_test=data.y_test % 2, classes=2)
    best = minimum(LeastSquares(parity, l2=1.0), lg.Ball(0.5))
    assert best.gap <= 1e-6


def test_what_cannot_be_certified_is_refused():
    with pytest.raises(ValueError, match="else no gap can be proven"):
        minimum(SoftmaxRegression(load("digits")))
    with pytest.raises(ValueError, match="else no gap can be proven"):
        minimum(SoftmaxRegression(load("digits")), lg.HalfSpace(torch.ones(650), 1.0))


class Orthant:
    """A set of a user's own: no coordinate is negative."""

    diameter = math.inf

    def diameter_in(self, dim):
        return math.inf

    def project(self, x):
        return x.clamp_min(0)

    def contains(self, x, tol=1e-5):
        return (x >= -tol).all(-1, keepdim=True)

    def support(self, direction):
        return torch.where(direction.amax(-1, keepdim=True) > 0, math.inf, 0.0).double()


@pytest.mark.parametrize("domain", [lg.Simplex(), lg.L1Ball(0.7), lg.HalfSpace(torch.arange(5) + 1.0, 0.2), Orthant(),
                                    lg.Product((lg.Simplex(), 2), (lg.Box(-1.0, -0.1), 3))])  # fmt: skip
def test_the_minimum_over_any_set_is_certified_by_its_members(domain):
    check_set(domain, dim=5, compile=False)
    problem = quadratic()
    best = minimum(problem, domain, tolerance=1e-9, cache=False)
    assert domain.contains(best.x).all()
    for seed in range(20):
        z = torch.randn(5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        value, _ = problem.value_and_gradient(domain.project(best.x + 0.1 * z))
        assert value >= best.value - 1e-9


def test_sets_that_print_alike_do_not_share_a_cache():
    problem = Quadratic(dim=2000, strong_convexity=0.5)
    here = torch.zeros(2000, dtype=torch.float64)
    there = here.clone()
    there[1000] = 5.0
    assert minimum(problem, lg.Ball(1.0, there)).value > minimum(problem, lg.Ball(1.0, here)).value + 1
