"""What users of other optimizers expect: modes, weight decay, and a sentence for every mistake."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import lategrad as lg
from helpers.parameters import flat, parameters, set_grads
from lategrad.optim import AnytimeSGD, Delayed, FromRule, OptimisticAnytime, SteadyAdam, SteadyMuon, StronglyConvexSGD


def run_steps(optimizer, params, seeds):
    for seed in seeds:
        set_grads(params, seed)
        optimizer.step()


def saved_and_loaded(saved):
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def interpolating(params):
    return AnytimeSGD(params, lr=0.5, interpolation=0.5)


def strongly_convex(params):
    return StronglyConvexSGD(params, 1.0)


def steady(params):
    return FromRule(params, lg.Steady(lr=0.5, c=0.5))


def steady_adam(params):
    return SteadyAdam(params, lr=0.1)


def steady_muon(params):
    return SteadyMuon(params, lr=0.1)


def delayed(params):
    return Delayed(steady(params), 2)


AVERAGING = [interpolating, strongly_convex, steady, steady_adam, steady_muon, delayed]

# ---- train() and eval()


@pytest.mark.parametrize("build", AVERAGING)
def test_eval_shows_the_output_until_train(build):
    params = parameters()
    optimizer = build(params)
    optimizer.eval()  # before any step the two are the same
    optimizer.train()
    run_steps(optimizer, params, range(6))
    query = flat(params)
    with optimizer.output():
        output = flat(params)
    assert not torch.equal(output, query)
    for _ in range(2):
        optimizer.eval()
        assert torch.equal(flat(params), output)
    with optimizer.output():
        assert torch.equal(flat(params), output)
    assert torch.equal(flat(params), output)
    set_grads(params, 6)
    with pytest.raises(RuntimeError, match="step\\(\\) in eval mode: .* call train\\(\\) first"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="load_state_dict\\(\\) in eval mode"):
        optimizer.load_state_dict(optimizer.state_dict())
    assert torch.equal(flat(params), output)
    for _ in range(2):
        optimizer.train()
        assert torch.equal(flat(params), query)
    optimizer.step()


def test_eval_mode_refuses_a_step_even_where_output_and_query_are_the_same():
    params = parameters()
    optimizer = AnytimeSGD(params, lr=0.5)
    run_steps(optimizer, params, range(2))
    optimizer.eval()
    with pytest.raises(RuntimeError, match="in eval mode"):
        run_steps(optimizer, params, [2])


def test_modes_do_not_change_inside_output():
    params = parameters()
    optimizer = steady(params)
    run_steps(optimizer, params, range(3))
    with optimizer.output():
        for change in (optimizer.eval, optimizer.train):
            with pytest.raises(RuntimeError, match="inside output"):
                change()


@pytest.mark.parametrize("build", AVERAGING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("inside", ["eval", "output"])
def test_what_is_saved_in_eval_mode_ships_and_resumes(build, dtype, inside):
    whole, part, resumed = (parameters(dtype=dtype, seed=seed) for seed in (0, 0, 9))
    run_steps(build(whole), whole, range(6))
    interrupted = build(part)
    run_steps(interrupted, part, range(3))
    with interrupted.output():
        output = flat(part)
    if inside == "eval":
        interrupted.eval()
        saved = saved_and_loaded({"model": [p.data for p in part], "optimizer": interrupted.state_dict()})
    else:
        with interrupted.output():
            saved = saved_and_loaded({"model": [p.data for p in part], "optimizer": interrupted.state_dict()})
    assert torch.equal(flat(saved["model"]), output)
    again = build(resumed)
    for p, value in zip(resumed, saved["model"], strict=True):
        p.data.copy_(value)
    again.load_state_dict(saved["optimizer"])
    run_steps(again, resumed, range(3, 6))
    assert torch.equal(flat(whole), flat(resumed))


def test_a_model_loaded_after_the_optimizer_is_noticed():
    part, resumed = parameters(), parameters(seed=9)
    interrupted, again = steady(part), steady(resumed)
    run_steps(interrupted, part, range(3))
    interrupted.eval()
    again.load_state_dict(interrupted.state_dict())
    for p, value in zip(resumed, part, strict=True):
        p.data.copy_(value)
    with pytest.raises(RuntimeError, match="load the model before the optimizer"):
        run_steps(again, resumed, [3])


def test_a_state_in_eval_mode_that_does_not_fit_changes_nothing():
    part, other = parameters(), parameters(seed=9)
    interrupted, optimizer = steady(part), strongly_convex(other)
    run_steps(interrupted, part, range(3))
    run_steps(optimizer, other, range(3))
    interrupted.eval()
    before, saved = flat(other), interrupted.state_dict()
    saved["param_groups"] = [
        {**optimizer.state_dict()["param_groups"][0], "scalars": interrupted.param_groups[0]["scalars"]}
    ]
    with pytest.raises(ValueError, match="the state is of another rule"):
        optimizer.load_state_dict(saved)
    assert torch.equal(flat(other), before)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_keep_the_mode(copied):
    params = parameters()
    optimizer = steady(params)
    run_steps(optimizer, params, range(3))
    query = flat(params)
    optimizer.eval()
    twins, twin = copied((params, optimizer))
    with pytest.raises(RuntimeError, match="in eval mode"):
        twin.step()
    twin.train()
    assert torch.equal(flat(twins), query)


@pytest.mark.parametrize("build", AVERAGING)
def test_the_output_can_be_looked_at_where_autograd_is_off_for_good(build):
    params, others = parameters(), parameters()
    optimizer, straight = build(params), build(others)
    run_steps(optimizer, params, range(3))
    run_steps(straight, others, range(3))
    copies, optimizer = copy.deepcopy((params, optimizer))  # its state is first used inside
    with torch.inference_mode(), optimizer.output():
        output = flat(copies)
    with straight.output():
        assert torch.equal(flat(others), output)
    run_steps(optimizer, copies, [3])
    run_steps(straight, others, [3])
    assert torch.equal(flat(copies), flat(others))


@pytest.mark.parametrize("build", AVERAGING)
def test_a_model_that_is_frozen_after_training_ships_its_output(build):
    params, others = parameters(), parameters(seed=9)
    optimizer = build(params)
    run_steps(optimizer, params, range(4))
    saved = optimizer.state_dict()
    with optimizer.output():
        output = flat(params)
    for p in params + others:
        p.requires_grad_(False)
    with optimizer.output():
        assert torch.equal(flat(params), output)
    loaded = build(others)
    loaded.load_state_dict(saved)
    with torch.no_grad():
        for q, p in zip(others, params, strict=True):
            q.copy_(p)
    with loaded.output():
        assert torch.equal(flat(others), output)
    with pytest.raises(RuntimeError, match="requires_grad of a parameter has changed since the first step"):
        run_steps(optimizer, params, [4])


# ---- Changes that the optimizer did not make


def clamp(params):
    with torch.no_grad():
        params[0].clamp_(max=0.1)


def load_others(params):
    nn.ParameterList(params).load_state_dict(nn.ParameterList(parameters(seed=9)).state_dict())


def look_up_with_max_norm(params):
    nn.functional.embedding(torch.arange(3), params[0], max_norm=0.1)


@pytest.mark.parametrize("build", AVERAGING)
@pytest.mark.parametrize("change", [clamp, load_others, look_up_with_max_norm])
@pytest.mark.parametrize("what", ["step", "output"])
def test_parameters_that_were_changed_between_two_steps_are_named_once(build, change, what):
    params = parameters()
    optimizer = build(params)
    run_steps(optimizer, params, range(4))
    change(params)
    proceed = optimizer.eval if what == "output" else lambda: run_steps(optimizer, params, [4])
    with pytest.warns(UserWarning, match="parameters were changed in place since the last step"):
        proceed()
    if what == "output":
        optimizer.train()
    run_steps(optimizer, params, [5])
    change(params)
    run_steps(optimizer, params, [6])


def test_steps_of_another_optimizer_on_other_parameters_are_no_change():
    params, others = parameters(), parameters(seed=9)
    mine, other = steady(params), torch.optim.SGD(others, lr=0.1)
    for t in range(3):
        run_steps(mine, params, [t])
        run_steps(other, others, [t])
    mine.load_state_dict(mine.state_dict())
    mine.add_param_group({"params": others})
    run_steps(mine, params + others, [3, 4])


@pytest.mark.parametrize("build", AVERAGING)
def test_what_is_shipped_is_a_model_that_was_trained(build):
    model, other = nn.ParameterList(parameters()), nn.ParameterList(parameters())
    optimizer = build(list(model))
    assert list(optimizer.output_state_dict(model)) == list(model.state_dict())
    with pytest.raises(ValueError, match="model must be the one that is trained, with the optimizer's parameters"):
        optimizer.output_state_dict(other)


def test_a_state_with_pending_gradients_is_for_delayed_optimizers():
    params = parameters()
    optimizer = delayed(params)
    run_steps(optimizer, params, range(3))
    with pytest.raises(ValueError, match=r"the state is of Delayed\(FromRule\), with pending gradients"):
        steady(params).load_state_dict(optimizer.state_dict())


# ---- Learning rates


@pytest.mark.parametrize("lr", [-1.0, float("nan"), "0.1"])
def test_a_wrong_learning_rate_of_a_group_changes_nothing(lr):
    params = parameters()
    optimizer = SteadyAdam(params, lr=0.1)
    run_steps(optimizer, params, range(2))
    before = flat(params)
    optimizer.param_groups[0]["lr"] = lr
    with pytest.raises(ValueError, match="Invalid learning rate"):
        run_steps(optimizer, params, [2])
    assert torch.equal(flat(params), before)


def test_a_number_after_a_tensor_is_the_learning_rate():
    params = parameters()
    optimizer = FromRule(params, lg.SGD(lr=1.0))
    for lr, moved in ((1.0, 1.0), (torch.tensor(0.25), 0.25), (1.0, 1.0)):
        optimizer.param_groups[0]["lr"] = lr
        before = flat(params)
        grad = set_grads(params, 0)
        optimizer.step()
        torch.testing.assert_close(before - flat(params), moved * grad)


def test_the_learning_rate_and_the_decay_of_a_rule_inside_another_are_those_of_the_group():
    rule = lg.Scheduled(lg.SGD(lr=0.5, weight_decay=0.1), warmup=2)
    params = parameters()
    optimizer = FromRule(params, rule)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (0.5, 0.1)
    group["lr"], group["weight_decay"] = 1.0, 0.0
    before, grad = flat(params), set_grads(params, 0)
    optimizer.step()
    torch.testing.assert_close(before - flat(params), 0.5 * grad)  # half-way through the warm-up


# ---- Weight decay


def shrunk(v, step, decay):
    return [max(0.0, 1 - step * decay) * x for x in v]


def moved(v, step, grad):
    return [x - step * g for x, g in zip(v, grad, strict=True)]


def anytime_sgd_by_hand(x, grads, lr, decay):
    w = list(x)
    for t, grad in enumerate(grads, start=1):
        w = moved(shrunk(w, lr / t**0.5, decay), lr / t**0.5, grad)
        x = [a + 2 / (t + 2) * (b - a) for a, b in zip(x, w, strict=True)]
    return x


def optimistic_by_hand(x, grads, lr, decay):
    """With diameter 2; the hint for a round is the gradient of the one before."""
    y, surprise, hint = list(x), 0.0, [0.0] * len(x)
    for t, grad in enumerate(grads, start=1):
        step = 2 * lr / (1 + surprise) ** 0.5 * t
        y = moved(shrunk(y, step, decay), step, grad)
        surprise += sum((t * g - t * m) ** 2 for g, m in zip(grad, hint, strict=True))
        ahead = 2 * lr / (1 + surprise) ** 0.5 * (t + 1)
        w = moved(shrunk(y, ahead, decay), ahead, grad)
        x = [a + 2 / (t + 2) * (b - a) for a, b in zip(x, w, strict=True)]
        hint = grad
    return x


def strongly_convex_by_hand(x, grads, lr, decay):
    """With strong convexity 2."""
    y = list(x)
    for t, grad in enumerate(grads, start=1):
        step = lr * 48 * t / (2 * (t + 1) * (2 * t + 1))
        y = moved(shrunk(y, step, decay), step, grad)
        ahead = lr * 48 * (t + 1) / (2 * (t + 2) * (2 * t + 3))
        x = moved(shrunk(y, ahead, decay), ahead, grad)
    return x


def sgd_by_hand(x, grads, lr, decay):
    for grad in grads:
        x = moved(shrunk(x, lr, decay), lr, grad)
    return x


def steady_by_hand(x, grads, lr, decay):
    """On the whole space without delays; the query is the iterate for 900 updates."""
    w, squares = list(x), 0.0
    for t, grad in enumerate(grads, start=1):
        squares += t**2 * sum(g * g for g in grad)
        step = min(lr, 2 * lr * t**0.5) * t / squares**0.5
        w = moved(shrunk(w, step, decay), step, grad)
    return w


DECAYING = {
    "anytime": (lambda groups: AnytimeSGD(groups, 0.5), anytime_sgd_by_hand, 0.5),
    "optimistic": (lambda groups: OptimisticAnytime(groups, 2.0, lr=0.3), optimistic_by_hand, 0.3),
    "strongly-convex": (lambda groups: StronglyConvexSGD(groups, 2.0, lr=0.5), strongly_convex_by_hand, 0.5),
    "sgd": (lambda groups: FromRule(groups, lg.SGD(0.5)), sgd_by_hand, 0.5),
    "steady": (lambda groups: FromRule(groups, lg.Steady(0.5)), steady_by_hand, 0.5),
    "rule-with-learner": (lambda groups: FromRule(groups, lg.Anytime(lg.OGD(0.5))), anytime_sgd_by_hand, 0.5),
}


@pytest.mark.parametrize("name", DECAYING)
@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
def test_weight_decay_of_each_group_is_that_of_the_plain_algorithm(name, compile):
    build, by_hand, lr = DECAYING[name]
    params = parameters([(4,), (3,), (5,)])
    starts, decays = [p.tolist() for p in params], (0.0, 0.3, 3.0)
    groups = [{"params": [p], "weight_decay": d, "compile": compile} for p, d in zip(params, decays, strict=True)]
    optimizer = build(groups)
    grads = [[], [], []]
    for t in range(5):
        set_grads(params, t)
        for own, p in zip(grads, params, strict=True):
            own.append(p.grad.tolist())
        optimizer.step()
    for p, start, own, decay in zip(params, starts, grads, decays, strict=True):
        torch.testing.assert_close(p.data, torch.tensor(by_hand(start, own, lr, decay), dtype=torch.float64))


def test_the_weight_decay_of_a_rule_is_the_groups_default():
    a, b = parameters([(3,), (3,)])
    optimizer = FromRule([{"params": [a]}, {"params": [b], "weight_decay": 0.0}], lg.SteadyAdam(0.1, weight_decay=0.5))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.0]
    starts = a.detach().clone(), b.detach().clone()
    set_grads([a, b], 0)
    optimizer.step()
    for p, start, decay in ((a, starts[0], 0.5), (b, starts[1], 0.0)):
        rule = lg.SteadyAdam(0.1, weight_decay=decay)
        assert torch.equal(p.data, rule.query(rule.update(rule.init(start), p.grad, torch.tensor([0]))))


def test_weight_decay_is_saved_and_a_change_takes_effect():
    params, twin = parameters(), parameters()
    optimizer, other = AnytimeSGD(params, lr=0.5, weight_decay=0.1), AnytimeSGD(twin, lr=0.5)
    run_steps(optimizer, params, range(2))
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["weight_decay"] == 0.1
    for p, value in zip(twin, params, strict=True):
        p.data.copy_(value)
    optimizer.param_groups[0]["weight_decay"] = 0.0
    for one, its in ((optimizer, params), (other, twin)):
        run_steps(one, its, range(2, 4))
    assert not torch.equal(flat(params), flat(twin))


# ---- Mistakes


def test_a_group_of_a_deep_optimizer_knows_its_keys():
    with pytest.raises(ValueError, match="SteadyAdam does not know 'betas' in a parameter group; valid are"):
        SteadyAdam([{"params": parameters(), "betas": (0.9, 0.99)}])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda p: AnytimeSGD([{"params": p, "momentum": 0.9}], lr=1),
         "AnytimeSGD does not know 'momentum' in a parameter group; valid are .*'compile', 'domain', .*'weight_decay'"),
        (lambda p: FromRule([{"params": p, "power": 2}], lg.SGD(1.0)), "FromRule does not know 'power'"),
        (lambda p: AnytimeSGD(p, lr=1, weight_decay=-1.0), "Invalid weight_decay value: -1.0"),
        (lambda p: FromRule([{"params": p, "weight_decay": 0.1}], lg.Anytime(lg.FTRL(1.0))),
         "Invalid weight_decay value: 0.1: Anytime.*FTRL.* has none; put the penalty into the loss"),
        (lambda p: FromRule(p, lg.SGD), "rule must be a rule, got the class SGD: call it, SGD\\(...\\)"),
        (lambda p: FromRule(p, torch.optim.AdamW), "such as 'adamw', got AdamW, an optimizer for a loop of your own"),
        (lambda p: FromRule([{"params": p, "rule": torch.optim.SGD}], "sgd:1"), "such as 'sgd', got SGD, an optimizer"),
        (lambda p: AnytimeSGD(p, lr=1, domain=lg.Ball), "domain must be an object, got the class Ball"),
        (lambda p: Delayed(torch.optim.SGD, 8), "optimizer must be an object, got the class SGD"),
        (lambda p: AnytimeSGD(DataLoader(torch.zeros(4, 2)), lr=1), "params is a DataLoader, which holds data"),
        (lambda p: AnytimeSGD(nn.Linear(2, 2), lr=1), "params is a module, Linear: call its parameters()"),
        (lambda p: AnytimeSGD(nn.Linear(2, 2).parameters, lr=1), "params is a function, Module.parameters: call it"),
        (lambda p: AnytimeSGD(nn.Linear, lr=1), "params is the class Linear"),
        (lambda p: AnytimeSGD(torch.optim.SGD(p, 0.1), lr=1), "params is an optimizer, SGD"),
    ],
)  # fmt: skip
def test_mistakes_are_named(build, message):
    with pytest.raises((ValueError, TypeError), match=message):
        build(parameters())


def test_groups_may_have_names_and_the_start_of_a_schedule():
    params = parameters()
    optimizer = AnytimeSGD([{"params": params, "name": "all", "initial_lr": 0.5}], lr=0.5)
    torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5, last_epoch=3)
    run_steps(optimizer, params, [0])


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        (lambda model: torch.optim.AdamW(model.parameters()).state_dict(), "is not of AnytimeSGD: .*'betas'"),
        (lambda model: model.state_dict(), "loads what its state_dict\\(\\) gave, .* got keys \\['bias', 'weight'\\]"),
        (lambda model: {"model": {}, "optimizer": {}}, "got keys \\['model', 'optimizer'\\]"),
        (lambda model: StronglyConvexSGD(model.parameters(), 1.0).state_dict(), "have no 'interpolation', 'power'"),
        (lambda model: [1], "got list"),
    ],
)  # fmt: skip
def test_a_state_dict_of_something_else_is_refused(saved, message):
    model = nn.Linear(2, 2)
    optimizer = AnytimeSGD(model.parameters(), lr=0.5)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved(model))
