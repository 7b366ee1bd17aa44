"""The rules as C loops over many tensors: equal to the rules themselves, or refused."""

import pytest
import torch
from torch import nn

import lategrad as lg
from helpers.parameters import ELEMENTWISE, backends, flat, parameters, pure_run, set_grads
from lategrad.execution import UnsupportedError
from lategrad.execution.codegen.emit import CHUNK, emit
from lategrad.execution.codegen.run import Loops
from lategrad.optim import AnytimeSGD, Delayed, FromRule
from lategrad.registry import build_rule

SHAPES = [(3, 4), (CHUNK + 5,), (), (2, 3, 2, 2)]
DIM = CHUNK + 42
COORDINATES = torch.linspace(-1, 1, DIM)
DOMAINS = {
    "whole": lg.WholeSpace(),
    "ball": lg.Ball(2.0),
    "ball off the origin": lg.Ball(2.0, center=COORDINATES),
    "box": lg.Box(-0.5, 0.5),
    "box of its own": lg.Box(COORDINATES - 0.5, COORDINATES + 0.1),
    "half-space": lg.HalfSpace(COORDINATES, 0.1),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.parametrize("domain", ["whole", "ball"])
def test_every_rule_is_itself(name, domain):
    rule = build_rule(name, 0.5, DOMAINS[domain])
    params = parameters(SHAPES, dtype=torch.float32)
    start, grads = rule.domain.project(flat(params)), []
    optimizer = FromRule(params, rule, compile=True)
    for t in range(4):
        grads.append(set_grads(params, seed=t))
        optimizer.step()
    assert backends(optimizer) == ["loops"]
    state = pure_run(rule, start, grads)
    torch.testing.assert_close(flat(params), rule.query(state), rtol=1e-5, atol=1e-6)
    with optimizer.output():
        torch.testing.assert_close(flat(params), rule.output(state), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("domain", "maximize"), [*((name, False) for name in DOMAINS), ("half-space", True)])
def test_every_set_of_arithmetic_and_sums(domain, maximize):
    params = parameters(SHAPES, dtype=torch.float64)
    rule = lg.Anytime(lg.OGD(0.5, DOMAINS[domain]), interpolation=0.9)
    start, grads = rule.domain.project(flat(params)), []
    optimizer = FromRule(params, rule, compile=True, maximize=maximize)
    for t in range(4):
        grads.append(set_grads(params, seed=t) * (-1 if maximize else 1))
        optimizer.step()
    assert backends(optimizer) == ["loops"]
    torch.testing.assert_close(flat(params), rule.query(pure_run(rule, start, grads)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_rounded_as_torch_rounds(dtype):
    params = parameters(SHAPES, dtype=dtype)
    rule = lg.Anytime(lg.OGD(0.5))
    state = rule.init(flat(params).float())
    optimizer = AnytimeSGD(params, lr=0.5, compile=True)
    for t in range(4):
        state = rule.update(state, set_grads(params, seed=t).float(), torch.tensor([0]))
        optimizer.step()
    assert backends(optimizer) == ["loops"]
    assert torch.equal(flat([optimizer.state[p]["x"] for p in params]), state.x)
    assert torch.equal(flat(params), state.x.to(dtype))


def test_what_is_not_finite_is_rounded_to_bf16_as_torch_does():
    special = torch.tensor([float("inf"), -float("inf"), float("nan"), 3.4e38, 1e-40, -0.0, 1.00390625])
    target = torch.zeros(7, dtype=torch.bfloat16)
    loops = Loops(lambda x: [x.to(torch.bfloat16)], [special], [1], [torch.bfloat16], [7], special.device)
    loops([[special], [target]])
    torch.testing.assert_close(target, special.bfloat16(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["adaptive-revision", "dc-asgd", "ringmaster"])
def test_late_gradients_bring_their_tickets_and_delays(name):
    a, b = parameters(SHAPES, dtype=torch.float32), parameters(SHAPES, dtype=torch.float32)
    rule = build_rule(name, 0.1, lg.WholeSpace())
    fast = FromRule(a, rule, compile=True)
    compiled = Delayed(fast, 3)
    eager = Delayed(FromRule(b, rule, compile=False), 3)
    for t in range(8):
        set_grads(a, t)
        set_grads(b, t)
        compiled.step()
        eager.step()
    assert backends(fast) == ["loops"]
    torch.testing.assert_close(flat(a), flat(b), rtol=1e-6, atol=1e-6)


def test_each_parameter_a_vector_of_its_own():
    a, b = parameters([(300,), (20, 30)]), parameters([(300,), (20, 30)])
    for params, compile in ((a, True), (b, False)):
        optimizer = AnytimeSGD(params, lr=0.5, domain=lg.Ball(1.0), per_parameter=True, compile=compile)
        for t in range(3):
            set_grads(params, t)
            optimizer.step()
        assert backends(optimizer) == ["loops" if compile else "eager"] * 2
    torch.testing.assert_close(flat(a), flat(b), rtol=1e-12, atol=1e-12)


def test_memory_may_move():
    """Gradients are new tensors at every step, and parameters may get other memory."""
    a, b = parameters(SHAPES, dtype=torch.float32), parameters(SHAPES, dtype=torch.float32)
    compiled, eager = AnytimeSGD(a, lr=0.5, compile=True), AnytimeSGD(b, lr=0.5, compile=False)
    kept = []
    for t in range(5):
        set_grads(a, t)
        set_grads(b, t)
        kept.append([p.grad for p in a])  # so that no address comes again
        if t == 2:
            for p in a:
                p.data = p.data.clone()
        compiled.step()
        eager.step()
    assert backends(compiled) == ["loops"]
    assert torch.equal(flat(a), flat(b))


def test_channels_last_with_a_vector_in_row_order_goes_another_way():
    weight = nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
    start = flat([weight])
    center = torch.linspace(-1, 1, 48)
    optimizer = AnytimeSGD([weight], lr=0.5, domain=lg.Ball(1.0, center=center), compile=True)
    weight.grad = torch.randn_like(weight)
    rule = lg.Anytime(lg.OGD(0.5, lg.Ball(1.0, center=center)))
    optimizer.step()
    assert backends(optimizer) == ["compile"]
    torch.testing.assert_close(flat([weight]), rule.query(pure_run(rule, start, [flat([weight.grad])])))


def traced(function, *inputs):
    size = max(x.numel() for x in inputs)
    dtypes = [x.dtype for x in inputs]
    return emit(lambda *args: [function(*args)], inputs, size, [len(inputs)], [*dtypes, torch.float32])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x.sort().values, "sort"),
        (lambda x: x - x.amax(-1, keepdim=True), "amax"),
        (lambda x: x.cumsum(-1), "cumsum"),
        (lambda x: torch.cat([x[:2], x[2:]]), "shape"),
        (lambda x: x.bfloat16() * 2, "bfloat16"),
    ],
)
def test_what_is_not_arithmetic_or_a_sum_is_refused(function, message):
    with pytest.raises(UnsupportedError, match=message):
        traced(function, torch.randn(5))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, s: torch.lerp(x, x * x, s.float()),
        lambda x, s: x.clamp_min(0.2) + x.clamp_max(0.1) * s,
        lambda x, s: torch.where((x > s) & (x <= 1), x.abs().sqrt(), x.sign() * x.exp()),
        lambda x, s: torch.maximum(x, s.float()) - torch.minimum(-x, s.float()).reciprocal(),
        lambda x, s: x / torch.linalg.vector_norm(x / x.sum(-1, keepdim=True), dim=-1, keepdim=True) ** 3 + s**-1.5,
        lambda x, s: x * (s % 0.3).floor() + (s == 0.7) * x.square() - torch.zeros_like(x) + 2 * torch.ones_like(x),
        lambda x, s: (x * float("inf")).clamp_max(3.0) + s,
        lambda x, s: 1 - 0.9**s + x.abs() ** s.float() - (2 - x) * x.mean(-1, keepdim=True),
        lambda x, s: x.clamp(-0.3, 0.4) + x.clamp(min=0.1) * x.clamp(max=0.2) + s,
    ],
)
def test_arithmetic_is_torchs(function):
    x, s = torch.randn(50, generator=torch.Generator().manual_seed(0)), torch.tensor([0.7], dtype=torch.float64)
    target = torch.zeros(50)
    loops = Loops(lambda *args: [function(*args)], [x, s], [2], [torch.float32], [20, 30], x.device)
    loops([x.split([20, 30]), s, target.split([20, 30])])
    torch.testing.assert_close(target, function(x, s).float(), rtol=1e-6, atol=1e-6, equal_nan=True)


def test_a_written_tensor_must_not_be_two_inputs():
    """The trace would take one for the other, and compute something else without a word."""
    x = torch.zeros(5)
    with pytest.raises(UnsupportedError, match="is two inputs"):
        emit(lambda a, b: [a + b], [x, x], 5, [0], [x.dtype] * 2)
    emit(lambda a, b: [a + b], [x, x.clone()], 5, [0], [x.dtype] * 2)
