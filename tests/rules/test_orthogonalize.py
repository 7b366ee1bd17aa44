"""The orthogonal factor, by theorem: on a CPU and in the form that GPUs use, whose products are the same everywhere."""

import numpy as np
import pytest
import torch

from lategrad.rules import _orthogonalize
from lategrad.rules._orthogonalize import _polynomial, _rational, matrix_batches, orthogonalise
from lategrad.rules.blocks import Blocks

FORMS = [pytest.param(_rational, 0.1553, id="rational"), pytest.param(_polynomial, 0.0351, id="polynomial")]


def with_singular_values(values, columns, dtype=torch.float64, seed=0):
    """A matrix with these singular values, and its orthogonal factor."""
    generator = torch.Generator().manual_seed(seed)
    rows = len(values)
    u = torch.linalg.qr(torch.randn(rows, rows, generator=generator, dtype=torch.float64))[0]
    v = torch.linalg.qr(torch.randn(columns, rows, generator=generator, dtype=torch.float64))[0]
    return ((u * torch.as_tensor(values, dtype=torch.float64)) @ v.mT).to(dtype), (u @ v.mT).to(dtype)


def of_a_gradient(rows, columns, noise):
    """Eight directions, each half as strong as the one before, and noise."""
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(rows, 8, generator=generator), torch.randn(8, columns, generator=generator)
    signal = (left * 2.0 ** -torch.arange(8)) @ right
    spread = torch.randn(rows, columns, generator=generator) / (rows**0.5 + columns**0.5)
    return signal / torch.linalg.matrix_norm(signal, 2) + noise * spread


@pytest.mark.parametrize(("form", "error"), FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(7, 7), (5, 40), (130, 150), (257, 300)], ids=str)
def test_u_v_is_found_within_the_stated_error(form, error, dtype, shape):
    x, factor = with_singular_values(np.geomspace(1, 0.01, shape[0]), shape[1], dtype)
    distance = torch.linalg.matrix_norm(form(x) - factor, 2)
    assert distance <= error + (2e-3 if dtype == torch.float32 else 1e-9)


@pytest.mark.parametrize(("form", "error"), FORMS)
def test_the_error_is_that_of_the_function_everywhere_from_a_500th_on(form, error):
    """On a 1 x 1 matrix beside a large one, both functions are read off point by point."""
    points = torch.linspace(np.log(0.002), 0, 2001, dtype=torch.float64).exp()
    pairs = torch.zeros(len(points), 2, 2, dtype=torch.float64)
    pairs[:, 0, 0], pairs[:, 1, 1] = (1 - points**4) ** 0.25, points  # |x x'| = 1
    values = form(pairs)[:, 1, 1]
    assert (values - 1).abs().max() <= error
    if form is _rational:  # the best function of its degree reaches its error six times, with alternating signs
        extremes = (values - 1).abs() > error - 1e-3
        signs = (values - 1)[extremes].sign()
        assert 1 + (signs[1:] != signs[:-1]).sum() == 6


@pytest.mark.parametrize("form", [_rational, _polynomial])
def test_scale_does_not_matter_and_zero_stays_zero(form):
    x, _ = with_singular_values(np.geomspace(1, 0.01, 20), 30, torch.float32)
    for scale in (1e-30, 1e-12, 1e18, 1e30):
        torch.testing.assert_close(form(scale * x), form(x), rtol=1e-4, atol=1e-4)
    assert form(torch.zeros(3, 4)).eq(0).all()
    assert form(torch.full((3, 4), torch.nan)).isnan().all()
    assert form(torch.full((130, 140), torch.inf)).isnan().all()


def test_batches_runs_and_tall_matrices_are_as_one_by_one():
    x = torch.randn(2, 3, 140, 150, generator=torch.Generator().manual_seed(0))
    one_by_one = torch.stack([torch.stack([orthogonalise(a) for a in row]) for row in x])
    torch.testing.assert_close(orthogonalise(x), one_by_one)
    torch.testing.assert_close(orthogonalise(x.mT), one_by_one.mT, rtol=1e-4, atol=1e-5)
    assert orthogonalise(x.bfloat16()).dtype == torch.bfloat16
    small = torch.randn(4, 1, 9)
    torch.testing.assert_close(orthogonalise(small).square().sum(-1), torch.ones(4, 1), rtol=0.34, atol=0)


def test_large_matrices_are_divided_among_threads(monkeypatch):
    before, seen = torch.get_num_threads(), []
    weights = _orthogonalize._weights
    monkeypatch.setattr(_orthogonalize, "_weights", lambda *a: seen.append(torch.get_num_threads()) or weights(*a))
    x = torch.randn(5, 520, 530, generator=torch.Generator().manual_seed(0))
    x[3, 5, 7] = torch.inf
    try:
        torch.set_num_threads(1)
        expected = orthogonalise(x)
        torch.set_num_threads(3)
        torch.testing.assert_close(orthogonalise(x), expected, equal_nan=True)
        assert torch.get_num_threads() == 3
        for mode in (torch.inference_mode(), torch.no_grad()):  # which new threads do not inherit
            with mode:
                assert orthogonalise(torch.nn.Parameter(x))[0].isfinite().all()
        del seen[10:]
        orthogonalise(x[:1])
        assert seen == [1] * 10 + [3]
        monkeypatch.setattr(_orthogonalize, "_weights", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            orthogonalise(x)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_a_matrix_that_is_not_finite_does_not_touch_the_others():
    x = torch.randn(3, 256, 256, generator=torch.Generator().manual_seed(0))
    expected = orthogonalise(x)
    x[1, 5, 7] = torch.inf
    result = orthogonalise(x)
    assert result[1].isnan().all()
    assert torch.equal(result[::2], expected[::2])


@pytest.mark.parametrize("rows", [160, 256])  # without and with padding
def test_large_matrices_one_by_one_are_as_small_ones_in_a_batch(monkeypatch, rows):
    x = of_a_gradient(rows, 300, noise=0.05)
    one = orthogonalise(x)
    monkeypatch.setattr(_orthogonalize, "_SMALL", 1000)
    torch.testing.assert_close(one, orthogonalise(x), rtol=1e-3, atol=1e-4)


def jordan(x):
    """Five steps with K. Jordan's coefficients, from x/|x|."""
    x = x / torch.linalg.matrix_norm(x)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


@pytest.mark.parametrize("noise", [0.1, 0.01, 0.003])
@pytest.mark.parametrize(("form", "error"), FORMS)
def test_of_a_gradient_it_is_nearer_to_one_than_muons_first_iteration(form, error, noise):
    """In float32, where the Gram matrix squares the condition number: it is up to 10^6 here."""
    x = of_a_gradient(128, 512, noise)
    distance = [torch.linalg.svdvals(y).sub(1).square().mean().sqrt() for y in (form(x), jordan(x))]
    assert distance[0] < distance[1]


def test_matrices_of_one_shape_are_batched_up_to_a_limit():
    blocks = Blocks.of_tensors([torch.zeros(shape) for shape in [(4, 3), (5,), (4, 3), (2, 6), (4, 3), (40, 40)]])
    assert matrix_batches(blocks, 24) == [[0], [2, 4], [3], [5]]
    assert matrix_batches(blocks, 10**9) == [[0, 2, 4], [3], [5]]
