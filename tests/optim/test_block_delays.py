"""A delay for each parameter: ``optimizer.step(delay=[...])``, ``Delayed`` by stage and the simulator agree."""

import copy
import warnings

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import lategrad as lg
from helpers.parameters import backends, flat, parameters, saved_and_loaded, set_grads
from lategrad.optim import Delayed, FromRule, SteadyAdam, SteadyMuon
from lategrad.problems import ModuleProblem, load

SHAPES = [(4, 3), (5,), (3, 4), ()]
RULES = {
    "steady-muon": lg.SteadyMuon(lr=0.1, weight_decay=0.1),
    "steady-adam": lg.SteadyAdam(lr=0.1, weight_decay=0.1),
    "pipemare": lg.baselines.PipeMare(lr=0.1, annealing=20),
    "weight-prediction": lg.baselines.WeightPrediction(lr=0.1),
    "muon-prediction": lg.baselines.Muon(lr=0.1, prediction=True),
    "scheduled": lg.Scheduled(lg.SteadyMuon(lr=0.1), warmup=3),
}


def delays_of(t):
    """Different for all parameters, and not constant; the first gradients are on time."""
    return [min(t, 6), min(t, 3) - (t % 3 == 2), min(t, 1), 0]


def run(optimizer, params, steps, delay=delays_of):
    for t in steps:
        set_grads(params, t)
        optimizer.step(delay=delay(t))
    return flat(params)


def pure(rule, params, steps):
    """The rule itself, told all delays from the start."""
    blocks = lg.Blocks.of_tensors(params)
    for field in ("blocks", "delay_blocks"):
        rule = lg.rules.blocks.fill_in(rule, blocks, field)
    copies = [nn.Parameter(p.detach().clone()) for p in params]
    state = rule.init(flat(copies))
    for t in steps:
        state = rule.update(state, set_grads(copies, t), torch.tensor(delays_of(t)))
    return rule.query(state), rule.output(state)


@pytest.mark.parametrize("name", RULES)
def test_each_parameter_has_its_own_delay(name):
    params = parameters(SHAPES)
    query, output = pure(RULES[name], params, range(8))
    frozen, empty = nn.Parameter(torch.ones(2), requires_grad=False), nn.Parameter(torch.zeros(0))
    optimizer = FromRule([params[0], frozen, *params[1:3], empty, params[3]], RULES[name])

    def with_unused(t):
        first, *middle, last = delays_of(t)
        return [first, 90, *middle, 80, last]

    torch.testing.assert_close(run(optimizer, params, range(8), with_unused), query, rtol=0, atol=1e-12)
    assert backends(optimizer) == ["eager"]
    with optimizer.output():
        torch.testing.assert_close(flat(params), output, rtol=0, atol=1e-12)
    longest = parameters(SHAPES)
    run(FromRule(longest, RULES[name]), longest, range(8), lambda t: max(delays_of(t)))
    assert not torch.allclose(flat(longest), query, rtol=0, atol=1e-3)


def test_a_parameter_on_time_is_not_braked_and_moves_as_without_delay():
    late, on_time = parameters(SHAPES), parameters(SHAPES)
    run(SteadyMuon(late), late, range(30), lambda t: [min(t, 20)] * 3 + [0])
    run(SteadyMuon(on_time), on_time, range(30), lambda t: 0)
    torch.testing.assert_close(late[3], on_time[3], rtol=0, atol=0)
    start = parameters(SHAPES)[0]
    assert (late[0] - start).norm() < 0.5 * (on_time[0] - start).norm()


@pytest.mark.slow
def test_compiled_the_numbers_are_the_same():
    params = parameters(SHAPES)
    query, _ = pure(RULES["steady-adam"], params, range(3, 6))
    optimizer = FromRule(params, RULES["steady-adam"], compile=True)
    torch.testing.assert_close(run(optimizer, params, range(3, 6)), query, rtol=0, atol=1e-10)
    assert backends(optimizer) == ["compile"]


@pytest.mark.parametrize("make", [SteadyMuon, SteadyAdam])
def test_groups_whose_parameters_agree_stay_one_vector_with_one_delay(make):
    params, alone = parameters(SHAPES), parameters(SHAPES)
    optimizer = make([{"params": params[:2]}, {"params": params[2:]}])
    run(optimizer, params, range(6), lambda t: [min(t, 4)] * 2 + [0, 0])
    halves = make(alone[:2]), make(alone[2:])
    for t in range(6):
        set_grads(alone, t)
        halves[0].step(delay=min(t, 4))
        halves[1].step(delay=0)
    assert torch.equal(flat(params), flat(alone))
    assert not any(group.get("block_delays") for group in optimizer.param_groups)


def test_each_parameter_as_a_vector_of_its_own_has_its_own_delay():
    params, alone = parameters(SHAPES), parameters(SHAPES)
    run(FromRule(params, RULES["steady-adam"], per_parameter=True), params, range(6))
    singles = [FromRule([p], RULES["steady-adam"]) for p in alone]
    for t in range(6):
        set_grads(alone, t)
        for single, delay in zip(singles, delays_of(t), strict=True):
            single.step(delay=delay)
    assert torch.equal(flat(params), flat(alone))


def test_a_rule_that_knows_one_delay_is_told_the_longest():
    params, longest = parameters(SHAPES), parameters(SHAPES)
    rule = lg.baselines.StalenessAware(lr=0.1)
    run(FromRule(params, rule), params, range(6))
    run(FromRule(longest, rule), longest, range(6), lambda t: max(delays_of(t)))
    assert torch.equal(flat(params), flat(longest))


WRONG = [[1, 2, 3], [1, 2, 3, -1], [1, 2, 3, 0.5], [True] * 4, -3, 0.5, np.ones(4), torch.tensor(-3), torch.tensor(2.7)]


@pytest.mark.parametrize("delay", WRONG)
def test_wrong_delays_are_refused(delay):
    params = parameters(SHAPES)
    set_grads(params, 0)
    with pytest.raises(ValueError, match="an integer >= 0, or 4 of them, one for each parameter, got"):
        SteadyAdam(params).step(delay=delay)


@pytest.mark.parametrize("make", [np.array, torch.tensor, list, tuple, lambda delay: [np.int64(one) for one in delay]])
def test_delays_may_be_any_integers(make):
    params, others = parameters(SHAPES), parameters(SHAPES)
    run(SteadyAdam(params), params, range(4))
    run(SteadyAdam(others), others, range(4), lambda t: make(delays_of(t)))
    assert torch.equal(flat(params), flat(others))


@pytest.mark.parametrize("delay", [torch.tensor([3]), torch.tensor(3), np.int64(3)])
def test_one_delay_may_be_any_integer(delay):
    params, others = parameters(SHAPES), parameters(SHAPES)
    run(SteadyAdam(params), params, range(4), lambda t: 3)
    run(SteadyAdam(others), others, range(4), lambda t: delay)
    assert torch.equal(flat(params), flat(others))


def test_block_delays_of_a_group_is_a_switch():
    with pytest.raises(ValueError, match="Invalid block_delays value: yes"):
        SteadyAdam([{"params": parameters(SHAPES), "block_delays": "yes"}])


def test_a_rule_is_told_as_many_delays_as_it_has_blocks():
    blocks = lg.Blocks.of_tensors(parameters(SHAPES))
    rule, x = lg.SteadyAdam(delay_blocks=blocks), torch.zeros(30)
    with pytest.raises(ValueError, match="of the 31 entries of the vector"):
        rule.init(torch.zeros(31))
    with pytest.raises(ValueError, match="one for each of 0 delay_blocks, got '4 numbers'"):
        lg.baselines.PipeMare(lr=0.1).update(lg.baselines.PipeMare(lr=0.1).init(x), x, torch.arange(4))
    params, other = parameters(SHAPES), lg.Blocks.of_tensors([torch.zeros(30)])
    set_grads(params, 0)
    with pytest.raises(ValueError, match="delay_blocks must be None, or tensors of the sizes of Blocks"):
        FromRule(params, lg.SteadyAdam(delay_blocks=other)).step(delay=[3, 2, 1, 0])


@pytest.mark.parametrize("make", [SteadyMuon, SteadyAdam])
@pytest.mark.parametrize("saved_after", [1, 5], ids=["one delay so far", "several delays"])
def test_a_saved_state_continues_alike(make, saved_after):
    params, again = parameters(SHAPES), parameters(SHAPES, seed=1)
    optimizer, resumed = make(params), make(again)
    run(optimizer, params, range(saved_after))
    with torch.no_grad():
        for p, q in zip(again, params, strict=True):
            p.copy_(q)
    resumed.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    straight = run(optimizer, params, range(saved_after, 9))
    assert torch.equal(run(resumed, again, range(saved_after, 9)), straight)


def test_a_distributed_checkpoint_continues_alike(tmp_path):
    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()

    first, second = model(), model()
    optimizer = SteadyMuon(first)
    run(optimizer, [*first.parameters()], range(5))
    groups = [{"params": second.parameters(), "block_delays": True}]  # the form of the state that will be loaded
    resumed = SteadyMuon(groups)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        saved = dict(zip(("model", "optimizer"), get_state_dict(first, optimizer), strict=True))
        dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
        straight = run(optimizer, [*first.parameters()], range(5, 9))
        state = dict(zip(("model", "optimizer"), get_state_dict(second, resumed), strict=True))
        dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    set_state_dict(second, resumed, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert resumed.param_groups[0]["scalars"][0]["mean_delay"].shape == (4,)
    assert torch.equal(run(resumed, [*second.parameters()], range(5, 9)), straight)


@pytest.mark.parametrize("name", ["steady-muon", "steady-adam", "weight-prediction"])
def test_delayed_by_stage_and_the_simulator_train_alike(name):
    data = load("digits")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 10))
    problem = ModuleProblem(copy.deepcopy(model), data)
    trace = lg.simulate(problem, RULES[name], lg.delays.by_stage(model, 3, delay=6), 20, compile=False)
    delayed = Delayed(FromRule(model.parameters(), RULES[name]), lg.delays.by_stage(model, 3, delay=6))
    for rows in problem.samples(0, 0, 20):
        delayed.zero_grad()
        nn.functional.cross_entropy(model(data.x_train[rows]), data.y_train[rows]).backward()
        delayed.step()
    torch.testing.assert_close(flat(model.parameters()), trace.query, rtol=1e-4, atol=1e-5)
    known = {"weight-prediction": "delay"}.get(name, "mean_delay")
    first, *_, last = delayed.param_groups[0]["scalars"][0][known].tolist()
    assert first > 4
    assert last == 0
