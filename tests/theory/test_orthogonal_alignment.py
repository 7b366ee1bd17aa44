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


def test_the_constants_of_both_orthogonalisers():
    y = torch.logspace(-5, 0, 20_001, dtype=torch.float64)
    rational = y * (_orthogonalize._CONSTANT + sum(b / (y * y + c) for c, b in _orthogonalize._POLES))
    polynomial = y
    for a, b, c in _orthogonalize._POLYNOMIALS:
        polynomial = a * polynomial + b * polynomial**3 + c * polynomial**5
    for r, low, high in ((rational, 0.845, 1.155), (polynomial, 0.9656, 1.0215)):
        assert low <= r[y >= 0.002].min()
        assert r.max() <= high
        assert (r / y)[y <= 0.002].min() >= 500 * low
    assert (rational / y).max() <= 508
    assert ((rational / y).diff() <= 0).all()


@pytest.mark.parametrize("spread", [0.5, 1, 3, 6])
def test_alignment_is_looser_than_it_need_be_on_geometric_spectra(spread):
    values = torch.logspace(0, -spread, 128, dtype=torch.float64).diag()
    assert (values * orthogonalise(values)).sum() / values.sum() >= 0.9


def test_alignment_falls_with_the_rank_so_that_no_constant_would_do():
    """One large singular value, and a thousand of a thousandth: small ones are not brought to 1."""
    values = torch.full((1000,), 1.2e-3, dtype=torch.float64)
    values[0] = 1
    aligned = (values.diag() * orthogonalise(values.diag())).sum() / values.sum()
    assert theory.orthogonal_alignment(1000) <= aligned < 0.84
