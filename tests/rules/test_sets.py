"""Sets by theorem: the variational inequality characterises the projection."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lategrad as lg

DIM = 5
SETS = {
    "whole": lg.WholeSpace(),
    "ball": lg.Ball(1.5),
    "ball-off-centre": lg.Ball(0.5, center=torch.arange(DIM).double()),
    "point": lg.Ball(0.0),
    "box": lg.Box(-1.0, 0.5),
    "box-per-coordinate": lg.Box(-torch.ones(DIM).double(), torch.linspace(0, 3, DIM).double()),
    "simplex": lg.Simplex(),
    "simplex-3": lg.Simplex(3.0),
    "l1": lg.L1Ball(2.0),
    "half-space": lg.HalfSpace(torch.tensor([1.0, -2.0, 0.0, 3.0, 0.5]), -0.7),
    "product": lg.Product((lg.Simplex(), 2), (lg.Ball(1.0), 3)),
    "product-with-box": lg.Product((lg.Box(0.0, 1.0), 2), (lg.Ball(1.0), 3)),
}
BOUNDED = sorted(SETS.keys() - {"whole", "half-space", "box", "product-with-box"})

entries = st.floats(-1e6, 1e6) | st.sampled_from([0.0, 1.0, -1.0, 1e-8])
vectors = st.lists(entries, min_size=DIM, max_size=DIM).map(lambda v: torch.tensor(v, dtype=torch.float64))


@pytest.mark.parametrize("name", SETS)
@given(z=vectors, u=vectors)
def test_variational_inequality(name, z, u):
    """p = P(z) iff p is in K and <z - p, u - p> <= 0 for every u in K."""
    domain = SETS[name]
    p, feasible = domain.project(z), domain.project(u)
    assert domain.contains(p, tol=1e-9)
    scale = (z.norm() + 1) * (z.norm() + feasible.norm() + 1)
    assert (z - p) @ (feasible - p) <= 1e-12 * scale


@pytest.mark.parametrize("name", SETS)
@given(z=vectors)
def test_inside_is_unchanged(name, z):
    domain = SETS[name]
    p = domain.project(z)
    torch.testing.assert_close(domain.project(p), p, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", BOUNDED)
@given(z=vectors, u=vectors)
def test_diameter_bounds_every_distance(name, z, u):
    domain = SETS[name]
    assert (domain.project(z) - domain.project(u)).norm() <= float(domain.diameter) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("domain", "far_apart"),
    [
        (lg.Ball(1.5), ([9.0, 0.0], [-9.0, 0.0])),
        (lg.Box(torch.zeros(2), torch.tensor([3.0, 4.0])), ([-9.0, -9.0], [9.0, 9.0])),
        (lg.Simplex(2.0), ([9.0, 0.0], [0.0, 9.0])),
        (lg.L1Ball(1.0), ([9.0, 0.0], [-9.0, 0.0])),
        (lg.Product((lg.Ball(1.5), 1), (lg.Ball(2.0), 1)), ([9.0, 9.0], [-9.0, -9.0])),
    ],
)
def test_diameter_is_reached(domain, far_apart):
    a, b = (domain.project(torch.tensor(v)) for v in far_apart)
    assert (a - b).norm().item() == pytest.approx(float(domain.diameter), rel=1e-6)


def test_the_diameter_of_a_box_with_numbers_comes_with_the_dimension():
    assert lg.Box(-1.0, 2.0).diameter_in(4) == pytest.approx(6.0)
    per_coordinate = lg.Box(torch.zeros(4), torch.tensor([3.0, 0.0, 4.0, 0.0]))
    assert float(per_coordinate.diameter_in(4)) == pytest.approx(5.0)
    assert lg.Product((lg.Box(0.0, 3.0), 1), (lg.Box(0.0, 2.0), 4)).diameter == pytest.approx(5.0)
    runs = lg.Box(torch.zeros(2, 1), torch.tensor([[1.0], [2.0]]))
    assert runs.diameter_in(9).tolist() == [[3.0], [6.0]]


@pytest.mark.parametrize("name", BOUNDED)
@given(g=vectors, z=vectors)
def test_the_support_function_bounds_every_point_and_is_reached(name, g, z):
    domain, size = SETS[name], g.norm() + 1
    support = domain.support(g).item()
    assert (g @ domain.project(z)).item() <= support + 1e-9 * size * (z.norm() + 1)
    far = domain.project(1e9 * g / size)
    assert (g @ far).item() == pytest.approx(support, abs=1e-5 * float(size))


def test_a_half_space_ends_in_the_direction_of_its_normal_alone():
    half = lg.HalfSpace(torch.tensor([3.0, 4.0]), 2.0)
    directions = torch.tensor([[1.5, 2.0], [-3.0, -4.0], [3.0, 4.1], [0.0, 0.0]])
    assert half.support(directions).flatten().tolist() == [1.0, math.inf, math.inf, 0.0]


def test_unbounded_sets_have_infinite_diameter():
    assert lg.WholeSpace().diameter == math.inf
    assert lg.HalfSpace(torch.ones(2), 0.0).diameter == math.inf


@given(v=st.lists(st.floats(-3, 3), min_size=2, max_size=6), total=st.floats(0.1, 4))
def test_simplex_against_bisection_on_the_threshold(v, total):
    low, high = min(v) - total, max(v)
    for _ in range(200):
        theta = (low + high) / 2
        low, high = (theta, high) if sum(max(a - theta, 0) for a in v) > total else (low, theta)
    want = torch.tensor([max(a - low, 0) for a in v], dtype=torch.float64)
    got = lg.Simplex(total).project(torch.tensor(v, dtype=torch.float64))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-9)


def test_simplex_keeps_small_differences_of_huge_float32_entries():
    got = lg.Simplex().project(torch.tensor([1e30, 1e30, 0.0]))
    torch.testing.assert_close(got, torch.tensor([0.5, 0.5, 0.0]))


def test_a_radius_for_each_run():
    domain = lg.Ball(torch.tensor([[1.0], [2.0]]))
    got = domain.project(torch.tensor([[3.0, 4.0], [3.0, 4.0]]))
    torch.testing.assert_close(got, torch.tensor([[0.6, 0.8], [1.2, 1.6]]))


@pytest.mark.parametrize("name", SETS)
def test_contains_says_no(name):
    far = SETS[name].project(torch.zeros(DIM, dtype=torch.float64)) + torch.tensor([9.0, -9, 9, 9, 9])
    far = far if name != "whole" else far * math.inf
    assert not SETS[name].contains(far)
    assert SETS[name].contains(far).shape == (1,)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: lg.Ball(-1.0), "radius must be a finite number >= 0, got -1.0"),
        (lambda: lg.Ball(math.nan), "radius must be a finite number >= 0, got nan"),
        (lambda: lg.Ball(math.inf), "radius must be a finite number >= 0, got inf"),
        (lambda: lg.Ball("1"), "radius must be a finite number >= 0, got '1'"),
        (lambda: lg.Ball(torch.tensor([[1.0], [-2.0]])), r"radius must be a finite number >= 0, got \["),
        (lambda: lg.Ball(1.0, center=torch.tensor([math.nan])), "center must be finite, got nan"),
        (lambda: lg.Box(1.0, 0.0), "low must be <= high = 0.0, got 1.0"),
        (lambda: lg.Box(0.0, math.inf), "high must be finite, got inf"),
        (lambda: lg.Box(math.nan, 1.0), "low must be finite, got nan"),
        (lambda: lg.Box(0.0, 1.0).diameter, "tensors of shape"),
        (lambda: lg.Simplex(-1.0), "total must be a finite number >= 0, got -1.0"),
        (lambda: lg.L1Ball(-2.0), "radius must be a finite number >= 0, got -2.0"),
        (lambda: lg.HalfSpace(torch.zeros(3), 1.0), "normal must be a vector that is not zero"),
        (lambda: lg.HalfSpace(torch.ones(3), math.nan), "offset must be finite, got nan"),
        (lambda: lg.Product(), "parts must be at least one pair"),
        (lambda: lg.Product(lg.Ball(1.0)), "parts must be pairs"),
        (lambda: lg.Product((lg.Ball(1.0), 0)), "size must be a positive integer, got 0"),
        (
            lambda: lg.Product((lg.Ball(1.0), 2)).project(torch.zeros(3)),
            r"split of the last dimension, 3, got \[2\]",
        ),
    ],
)
def test_bad_arguments_are_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()
