"""A and B of the orthogonalised step: step 13 of docs/theory-deep.md, on the library's own functions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lategrad import theory
from lategrad.rules import _orthogonalize
from lategrad.rules._orthogonalize import orthogonalise


@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 40), columns=st.integers(1, 40), spread=st.floats(0, 12))
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_orthogonalised_step_has_the_stated_length_and_alignment(dtype, seed, rows, columns, spread):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    values = 10 ** (-spread * torch.rand(min(rows, columns), generator=generator, dtype=torch.float64))
    x = ((u * values) @ v).to(dtype).double()
    step = orthogonalise(x.to(dtype)).double()
    assert torch.linalg.svdvals(step).max() <= 1.16
    assert (x * step).sum() >= theory.orthogonal_alignment(min(rows, columns)) * torch.linalg.svdvals(x).sum()


def rational_function(y):
    """What a singular value y becomes on a CPU, in exact arithmetic."""
    return y * (_orthogonalize._CONSTANT + sum(b / (y * y + c) for c, b in _orthogonalize._POLES))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2, 2), (8, 8), (64, 64), (64, 500), (200, 300)], ids=str)
def test_the_step_is_not_too_long_at_the_first_peak_of_the_function_where_rounding_counts_most(shape, dtype):
    generator = torch.Generator().manual_seed(0)
    u, _, v = torch.linalg.svd(torch.randn(shape, generator=generator, dtype=torch.float64), full_matrices=False)
    values = torch.full(shape[:1], 0.00479, dtype=torch.float64)
    values[0] = 1
    x = ((u * values) @ v).to(dtype)
    assert 1.15 < torch.linalg.svdvals(orthogonalise(x).double()).max() <= 1.16


def test_the_constants_of_both_orthogonalisers():
    y = torch.logspace(-5, 0, 20_001, dtype=torch.float64)
    rational = rational_function(y)
    polynomial = y
    for a, b, c in _orthogonalize._POLYNOMIALS:
        polynomial = a * polynomial + b * polynomial**3 + c * polynomial**5
    for r, low, high in ((rational, 0.845, 1.155), (polynomial, 0.9656, 1.0215)):
        assert low <= r[y >= 0.002].min()
        assert r.max() <= high
        assert (r / y)[y <= 0.002].min() >= 500 * low
    assert (rational / y).max() <= 508
    assert ((rational / y).diff() <= 0).all()
    assert 680 < (polynomial / y).max() <= 690


SMALLEST = [(16, 1, 1.0, 0.857), (32, 1, 1.0, 0.845), (600, 24, 1.95e-3, 0.829), (2000, 1, 7.03e-4, 0.683),
            (10_000, 1, 3.99e-4, 0.392), (100_000, 1, 1.4e-4, 0.143)]  # fmt: skip
"""k singular values, of which the first few are 1 and the others are small: the smallest alignments that were found."""


@pytest.mark.parametrize(("k", "ones", "small", "found"), SMALLEST)
def test_alignment_falls_with_the_rank_and_nearly_as_fast_as_its_bound(k, ones, small, found):
    size = (ones + (k - ones) * small**4) ** 0.25
    become = [rational_function(value / size) for value in (1.0, small)]
    aligned = (ones * become[0] + (k - ones) * small * become[1]) / (ones + (k - ones) * small)
    bound = theory.orthogonal_alignment(k)
    assert aligned == pytest.approx(found, abs=1e-3)
    assert bound <= aligned < 1.35 * bound


def test_the_alignment_is_that_of_the_page_and_only_for_ranks_for_which_it_is_proved():
    assert theory.orthogonal_alignment(1) == pytest.approx(0.84)
    assert theory.orthogonal_alignment(1501) == pytest.approx(1.68 / 3)  # 1500 / 500 = 3, and the root of 4 is 2
    assert theory.orthogonal_alignment(1501, level=0.96) == pytest.approx(1.92 / 3)
    for rank in (0, 10**6 + 1):
        with pytest.raises(ValueError, match=f"rank must be between 1 and 1,000,000.*got {rank}"):
            theory.orthogonal_alignment(rank)


def test_alignment_of_a_matrix_is_that_of_its_singular_values():
    """One large singular value, and a thousand of a thousandth: small ones are not brought to 1."""
    values = torch.full((1000,), 1.2e-3, dtype=torch.float64)
    values[0] = 1
    aligned = (values.diag() * orthogonalise(values.diag())).sum() / values.sum()
    size = (values**4).sum() ** 0.25
    assert aligned.item() == pytest.approx(((values * rational_function(values / size)).sum() / values.sum()).item())
    assert theory.orthogonal_alignment(1000) <= aligned < 0.84
