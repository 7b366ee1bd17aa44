"""Delayed: every gradient applied once, exactly as late as the delays say."""

import contextlib
import copy
import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler

import lategrad as lg
from helpers.examples import example
from helpers.parameters import expected_warnings
from lategrad.optim import AnytimeSGD, Delayed, FromRule, StronglyConvexSGD
from lategrad.problems import Quadratic
from lategrad.registry import RULES, build_rule


class Recorder(torch.optim.Optimizer):
    """Adds 1 to its parameter, which so counts the updates, and writes down what it was given."""

    def __init__(self, count):
        super().__init__([count], {"lr": 1.0})
        self.received = []

    @torch.no_grad()
    def step(self, closure=None):
        (count,) = self.param_groups[0]["params"]
        self.received.append(tuple(int(entry) for entry in count.grad))
        count += 1


def run_recorder(optimizer, passes):
    """Each pass's gradient is (the number of the parameters, the number of the batch), both from 1."""
    (count,) = optimizer.param_groups[0]["params"]
    done = []
    for batch in range(1, passes + 1):
        optimizer.zero_grad()
        count.grad = torch.stack([count.detach()[0] + 1, torch.tensor(float(batch))])
        optimizer.step()
        done.append(len(optimizer.received))
    return done


@given(st.lists(st.integers(0, 12), min_size=1, max_size=60), st.integers(0, 12))
def test_update_t_gets_a_gradient_of_the_parameters_t_minus_tau(raw, delay_cap):
    taus = [min(tau, t) for t, tau in enumerate(raw)]
    optimizer = Delayed(Recorder(nn.Parameter(torch.zeros(2))), lg.delays.Recorded(torch.tensor(taus)),
                        delay_cap=delay_cap)  # fmt: skip
    most = 0
    for _ in range(len(taus)):
        run_recorder(optimizer, 1)
        most = max(most, optimizer.pending)
    taus = [min(tau, delay_cap) for tau in taus]
    sources = [source for source, _ in optimizer.received]
    assert optimizer.updates == len(taus) == len(sources)  # all gradients have been applied
    assert sources == [t - tau for t, tau in enumerate(taus, start=1)]
    assert most <= delay_cap + 1
    assert optimizer.pending == 0
    with pytest.raises(RuntimeError, match=f"all {len(taus)} updates have been made"):
        run_recorder(optimizer, 1)


@given(st.integers(0, 9), st.integers(1, 40))
def test_with_a_constant_delay_pass_s_makes_update_s_minus_tau(tau, passes):
    optimizer = Delayed(Recorder(nn.Parameter(torch.zeros(2))), tau)
    done = run_recorder(optimizer, passes)
    assert done == [max(0, s - tau) for s in range(1, passes + 1)]
    assert optimizer.received == [(max(1, t - tau), t) for t in range(1, passes - tau + 1)]
    assert optimizer.pending == min(tau, passes)


def test_every_batch_is_used_once():
    optimizer = Delayed(Recorder(nn.Parameter(torch.zeros(2))), "uniform:0,7", seed=3)
    run_recorder(optimizer, 3000)  # beyond the first block of delays
    taus = lg.delays.Uniform(0, 7).draw(3000, seed=3).delays.tolist()
    assert len(optimizer.received) == optimizer.updates == 3000 - optimizer.pending
    for t, (source, _) in enumerate(optimizer.received, start=1):
        assert source == t - taus[t - 1]
    batches = [batch for _, batch in optimizer.received]
    assert len(set(batches)) == len(batches)
    assert set(range(1, 2990)) <= set(batches)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("delays", [3, "cyclic:0,4,1"])
def test_is_what_the_simulator_simulates(name, delays):
    """Without noise all batches are alike, so the two must agree under any delays, tickets included."""
    problem = Quadratic(dim=6, noise=0.0)
    rule = build_rule(name, 0.3, lg.Ball(2.0))
    steps = 24
    with expected_warnings(rule):
        trace = lg.simulate(problem, rule, delays, steps=steps, compile=False, progress=False)
    x = nn.Parameter(problem.start())
    optimizer = Delayed(FromRule([x], rule), delays, steps=steps)
    while optimizer.updates < steps:
        x.grad = problem.gradient(x.detach(), torch.zeros(6, dtype=torch.float64))
        optimizer.step()
    torch.testing.assert_close(x.detach(), trace.query.to(x.dtype), rtol=1e-9, atol=1e-9)
    with optimizer.output():
        torch.testing.assert_close(x.detach(), trace.output.to(x.dtype), rtol=1e-9, atol=1e-9)


def quadratic_pass(model, optimizer, batch):
    optimizer.zero_grad()
    generator = torch.Generator().manual_seed(batch)
    loss = model(torch.randn(16, 4, generator=generator)).square().mean()
    loss.backward()
    optimizer.step()


def models(count):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return [copy.deepcopy(model) for _ in range(count)]


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize(
    "build",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.AdamW(p, lr=0.01),
        lambda p: AnytimeSGD(p, lr=0.5, domain=lg.Ball(2.0)),
    ],
    ids=["SGD", "AdamW", "AnytimeSGD"],
)
def test_no_delay_is_the_optimizer_itself(build):
    plain, wrapped = models(2)
    optimizer, delayed = build(plain.parameters()), Delayed(build(wrapped.parameters()), 0)
    for batch in range(5):
        quadratic_pass(plain, optimizer, batch)
        quadratic_pass(wrapped, delayed, batch)
    assert torch.equal(flat(plain), flat(wrapped))


def test_gradients_on_their_way_are_copies_and_grad_is_left_alone():
    (model,) = models(1)
    delayed = Delayed(torch.optim.SGD(model.parameters(), lr=0.1), 2)
    kept = []
    for batch in range(5):
        quadratic_pass(model, delayed, batch)
        grads = [p.grad for p in model.parameters()]
        kept.append([grad.clone() for grad in grads])
        before = flat(model)
        delayed.zero_grad(set_to_none=False)
        assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))
    delayed.zero_grad()
    for p in model.parameters():
        p.grad = torch.full_like(p, 7.0)
    delayed.step()
    want = before - 0.1 * torch.cat([grad.flatten() for grad in kept[3]])
    torch.testing.assert_close(flat(model), want)


def test_missing_gradients_stay_missing():
    a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    delayed = Delayed(torch.optim.SGD([a, b], lr=1.0, weight_decay=0.5), 1)
    for grads in [(None, torch.ones(2)), (torch.ones(2), None)]:
        a.grad, b.grad = grads
        delayed.step()
    assert not a.any()
    assert torch.equal(b.data, -torch.ones(2))
    assert b.grad is None


def test_closure():
    (model,) = models(1)
    delayed = Delayed(torch.optim.SGD(model.parameters(), lr=0.1), 1)

    def closure():
        delayed.zero_grad()
        loss = model(torch.ones(1, 4)).square().mean()
        loss.backward()
        return loss

    before = flat(model)
    with torch.no_grad():
        first = delayed.step(closure)
        assert torch.equal(flat(model), before)
        delayed.step(closure)
    assert not torch.equal(flat(model), before)
    assert closure() < first


def test_schedulers_and_groups():
    a, b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    inner = torch.optim.SGD([a], lr=1.0)
    delayed = Delayed(inner, 1)
    scheduler = lr_scheduler.StepLR(delayed, step_size=1, gamma=0.5)
    rates = []
    for step in range(4):
        a.grad, b.grad = torch.ones(1), torch.ones(1)
        delayed.step()
        rates.append(inner.param_groups[0]["lr"])
        scheduler.step()
        if step == 1:
            delayed.add_param_group({"params": [b], "lr": 1.0})
    assert rates == [1.0, 0.5, 0.25, 0.125]
    assert a.item() == 1 - 0.5 - 0.25 - 0.125
    assert b.item() == 0.5  # one late gradient, at an lr that was halved once


def test_grad_scaler_drops_the_pass_of_a_gradient_that_overflows():
    x = nn.Parameter(torch.ones(1))
    delayed = Delayed(torch.optim.SGD([x], lr=0.5), 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(4):
        delayed.zero_grad()
        scaler.scale(x.sum()).backward()
        if step == 1:
            x.grad.fill_(float("inf"))
        scaler.step(delayed)
        scaler.update()
    assert delayed.updates == 2
    assert x.item() == 0.0


@pytest.mark.parametrize("rule", ["anytime-sgd", "adaptive-revision"])
def test_resumes_with_the_gradients_on_their_way(rule):
    def build(model):
        return Delayed(FromRule(model.parameters(), build_rule(rule, 0.5, lg.Ball(2.0))), "uniform:0,5", seed=1)

    whole, part, resumed = models(3)
    delayed = build(whole)
    for batch in range(30):
        quadratic_pass(whole, delayed, batch)
    interrupted = build(part)
    for batch in range(17):
        quadratic_pass(part, interrupted, batch)
    buffer = io.BytesIO()
    torch.save({"model": part.state_dict(), "optimizer": interrupted.state_dict()}, buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    again = build(resumed)
    resumed.load_state_dict(saved["model"])
    again.load_state_dict(saved["optimizer"])
    assert interrupted.pending == again.pending > 0
    for batch in range(17, 30):
        quadratic_pass(resumed, again, batch)
    assert torch.equal(flat(whole), flat(resumed))
    assert again.updates == delayed.updates


def test_only_the_same_delays_take_a_state():
    (model,) = models(1)
    state = Delayed(torch.optim.SGD(model.parameters(), lr=0.1), 3).state_dict()
    with pytest.raises(ValueError, match="another sequence of delays: delay_cap 3, not 4"):
        Delayed(torch.optim.SGD(model.parameters(), lr=0.1), 4).load_state_dict(state)
    with pytest.raises(ValueError, match="not of a Delayed optimizer"):
        Delayed(torch.optim.SGD(model.parameters(), lr=0.1), 4).load_state_dict({"state": {}, "param_groups": []})


def test_a_copy_continues_alike():
    (model,) = models(1)
    delayed = Delayed(torch.optim.SGD(model.parameters(), lr=0.1), "uniform:0,5")
    for batch in range(9):
        quadratic_pass(model, delayed, batch)
    twin, twin_delayed = copy.deepcopy((model, delayed))
    for batch in range(9, 20):
        quadratic_pass(model, delayed, batch)
        quadratic_pass(twin, twin_delayed, batch)
    assert torch.equal(flat(model), flat(twin))


def test_output_and_other_methods_are_the_wrapped_ones():
    (model,) = models(1)
    delayed = Delayed(StronglyConvexSGD(model.parameters(), 1.0), 2)
    for batch in range(5):
        quadratic_pass(model, delayed, batch)
    query = flat(model)
    with delayed.output():
        assert not torch.equal(flat(model), query)
    assert torch.equal(flat(model), query)
    assert "Delayed(StronglyConvexSGD" in repr(delayed)
    with pytest.raises(AttributeError, match="no_such_thing"):
        delayed.no_such_thing  # noqa: B018


@pytest.mark.parametrize("build", [torch.optim.SGD, torch.optim.AdamW])
def test_what_torchs_own_ship_are_the_parameters_themselves(build):
    (model,) = models(1)
    delayed = Delayed(build(model.parameters(), lr=0.1), 2)
    for batch in range(5):
        quadratic_pass(model, delayed, batch)
    trained = flat(model)
    with delayed.output():
        assert torch.equal(flat(model), trained)
    shipped = delayed.output_state_dict(model)
    quadratic_pass(model, delayed, 5)
    assert torch.equal(torch.cat([value.flatten() for value in shipped.values()]), trained), "a copy"
    assert not hasattr(delayed, "eval"), "trainers that ask for modes find none"


def test_what_schedule_free_optimizers_ship_is_what_eval_shows():
    schedulefree = pytest.importorskip("schedulefree")
    (model,) = models(1)
    delayed = Delayed(schedulefree.SGDScheduleFree(model.parameters(), lr=0.5), 2)
    delayed.train()
    for batch in range(5):
        quadratic_pass(model, delayed, batch)
    query = flat(model)
    with delayed.output():
        output = flat(model)
    torch.testing.assert_close(flat(model), query)
    quadratic_pass(model, delayed, 5)  # in train mode again
    delayed.eval()
    evaluated = flat(model)
    with delayed.output():
        assert torch.equal(flat(model), evaluated)
    assert torch.equal(flat(model), evaluated), "in eval mode as before"
    assert not torch.allclose(output, query)


def test_inside_a_compiled_training_step():
    plain, compiled = models(2)
    torch.compiler.reset()
    step = torch.compile(quadratic_pass, backend="eager")
    for model, run in ((plain, quadratic_pass), (compiled, step)):
        delayed = Delayed(AnytimeSGD(model.parameters(), lr=0.5), 2)
        for batch in range(5):
            run(model, delayed, batch)
    torch.testing.assert_close(flat(plain), flat(compiled))


def test_what_depends_on_the_length_of_the_run_needs_it():
    halves = lg.delays.Regimes(((0.5, 0), (None, 3)))
    optimizer = Delayed(Recorder(nn.Parameter(torch.zeros(2))), halves)
    with pytest.raises(ValueError, match="steps must be given: the delays of Regimes"):
        run_recorder(optimizer, 5000)
    optimizer = Delayed(Recorder(nn.Parameter(torch.zeros(2))), halves, steps=20)
    run_recorder(optimizer, 20)
    taus = halves.draw(20, seed=0).delays.tolist()
    assert [source for source, _ in optimizer.received] == [t - tau for t, tau in enumerate(taus, start=1)]


class MyDelays:
    """A delay model of a user's own: every third gradient is late."""

    needs_labels, largest = False, 4

    def draw(self, steps, seed, labels=None):
        return lg.delays.Arrivals(lg.delays.cap(4 * (torch.arange(steps) % 3 == 0).numpy()))


def test_a_delay_model_of_ones_own_bounds_the_memory_itself():
    optimizer = Delayed(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), MyDelays())
    assert optimizer.delay_cap == 4
    assert lg.simulate(Quadratic(), lg.SGD(0.1), MyDelays(), steps=9).delays.max() == 4
    assert lg.delays.Regimes(((5, 9), (None, MyDelays()))).largest == 9


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"delays": -1}, ValueError, "delay must be an integer >= 0"),
        ({"delays": 1.5}, ValueError, "delays must be a delay model, an integer, or a text"),
        ({"delays": True}, ValueError, "delays must be a delay model, an integer, or a text"),
        ({"delays": "sometimes"}, ValueError, "unknown delay"),
        ({"delays": "lognormal:2,0.5"}, ValueError, "delay_cap must be given, to bound the memory: LogNormal"),
        ({"delays": 3, "delay_cap": -1}, ValueError, "delay_cap must be an integer >= 0"),
        ({"delays": 3, "steps": 0}, ValueError, "steps must be an integer >= 1"),
        ({"delays": lg.delays.ByClass((0, 1))}, ValueError, "a model that does not need labels"),
        ({"optimizer": torch.optim.LBFGS([nn.Parameter(torch.zeros(1))]), "delays": 1}, TypeError, "LBFGS"),
        ({"optimizer": nn.Linear(1, 1), "delays": 1}, TypeError, "must be a torch.optim.Optimizer, got Linear"),
    ],
)
def test_bad_arguments(arguments, error, message):
    arguments = {"optimizer": torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1), **arguments}
    with pytest.raises(error, match=message):
        Delayed(**arguments)


@pytest.mark.slow
def test_the_example_of_delayed_training(tmp_path):
    results = example("delayed_training").main(["--quick", "--out", str(tmp_path)])
    at_no_delay, at_delay_8 = zip(*(values for _, values in results["MLP"].values()), strict=True)
    assert min(at_no_delay) > 0.8
    of = dict(zip(results["MLP"], at_delay_8, strict=True))
    assert of["AnytimeSGD"] > of["SGD"] + 0.2
    assert (tmp_path / "delayed_training.png").stat().st_size > 10_000
    text = (tmp_path / "delayed_training.md").read_text()
    assert text.count("| AnytimeSGD |") == 2
    assert "| delay 8 |" in text


def test_the_example_of_a_constrained_mixture(capsys):
    model = example("constrained_mixture").main(["--steps", "1500"])
    weights = model.weights.detach()
    assert lg.Simplex().contains(weights)
    torch.testing.assert_close(weights, torch.tensor([0.5, 0.3, 0.2, 0.0, 0.0]), rtol=0, atol=0.1)
    assert "weights learned" in capsys.readouterr().out


class Failing(Recorder):
    """Raises in some of its calls, or for the gradients of some batches."""

    def __init__(self, count, calls=(), batches=()):
        super().__init__(count)
        self.calls, self.failing_calls, self.failing_batches = 0, calls, batches

    def step(self, closure=None):
        self.calls += 1
        (count,) = self.param_groups[0]["params"]
        if self.calls in self.failing_calls or int(count.grad[1]) in self.failing_batches:
            raise OSError("no")
        super().step()


def run_through_errors(optimizer, passes):
    errors = []
    (count,) = optimizer.param_groups[0]["params"]
    for batch in range(1, passes + 1):
        count.grad = torch.stack([count.detach()[0] + 1, torch.tensor(float(batch))])
        try:
            optimizer.step()
        except OSError:
            errors.append(batch)
    return errors


@pytest.mark.parametrize("taus", [2, lg.delays.Recorded(torch.tensor([0, 1, 2, 3, 0, 1, 3, 2, 0, 0]))])
def test_an_update_that_failed_is_tried_again(taus):
    """No gradient of the schedule is lost or applied twice; the pass of the second trial is not needed."""
    whole = Delayed(Recorder(nn.Parameter(torch.zeros(2))), taus)
    run_recorder(whole, 10)
    optimizer = Delayed(Failing(nn.Parameter(torch.zeros(2)), calls=(3, 6)), taus)
    errors = run_through_errors(optimizer, 12)
    assert len(errors) == 2
    sources = [source for source, _ in optimizer.received]
    assert sources == [source for source, _ in whole.received]
    assert len({batch for _, batch in optimizer.received}) == len(sources)


def test_a_gradient_that_fails_twice_gives_way_to_the_next():
    optimizer = Delayed(Failing(nn.Parameter(torch.zeros(2)), batches=(3,)), 2)
    assert run_through_errors(optimizer, 12) == [5, 6]
    batches = [batch for _, batch in optimizer.received]
    assert batches == [1, 2, 7, 4, 5, 8, 9, 10]


def test_pending_gradients_follow_the_dtype_of_the_model():
    model = nn.Linear(2, 1)
    delayed = Delayed(torch.optim.SGD(model.parameters(), lr=0.1), 2)
    for dtype in (torch.float32, torch.float64, torch.float64, torch.float64):
        model.to(dtype)
        delayed.zero_grad()
        model(torch.ones(1, 2, dtype=dtype)).sum().backward()
        delayed.step()
    assert delayed.updates == 2


def test_an_update_that_failed_keeps_the_versions_of_stages():
    torch.manual_seed(0)
    model, rows = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)), torch.randn(8, 4, 3)
    other = copy.deepcopy(model)

    def train(model, fails_at):
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = Delayed(sgd, lg.delays.by_stage(model, 2, delay=3))
        handle = None
        for i, batch in enumerate(rows):
            for trial in range(1 + (i == fails_at)):
                if handle is not None:
                    handle.remove()
                if i == fails_at and trial == 0:
                    handle = sgd.register_step_pre_hook(lambda *_: 1 / 0)
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                with contextlib.suppress(ZeroDivisionError):
                    optimizer.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(train(model, fails_at=4), train(other, fails_at=None))


@pytest.mark.parametrize("build", [torch.optim.AdamW, lambda params: AnytimeSGD(params, lr=0.1)])
def test_sparse_gradients_are_refused_at_once(build):
    embedding = nn.Embedding(5, 3, sparse=True)
    optimizer = Delayed(build(embedding.parameters()), 2)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        optimizer.step()
    assert optimizer.pending == 0
    embedding.weight.grad = torch.ones(5, 3)
    for _ in range(3):
        optimizer.step()
    assert optimizer.updates == 1


def test_sparse_gradients_reach_an_optimizer_that_takes_them():
    embedding = nn.Embedding(5, 3, sparse=True)
    before = embedding.weight.detach().clone()
    optimizer = Delayed(torch.optim.SGD(embedding.parameters(), lr=1.0), 1)
    for _ in range(2):
        optimizer.zero_grad()
        embedding(torch.tensor([1])).sum().backward()
        optimizer.step()
    torch.testing.assert_close(before[1] - embedding.weight[1], torch.ones(3))
