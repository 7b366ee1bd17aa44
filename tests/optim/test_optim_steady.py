"""SteadyAdam and SteadyMuon as optimizers: the rules themselves, groups, resumption, and a network under delay."""

import copy
import io
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import lategrad as lg
from lategrad.optim import Delayed, SteadyAdam, SteadyMuon
from lategrad.problems import load

DELAYS = [0, 1, 2, 3, 3, 0, 3, 2]


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 3))


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def set_grads(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize(
    ("build", "rule"),
    [
        (lambda model: SteadyAdam(model.parameters(), 0.05, weight_decay=0.1), lg.SteadyAdam(0.05, weight_decay=0.1)),
        (
            lambda model: SteadyMuon(model, 0.05, weight_decay=0.1),
            lg.SteadyMuon(0.05, weight_decay=0.1, blocks=lg.Blocks.of_module(network())),
        ),
        (
            lambda model: SteadyMuon(model.parameters(), 0.05),
            lg.SteadyMuon(0.05, blocks=lg.Blocks.of_tensors(network().parameters())),
        ),
    ],
    ids=["adam", "muon of a module", "muon of parameters"],
)
def test_are_their_rules_and_are_told_the_delay(build, rule):
    model = network()
    state, optimizer = rule.init(flat(model)), build(model)
    for t, delay in enumerate(DELAYS):
        state = rule.update(state, set_grads(model, t), torch.tensor(delay))
        optimizer.step(delay=delay)
    torch.testing.assert_close(flat(model), rule.query(state), rtol=1e-5, atol=1e-7)
    with optimizer.output():
        torch.testing.assert_close(flat(model), rule.output(state), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(flat(model), rule.query(state), rtol=1e-5, atol=1e-7)


def test_a_group_says_what_its_parameters_are():
    model = network()
    body, head = list(model.parameters())[:-2], list(model.parameters())[-2:]
    groups = [{"params": body}, {"params": head, "kinds": "other", "lr": 0.01}]
    optimizer = SteadyMuon(groups, lr=0.1)
    assert optimizer.param_groups[0]["kinds"] == ["matrix", "matrix", "other"]
    assert optimizer.param_groups[1]["kinds"] == ["other", "other"]
    rule = lg.SteadyMuon(0.01, blocks=lg.Blocks.of_tensors(head, ["other"] * 2))
    state = rule.init(torch.cat([p.detach().flatten() for p in head]))
    set_grads(model, 0)
    state = rule.update(state, torch.cat([p.grad.flatten() for p in head]), torch.tensor(0))
    optimizer.step()
    torch.testing.assert_close(torch.cat([p.detach().flatten() for p in head]), rule.query(state))
    for kinds, message in (("scalar", "kind of '0'"), (["matrix"] * 3, "of '2' .* shape"), ([], "or 3, one")):
        with pytest.raises(ValueError, match=message):
            SteadyMuon([{"params": body, "kinds": kinds}])


@pytest.mark.parametrize("build", [SteadyAdam, SteadyMuon])
def test_resumption_is_exact_with_a_schedule(build):
    def make(model):
        optimizer = build(model.parameters(), lr=0.05, weight_decay=0.01)
        return optimizer, lr_scheduler.CosineAnnealingLR(optimizer, 12)

    def train(model, optimizer, scheduler, first, last):
        for t in range(first, last):
            set_grads(model, t)
            optimizer.step(delay=DELAYS[t % len(DELAYS)])
            scheduler.step()

    straight = network()
    train(straight, *make(straight), 0, 12)
    before = network()
    optimizer, scheduler = make(before)
    train(before, optimizer, scheduler, 0, 6)
    file = io.BytesIO()
    torch.save([before.state_dict(), optimizer.state_dict(), scheduler.state_dict()], file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    after = network(seed=1)
    optimizer, scheduler = make(after)
    for thing, state in zip((after, optimizer, scheduler), saved, strict=True):
        thing.load_state_dict(state)
    train(after, optimizer, scheduler, 6, 12)
    assert torch.equal(flat(after), flat(straight))


@pytest.mark.parametrize("build", [SteadyAdam, SteadyMuon])
def test_frozen_parameters_stay_where_they_are_in_spite_of_weight_decay(build):
    model = network()
    model[0].weight.requires_grad_(False)
    optimizer = build(model.parameters(), lr=0.1, weight_decay=1.0)
    kept = model[0].weight.clone()
    for t in range(5):
        set_grads(model, t)
        model[0].weight.grad = None
        optimizer.step()
    assert torch.equal(model[0].weight, kept)
    assert not torch.equal(model[2].weight, network()[2].weight)
    model[0].weight.requires_grad_(True)
    set_grads(model, 5)
    with pytest.raises(RuntimeError, match="requires_grad"):
        optimizer.step()


def accuracy_under_delay(build, delay, updates=600):
    """A small network on digits, its steps chosen without delay."""
    data = load("digits", "standardise-globally")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = build(model)
    late = Delayed(optimizer, delay)
    generator = torch.Generator().manual_seed(0)
    for _ in range(updates):
        rows = torch.randint(0, len(data.x_train), (32,), generator=generator)
        late.zero_grad()
        nn.functional.cross_entropy(model(data.x_train[rows]), data.y_train[rows]).backward()
        late.step()
    if hasattr(optimizer, "output_state_dict"):
        model.load_state_dict(optimizer.output_state_dict(model))
    return (model(data.x_test).argmax(1) == data.y_test).double().mean().item()


def test_a_network_trains_through_a_delay_that_adamw_does_not_survive():
    assert accuracy_under_delay(lambda model: torch.optim.AdamW(model.parameters(), lr=0.01), 48) < 0.6
    assert accuracy_under_delay(lambda model: SteadyMuon(model, lr=0.01), 48) > 0.85
    assert accuracy_under_delay(lambda model: SteadyAdam(model.parameters(), lr=0.01), 48) > 0.7


@pytest.mark.parametrize("build", [SteadyAdam, SteadyMuon])
def test_a_model_that_is_evaluated_at_the_query_says_so_once(build):
    model, rows = network(), torch.ones(3, 2, dtype=torch.long)
    optimizer = build(model, lr=0.1)
    model.eval()
    with torch.no_grad():
        model(rows)  # before the first step the query is the output
    set_grads(model, 0)
    optimizer.step()
    saved = pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(model)(rows), saved(rows))  # copies are not the optimizer's
    model(rows)  # with gradients, as a model with frozen statistics is trained
    message = f"at the query of {build.__name__}.*with optimizer.output"
    with torch.no_grad(), pytest.warns(UserWarning, match=message) as caught:
        model(rows)
    assert caught[0].filename == __file__
    with torch.no_grad():
        model(rows)
    assert not model._forward_pre_hooks


def test_a_loop_that_uses_the_output_is_not_warned():
    model, rows = network().eval(), torch.ones(3, 2, dtype=torch.long)
    optimizer = Delayed(SteadyMuon(model, lr=0.1), 1)
    for t in range(3):
        set_grads(model, t)
        optimizer.step()
    with optimizer.output(), torch.no_grad():
        model(rows)
    assert not model._forward_pre_hooks
    with torch.no_grad():
        model(rows)  # a comparison of the two points is meant


def test_the_output_is_found_under_wrappers():
    model = network()
    optimizer = SteadyAdam(model, lr=0.1)
    for t in range(3):
        set_grads(model, t)
        optimizer.step()
    query = flat(model)
    with optimizer.output():
        output = flat(model)
    prepared = SimpleNamespace(optimizer=SimpleNamespace(optimizer=Delayed(optimizer, 2)))  # as a trainer wraps it
    with lg.optim.output_of(prepared):
        assert torch.equal(flat(model), output)
    assert torch.equal(flat(model), query)
    assert not torch.equal(output, query)
    for other in ([optimizer], SimpleNamespace(hidden=optimizer)):
        with (
            pytest.raises(ValueError, match="must be an optimizer, or have it as .optimizer"),
            lg.optim.output_of(other),
        ):
            pass


@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, lambda optimizer: Delayed(optimizer, 1)])
def test_one_cycle_needs_to_be_told_that_there_is_no_momentum(wrap):
    model = network()
    optimizer = wrap(SteadyAdam(model, lr=0.1))
    with pytest.raises(ValueError, match="momentum"):
        lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=4)
    schedule = lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10, cycle_momentum=False)
    lrs = []
    for t in range(10):
        set_grads(model, t)
        optimizer.step()
        lrs.append(optimizer.param_groups[0]["lr"])
        if t < 9:
            schedule.step()
    assert max(lrs) == pytest.approx(0.1)
    assert min(lrs) < 0.01
