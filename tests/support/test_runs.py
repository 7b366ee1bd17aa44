"""Hyper-parameters with a value for each run: a sweep is one rule."""

import pytest
import torch

import lategrad as lg
from helpers.parameters import expected_warnings
from lategrad.registry import RULES, SETS, build_rule, parse_set
from lategrad.rules import apply_update, issue_ticket
from lategrad.support.runs import map_tensors, runs_shape, tensors
from lategrad.trace import describe

VALUES = [0.1, 0.5, 2.0]


def step(rule, state, grad):
    return apply_update(rule, state, grad, torch.tensor(0), issue_ticket(rule, state))


@pytest.mark.parametrize("name", RULES)
def test_a_sweep_equals_its_runs_one_by_one(name):
    sweep = build_rule(name, torch.tensor(VALUES, dtype=torch.float64).unsqueeze(-1), lg.Ball(1.0))
    grads = torch.randn(10, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x0 = torch.zeros(5, dtype=torch.float64)
    singles = [build_rule(name, value, lg.Ball(1.0)) for value in VALUES]
    with expected_warnings(sweep):
        state, states = sweep.init(x0), [rule.init(x0) for rule in singles]
    assert sweep.query(state).shape == (3, 5)
    for grad in grads:
        state = step(sweep, state, grad)
        states = [step(rule, one, grad) for rule, one in zip(singles, states, strict=True)]
    for run, (rule, one) in enumerate(zip(singles, states, strict=True)):
        torch.testing.assert_close(sweep.output(state)[run], rule.output(one), rtol=1e-10, atol=1e-12)


def test_runs_of_the_rule_and_of_the_start_combine():
    rule = lg.SGD(torch.tensor([[0.1], [0.2]]), lg.Ball(1.0))
    assert rule.init(torch.zeros(3, 1, 5)).x.shape == (3, 2, 5)


def test_runs_of_nested_parts_combine():
    domain = lg.Ball(torch.ones(4, 1, 1))
    rule = lg.Anytime(lg.OGD(torch.ones(3, 1), domain), power=torch.ones(2, 1, 1, 1))
    assert runs_shape(rule) == (2, 4, 3)


def test_map_tensors_keeps_the_structure_and_the_rest():
    rule = lg.Anytime(lg.OGD(torch.ones(3, 1), lg.Product((lg.Ball(torch.ones(1)), 2))), interpolation=0.5)
    copy = map_tensors(lambda leaf: leaf * 2, rule)
    assert copy.interpolation == 0.5
    assert copy.learner.domain.parts[0][1] == 2
    assert [leaf.max().item() for leaf in tensors(copy)] == [2.0, 2.0]
    assert [leaf.max().item() for leaf in tensors(rule)] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: lg.OGD(lr=-1.0), "lr must be a finite number >= 0, got -1.0"),
        (lambda: lg.OGD(lr=float("nan")), "lr must be a finite number >= 0, got nan"),
        (lambda: lg.OGD(lr=True), "lr must be a finite number >= 0, got True"),
        (
            lambda: lg.OGD(lr=0.1, schedule="cosine"),
            "schedule must be one of 'sqrt', 'constant', got 'cosine'",
        ),
        (lambda: lg.FTRL(lr=-1.0), "lr must be"),
        (lambda: lg.SGD(lr=-1.0), "lr must be"),
        (lambda: lg.SGD(lr=1.0, average="median"), "average must be one of 'none', 'uniform', 'linear'"),
        (lambda: lg.AdaGrad(diameter=-1.0), "diameter must be"),
        (lambda: lg.AdaGradNorm(diameter=float("inf")), "diameter must be"),
        (lambda: lg.OptimisticOGD(diameter=-1.0), "diameter must be"),
        (lambda: lg.OptimisticFTRL(diameter=-1.0), "diameter must be"),
        (lambda: lg.StronglyConvexOGD(0.0), "strong_convexity must be a finite number > 0, got 0.0"),
        (
            lambda: lg.Anytime(lg.OGD(1.0), interpolation=1.5),
            r"interpolation must be a number in \[0, 1\], got 1.5",
        ),
        (lambda: lg.Anytime(lg.OGD(1.0), power=-1), "power must be a finite number >= 0, got -1"),
        (lambda: build_rule("xyz", 0.1, lg.WholeSpace()), "unknown rule 'xyz'; valid: anytime-sgd"),
        (lambda: parse_set("ball"), "constraint set 'ball' needs radius: write ball:RADIUS"),
        (lambda: parse_set("ball:x"), "radius of constraint set 'ball' must be a number, got 'x'"),
        (lambda: parse_set("ball:-1"), "radius must be a finite number >= 0, got -1.0"),
    ],
)
def test_bad_hyper_parameters_are_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("name", SETS)
def test_every_set_form_parses(name):
    spec = SETS[name].form.split(" or ")[-1]
    for word in ("RADIUS", "HIGH", "TOTAL"):
        spec = spec.replace(word, "2")
    parsed = parse_set(spec.replace("LOW", "-1"))
    values = {option: getattr(parsed, option) for option in SETS[name].options}
    assert describe(SETS[name].make(**values)) == describe(parsed)
