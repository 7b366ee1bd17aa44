"""Delays by stage: each tensor of a model as old as its stage is late."""

import copy
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import lategrad as lg
from lategrad.optim import AnytimeSGD, Delayed, FromRule
from lategrad.problems import ModuleProblem, Quadratic, load
from lategrad.rules.blocks import Block, Blocks

BLOCKS = Blocks((Block("a", (2,), "other"), Block("b", (3,), "other"), Block("c", (1,), "other")))


def layers(*sizes):
    return Blocks(tuple(Block(f"{i}.weight", (size,), "other") for i, size in enumerate(sizes)))


@given(st.lists(st.integers(1, 50), min_size=1, max_size=9), st.data())
def test_stages_are_layers_in_a_row_and_no_split_has_a_smaller_largest_one(sizes, data):
    stages = data.draw(st.integers(1, len(sizes)))
    chosen = [stages - 1 - delay for delay in lg.delays.by_stage(layers(*sizes), stages).delays]
    assert sorted(set(chosen)) == list(range(stages))
    assert chosen == sorted(chosen)
    largest = max(sum(size for size, stage in zip(sizes, chosen, strict=True) if stage == k) for k in range(stages))

    def best(first, parts):
        if parts == 1:
            return sum(sizes[first:])
        cuts = range(first + 1, len(sizes) - parts + 2)
        return min(max(sum(sizes[first:cut]), best(cut, parts - 1)) for cut in cuts)

    assert largest == best(0, stages)


def test_the_first_of_eight_stages_is_seven_late_and_a_layer_stays_whole():
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(8)])
    assert lg.delays.by_stage(model, stages=8).delays == tuple(7 - i // 2 for i in range(16))
    assert lg.delays.by_stage(model, stages=8, delay=0).delays == (0,) * 16
    table = lg.delays.by_stage(model, stages=2).table().splitlines()
    assert table == [
        "delay    1           80 entries  0.weight ... 3.bias",
        "delay    0           80 entries  4.weight ... 7.bias",
    ]


@pytest.mark.parametrize(
    ("stages", "options", "message"),
    [
        (9, {}, "stages must be <= 2, the layers that have parameters, got 9"),
        (0, {}, "stages must be an integer >= 1"),
        (1, {"delay": 3}, "delay must be 0 with one stage"),
        ({"nope": 1, "*": 0}, {}, "each pattern of stages must be one that matches a parameter: 0.weight"),
        ({"0.*": 1}, {}, "with a pattern for '1.weight'"),
        ({"*": -1}, {}, "must be an integer >= 0, got -1"),
        ({"*": 1}, {"delay": 3}, "delay must be left out where each pattern has its own, got 3"),
    ],
)
def test_bad_stages(stages, options, message):
    with pytest.raises(ValueError, match=message.replace("*", r"\*")):
        lg.delays.by_stage(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), stages, **options)


def mixed_queries(gradient, x, lr, delays, steps):
    """SGD in plain words: entry j of the point of update t is that of version max(1, t - tau_j)."""
    versions = [x]
    for t in range(1, steps + 1):
        point = torch.stack([versions[max(1, t - tau) - 1][j] for j, tau in enumerate(delays)])
        versions.append(versions[-1] - lr * gradient(point, t))
    return versions[-1]


@given(st.tuples(*[st.integers(0, 7)] * 3), st.integers(1, 25))
def test_the_simulator_takes_each_block_from_its_own_version(taus, steps):
    problem = Quadratic(dim=6, noise=0.3)
    profile = lg.delays.by_stage(BLOCKS, dict(zip("abc", taus, strict=True)))
    warned = pytest.warns(UserWarning, match="every gradient is taken at the start")
    with warned if steps > 1 and max(taus) >= steps - 1 else nullcontext():
        trace = lg.simulate(problem, lg.SGD(lr=0.1), profile, steps, compile=False)
    entries = [taus[0]] * 2 + [taus[1]] * 3 + [taus[2]]
    samples = problem.samples(0, 0, steps)
    want = mixed_queries(lambda x, t: problem.gradient(x, samples[t - 1]), problem.start(), 0.1, entries, steps)
    torch.testing.assert_close(trace.query, want)
    assert trace.delays.max() == min(max(taus), steps - 1)
    assert trace.config["delays"][0].startswith("StageDelays(")


def test_profiles_models_and_seeds_side_by_side_are_each_what_they_are_alone():
    problem = Quadratic(dim=6, noise=0.3)
    profiles = [lg.delays.by_stage(BLOCKS, {"a": 4, "b": 2, "c": 0}), 3, lg.delays.by_stage(BLOCKS, {"a": 1, "*": 6})]
    lr = torch.tensor([[0.05], [0.2]], dtype=torch.float64)
    for rule in (lg.SGD(lr), lg.SteadyAdam(lr), lg.baselines.WeightPrediction(lr)):
        together = lg.simulate(problem, rule, profiles, 40, seed=[0, 1], compile=False)
        for i, seed in enumerate((0, 1)):
            for k, profile in enumerate(profiles):
                alone = lg.simulate(problem, rule, profile, 40, seed=seed, compile=False)
                assert torch.equal(together.query[i, k], alone.query)


def test_one_delay_for_all_blocks_is_the_constant_delay():
    problem = Quadratic(dim=6, noise=0.3)
    for rule in (lg.Anytime(lg.OGD(lr=0.5)), lg.baselines.AdaptiveRevision(lr=0.1), lg.baselines.DCASGD(lr=0.1),
                 lg.baselines.Ringmaster(lr=0.1, threshold=4), lg.SteadyAdam(lr=0.1), lg.baselines.PipeMare(lr=0.1),
                 lg.SteadyMuon(lr=0.1, blocks=BLOCKS)):  # fmt: skip
        by_stage, constant = (
            lg.simulate(problem, rule, delays, 50, compile=False)
            for delays in (lg.delays.by_stage(BLOCKS, {"*": 5}), 5)
        )
        assert torch.equal(by_stage.query, constant.query)


@pytest.mark.parametrize("rule", [lg.SteadyAdam(lr=0.1), lg.SteadyMuon(lr=0.1, blocks=BLOCKS)])
def test_a_rule_that_takes_a_delay_for_each_block_is_told_each(rule):
    """The loop in plain words: a vector of versions by block, and the delays of all blocks."""
    problem, taus, steps = Quadratic(dim=6, noise=0.3), (4, 2, 0), 25
    trace = lg.simulate(problem, rule, lg.delays.by_stage(BLOCKS, dict(zip("abc", taus, strict=True))), steps)
    told = replace(rule, delay_blocks=BLOCKS)
    state, samples = told.init(problem.start()), problem.samples(0, 0, steps)
    queries = [told.query(state)]
    for t in range(steps):
        late = torch.tensor(taus).clamp_max(t)
        parts = [queries[t - tau].split([2, 3, 1])[b] for b, tau in enumerate(late.tolist())]
        state = told.update(state, problem.gradient(torch.cat(parts), samples[t]), late)
        queries.append(told.query(state))
    torch.testing.assert_close(trace.query, queries[-1], rtol=0, atol=1e-12)


def test_profiles_of_other_tensors_are_refused_where_a_rule_is_told_each_delay():
    halves = lg.delays.by_stage(layers(3, 3), 2)
    with pytest.raises(ValueError, match="delay_blocks must be None, or tensors of the sizes of Blocks"):
        lg.simulate(Quadratic(dim=6), lg.SteadyAdam(), [lg.delays.by_stage(BLOCKS, {"*": 2}), halves], 5)


def test_what_the_simulator_cannot_do_by_stage_it_refuses():
    problem = Quadratic(dim=6)
    with pytest.raises(ValueError, match="with stashing"):
        lg.simulate(problem, lg.SGD(lr=0.1), lg.delays.by_stage(BLOCKS, {"*": 2}, stashing=False), 5)
    with pytest.raises(ValueError, match="of the problem's 10 entries"):
        lg.simulate(Quadratic(dim=10), lg.SGD(lr=0.1), lg.delays.by_stage(BLOCKS, {"*": 2}), 5)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def one_pass(model, optimizer, batch):
    optimizer.zero_grad()
    model(torch.randn(16, 4, generator=torch.Generator().manual_seed(batch))).square().mean().backward()
    optimizer.step()


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "Steady": lambda p: FromRule(p, lg.Steady(lr=0.5)),
    "AnytimeSGD": lambda p: AnytimeSGD(p, lr=0.5, domain=lg.Ball(3.0)),
    "AdaptiveRevision": lambda p: FromRule(p, lg.baselines.AdaptiveRevision(lr=0.1)),
}


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "AdaptiveRevision"])
@pytest.mark.parametrize("stages", [3, {"*": 0}])
def test_a_delay_of_zero_in_all_stages_is_the_bare_optimizer_to_the_bit(name, stages):
    plain, staged = network(), network()
    optimizer = OPTIMIZERS[name](plain.parameters())
    profile = lg.delays.by_stage(staged, stages, **({"delay": 0} if stages == 3 else {}))
    delayed = Delayed(OPTIMIZERS[name](staged.parameters()), profile)
    for batch in range(8):
        one_pass(plain, optimizer, batch)
        one_pass(staged, delayed, batch)
    assert torch.equal(flat(plain), flat(staged))


@pytest.mark.parametrize("name", ["SGD", "Adam", "AnytimeSGD", "Steady"])
def test_one_delay_for_all_stages_is_the_constant_delay(name):
    """The gradients of the two are the same: T updates take T passes here and T + tau there."""
    constant, staged = network(), network()
    late = Delayed(OPTIMIZERS[name](constant.parameters()), 3)
    by_stage = Delayed(OPTIMIZERS[name](staged.parameters()), lg.delays.by_stage(staged, {"*": 3}))
    for batch in range(12):
        one_pass(staged, by_stage, batch)
    for batch in range(15):
        one_pass(constant, late, batch)
    assert late.updates == by_stage.updates == 12
    assert torch.equal(flat(constant), flat(staged))


def test_the_optimizer_and_the_simulator_train_alike():
    data = load("digits")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 10))
    problem = ModuleProblem(copy.deepcopy(model), data)
    trace = lg.simulate(problem, lg.SGD(lr=0.3), lg.delays.by_stage(model, 3), 30, compile=False)
    optimizer = Delayed(torch.optim.SGD(model.parameters(), lr=0.3), lg.delays.by_stage(model, 3))
    for rows in problem.samples(0, 0, 30):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(data.x_train[rows]), data.y_train[rows]).backward()
        optimizer.step()
    torch.testing.assert_close(flat(model), trace.query, rtol=1e-4, atol=1e-5)


def test_validation_and_the_optimizer_see_the_newest_parameters():
    model = network()
    delayed = Delayed(torch.optim.SGD(model.parameters(), lr=0.1), lg.delays.by_stage(model, 3))
    for batch in range(5):
        one_pass(model, delayed, batch)
    newest = flat(model)
    x = torch.ones(1, 4)
    with torch.no_grad():
        seen_in_validation = model(x)
    assert torch.equal(flat(model), newest)
    seen_in_training = model(x)
    assert not torch.equal(flat(model), newest)
    assert not torch.equal(seen_in_training.detach(), seen_in_validation)
    seen_in_training.sum().backward()
    before = model[4].bias.detach().clone()
    delayed.step()
    torch.testing.assert_close(model[4].bias.detach(), before - 0.1 * model[4].bias.grad)
    torch.testing.assert_close(flat(model)[:32], newest[:32] - 0.1 * model[0].weight.grad.flatten())


def test_without_stashing_the_way_back_sees_the_newest_weights():
    """Two linear layers, so that the gradients can be written down: W1's goes back through the newest W2."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 2, bias=False))
    profile = lg.delays.by_stage(model, {"0.*": 2, "1.*": 1}, stashing=False)
    optimizer = Delayed(torch.optim.SGD(model.parameters(), lr=0.1), profile)
    ours = [[model[0].weight.detach().clone(), model[1].weight.detach().clone()]]
    for t in range(1, 7):
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(t))
        optimizer.zero_grad()
        model(x.clone().requires_grad_()).square().sum().div(2).backward()
        optimizer.step()
        w1, w2 = ours[max(1, t - 2) - 1][0], ours[max(1, t - 1) - 1][1]
        hidden = x @ w1.T
        out = hidden @ w2.T
        g2 = out.T @ hidden
        g1 = (out @ ours[-1][1]).T @ x
        ours.append([ours[-1][0] - 0.1 * g1, ours[-1][1] - 0.1 * g2])
        torch.testing.assert_close(model[0].weight.detach(), ours[-1][0])
        torch.testing.assert_close(model[1].weight.detach(), ours[-1][1])


def test_a_loaded_state_continues_alike():
    model = network()
    delayed = Delayed(torch.optim.Adam(model.parameters(), lr=0.01), lg.delays.by_stage(model, 3))
    for batch in range(6):
        one_pass(model, delayed, batch)
    saved = copy.deepcopy((model.state_dict(), delayed.state_dict()))
    twin, twin_delayed = copy.deepcopy((model, delayed))
    again = network()
    again.load_state_dict(saved[0])
    resumed = Delayed(torch.optim.Adam(again.parameters(), lr=0.01), lg.delays.by_stage(again, 3))
    resumed.load_state_dict(saved[1])
    for batch in range(6, 12):
        for one, optimizer in ((model, delayed), (twin, twin_delayed), (again, resumed)):
            one_pass(one, optimizer, batch)
    assert torch.equal(flat(model), flat(again))
    assert torch.equal(flat(model), flat(twin))
    with pytest.raises(ValueError, match="one of the two is by stage"):
        Delayed(torch.optim.Adam(again.parameters(), lr=0.01), 2).load_state_dict(saved[1])


def test_a_forward_that_passes_by_the_model_is_not_taken_for_a_delayed_one():
    model = network()
    delayed = Delayed(torch.optim.SGD(model.parameters(), lr=0.1), lg.delays.by_stage(model, 3))
    model[4](model[2](model[0](torch.ones(1, 4)))).sum().backward()
    with pytest.raises(RuntimeError, match="forward, which has not been called since the last step"):
        delayed.step()


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def steady_muon(model):
    return lg.optim.SteadyMuon(model, lr=0.05)


@pytest.mark.parametrize("make", [adamw, steady_muon])
def test_past_versions_are_in_the_model_only_for_the_passes_of_its_optimizer(make):
    model, same = network(), network()
    delayed, straight = (Delayed(make(one), lg.delays.by_stage(one, 3)) for one in (model, same))
    for batch in range(6):
        one_pass(model, delayed, batch)
        one_pass(same, straight, batch)
    lone = copy.deepcopy(model)
    newest = flat(model)
    lone(torch.ones(1, 4))
    assert torch.equal(flat(lone), newest)  # a copy without the optimizer has no delays
    shipped = straight.output_state_dict(same)
    model(torch.ones(1, 4))  # a pass without a step
    torch.testing.assert_close(delayed.output_state_dict(model), shipped, rtol=0, atol=0)
    with delayed.output():
        output = flat(model)
        model(torch.ones(1, 4))
        assert torch.equal(flat(model), output)
        with delayed.output():
            assert torch.equal(flat(model), output)
    for batch in range(6, 9):
        one_pass(model, delayed, batch)
        one_pass(same, straight, batch)
    assert torch.equal(flat(model), flat(same))
    del delayed
    newest = flat(model)
    model(torch.ones(1, 4))
    assert torch.equal(flat(model), newest)


def test_what_an_optimizer_cannot_do_by_stage_it_refuses():
    model, other = network(), network()
    profile = lg.delays.by_stage(model, 3)
    with pytest.raises(ValueError, match="carries no ticket"):
        Delayed(OPTIMIZERS["AdaptiveRevision"](model.parameters()), profile)
    with pytest.raises(ValueError, match="must be made from the model itself"):
        Delayed(torch.optim.SGD(model.parameters()), lg.delays.by_stage(Blocks.of_module(model), 3))
    with pytest.raises(ValueError, match="the model has no parameter number 0 of shape"):
        Delayed(torch.optim.SGD(other.parameters()), profile)
    with pytest.raises(ValueError, match="steps must be left out with delays by stage"):
        Delayed(torch.optim.SGD(model.parameters()), profile, steps=5)
