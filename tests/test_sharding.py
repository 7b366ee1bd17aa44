"""A vector in parts: the same numbers as in one piece, on the same gradients in the same order."""

import pytest
import torch

import lategrad as lg
from lategrad.registry import RULES, build_rule
from lategrad.serve.sharding import Lockstep, bounds, join_leaves, require_splittable, split_leaves, split_set

DIM = 23
REFUSED = {
    "anytime-kt": "norms",  # a scalar product of two vectors
    "adaptive-revision": "tickets",
    "dc-asgd": "tickets",
    "dc-asgd-a": "tickets",
    "picky-sgd": "tickets",
    "ringmaster": "tickets",
    "gap-aware": "tickets",
    "dana-slim": "tickets",
    "ringmaster-muon": "tickets",
    "steady-coordinate": "norms",
}


def gradients(count=40):
    rng = torch.Generator().manual_seed(1)
    return torch.randn(count, DIM, generator=rng, dtype=torch.float64)


def both(rule, shards):
    """Queries and outputs after each update, of the whole and of the parts."""
    start = torch.linspace(-1, 2, DIM, dtype=torch.float64)
    state, parts = rule.init(start), Lockstep(rule, start, shards)
    yield rule.query(state), parts.query()
    for t, grad in enumerate(gradients()):
        delay = min(t, t % 5)
        state = rule.update(state, grad, torch.tensor(delay))
        parts.update(grad, delay)
        yield rule.query(state), parts.query()
        yield rule.output(state), parts.output()


DOMAINS = {
    "whole": lg.WholeSpace(),
    "ball": lg.Ball(1.0, center=torch.linspace(0, 1, DIM)),
    "box": lg.Box(-0.5, torch.linspace(0, 1, DIM).double()),
}


@pytest.mark.parametrize("domain", DOMAINS.values(), ids=DOMAINS)
@pytest.mark.parametrize("name", [name for name in RULES if name not in REFUSED])
def test_parts_equal_the_whole(name, domain):
    rule = build_rule(name, 0.7, domain)
    require_splittable(rule, DIM, 3)
    for whole, parts in both(rule, shards=3):
        torch.testing.assert_close(parts, whole, rtol=1e-10, atol=1e-12)


def test_what_is_refused_is_known():
    refused = {}
    for name in RULES:
        try:
            require_splittable(build_rule(name, 0.7, lg.WholeSpace()), DIM, 3)
        except ValueError as error:
            refused[name] = str(error)
    assert set(refused) == set(REFUSED)
    assert all(reason in refused[name] for name, reason in REFUSED.items())


def test_only_rules_that_need_norms_exchange_any():
    assert not require_splittable(lg.Anytime(lg.OGD(lr=1.0)), DIM, 2)
    assert not require_splittable(lg.SGD(lr=1.0, domain=lg.Box(0.0, 1.0)), DIM, 2)
    assert require_splittable(lg.SGD(lr=1.0, domain=lg.Ball(1.0)), DIM, 2)
    assert require_splittable(lg.Anytime(lg.AdaGradNorm(diameter=1.0)), DIM, 2)


def test_sets_that_sort_all_coordinates_are_refused():
    for domain in (lg.Simplex(), lg.L1Ball(1.0), lg.HalfSpace(torch.ones(DIM), 1.0)):
        with pytest.raises(ValueError, match="domain must be WholeSpace, Box, Ball, or a Product"):
            require_splittable(lg.SGD(lr=1.0, domain=domain), DIM, 2)


def test_a_product_may_be_split_between_its_parts_and_inside_simple_ones():
    product = lg.Product((lg.Simplex(), 11), (lg.WholeSpace(), 12))
    for whole, parts in both(lg.SGD(lr=0.3, domain=product), shards=2):
        torch.testing.assert_close(parts, whole)
    with pytest.raises(ValueError, match="would be cut at coordinate 7"):
        require_splittable(lg.SGD(lr=0.3, domain=product), DIM, 3)


def test_a_ball_inside_one_part_keeps_its_own_norm():
    part = split_set(lg.Product((lg.Ball(1.0), 4), (lg.WholeSpace(), 4)), 0, 6)
    torch.testing.assert_close(part.project(torch.full((6,), 3.0)), torch.tensor([0.5, 0.5, 0.5, 0.5, 3.0, 3.0]))


@pytest.mark.parametrize("shards", [1, 2, 3, 7])
def test_a_state_can_be_taken_apart_and_joined(shards):
    leaves = [torch.arange(DIM), torch.tensor([3.0]), torch.empty(0), torch.arange(DIM) * 2.0]
    parts = [split_leaves(leaves, DIM, begin, end) for begin, end in bounds(DIM, shards)]
    assert all(torch.equal(*pair) for pair in zip(join_leaves(parts), leaves, strict=True))


def test_too_many_shards_are_refused():
    with pytest.raises(ValueError, match="shards must be at most half"):
        bounds(5, 3)
