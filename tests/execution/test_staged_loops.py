"""SteadyMuon in loops, one batch of matrices after another: the rule's own values, in little memory."""

import pytest
import torch
from torch import nn

import lategrad as lg
from helpers.memory import largest_allocation
from helpers.parameters import backends, flat, parameters, set_grads
from lategrad.execution import UnsupportedError, in_place
from lategrad.execution.codegen import staged
from lategrad.optim import SteadyMuon

SHAPES = [(9, 4), (8, 6), (5,), (6, 8), (8, 6), (3, 2, 2, 2), (7, 3), (), (8, 6)]
KINDS = ["embedding", "matrix", "other", "matrix", "matrix", "matrix", "other", "other", "matrix"]
SLOW_DTYPES = [pytest.param(dtype, marks=pytest.mark.slow) for dtype in (torch.float64, torch.bfloat16)]


def steps(compile, dtype=torch.float32, kinds=KINDS, shapes=SHAPES, **options):
    """Parameters and outputs after five late updates."""
    params = parameters(shapes, dtype=dtype)
    optimizer = SteadyMuon([{"params": params, "kinds": kinds}], lr=0.05, compile=compile, **options)
    for t in range(5):
        set_grads(params, t)
        optimizer.step(delay=min(t, 2))
    assert backends(optimizer) == ["loops" if compile else "eager"]
    queries = flat(params)
    with optimizer.output():
        return queries, flat(params), optimizer


@pytest.mark.parametrize("least", [1, 100, 2**20], ids="at least {} entries a batch".format)
@pytest.mark.parametrize("dtype", [torch.float32, *SLOW_DTYPES], ids=str)
def test_loops_are_the_rule(dtype, least, monkeypatch):
    monkeypatch.setattr(staged, "_LEAST", least)
    got, want = (steps(compile, dtype, weight_decay=0.1) for compile in (True, False))
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-10, torch.bfloat16: 1e-2}[dtype]
    for a, b in zip(got[:2], want[:2], strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    for p, q in zip(*(o.param_groups[0]["params"] for o in (got[2], want[2])), strict=True):
        assert got[2].state[p].keys() == want[2].state[q].keys()
    for name, value in want[2].param_groups[0]["scalars"][0].items():
        torch.testing.assert_close(got[2].param_groups[0]["scalars"][0][name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [["matrix"] * 2, ["other"] * 2], ids=["matrices alone", "no matrix"])
@pytest.mark.parametrize("maximize", [False, True], ids=["down", "up"])
def test_groups_of_one_kind(kinds, maximize):
    got, want = (steps(compile, kinds=kinds, shapes=[(8, 6), (4, 5)], maximize=maximize) for compile in (True, False))
    torch.testing.assert_close(torch.stack(got[:2]), torch.stack(want[:2]), rtol=1e-5, atol=1e-6)


def test_a_server_runs_the_same_loops():
    blocks = lg.Blocks.of_tensors(parameters(SHAPES), KINDS)
    rule = lg.SteadyMuon(0.05, blocks=blocks)
    pure = rule.init(torch.randn(blocks.size, generator=torch.Generator().manual_seed(0)))
    state = rule.init(pure.q)
    step = in_place(rule, state)
    for t in range(4):
        grad = torch.randn(blocks.size, generator=torch.Generator().manual_seed(t))
        query = torch.empty(blocks.size)
        pure = rule.update(pure, grad, torch.tensor(t))
        step(grad, t, query_out=query)
        torch.testing.assert_close(query, pure.q, rtol=1e-5, atol=1e-6)
    assert step.backend == "loops"
    for got, want in zip(state, pure, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_what_couples_the_entries_or_is_not_stored_by_rows_is_refused():
    params = parameters(SHAPES, dtype=torch.float32)
    blocks = lg.Blocks.of_tensors(params, KINDS)
    with pytest.raises(UnsupportedError, match="sums over the vector"):
        in_place(lg.SteadyMuon(0.1, lg.Ball(1.0), blocks=blocks), None, tensors=params, backend="loops")
    params[5] = nn.Parameter(torch.zeros(3, 2, 2, 2).to(memory_format=torch.channels_last))
    with pytest.raises(UnsupportedError, match="another memory layout"):
        in_place(lg.SteadyMuon(0.1, blocks=blocks), None, tensors=params, backend="loops")
    large = [nn.Parameter(torch.zeros(64, 64, 8, 8).to(memory_format=torch.channels_last))]
    for one in (params, large):  # not by torch.compile, which would take a minute to save milliseconds
        optimizer = SteadyMuon([{"params": one, "kinds": "other" if one is params else "matrix"}])
        set_grads(one, 0)
        optimizer.step()
        assert backends(optimizer) == ["eager"]


def test_a_matrix_of_a_single_number_is_one_of_many():
    params = parameters([(1, 1), (4, 3)], dtype=torch.float32)
    optimizer = SteadyMuon([{"params": params, "kinds": "matrix"}], compile=True)
    others = parameters([(1, 1), (4, 3)], dtype=torch.float32)
    plain = SteadyMuon([{"params": others, "kinds": "matrix"}], compile=False)
    for t in range(3):
        for one, own in ((optimizer, params), (plain, others)):
            set_grads(own, t)
            one.step()
    assert backends(optimizer) == ["loops"]
    torch.testing.assert_close(flat(params), flat(others))


def test_resumes_exactly_from_eager_in_loops():
    params, resumed = (parameters(SHAPES, dtype=torch.float32) for _ in range(2))
    straight, second = (SteadyMuon([{"params": p, "kinds": KINDS}], lr=0.05, compile=True) for p in (params, resumed))
    for t in range(6):
        set_grads(params, t)
        if t == 3:
            second.load_state_dict(straight.state_dict())
            for p, q in zip(resumed, params, strict=True):
                p.data.copy_(q.data)
        straight.step(delay=1)
        if t >= 3:
            set_grads(resumed, t)
            second.step(delay=1)
    assert torch.equal(flat(params), flat(resumed))


def test_temporaries_of_every_step_are_at_most_a_third_of_a_vector(monkeypatch):
    """A GPT-2 of a sixth of the width: its proportions, with the floor of a batch in proportion."""
    monkeypatch.setattr(staged, "_LEAST", 2**15)
    width, layers = 128, 12
    matrices = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)] * layers
    params = [nn.Parameter(torch.zeros(shape)) for shape in [(8376, width), (256, width), *matrices, (10 * width,)]]
    for p in params:
        p.grad = torch.randn_like(p)
    vector = sum(p.nbytes for p in params)
    kinds = ["embedding"] * 2 + ["matrix"] * len(matrices) + ["other"]

    def build():
        return SteadyMuon([{"params": params, "kinds": kinds}], compile=True)

    state = 3 + sum(p.nbytes for p, kind in zip(params, kinds, strict=True) if kind != "matrix") / vector

    def first_step():
        optimizer = build()
        optimizer.step()
        return optimizer

    assert largest_allocation(first_step) / vector <= state + 0.35
    optimizer = first_step()
    assert largest_allocation(optimizer.step) / vector <= 0.35
