"""Our rules for deep models: equal to plain transcriptions, and alive where the baselines are not."""

import math

import pytest
import torch
from torch import nn

import lategrad as lg
from helpers.transcriptions import orthogonal_factor
from lategrad.checks import check_rule
from lategrad.rules.blocks import Block, Blocks, fill_in

BLOCKS = lg.Blocks.of_module(nn.Linear(2, 3), {"weight": "tokens"})  # a 3 x 2 matrix and a bias


# ---- Plain transcriptions: one run, lists of floats, all delays given


def steady_adam(x0, grads, delays, lr, decay):
    z, x, v, mean = list(x0), list(x0), [0.0] * len(x0), 0.0
    queries = [list(x0)]
    for t, (g, tau) in enumerate(zip(grads, delays, strict=True), start=1):
        mean += (tau - mean) / min(t, 32)
        late = max(mean, tau)
        brake = min(1, 3 / (3 + late) * math.sqrt(max(1, t / (10 * (1 + late)))))
        step = lr * (t - tau) / t * brake
        v = [0.999 * a + 0.001 * b * b for a, b in zip(v, g, strict=True)]
        a = [b / (math.sqrt(c / (1 - 0.999**t)) + 1e-8) for b, c in zip(g, v, strict=True)]
        size = max(1, math.sqrt(sum(b * b for b in a) / len(a)))
        z = [(1 - step * decay) * c - step * b / size for b, c in zip(a, z, strict=True)]
        x = [b + 2 / (t + 1) * (c - b) for b, c in zip(x, z, strict=True)]
        queries.append([b + 0.2 * (c - b) for b, c in zip(x, z, strict=True)])
    return queries, x


def steady_muon(x0, grads, delays, lr, decay):
    """The first six entries are a 3 x 2 matrix with a row for each token."""
    z, x, m, v, mean = list(x0), list(x0), [0.0] * len(x0), [0.0] * len(x0), 0.0
    queries = [list(x0)]
    for t, (g, tau) in enumerate(zip(grads, delays, strict=True), start=1):
        mean += (tau - mean) / min(t, 32)
        beta = 1 - 1 / (10 + mean)
        m = [beta * a + (1 - beta) * b for a, b in zip(m, g, strict=True)]
        n = [beta * a + (1 - beta) * b for a, b in zip(m, g, strict=True)]
        v = [0.999 * a + 0.001 * b * b for a, b in zip(v, g, strict=True)]
        columns = orthogonal_factor([n[0:6:2], n[1:6:2]])
        rows = [[0.2 * math.sqrt(3) * a for a in row] for row in zip(*columns, strict=True)]
        sizes = [math.sqrt(sum(a * a for a in row) / 2) for row in rows]
        d = [a * min(1, 0.2 / size) for row, size in zip(rows, sizes, strict=True) for a in row]
        d += [0.3 * a / (math.sqrt(b / (1 - 0.999**t)) + 1e-8) for a, b in zip(n[6:], v[6:], strict=True)]
        step = lr * (t - tau) / t / math.sqrt(1 + max(mean, tau))
        before, z = z, [(1 - step * decay) * c - step * b for b, c in zip(d, z, strict=True)]
        x = [b + 4 / (t + 3) * (c - b) for b, c in zip(x, z, strict=True)]
        ahead = min(mean, t)
        z_ahead = [c + ahead * (c - b) for b, c in zip(before, z, strict=True)]
        share = 1 - (t / (t + ahead)) ** 4
        x_ahead = [a + share * ((b + c) / 2 - a) for a, b, c in zip(x, z, z_ahead, strict=True)]
        share = 0.2 + 0.3 * 10 / (10 + mean)
        queries.append([a + share * (b - a) for a, b in zip(x_ahead, z_ahead, strict=True)])
    return queries, x


DELAYS = {"none": [0] * 40, "constant": [min(t, 5) for t in range(40)], "mixed": [(t * 7) % (t + 1) for t in range(40)]}


@pytest.mark.parametrize("delays", DELAYS.values(), ids=DELAYS)
@pytest.mark.parametrize(
    ("rule", "transcription"),
    [
        (lg.SteadyAdam(lr=0.1, weight_decay=0.3), steady_adam),
        (lg.SteadyMuon(lr=0.1, weight_decay=0.3, blocks=BLOCKS), steady_muon),
    ],
    ids=["adam", "muon"],
)
def test_equals_its_transcription(rule, transcription, delays):
    torch.manual_seed(0)
    grads, x0 = torch.randn(len(delays), 9, dtype=torch.float64), torch.randn(9, dtype=torch.float64)
    state = rule.init(x0)
    queries = [rule.query(state)]
    for grad, delay in zip(grads, delays, strict=True):
        state = rule.update(state, grad, torch.tensor(delay))
        queries.append(rule.query(state))
    want, output = transcription(x0.tolist(), grads.tolist(), delays, lr=0.1, decay=0.3)
    torch.testing.assert_close(torch.stack(queries), torch.tensor(want, dtype=torch.float64), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(rule.output(state), torch.tensor(output, dtype=torch.float64), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("domain", [lg.WholeSpace(), lg.Ball(2.0), lg.Box(-1.0, 1.0)], ids=lambda d: type(d).__name__)
def test_pass_the_checks_of_every_rule(domain):
    compile = isinstance(domain, lg.WholeSpace)
    check_rule(lg.SteadyAdam(lr=0.1, domain=domain, weight_decay=0.1), compile=compile)
    check_rule(lg.SteadyMuon(lr=0.1, domain=domain, weight_decay=0.1, blocks=BLOCKS), dim=9, compile=compile)


def first_direction(grad):
    """The direction of SteadyMuon's first update, which is along the gradient alone, divided by its scale."""
    *runs, rows, columns = grad.shape
    rule = lg.SteadyMuon(lr=1.0, blocks=Blocks((Block("weight", (rows, columns), "matrix"),)))
    state = rule.init(torch.zeros(*runs, rows * columns, dtype=grad.dtype))
    moved = rule.output(rule.update(state, grad.flatten(-2), torch.tensor(0)))
    return -moved.unflatten(-1, (rows, columns)) / (0.2 * math.sqrt(max(rows, columns)))


def test_the_direction_has_the_singular_vectors_of_the_gradient_and_singular_values_near_one():
    torch.manual_seed(0)
    for shape in ((5, 9), (9, 5), (4, 3, 6, 6)):
        grad = torch.randn(shape, dtype=torch.float64)
        direction = first_direction(grad)
        values = torch.linalg.svdvals(direction)
        assert values.min() > 0.6, shape
        assert values.max() < 1.25, shape
        u, _, vh = torch.linalg.svd(grad, full_matrices=False)
        alignment = (direction * (u @ vh)).sum((-2, -1)) / min(shape[-2:])
        assert (alignment > 0.8).all(), shape
    assert first_direction(torch.zeros(3, 4)).eq(0).all()


def test_without_blocks_it_says_that_there_are_no_matrices():
    with pytest.warns(UserWarning, match="SteadyMuon without blocks knows no matrices"):
        lg.SteadyMuon().init(torch.zeros(4))
    with pytest.raises(ValueError, match="of shape .*9"):
        lg.SteadyMuon(blocks=BLOCKS).init(torch.zeros(4))


def test_blocks_are_filled_in_only_where_they_are_wanted_and_missing():
    assert fill_in(lg.SteadyMuon(), BLOCKS).blocks is BLOCKS
    own = lg.SteadyMuon(blocks=BLOCKS)
    assert fill_in(own, lg.Blocks.of_tensors([torch.zeros(9)])) is own
    plain = lg.SteadyAdam()
    assert fill_in(plain, BLOCKS) is plain


def test_splitting_and_joining_are_inverse_for_convolutions_and_numbers():
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(4, 2))
    model.scale = nn.Parameter(torch.tensor(1.0))
    blocks = lg.Blocks.of_module(model)
    x = torch.randn(5, blocks.size)
    parts = blocks.split(x)
    assert [tuple(part.shape) for part in parts] == [(5, *p.shape) for p in model.parameters()]
    assert torch.equal(blocks.join(parts), x)
    assert {block.matrix_shape for block in blocks.parts if block.kind == "matrix"} == {(3, 18), (2, 4)}
