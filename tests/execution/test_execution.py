"""A pure rule as an in-place step: the same values, in buffers that the host owns."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import lategrad as lg
from helpers.memory import largest_allocation
from helpers.parameters import expected_warnings
from lategrad.execution.backend import overwrite
from lategrad.registry import RULES, build_rule
from lategrad.rules import apply_update, issue_ticket
from lategrad.support.runs import map_tensors, tensors


@pytest.mark.parametrize("backend", ["eager", "compile"])
@pytest.mark.parametrize(
    "name", ["anytime-sgd", "optimistic-anytime", "strongly-convex", "sgd-linear", "steady", "dc-asgd"]
)
def test_equals_the_pure_form_in_the_same_memory(name, backend):
    rule = build_rule(name, 0.5, lg.Ball(1.0))
    generator = torch.Generator().manual_seed(0)
    pure = state = rule.init(torch.zeros(4, 1000, dtype=torch.float64))
    state = map_tensors(torch.Tensor.clone, state)
    addresses = [leaf.data_ptr() for leaf in tensors(state)]
    ticket = issue_ticket(rule, pure)  # all gradients come from the start
    step = lg.in_place(rule, state, backend=backend)
    assert step.backend == backend
    for t in range(20):
        grad = torch.randn(4, 1000, generator=generator, dtype=torch.float64)
        pure = apply_update(rule, pure, grad, torch.tensor(t), ticket)
        step(grad, t, ticket)
    for got, want in zip(tensors(state), tensors(pure), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert [leaf.data_ptr() for leaf in tensors(state)] == addresses


def test_a_missing_ticket_is_named():
    grad, delay = torch.ones(2), torch.tensor(0)
    rule = lg.baselines.DCASGD(0.1)
    state = rule.init(torch.zeros(2))
    with pytest.raises(ValueError, match="ticket must be what issue_ticket gave with the query: DCASGD needs it"):
        lg.in_place(rule, state, backend="eager")(grad, delay)
    assert torch.equal(state.x, torch.zeros(2))


class Pair(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor


def test_values_that_change_places_are_not_lost():
    state = Pair(torch.tensor([1.0]), torch.tensor([2.0]))
    overwrite(state, Pair(a=state.b, b=state.a))
    assert (state.a.item(), state.b.item()) == (2.0, 1.0)
    overwrite(state, Pair(a=state.a + state.b, b=state.a))
    assert (state.a.item(), state.b.item()) == (3.0, 2.0)


def test_the_profiler_sees_allocations():
    """The measure itself: two vectors of 4 bytes x 10^6, one after the other and both kept."""
    assert largest_allocation(lambda: [torch.ones(10**6), torch.ones(10**6)]) >= 8e6


_ALSO_COMPILED = ("anytime-sgd", "dc-asgd", "steady", "adaptive-revision", "optimistic-anytime", "steady-muon")


@pytest.mark.parametrize("name", RULES)
def test_an_update_allocates_at_most_one_new_state(name):
    dim = 200_000
    rule = build_rule(name, 0.5, lg.WholeSpace())
    with expected_warnings(rule):
        state = rule.init(torch.zeros(dim))
    size = sum(leaf.nbytes for leaf in tensors(state))
    grad, delay, ticket = torch.randn(dim), torch.tensor(0), issue_ticket(rule, state).clone()
    slack = 10_000  # scalars
    if name in _ALSO_COMPILED:
        update = torch.compile(lambda *args: apply_update(rule, *args), fullgraph=True, dynamic=False)
        torch.compiler.reset()
        assert largest_allocation(lambda: update(state, grad, delay, ticket)) <= size + slack
    for backend in ("compile", "loops") if name in ("anytime-sgd", "dc-asgd", "steady") else ("loops",):
        step = lg.in_place(rule, state, backend=backend)
        assert largest_allocation(partial(step, grad, delay, ticket)) <= slack


def test_what_is_private_in_torch_is_still_there():
    """All that the package uses of it: when a version of torch drops one, this says which."""
    import torch._dynamo.exc
    import torch._inductor.codecache
    import torch._inductor.exc

    assert callable(torch._inductor.codecache.CppCodeCache.load)
    assert callable(torch.cuda._compile_kernel)
    assert callable(torch._foreach_copy_)
    assert callable(torch._C._nn.flatten_dense_tensors)
    assert callable(torch._C._nn.unflatten_dense_tensors)
    assert callable(torch.autograd.graph._engine_run_backward)
    assert callable(torch.Tensor._make_wrapper_subclass)
    assert callable(torch._C._disabled_torch_function_impl)
    assert issubclass(torch._dynamo.exc.TorchDynamoException, Exception)
    assert issubclass(torch._inductor.exc.InvalidCxxCompiler, Exception)
    assert issubclass(torch._inductor.exc.CppCompileError, Exception)
    private = re.compile(r"(torch|cuda|graph)\._[a-zC]|\b_inductor\b|\b_dynamo\b|_engine_run_backward")
    source = Path(lg.__file__).parent
    using = {path.relative_to(source).as_posix() for path in source.rglob("*.py") if private.search(path.read_text())}
    assert using == {"support/torch_private.py"}


def test_the_step_says_what_runs_it():
    rule = lg.Anytime(lg.OGD(lr=0.5))
    one, many = rule.init(torch.zeros(5)), rule.init(torch.zeros(2, 5))
    assert repr(lg.in_place(rule, one)) == "<loops step of Anytime>"
    assert repr(lg.in_place(rule, many)) == "<compile step of Anytime>"
    assert repr(lg.in_place(rule, None, tensors=[torch.zeros(2, 2), torch.zeros(3)])) == (
        "<loops step of Anytime on 2 tensors>"
    )


@pytest.mark.parametrize("wrong", [torch.zeros(4), torch.zeros(5, dtype=torch.float64), torch.zeros(2, 5)])
def test_loops_refuse_a_gradient_of_another_form(wrong):
    rule = lg.SGD(0.1)
    step = lg.in_place(rule, rule.init(torch.zeros(5)), backend="loops")
    with pytest.raises(ValueError, match="grad must be torch.float32 of shape \\(5,\\) on cpu"):
        step(wrong, 0)


def test_a_gradient_may_have_gaps():
    rule = lg.SGD(1.0)
    state = rule.init(torch.zeros(5))
    lg.in_place(rule, state, backend="loops")(torch.arange(10.0)[::2], 0)
    assert state.x.tolist() == [0.0, -2.0, -4.0, -6.0, -8.0]


def test_without_a_compiler_it_warns_and_runs_eagerly(tmp_path):
    """A machine with no C++ compiler: an empty PATH and a compiler that does not exist."""
    program = """
import torch, warnings, lategrad as lg
rule = lg.Anytime(lg.OGD(lr=0.5))
state = rule.init(torch.zeros(2))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for run in range(2):  # the second step says nothing
        state = rule.init(torch.zeros(2))
        step = lg.in_place(rule, state)
        for t in range(3):
            step(torch.tensor([1.0, 0.0]), 0)
assert step.backend == "eager"
assert sum("running eagerly" in str(w.message) for w in caught) == 1, [str(w.message) for w in caught]
for backend in ("loops", "compile"):
    try:
        lg.in_place(rule, state, backend=backend)
    except lg.execution.UnsupportedError as error:
        assert "no compiler works here" in str(error)
    else:
        raise AssertionError(backend)
want = rule.init(torch.zeros(2))
for t in range(3):
    want = rule.update(want, torch.tensor([1.0, 0.0]), torch.tensor(0))
assert torch.equal(rule.query(state), rule.query(want))
"""
    env = {
        "PATH": "",
        "CXX": "no-such-compiler",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "HOME": str(tmp_path),
        **{name: os.environ[name] for name in ("PYTHONPATH", "OMP_NUM_THREADS") if name in os.environ},
    }
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
def test_a_compiler_that_is_killed_costs_no_update(tmp_path):
    """As by the Ctrl-C that ends a run: it reaches the compiler too.

    `in_place` compiles the loops of a step; those that also write the query are compiled at the first step that asks
    for it. Of SteadyMuon's it is the second program: the first is compiled, and must not have written anything.
    """
    compiler, count = tmp_path / "compiler", tmp_path / "count"
    program = f"""
import copy, torch, warnings, lategrad as lg
blocks = lg.Blocks.of_module(torch.nn.Linear(4, 3))
rule = lg.SteadyMuon(0.1, blocks=blocks)
x, grad = torch.linspace(-1, 1, 15), torch.linspace(1, -2, 15)
step = lg.in_place(rule, rule.init(x))
step(grad, 0)
assert step.backend == "loops"
want = rule.update(copy.deepcopy(step.state), grad, torch.tensor([0]))
open({str(count)!r}, "w").close()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    step(grad, 0, query_out=torch.empty(15))
assert step.backend == "eager"
assert ["running eagerly: the compiler failed" in str(w.message) for w in caught] == [True], caught
assert torch.equal(rule.query(step.state), rule.query(want))
"""
    compiler.write_text(f"""#!/bin/sh
if [ -e {count} ] && grep -qs "void run" $(echo "$@" | tr " " "\\n" | grep "main.cpp$"); then
    echo >> {count}
    [ $(wc -l < {count}) -ge 2 ] && kill -INT $$
fi
exec g++ "$@"
""")
    compiler.chmod(0o755)
    env = {**os.environ, "CXX": str(compiler), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(count.read_text()) == 2


class _PairState(NamedTuple):
    start: torch.Tensor
    x: torch.Tensor


@dataclass(frozen=True)
class _KeepsTwiceItsStart(lg.SGD):
    """SGD that also keeps twice its start: a state whose parts are different functions of x0."""

    lr: float = 0.1

    def init(self, x0):
        return _PairState(2 * x0, x0)

    def update(self, state, grad, delay):
        return _PairState(state.start, state.x - self.lr * grad)


class _SortsItsStart(_KeepsTwiceItsStart):
    def init(self, x0):
        return _PairState(x0.sort().values, x0)


class _SortsItsQuery(_KeepsTwiceItsStart):
    def query(self, state):
        return state.x.sort().values


@pytest.mark.parametrize("backend", ["eager", "compile", "loops"])
def test_the_first_state_is_made_of_the_start_not_of_the_first_query(backend):
    parameter = torch.ones(3)
    step = lg.in_place(_KeepsTwiceItsStart(), None, tensors=[parameter], backend=backend)
    assert step.state.vectors[0]["start"].tolist() == [2, 2, 2]


def test_a_start_without_a_form_in_loops_is_compiled_otherwise():
    parameter = torch.tensor([3.0, 1.0, 2.0])
    step = lg.in_place(_SortsItsStart(), None, tensors=[parameter])
    assert step.backend == "compile"
    assert step.state.vectors[0]["start"].tolist() == [1, 2, 3]


def test_a_query_without_a_form_in_loops_is_written_eagerly_with_a_warning():
    rule, query = _SortsItsQuery(), torch.empty(3)
    step = lg.in_place(rule, rule.init(torch.tensor([3.0, 1.0, 2.0])))
    assert step.backend == "loops"
    with pytest.warns(UserWarning, match="running eagerly: aten.sort"):
        step(torch.ones(3), 0, None, query)
    assert step.backend == "eager"
    torch.testing.assert_close(query, torch.tensor([0.9, 1.9, 2.9]))
