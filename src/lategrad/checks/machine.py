"""The checks that rules and learners share: purity, shapes, independent runs, saving, all backends."""

import io
from typing import Any

import torch
from torch import Tensor

from lategrad.checks.comparing import assert_close, assert_true, gradients, pickled_copy
from lategrad.execution import BACKENDS, UnsupportedError, in_place
from lategrad.rules.rule import AnyRule, apply_update, issue_ticket
from lategrad.support.runs import leaf_names, map_tensors, owned, require_state, runs_shape, tensors, tree_structure
from lategrad.support.torch_private import missing_compiler
from lategrad.support.validation import require


def check_machine(rule: AnyRule[Any], kind: str, title: str, dim: int, steps: int, seed: int, compile: bool) -> None:
    """Check a rule, or a learner in the form of one; ``kind`` and ``title`` name it in messages."""
    name = f"{kind} {title}"
    require("runs of the " + kind, tuple(runs_shape(rule)), runs_shape(rule) == (),
            "none: check it with plain numbers as hyper-parameters")  # fmt: skip
    grads = gradients(steps, (3, dim), seed)
    x0 = gradients(1, (3, dim), seed + 1)[0]
    check_first_state(rule, name, title, x0)
    states = _run(rule, name, x0, grads)
    _check_purity(rule, name, states, grads[-1])
    _check_tickets(rule, name, states)
    _check_shapes_and_dtypes(rule, name, dim, steps, seed)
    again = _run(pickled_copy(rule, name), name, x0, grads)
    assert_close(again[-1], states[-1], f"{name}: a pickled copy behaves differently")

    # Only rounding may differ: reductions may add in another order for another shape.
    for run in range(3):
        alone = _run(rule, name, x0[run], grads[:, run])[-1]
        row = map_tensors(lambda leaf, run=run: leaf[run], states[-1])
        assert_close(alone, row, f"{name}: run {run} alone differs from run {run} in a batch", 1e-9, 1e-12)
    order = torch.tensor([2, 0, 1])
    permuted = _run(rule, name, x0[order], grads[:, order])[-1]
    in_order = map_tensors(lambda leaf: leaf[order], states[-1])
    assert_close(permuted, in_order, f"{name}: permuting the runs does not permute the results", 1e-9, 1e-12)

    for state in states:
        for point in (rule.query(state), rule.output(state)):
            assert_true(rule.domain.contains(point), f"{name}: leaves its domain")
    _check_saved_state(rule, name, states, grads)
    _check_in_place(rule, name, grads, states, compile)


def _run(rule: AnyRule[Any], name: str, x0: Tensor, grads: Tensor) -> list[Any]:
    """All states, from the first to the one after the last gradient; delays 0, 1, 0, 1, ... for each run."""
    states = [rule.init(x0)]
    kinds = [(leaf.dtype, tuple(leaf.shape)) for leaf in tensors(states[0])]
    for t, grad in enumerate(grads):
        ticket = issue_ticket(rule, states[t - t % 2])  # of the query that the gradient was computed at
        states.append(apply_update(rule, states[-1], grad, torch.full((*x0.shape[:-1], 1), t % 2), ticket))
        assert_true(tree_structure(states[-1]) == tree_structure(states[0]), f"{name}: the state changes its "
                    f"structure from {tree_structure(states[0])} to {tree_structure(states[-1])}")  # fmt: skip
        now = [(leaf.dtype, tuple(leaf.shape)) for leaf in tensors(states[-1])]
        assert_true(now == kinds, f"{name}: the state changes its dtypes or shapes: {leaf_names(states[0])} had "
                                  f"{kinds}, and then {now}")  # fmt: skip
    return states


def check_first_state(rule: Any, name: str, title: str, x0: Tensor) -> None:
    """Require a state that hosts can store, and that does not share memory with the start."""
    start = x0.clone()
    state = rule.init(start)
    try:
        require_state(state, title)
    except ValueError as error:
        raise AssertionError(f"{name}: {error}") from None
    assert_true(len(tensors(state)) > 0, f"{name}: the state has no tensor in it")
    for leaf, place in zip(tensors(state), leaf_names(state), strict=True):
        assert_true(leaf.shape[:1] == (3,), f"{name}: {place} of the state has shape {tuple(leaf.shape)} for 3 runs; a "
                    "vector has shape (*runs, d), a number (*runs, 1), such as per_run(x, 0)")  # fmt: skip
    memory = start.untyped_storage().data_ptr()
    shared = any(leaf.untyped_storage().data_ptr() == memory for leaf in tensors(state) if leaf.numel())
    assert_true(not shared, f"{name}: init returns x0 itself, or a view of it, which hosts overwrite: copy it, "
                            f"as first_query(self, x0) of lategrad.rules does")  # fmt: skip


def _check_purity(rule: AnyRule[Any], name: str, states: list[Any], grad: Tensor) -> None:
    before = map_tensors(Tensor.clone, states[-2])
    grad_before, delay = grad.clone(), torch.tensor(1)
    ticket = issue_ticket(rule, states[-3]).clone()
    ticket_before = ticket.clone()
    first = apply_update(rule, states[-2], grad, delay, ticket)
    second = apply_update(rule, states[-2], grad, delay, ticket)
    assert_close(first, second, f"{name}: the same input gives two outputs")
    assert_close(states[-2], before, f"{name}: update changes the state it was given")
    assert_close(grad, grad_before, f"{name}: update changes the gradient it was given")
    assert_close(ticket, ticket_before, f"{name}: update changes the ticket it was given")
    copy = map_tensors(Tensor.clone, first)
    grad.zero_()
    assert_close(first, copy, f"{name}: the state shares memory with the gradient")
    grad.copy_(grad_before)
    ticket.zero_()
    assert_close(first, copy, f"{name}: the state shares memory with the ticket")


def _check_tickets(rule: AnyRule[Any], name: str, states: list[Any]) -> None:
    before = map_tensors(Tensor.clone, tuple(states))
    tickets = [issue_ticket(rule, state) for state in states]
    assert_close(tuple(states), before, f"{name}: issuing a ticket changes the state")
    for ticket in tickets:
        same_kind = ticket.dtype == tickets[0].dtype and ticket.shape == tickets[0].shape
        assert_true(same_kind, f"{name}: the ticket changes its dtype or shape")
        assert_true(ticket.shape[:-1] == (3,), f"{name}: a ticket has shape {tuple(ticket.shape)}")


def _check_shapes_and_dtypes(rule: AnyRule[Any], name: str, dim: int, steps: int, seed: int) -> None:
    for dtype in (torch.float32, torch.float64):
        for runs in ((), (1,), (2, 3)):
            x0 = gradients(1, (*runs, dim), seed, dtype)[0]
            states = _run(rule, name, x0, gradients(steps, (*runs, dim), seed, dtype))
            for point in (rule.query(states[-1]), rule.output(states[-1])):
                assert_true(point.dtype == dtype, f"{name}: a {dtype} start gives a {point.dtype} point")
                assert_true(point.shape == x0.shape, f"{name}: a point has shape {tuple(point.shape)}")


def _check_saved_state(rule: AnyRule[Any], name: str, states: list[Any], grads: Tensor) -> None:
    buffer = io.BytesIO()
    torch.save(tensors(states[1]), buffer)
    buffer.seek(0)
    state = map_tensors(lambda _, loaded: loaded, states[1], torch.load(buffer, weights_only=True))
    for t, grad in enumerate(grads[1:], start=1):
        state = apply_update(rule, state, grad, torch.tensor(t % 2), issue_ticket(rule, states[t - t % 2]))
    assert_close(state, states[-1], f"{name}: a saved and loaded state continues differently")


def _check_in_place(rule: AnyRule[Any], name: str, grads: Tensor, states: list[Any], compile: bool) -> None:
    """Compare every backend that runs here with the pure update: three runs at once, and one alone."""
    for backend in [b for b in BACKENDS if b == "eager" or (compile and missing_compiler("cpu", b) is None)]:
        for runs in (slice(None), 0) if backend != "compile" else (slice(None),):
            past = [map_tensors(lambda leaf, runs=runs: leaf[runs], state) for state in states]
            state = owned(past[0])
            try:
                step = in_place(rule, state, backend=backend)
                for t, grad in enumerate(grads[:, runs]):
                    step(grad, t % 2, issue_ticket(rule, past[t - t % 2]).clone())
            except UnsupportedError as error:  # not everything is arithmetic, but everything can be traced
                assert_true(backend == "loops", f"{name}: {error}")
                continue
            assert_true(step.backend == backend, f"{name}: {step.backend} instead of {backend}")
            tolerance = 0.0 if backend == "eager" and runs != 0 else 1e-9
            assert_close(state, past[-1], f"{name}: the in-place update ({backend}) differs from the pure one",
                         tolerance, tolerance)  # fmt: skip
