"""Parameters with random values and gradients, and a rule run on the same numbers as one vector."""

import io
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import lategrad as lg
from lategrad.registry import RULES, build_rule
from lategrad.rules.rule import apply_update, issue_ticket

SHAPES = [(3, 4), (5,), (2, 3, 2, 2), ()]
NO_DELAY = torch.tensor([0])


def parameters(shapes=SHAPES, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in shapes]


def set_grads(params, seed):
    """Random gradients; returns them as one vector."""
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
    return flat([p.grad for p in params])


def flat(tensors):
    return torch.cat([t.detach().flatten() for t in tensors])


def pure_run(rule, x0, grads):
    """The rule itself: its state after the gradients."""
    state = rule.init(x0)
    for grad in grads:
        state = apply_update(rule, state, grad, NO_DELAY, issue_ticket(rule, state))
    return state


ELEMENTWISE = [name for name in RULES if not hasattr(build_rule(name, 0.5, lg.WholeSpace()), "blocks")]
"""The rules that do not look at shapes: they have a form as loops."""


def expected_warnings(rule):
    """SteadyMuon warns where it has no shapes."""
    shapeless = isinstance(rule, lg.SteadyMuon) and rule.blocks is None
    return pytest.warns(UserWarning, match="SteadyMuon without blocks") if shapeless else nullcontext()


def backends(optimizer):
    """What runs each vector of the first group."""
    return [step.backend for step in optimizer.in_place_steps(0)]


def saved_and_loaded(state_dict):
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)
