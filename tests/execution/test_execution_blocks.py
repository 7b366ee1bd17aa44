"""Rules that look at shapes, on a model's tensors: in place like any other, but not as loops."""

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import nn

import lategrad as lg
from helpers.parameters import backends, flat, parameters, pure_run, saved_and_loaded, set_grads
from lategrad.execution import UnsupportedError, in_place
from lategrad.optim import FromRule
from lategrad.rules.rule import first_query

SHAPES = [(4, 3), (5,), (4, 3), (2, 3, 2, 2), ()]


class OrthogonalState(NamedTuple):
    x: torch.Tensor
    momentum: torch.Tensor


@dataclass(frozen=True, eq=False)
class Orthogonal:
    """Momentum whose matrices are divided by their Gram matrix's trace: one product for each block."""

    lr: float
    blocks: lg.Blocks | None = None
    domain: lg.WholeSpace = lg.WholeSpace()

    def init(self, x0):
        x = first_query(self, x0)
        return OrthogonalState(x, torch.zeros_like(x))

    def query(self, state):
        return state.x

    output = query

    def update(self, state, grad, delay):
        momentum = 0.9 * state.momentum + grad
        steps = [
            self._step(part, block) for part, block in zip(self.blocks.split(momentum), self.blocks.parts, strict=True)
        ]
        return OrthogonalState(state.x - self.lr * self.blocks.join(steps), momentum)

    def _step(self, part, block):
        if block.kind != "matrix":
            return part
        matrix = part.reshape(block.matrix_shape)
        gram = matrix @ matrix.mT
        return (gram @ matrix / (1 + gram.diagonal().sum())).reshape(block.shape)


def filled(params, kinds=None):
    return Orthogonal(0.1, lg.Blocks.of_tensors(params, kinds))


def run(optimizer, params, seeds):
    """Steps with random gradients; returns those as vectors."""
    grads = []
    for seed in seeds:
        grads.append(set_grads(params, seed))
        optimizer.step()
    return grads


@pytest.mark.parametrize(("compile", "backend"), [(False, "eager"), (True, "compile")])
@pytest.mark.parametrize("channels_last", [False, True], ids=["rows", "channels last"])
def test_the_host_fills_in_the_shapes(compile, backend, channels_last):
    params = parameters(SHAPES)
    if channels_last:
        params[3] = nn.Parameter(params[3].detach().to(memory_format=torch.channels_last))
    start = flat(params)
    optimizer = FromRule(params, Orthogonal(0.1), compile=compile)
    grads = run(optimizer, params, range(4))
    assert backends(optimizer) == [backend]
    state = pure_run(filled(params), start, grads)
    torch.testing.assert_close(flat(params), state.x, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(flat([optimizer.state[p]["momentum"] for p in params]), state.momentum)


def test_the_state_is_one_vector_that_the_parameters_have_views_into():
    params = parameters(SHAPES)
    optimizer = FromRule(params, Orthogonal(0.1), compile=False)
    run(optimizer, params, range(2))
    homes = [optimizer.state[p]["momentum"] for p in params]
    assert {home.untyped_storage().data_ptr() for home in homes} == {homes[0].data_ptr()}
    assert all(set(optimizer.state[p]) == {"momentum"} for p in params)  # the parameters hold x


def test_matrix_products_are_compiled_only_when_asked_to():
    """They take most of the time, compiled or not, and compiling them takes long."""
    params = parameters([(2000, 100), (4,)], dtype=torch.float32)
    optimizer = FromRule(params, Orthogonal(0.1))
    run(optimizer, params, [0])
    assert backends(optimizer) == ["eager"]


def test_each_parameter_alone_and_upwards():
    params = parameters(SHAPES)
    starts = [p.detach().clone().flatten() for p in params]
    optimizer = FromRule(params, Orthogonal(0.1), per_parameter=True, maximize=True, compile=False)
    grads = run(optimizer, params, range(3))
    sizes = [p.numel() for p in params]
    for i, p in enumerate(params):
        own = [-g.split(sizes)[i] for g in grads]
        torch.testing.assert_close(p.detach().flatten(), pure_run(filled([p]), starts[i], own).x)


def test_a_group_may_say_what_its_tensors_are():
    params = parameters(SHAPES)
    kinds = ["embedding", "other", "matrix", "matrix", "other"]
    start = flat(params)
    optimizer = FromRule([{"params": params, "kinds": kinds}], Orthogonal(0.1))
    grads = run(optimizer, params, range(3))
    assert torch.equal(flat(params), pure_run(filled(params, kinds), start, grads).x)
    assert not torch.equal(flat(params), pure_run(filled(params), start, grads).x)


def test_resumes_exactly():
    whole, part, resumed = (parameters(SHAPES, dtype=torch.float32) for _ in range(3))
    run(FromRule(whole, Orthogonal(0.1)), whole, range(6))
    interrupted = FromRule(part, Orthogonal(0.1))
    run(interrupted, part, range(3))
    saved = saved_and_loaded(interrupted.state_dict())
    optimizer = FromRule(resumed, Orthogonal(0.1))
    for p, q in zip(resumed, part, strict=True):
        p.data.copy_(q.data)
    optimizer.load_state_dict(saved)
    run(optimizer, resumed, range(3, 6))
    assert torch.equal(flat(resumed), flat(whole))


def test_a_tensor_put_in_place_of_a_view_is_taken_over():
    a, b = parameters(SHAPES), parameters(SHAPES)
    first, second = (FromRule(params, Orthogonal(0.1), compile=False) for params in (a, b))
    run(first, a, range(2))
    run(second, b, range(2))
    for p in b:
        second.state[p]["momentum"] = second.state[p]["momentum"].clone()
    run(first, a, [2])
    run(second, b, [2])
    assert torch.equal(flat(a), flat(b))


def test_loops_say_that_they_cannot():
    params = parameters(SHAPES)
    with pytest.raises(UnsupportedError, match="Orthogonal looks at shapes"):
        in_place(filled(params), None, tensors=params, backend="loops")
    with pytest.raises(ValueError, match="backend must be None or one of eager, compile, loops"):
        in_place(filled(params), None, tensors=params, backend="fortran")
