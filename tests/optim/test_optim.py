"""lategrad.optim against the rules themselves and against the contract of torch.optim."""

import contextlib
import copy
import os
import pickle
import re
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import lategrad as lg
import lategrad.optim
from helpers.memory import largest_allocation
from helpers.parameters import NO_DELAY, backends, flat, parameters, pure_run, saved_and_loaded, set_grads
from lategrad.execution.codegen import run as codegen
from lategrad.optim import AnytimeSGD, FromRule, OptimisticAnytime, StronglyConvexSGD
from lategrad.registry import RULES, build_rule
from lategrad.rules.blocks import fill_in

DIM = 42


# ---- The same numbers as the rules


@pytest.mark.parametrize("name", RULES)
def test_any_rule_is_itself_bit_for_bit(name):
    params = parameters(dtype=torch.float32)
    rule = fill_in(build_rule(name, 0.5, lg.Ball(2.0)), lg.Blocks.of_tensors(params))
    outside = flat(params)
    optimizer = FromRule(params, build_rule(name, 0.5, lg.Ball(2.0)))
    assert torch.equal(flat(params), rule.domain.project(outside))
    start, grads = flat(params), []
    for t in range(6):
        grads.append(set_grads(params, seed=t))
        optimizer.step()
    state = pure_run(rule, start, grads)
    assert torch.equal(flat(params), rule.query(state))
    with optimizer.output():
        assert torch.equal(flat(params), rule.output(state))
    assert torch.equal(flat(params), rule.query(state))


COORDINATES = torch.linspace(-1, 1, DIM, dtype=torch.float64)


SETS = [
    lg.WholeSpace(),
    lg.Ball(1.0, center=COORDINATES),
    lg.Box(COORDINATES - 0.5, COORDINATES + 0.1),
    lg.HalfSpace(COORDINATES, 0.1),
    lg.Simplex(),
    lg.Product((lg.Ball(1.0), 20), (lg.Simplex(), 20), (lg.HalfSpace(COORDINATES[:2], 0.1), 2)),
]


@pytest.mark.parametrize(
    ("domain", "compile"),
    [*((domain, False) for domain in SETS), *((SETS[i], True) for i in (1, 4, 5)),
     *(pytest.param(SETS[i], True, marks=pytest.mark.slow) for i in (0, 2, 3))],
    ids=lambda value: ("eager", "compiled")[value] if isinstance(value, bool) else type(value).__name__,
)  # fmt: skip
def test_a_constraint_set_is_of_the_whole_group(domain, compile):
    """Any memory layout: the rule on the concatenated vector."""
    params = parameters()
    params[2] = nn.Parameter(params[2].detach().to(memory_format=torch.channels_last))
    params[0] = nn.Parameter(torch.randn(3, 8, dtype=torch.float64)[:, ::2])  # with gaps
    start = flat(params)
    optimizer = AnytimeSGD(params, lr=0.5, domain=domain, compile=compile)
    grads = []
    for t in range(5):
        grads.append(set_grads(params, seed=t))
        optimizer.step()
    assert backends(optimizer) == ["compile" if compile else "eager"]
    rule = lg.Anytime(lg.OGD(0.5, domain))
    torch.testing.assert_close(flat(params), rule.query(pure_run(rule, start, grads)), rtol=1e-12, atol=1e-12)


def mixed_parameters():
    params = parameters([(64, 3, 3, 3), (300,), (40, 10), (7,), ()], dtype=torch.float32)
    params[0] = nn.Parameter(params[0].detach().to(memory_format=torch.channels_last))
    return params


@pytest.mark.parametrize(("name", "backend"), [("anytime-sgd", "loops"), ("adaptive-revision", "compile")])
def test_compiled_is_the_rule_within_rounding(name, backend):
    """In memory layouts of their own; a ticket that is a vector is in row order, which loops cannot follow."""
    rule = build_rule(name, 0.5, lg.Ball(3.0))
    params = mixed_parameters()
    start, grads = flat(params), []
    optimizer = FromRule(params, rule, compile=True)
    for t in range(4):
        grads.append(set_grads(params, seed=t))
        optimizer.step()
    assert backends(optimizer) == [backend]
    state = pure_run(rule, start, grads)
    torch.testing.assert_close(flat(params), rule.query(state), rtol=1e-6, atol=1e-6)
    with optimizer.output():
        torch.testing.assert_close(flat(params), rule.output(state), rtol=1e-6, atol=1e-6)
    squares = [p.square().sum() for p in params]
    set_grads(params, seed=4)
    optimizer.step()
    for square in squares:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # autograd must know
            square.backward()


def test_per_parameter_each_is_a_vector_of_its_own():
    params = parameters()
    optimizer = OptimisticAnytime(params, diameter=2.0, domain=lg.Ball(1.0), per_parameter=True)
    starts = [p.detach().clone().flatten() for p in params]
    grads = []
    for t in range(4):
        set_grads(params, seed=t)
        grads.append([p.grad.flatten() for p in params])
        optimizer.step()
    rule = lg.Anytime(lg.OptimisticOGD(2.0, lg.Ball(1.0)))
    for i, p in enumerate(params):
        want = rule.query(pure_run(rule, starts[i], [g[i] for g in grads]))
        assert torch.equal(p.detach().flatten(), want)


def test_the_papers_optimizers_are_their_rules():
    cases = [
        (lambda p: AnytimeSGD(p, 0.3, power=2, interpolation=0.8, domain=lg.Ball(2.0), schedule="constant"),
         lg.Anytime(lg.OGD(0.3, lg.Ball(2.0), "constant"), power=2, interpolation=0.8)),
        (lambda p: OptimisticAnytime(p, 2.0, lr=0.5, power=2, interpolation=0.9),
         lg.Anytime(lg.OptimisticOGD(1.0), power=2, interpolation=0.9)),
        (lambda p: StronglyConvexSGD(p, 2.0, lr=0.5, domain=lg.Ball(1.0)), lg.StronglyConvexOGD(4.0, lg.Ball(1.0))),
    ]  # fmt: skip
    for build, rule in cases:
        params = parameters()
        start, grads = flat(params), []
        optimizer = build(params)
        for t in range(5):
            grads.append(set_grads(params, seed=t))
            optimizer.step()
        state = pure_run(rule, start, grads)
        torch.testing.assert_close(flat(params), rule.query(state), rtol=1e-14, atol=1e-14)
        with optimizer.output():
            torch.testing.assert_close(flat(params), rule.output(state), rtol=1e-14, atol=1e-14)


# ---- Groups


def test_groups_have_their_own_lr_set_and_count():
    a, b, c = parameters([(4,), (6,), (3,)])
    starts = [p.detach().clone() for p in (a, b, c)]
    optimizer = AnytimeSGD([{"params": [a], "domain": lg.Simplex()}, {"params": [b], "lr": 2.0}], lr=0.5)
    set_grads([a, b], seed=0)
    first = [a.grad, b.grad]
    optimizer.step()
    optimizer.add_param_group({"params": [c], "lr": 0.1, "domain": lg.Ball(0.5)})
    assert lg.Ball(0.5).contains(c.data)
    set_grads([a, b, c], seed=1)
    optimizer.step()
    rules = [lg.Anytime(lg.OGD(0.5, lg.Simplex())), lg.Anytime(lg.OGD(2.0)), lg.Anytime(lg.OGD(0.1, lg.Ball(0.5)))]
    for p, start, grads, rule in zip((a, b, c), starts, [first[:1], first[1:], []], rules, strict=True):
        assert torch.equal(p.data, rule.query(pure_run(rule, start, [*grads, p.grad])))


def test_a_change_of_a_groups_set_takes_effect():
    (p,) = parameters([(6,)])
    optimizer = AnytimeSGD([p], lr=0.5)
    optimizer.param_groups[0]["domain"] = lg.Box(-0.01, 0.01)
    for t in range(500):
        set_grads([p], seed=t)
        optimizer.step()
    assert p.abs().max() < 0.02


def test_a_bad_group_is_not_added():
    a, b = parameters([(2,), (3,)])
    optimizer = AnytimeSGD([a], lr=0.5)
    with pytest.raises(ValueError, match="Invalid learning rate: -1"):
        optimizer.add_param_group({"params": [b], "lr": -1})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [b]})


def test_rules_of_groups_and_their_lr():
    a, b = parameters([(2,), (3,)])
    adaptive = lg.Anytime(lg.AdaGradNorm(1.0))
    optimizer = FromRule([{"params": [a]}, {"params": [b], "rule": adaptive}], lg.SGD(lr=0.25))
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert "lr" not in optimizer.param_groups[1]
    starts = a.detach().clone(), b.detach().clone()
    set_grads([a, b], seed=0)
    optimizer.step()
    assert torch.equal(a.data, starts[0] - 0.25 * a.grad)
    assert torch.equal(b.data, adaptive.query(pure_run(adaptive, starts[1], [b.grad])))


# ---- Saving and loading


def run_steps(optimizer, params, seeds):
    for seed in seeds:
        set_grads(params, seed)
        optimizer.step()


@pytest.mark.parametrize("name", ["anytime-sgd", "optimistic-anytime", "anytime-ftrl", "strongly-convex", "sgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_resumes_from_a_saved_state(name, dtype):
    rule = build_rule(name, 0.5, lg.Ball(2.0))
    whole, part, resumed = parameters(dtype=dtype), parameters(dtype=dtype), parameters(dtype=dtype, seed=9)
    run_steps(FromRule(whole, rule), whole, range(6))
    interrupted = FromRule(part, rule)
    run_steps(interrupted, part, range(3))
    saved = saved_and_loaded({"model": [p.data for p in part], "optimizer": interrupted.state_dict()})
    optimizer = FromRule(resumed, rule)
    for p, value in zip(resumed, saved["model"], strict=True):
        p.data.copy_(value)
    kept = copy.deepcopy(saved["optimizer"])
    optimizer.load_state_dict(saved["optimizer"])
    run_steps(optimizer, resumed, range(3, 6))
    for p, q in zip(whole, resumed, strict=True):
        assert torch.equal(p, q)
    for values, before in zip(saved["optimizer"]["state"].values(), kept["state"].values(), strict=True):
        for key, value in values.items():
            assert torch.equal(value, before[key]), "loading shares memory with the saved state"


def test_a_state_of_another_rule_is_refused_and_nothing_changes():
    a, b = parameters(), parameters()
    other = FromRule(a, lg.StronglyConvexOGD(1.0))
    run_steps(other, a, range(2))
    optimizer = AnytimeSGD(b, lr=0.5)
    run_steps(optimizer, b, range(2))
    before, values = flat(b), optimizer.state_dict()["param_groups"][0]["scalars"][0]["t"].item()
    with pytest.raises(ValueError, match="the state is of another rule"):
        optimizer.load_state_dict({**other.state_dict(), "param_groups": [
            {**optimizer.state_dict()["param_groups"][0],
             "scalars": other.state_dict()["param_groups"][0]["scalars"]}]})  # fmt: skip
    run_steps(optimizer, b, [2])
    assert values == 2
    assert not torch.equal(flat(b), before)
    assert optimizer.param_groups[0]["scalars"][0]["t"].item() == 3


@pytest.mark.parametrize("shape", [(1, 4), (6, 4), (12,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_state_of_other_shapes_is_refused_and_nothing_changes(shape, dtype):
    """Values of (1, 4) could be copied to (3, 4), and trained with."""
    for rule in (lg.SGD(0.5), lg.SteadyAdam(0.5)):
        (a,), (b,) = parameters([shape], dtype=dtype), parameters([(3, 4)], dtype=torch.float32)
        other, optimizer = FromRule([a], rule), FromRule([b], rule)
        run_steps(other, [a], range(2))
        before, saved = flat([b]), other.state_dict()
        if saved["state"][0]:  # where it is not the query alone, which the parameters hold
            with pytest.raises(ValueError, match="saved state is .*, its parameter .*3, 4"):
                optimizer.load_state_dict(saved)
            assert torch.equal(flat([b]), before)
            assert not optimizer.state


def test_a_refused_state_leaves_the_parameters_of_the_groups_before_it():
    """The state of bfloat16 parameters has their query, which float32 parameters take over when they load it."""

    def optimizer(dtype, second):
        params = parameters([(4,), (4,)], dtype=dtype)
        return params, FromRule([{"params": params[:1]}, {"params": params[1:], "rule": second}], lg.SteadyAdam(0.1))

    params, saved = optimizer(torch.bfloat16, lg.SteadyAdam(0.1))
    run_steps(saved, params, range(2))
    params, other = optimizer(torch.float32, lg.Steady(0.1))
    before = flat(params)
    with pytest.raises(ValueError, match="the state is of another rule"):
        other.load_state_dict(saved.state_dict())
    assert torch.equal(flat(params), before)


def test_a_state_from_before_the_first_step_starts_anew():
    params = parameters()
    optimizer = AnytimeSGD(params, lr=0.5)
    fresh = saved_and_loaded(optimizer.state_dict())
    run_steps(optimizer, params, range(2))
    optimizer.load_state_dict(fresh)
    start = flat(params)
    grads = [set_grads(params, 5)]
    optimizer.step()
    rule = lg.Anytime(lg.OGD(0.5))
    assert torch.equal(flat(params), rule.query(pure_run(rule, start, grads)))


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"]
)
def test_copies_continue_alike(copied):
    model = nn.Linear(3, 2)
    optimizer = AnytimeSGD(model.parameters(), lr=0.5, domain=lg.Ball(1.0))
    run_steps(optimizer, list(model.parameters()), range(2))
    twin, twin_optimizer = copied((model, optimizer))
    for m, o in ((model, optimizer), (twin, twin_optimizer)):
        run_steps(o, list(m.parameters()), [2])
    assert torch.equal(flat(model.parameters()), flat(twin.parameters()))


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
def test_a_model_may_change_its_memory_layout_and_dtype(compile):
    rule = lg.Anytime(lg.OGD(0.5))
    model = nn.Conv2d(3, 4, 2, bias=False)
    weight = model.weight
    state = rule.init(weight.detach().flatten())
    optimizer = FromRule(model.parameters(), rule, compile=compile)
    changes = [None, lambda: model.to(memory_format=torch.channels_last), model.bfloat16, model.float]
    for t, change in enumerate(changes):
        if change is not None:
            change()
        state = rule.update(state, set_grads([weight], t).float(), NO_DELAY)
        optimizer.step()
        torch.testing.assert_close(flat([weight]).float(), state.x, rtol=1e-5, atol=1e-2 if t >= 2 else 1e-5)
    assert optimizer.param_groups[0]["scalars"][0]["t"].item() == len(changes)
    assert set(optimizer.state[weight]) == {"learner.w"}


def test_a_state_that_was_tampered_with_is_refused():
    (p,) = parameters([(6,)], dtype=torch.float32)
    optimizer = AnytimeSGD([p], lr=0.5)
    run_steps(optimizer, [p], range(2))
    optimizer.state[p]["learner.w"] = optimizer.state[p]["learner.w"].half()
    with pytest.raises(ValueError, match="state 'learner.w' of a parameter of shape .* should be torch.float32"):
        optimizer.step()


# ---- The rest of torch.optim's contract


def test_closure_sees_gradients_even_in_no_grad():
    (p,) = parameters([(3,)])
    optimizer = AnytimeSGD([p], lr=0.5)

    def closure():
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    with torch.no_grad():
        before = p.square().sum()
        assert torch.equal(optimizer.step(closure), before)
    assert p.square().sum() < before


def test_maximize_is_the_negated_gradient():
    a, b = parameters(), parameters()
    up, down = OptimisticAnytime(a, 1.0, maximize=True), OptimisticAnytime(b, 1.0)
    for t in range(3):
        set_grads(a, t)
        set_grads(b, t)
        for p in b:
            p.grad.neg_()
        up.step()
        down.step()
    assert torch.equal(flat(a), flat(b))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(set_to_none):
    params = parameters()
    optimizer = AnytimeSGD(params, lr=0.5)
    set_grads(params, 0)
    optimizer.zero_grad(set_to_none)
    assert all(p.grad is None if set_to_none else not p.grad.any() for p in params)


@pytest.mark.parametrize("tensor_lr", [False, True], ids=["float", "tensor"])
def test_schedulers_set_the_lr_of_every_step(tensor_lr):
    params = parameters()
    start, grads = flat(params), []
    optimizer = AnytimeSGD(params, lr=torch.tensor(0.5, dtype=torch.float64) if tensor_lr else 0.5)
    scheduler = lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    rule = lg.Anytime(lg.OGD(0.5))
    state = rule.init(start)
    for t in range(4):
        grads.append(set_grads(params, t))
        optimizer.step()
        state = lg.Anytime(lg.OGD(0.5**t * 0.5)).update(state, grads[-1], NO_DELAY)
        scheduler.step()
    torch.testing.assert_close(flat(params), state.x, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("build", [lambda p: OptimisticAnytime(p, 2.0), lambda p: StronglyConvexSGD(p, 2.0)])
def test_schedulers_scale_rules_without_lr(build):
    a, b = parameters(), parameters()
    frozen = build(a)
    lr_scheduler.LambdaLR(frozen, lambda epoch: 0.0)
    before = flat(a)
    run_steps(frozen, a, range(3))
    assert torch.equal(flat(a), before)
    run_steps(build(b), b, range(3))
    assert not torch.equal(flat(b), before)


def test_neither_lr_nor_missing_gradients_compile_again(monkeypatch):
    compilations, emit = [], codegen.emit
    monkeypatch.setattr(codegen, "emit", lambda *args: compilations.append(1) or emit(*args))
    params = parameters([(300,), (200,)], dtype=torch.float32)
    optimizer = AnytimeSGD(params, lr=0.5, domain=lg.Ball(3.0), compile=True)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    rule, start, grads = lg.Anytime(lg.OGD(0.5, lg.Ball(3.0))), flat(params), []
    state = rule.init(start)
    for t in range(6):
        grads.append(set_grads(params, t))
        if t == 3:
            params[0].grad = None
            grads[-1][:300] = 0
        if t == 4:  # another memory layout
            params[1].grad = torch.stack([params[1].grad, params[1].grad], dim=1)[:, 0]
        lr = optimizer.param_groups[0]["lr"]
        state = lg.Anytime(lg.OGD(lr, lg.Ball(3.0))).update(state, grads[-1], NO_DELAY)
        optimizer.step()
        scheduler.step()
    assert len(compilations) == 2  # the first state, and the update
    torch.testing.assert_close(flat(params), state.x, rtol=1e-5, atol=1e-6)


def test_a_missing_gradient_is_zero_and_no_gradient_is_no_step():
    params = parameters([(3,), (4,)])
    start = flat(params)
    optimizer = AnytimeSGD([{"params": params}, {"params": parameters([(2,)])}], lr=0.5, domain=lg.Ball(1.0))
    first = set_grads(params, 0)
    optimizer.step()
    params[1].grad = None
    second = flat([params[0].grad, torch.zeros(4, dtype=torch.float64)])
    optimizer.step()
    rule = lg.Anytime(lg.OGD(0.5, lg.Ball(1.0)))
    assert torch.equal(flat(params), rule.query(pure_run(rule, start, [first, second])))
    optimizer.zero_grad()
    with pytest.warns(UserWarning, match="no parameter of AnytimeSGD has a gradient"):
        optimizer.step()
    assert optimizer.param_groups[0]["scalars"][0]["t"].item() == 2
    assert optimizer.param_groups[1]["scalars"] == []


def test_sparse_gradients_are_refused_before_anything_moves():
    embedding, other = nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1)
    optimizer = AnytimeSGD([{"params": other.parameters()}, {"params": embedding.parameters()}], lr=0.5)
    before = flat(other.parameters())
    other(embedding(torch.tensor([1, 2]))).sum().backward()
    with pytest.raises(RuntimeError, match="AnytimeSGD does not support sparse gradients"):
        optimizer.step()
    assert torch.equal(flat(other.parameters()), before)


def test_grad_scaler_unscales_and_skips():
    params, plain = parameters(dtype=torch.float32), parameters(dtype=torch.float32)
    optimizer, reference = AnytimeSGD(params, lr=0.5), AnytimeSGD(plain, lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for t in range(4):
        optimizer.zero_grad()
        loss = sum(((p - t) ** 2).sum() for p in params)
        scaler.scale(loss).backward()
        if t == 2:
            params[0].grad[0] = float("inf")
        else:
            reference.zero_grad()
            sum(((p - t) ** 2).sum() for p in plain).backward()
            reference.step()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 512.0
    torch.testing.assert_close(flat(params), flat(plain))


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
def test_bf16_parameters_have_a_float32_state(compile):
    """Steps far below bf16's resolution add up, beside parameters that have the resolution."""
    exact = parameters([(40,), (30, 2)], dtype=torch.float32)
    params = [nn.Parameter(exact[0].detach().bfloat16()), nn.Parameter(exact[1].detach().clone())]
    exact[0].data.copy_(params[0].data)
    optimizer = AnytimeSGD(params, lr=1e-3, domain=lg.Ball(20.0), compile=compile)
    reference = AnytimeSGD(exact, lr=1e-3, domain=lg.Ball(20.0), compile=False)
    for _ in range(20):
        for p, q in zip(params, exact, strict=True):
            p.grad = torch.full_like(p, 0.5)
            q.grad = torch.full_like(q, 0.5)
        optimizer.step()
        reference.step()
    assert optimizer.state[params[0]]["x"].dtype == torch.float32
    assert set(optimizer.state[params[1]]) == {"learner.w"}
    torch.testing.assert_close(optimizer.state[params[0]]["x"], exact[0].detach(), rtol=1e-6, atol=1e-6)
    assert torch.equal(params[0].detach(), optimizer.state[params[0]]["x"].bfloat16())
    torch.testing.assert_close(params[1], exact[1], rtol=1e-6, atol=1e-6)


def test_hundreds_of_small_tensors():
    params = parameters([(3, 2)] * 150 + [(5,)] * 150 + [(0,), ()])
    start = flat(params)
    optimizer = AnytimeSGD(params, lr=0.5, domain=lg.Ball(4.0))
    grads = [set_grads(params, 0)]
    optimizer.step()
    grads.append(set_grads(params, 1))
    optimizer.step()
    rule = lg.Anytime(lg.OGD(0.5, lg.Ball(4.0)))
    assert torch.equal(flat(params), rule.query(pure_run(rule, start, grads)))


def depth_of_call(function, run):
    """How many Python frames deep ``function`` is called within ``run``."""
    depth, found = 0, []

    def trace(frame, event, _):
        nonlocal depth
        if event in ("call", "return"):
            depth += 1 if event == "call" else -1
            if event == "call" and frame.f_code is function.__code__:
                found.append(depth)

    sys.setprofile(trace)
    try:
        run()
    finally:
        sys.setprofile(None)
    return max(found)


def test_a_step_passes_six_frames_at_most_before_arithmetic():
    """Those of torch's hooks and of torch.compiler.disable, the optimizer's, the step's, the backend's, and where
    errors of a rule get plain words."""
    params = parameters([(300,), (20, 30)])
    set_grads(params, 0)
    for compile, arithmetic, frames in ((False, lg.Anytime.update, 6), (True, codegen.Loops.run, 4)):
        optimizer = AnytimeSGD(params, lr=0.5, compile=compile)
        optimizer.step()
        assert depth_of_call(arithmetic, optimizer.step) <= frames + 1


def test_hooks_run():
    params, calls = parameters(), []
    optimizer = AnytimeSGD(params, lr=0.5)
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    run_steps(optimizer, params, [0])
    assert calls == ["before", "after"]


def test_named_parameters():
    model = nn.Linear(3, 2)
    optimizer = AnytimeSGD(model.named_parameters(), lr=0.5)
    run_steps(optimizer, list(model.parameters()), [0])
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["weight", "bias"]


def train(model, optimizer, step, steps=5):
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        step(model, optimizer, torch.randn(8, 3, generator=generator))
    return flat(model.parameters())


def train_step(model, optimizer, x):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def test_inside_a_compiled_training_step():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    twin = copy.deepcopy(model)
    torch.compiler.reset()
    compiled_step = torch.compile(train_step, backend="eager")
    got = train(model, AnytimeSGD(model.parameters(), lr=0.5, domain=lg.Ball(2.0)), compiled_step)
    want = train(twin, AnytimeSGD(twin.parameters(), lr=0.5, domain=lg.Ball(2.0)), train_step)
    torch.testing.assert_close(got, want)


TWO_PROCESSES = """
import sys, torch
from torch import nn
import lategrad as lg
from lategrad.optim import AnytimeSGD
rank, folder, distributed = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "distributed"
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
if distributed:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
optimizer = AnytimeSGD(model.parameters(), lr=0.5, domain=lg.Ball(2.0), compile=True)
x = torch.randn(6, 8, 3)
for batch in x:
    optimizer.zero_grad()
    model(batch[4 * rank : 4 * rank + 4] if distributed else batch).square().mean().backward()
    optimizer.step()
torch.save([p.detach() for p in model.parameters()], f"{folder}/{'half' if distributed else 'whole'}{rank}.pt")
"""


@pytest.mark.slow
def test_distributed_data_parallel_in_two_processes(tmp_path):
    """Each has half of every batch; both end where one process with whole batches ends."""
    (tmp_path / "program.py").write_text(TWO_PROCESSES)
    runs = [("0", "distributed"), ("1", "distributed"), ("0", "alone")]
    started = [
        subprocess.Popen([sys.executable, tmp_path / "program.py", rank, tmp_path, how],
                         stderr=subprocess.PIPE, text=True)
        for rank, how in runs
    ]  # fmt: skip
    try:
        for process in started:
            errors = process.communicate(timeout=300)[1]
            assert process.returncode == 0, errors[-2000:]
    finally:
        for process in started:
            process.kill()
    first, second, alone = (flat(torch.load(tmp_path / name)) for name in ("half0.pt", "half1.pt", "whole0.pt"))
    assert torch.equal(first, second)
    torch.testing.assert_close(first, alone, rtol=1e-5, atol=1e-6)


# ---- Output and query


def interpolating(params):
    return AnytimeSGD(params, lr=0.5, interpolation=0.5)


def strongly_convex(params):
    return StronglyConvexSGD(params, 1.0)


@pytest.mark.parametrize("build", [interpolating, strongly_convex])
def test_output_comes_and_goes(build):
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    params = list(model.parameters())
    optimizer = build(params)
    with optimizer.output():  # before any step the two are the same
        pass
    run_steps(optimizer, params, range(5))
    query = flat(params)
    with optimizer.output():
        output = flat(params)
        assert not torch.equal(output, query)
        with optimizer.output():
            assert torch.equal(flat(params), output)
        assert torch.equal(flat(params), output)
        with pytest.raises(RuntimeError, match=re.escape("step() inside output")):
            optimizer.step()
        with pytest.raises(RuntimeError, match=re.escape("load_state_dict() inside output")):
            optimizer.load_state_dict(optimizer.state_dict())
        params[0].data.zero_()
    assert torch.equal(flat(params), query)
    with contextlib.suppress(ZeroDivisionError), optimizer.output():
        raise ZeroDivisionError
    assert torch.equal(flat(params), query)
    shipped = optimizer.output_state_dict(model)
    assert shipped.keys() == model.state_dict().keys()
    assert torch.equal(flat([shipped[name] for name, _ in model.named_parameters()]), output)
    run_steps(optimizer, params, [5])  # what was shipped does not move on
    assert torch.equal(flat([shipped[name] for name, _ in model.named_parameters()]), output)


def test_with_the_papers_settings_the_output_is_the_query():
    model = nn.Linear(3, 2)
    optimizer = AnytimeSGD(model.parameters(), lr=0.5)
    run_steps(optimizer, list(model.parameters()), range(3))
    query = flat(model.parameters())
    assert torch.equal(flat(optimizer.output_state_dict(model).values()), query)
    addresses = [p.data_ptr() for p in model.parameters()]
    with optimizer.output():
        assert torch.equal(flat(model.parameters()), query)
        assert [p.data_ptr() for p in model.parameters()] == addresses
        run_steps(optimizer, list(model.parameters()), [3])  # nothing was swapped: nothing to refuse


# ---- Errors in torch's words


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda p: AnytimeSGD(p, lr=-1), "Invalid learning rate: -1"),
        (lambda p: AnytimeSGD(p, lr=float("nan")), "Invalid learning rate: nan"),
        (lambda p: AnytimeSGD(p, lr="1"), "Invalid learning rate: 1"),
        (lambda p: AnytimeSGD(p, lr=torch.ones(2)), "Tensor lr must be 1-element"),
        (lambda p: AnytimeSGD(p, lr=1, power=-2), "Invalid power value: -2"),
        (lambda p: AnytimeSGD(p, lr=1, interpolation=1.5), "Invalid interpolation value: 1.5"),
        (lambda p: AnytimeSGD(p, lr=1, schedule="cosine"), "Invalid schedule: cosine"),
        (lambda p: AnytimeSGD(p, lr=1, domain="cube"), "unknown constraint set .cube.; valid: "),
        (lambda p: AnytimeSGD(p, lr=1, maximize=1), "Invalid maximize value: 1"),
        (lambda p: AnytimeSGD(p, lr=1, compile="yes"), "Invalid compile value: yes"),
        (lambda p: OptimisticAnytime(p, diameter=-1.0), "Invalid diameter value: -1.0"),
        (lambda p: StronglyConvexSGD(p, strong_convexity=0), "Invalid strong_convexity value: 0"),
        (lambda p: FromRule(p, lg.Ball(1.0)), "got Ball, which has no domain, init, query, update, output"),
        (lambda p: FromRule(p, lg.SGD(lr=torch.ones(3, 1))), "Tensor lr must be 1-element"),
        (lambda p: FromRule(p, lg.Anytime(lg.AdaGradNorm(torch.ones(3, 1)))), "an optimizer is one run"),
        (lambda p: FromRule([{"params": p, "lr": 1.0}], lg.Anytime(lg.AdaGradNorm(1.0))), "Invalid learning rate"),
        (lambda p: AnytimeSGD([], lr=1), "optimizer got an empty parameter list"),
        (lambda p: AnytimeSGD([torch.zeros(2, dtype=torch.complex64)], lr=1), "needs floating-point parameters"),
        (lambda p: AnytimeSGD([torch.zeros(2), torch.zeros(2, device="meta")], lr=1), "on one device"),
        (lambda p: AnytimeSGD(p, lr=1, domain=lg.Product((lg.Ball(1.0), 3))), "a split of the last dimension"),
    ],
)  # fmt: skip
def test_bad_hyper_parameters(build, message):
    with pytest.raises(ValueError, match=message):
        build(parameters())


# ---- Memory


@pytest.mark.parametrize("domain", [lg.WholeSpace(), lg.Ball(1.0)], ids=["whole", "ball"])
@pytest.mark.parametrize("shapes", [[(300_000,)], [(150_000,)] * 2 + [(100,)] * 30], ids=["one", "many"])
def test_one_vector_of_state_and_nothing_more_during_a_step(shapes, domain):
    params = parameters(shapes, dtype=torch.float32)
    set_grads(params, 0)
    optimizer = AnytimeSGD(params, lr=0.5, domain=domain)
    one_vector = sum(p.nbytes for p in params)

    def first_step():
        optimizer.state.clear()
        optimizer.param_groups[0]["scalars"] = []
        optimizer.step()

    assert largest_allocation(first_step) <= one_vector + 20_000
    assert all(list(optimizer.state[p]) == ["learner.w"] for p in params)
    assert sum(optimizer.state[p]["learner.w"].nbytes for p in params) == one_vector
    assert largest_allocation(optimizer.step) <= 10_000


@pytest.mark.slow
def test_without_a_compiler_it_warns_and_runs_eagerly(tmp_path):
    program = """
import torch, warnings, lategrad as lg, lategrad.optim
params = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(3))]
optimizer = lg.optim.AnytimeSGD(params, lr=0.5, compile=True)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for t in range(3):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
assert sum("running eagerly" in str(w.message) for w in caught) == 1, [str(w.message) for w in caught]
rule = lg.Anytime(lg.OGD(0.5))
state = rule.init(torch.zeros(5))
for t in range(3):
    state = rule.update(state, torch.ones(5), torch.tensor(0))
assert torch.equal(torch.cat([p.data for p in params]), state.x)
"""
    env = {"PATH": "", "CXX": "no-such-compiler", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "HOME": str(tmp_path)}
    env |= {name: os.environ[name] for name in ("OMP_NUM_THREADS", "PYTHONPATH") if name in os.environ}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_model_learns_within_its_set():
    x = torch.randn(64, 5, generator=torch.Generator().manual_seed(0))
    target = x @ torch.tensor([[1.0], [-1.0], [0.5], [0.0], [0.0]])
    torch.manual_seed(0)
    model = nn.Linear(5, 1)
    optimizer = AnytimeSGD(model.parameters(), lr=1.0, domain=lg.L1Ball(2.0))
    for _ in range(300):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
    assert lg.L1Ball(2.0).contains(flat(model.parameters()))
    assert loss.item() == pytest.approx(0.06, abs=0.01)  # the solution has an l1 norm of 2.5


def test_the_first_step_in_which_no_parameter_has_a_gradient_warns_and_changes_nothing():
    """As of an optimizer that was built before ``fully_shard``, which replaces the parameters of a model."""
    params = parameters()
    optimizer, start = AnytimeSGD(params, lr=0.5), flat(params)
    with pytest.warns(UserWarning, match="no parameter of AnytimeSGD has a gradient.* after fully_shard"):
        optimizer.step()
    optimizer.step()  # says it once
    assert torch.equal(flat(params), start)
    set_grads(params, seed=0)
    optimizer.step()
    assert not torch.equal(flat(params), start)


def test_a_frozen_group_is_no_reason_to_warn():
    params = parameters()
    optimizer = AnytimeSGD([{"params": params[:2]}, {"params": params[2:]}], lr=0.5)
    set_grads(params[:2], seed=0)
    optimizer.step()
