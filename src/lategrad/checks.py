"""Checks that every rule, learner and set must pass, shipped so that you can run them on your own.

Each check raises an AssertionError that says which property failed. They test properties, not numbers:
purity, pickling, stable dtypes and shapes, runs that do not see each other, feasibility, agreement of the
pure, in-place and compiled forms, and a state that can be saved without pickle.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lategrad.execution import BACKENDS, UnsupportedError, in_place
from lategrad.execution.compiled import Compiled
from lategrad.learners.learner import Learner, Linear
from lategrad.registry import as_rule
from lategrad.rules.rule import AnyRule, apply_update, first_state, issue_ticket
from lategrad.sets import ConvexSet, norm
from lategrad.support.options import Option, options_of
from lategrad.support.runs import map_tensors, owned, require_state, runs_shape, structure, tensors
from lategrad.support.torch_private import missing_compiler
from lategrad.support.validation import require

__all__ = ["check_learner", "check_rule", "check_set"]

Reference = Callable[[list[float], list[list[float]]], Sequence[Sequence[float]]]
"""A plain transcription: from the start and the gradients to the points before each update and after all."""


def _assert(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def _close(got: Any, want: Any, message: str, rtol: float = 0.0, atol: float = 0.0) -> None:
    for g, w in zip(tensors(got), tensors(want), strict=True):
        same_kind = g.dtype == w.dtype and g.shape == w.shape
        _assert(same_kind, f"{message}: {g.dtype} {tuple(g.shape)} against {w.dtype} {tuple(w.shape)}")
        if g.numel() and not torch.allclose(g, w, rtol=rtol, atol=atol, equal_nan=True):
            raise AssertionError(f"{message}: differs by up to {(g - w).abs().max().item():.3g}")


@dataclass(frozen=True)
class _Machine:
    """What rules and learners have in common: a state, a step on a gradient, and points to look at."""

    kind: str
    part: Any
    domain: ConvexSet
    step: Callable[[Any, Any, Tensor, Tensor, Tensor], Any]
    """From (part, state, gradient, delay, ticket) to the next state."""
    points: Callable[[Any, Any], tuple[Tensor, ...]]
    ticket: Callable[[Any, Any], Tensor]
    """From (part, state) to what its query carries."""

    def run(self, x0: Tensor, grads: Tensor, part: Any = None) -> list[Any]:
        """All states, from the first to the one after the last gradient; delays 0, 1, 0, 1, ..."""
        part = self.part if part is None else part
        states = [part.init(x0)]
        for t, grad in enumerate(grads):
            ticket = self.ticket(part, states[t - t % 2])  # of the query that the gradient was computed at
            states.append(self.step(part, states[-1], grad, torch.tensor(t % 2), ticket))
        return states


def _gradients(steps: int, shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(steps, *shape, generator=generator, dtype=torch.float64).to(dtype)


def _pickled_copy(part: Any, name: str) -> Any:
    try:
        return pickle.loads(pickle.dumps(part))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise AssertionError(f"{name}: cannot be pickled, as worker processes ask for: {error}; define its class at "
                             f"the top of a module, and keep no functions or locks in it") from None  # fmt: skip


def _check_machine(machine: _Machine, dim: int, steps: int, seed: int, compile: bool) -> None:
    name = f"{machine.kind} {type(machine.part).__name__}"
    require("runs of the " + machine.kind, tuple(runs_shape(machine.part)), runs_shape(machine.part) == (),
            "none: check it with plain numbers as hyper-parameters")  # fmt: skip
    grads = _gradients(steps, (3, dim), seed)
    x0 = _gradients(1, (3, dim), seed + 1)[0]
    _check_first_state(machine, name, x0)
    states = machine.run(x0, grads)

    _check_purity(machine, name, states, grads[-1])
    _check_tickets(machine, name, states)
    _check_shapes_and_dtypes(machine, name, dim, steps, seed)

    again = machine.run(x0, grads, part=_pickled_copy(machine.part, name))
    _close(again[-1], states[-1], f"{name}: a pickled copy behaves differently")

    # Only rounding may differ: reductions may add in another order for another shape.
    for run in range(3):
        alone = machine.run(x0[run], grads[:, run])[-1]
        row = map_tensors(lambda leaf, run=run: leaf[run], states[-1])  # type: ignore[misc]
        _close(alone, row, f"{name}: run {run} alone differs from run {run} in a batch", 1e-9, 1e-12)
    order = torch.tensor([2, 0, 1])
    permuted = machine.run(x0[order], grads[:, order])[-1]
    in_order = map_tensors(lambda leaf: leaf[order], states[-1])
    _close(permuted, in_order, f"{name}: permuting the runs does not permute the results", 1e-9, 1e-12)

    for state in states:
        for point in machine.points(machine.part, state):
            _assert(bool(machine.domain.contains(point).all()), f"{name}: leaves its domain")

    _check_saved_state(machine, name, states, grads)
    _check_in_place(machine, name, x0, grads, states, compile)


def _check_first_state(machine: _Machine, name: str, x0: Tensor) -> None:
    """A state that hosts can keep, and that is not the start itself."""
    given = x0.clone()
    state = machine.part.init(given)
    try:
        require_state(state, type(machine.part).__name__)
    except ValueError as error:
        raise AssertionError(f"{name}: {error}") from None
    _assert(len(tensors(state)) > 0, f"{name}: the state has no tensor in it")
    memory = given.untyped_storage().data_ptr()
    shared = any(leaf.untyped_storage().data_ptr() == memory for leaf in tensors(state) if leaf.numel())
    _assert(not shared, f"{name}: init returns x0 itself, or a view of it, which hosts would overwrite: copy it, as "
                        f"first_query(self, x0) of lategrad.rules does")  # fmt: skip


def _check_purity(machine: _Machine, name: str, states: list[Any], grad: Tensor) -> None:
    before = map_tensors(Tensor.clone, states[-2])
    grad_before, delay = grad.clone(), torch.tensor(1)
    ticket = machine.ticket(machine.part, states[-3]).clone()
    ticket_before = ticket.clone()
    first = machine.step(machine.part, states[-2], grad, delay, ticket)
    second = machine.step(machine.part, states[-2], grad, delay, ticket)
    _close(first, second, f"{name}: the same input gives two outputs")
    _close(states[-2], before, f"{name}: update changes the state it was given")
    _close(grad, grad_before, f"{name}: update changes the gradient it was given")
    _close(ticket, ticket_before, f"{name}: update changes the ticket it was given")
    kept = map_tensors(Tensor.clone, first)
    grad.zero_()
    _close(first, kept, f"{name}: the state shares memory with the gradient")
    grad.copy_(grad_before)
    ticket.zero_()
    _close(first, kept, f"{name}: the state shares memory with the ticket")


def _check_tickets(machine: _Machine, name: str, states: list[Any]) -> None:
    before = map_tensors(Tensor.clone, tuple(states))
    tickets = [machine.ticket(machine.part, state) for state in states]
    _close(tuple(states), before, f"{name}: issuing a ticket changes the state")
    for ticket in tickets:
        same_kind = ticket.dtype == tickets[0].dtype and ticket.shape == tickets[0].shape
        _assert(same_kind, f"{name}: the ticket changes its dtype or shape")
        _assert(ticket.shape[:-1] == (3,), f"{name}: a ticket has shape {tuple(ticket.shape)}")


def _check_shapes_and_dtypes(machine: _Machine, name: str, dim: int, steps: int, seed: int) -> None:
    for dtype in (torch.float32, torch.float64):
        for runs in ((), (1,), (2, 3)):
            x0 = _gradients(1, (*runs, dim), seed, dtype)[0]
            states = machine.run(x0, _gradients(steps, (*runs, dim), seed, dtype))
            _assert(all(structure(state) == structure(states[0]) for state in states),
                    f"{name}: the state changes what it is made of")  # fmt: skip
            kinds = [[(leaf.dtype, leaf.shape) for leaf in tensors(state)] for state in states]
            _assert(all(kind == kinds[0] for kind in kinds), f"{name}: the state changes its dtypes or shapes")
            for point in machine.points(machine.part, states[-1]):
                _assert(point.dtype == dtype, f"{name}: a {dtype} start gives a {point.dtype} point")
                _assert(point.shape == x0.shape, f"{name}: a point has shape {tuple(point.shape)}")


def _check_saved_state(machine: _Machine, name: str, states: list[Any], grads: Tensor) -> None:
    buffer = io.BytesIO()
    torch.save(tensors(states[1]), buffer)
    buffer.seek(0)
    loaded = iter(torch.load(buffer, weights_only=True))
    state = map_tensors(lambda _: next(loaded), states[1])
    for t, grad in enumerate(grads[1:], start=1):
        ticket = machine.ticket(machine.part, states[t - t % 2])
        state = machine.step(machine.part, state, grad, torch.tensor(t % 2), ticket)
    _close(state, states[-1], f"{name}: a saved and loaded state goes on differently")


@dataclass(frozen=True, eq=False)
class _AsRule:
    """What steps need of a rule, for learners too."""

    machine: _Machine

    def query(self, state: Any) -> Tensor:
        return self.machine.points(self.machine.part, state)[0]

    def ticket(self, state: Any) -> Tensor:
        return self.machine.ticket(self.machine.part, state)

    def update(self, state: Any, grad: Tensor, delay: Tensor, ticket: Tensor) -> Any:
        return self.machine.step(self.machine.part, state, grad, delay, ticket)


def _check_in_place(machine: _Machine, name: str, x0: Tensor, grads: Tensor, states: list[Any], compile: bool) -> None:
    """Through every backend that this machine has: three runs at once, and one alone."""
    for backend in [b for b in BACKENDS if b == "eager" or (compile and missing_compiler("cpu", b) is None)]:
        for runs in (slice(None), 0) if backend != "compile" else (slice(None),):
            past = [map_tensors(lambda leaf, runs=runs: leaf[runs], state) for state in states]  # type: ignore[misc]
            state = owned(past[0])
            rule: Any = _AsRule(machine)
            try:
                step = in_place(rule, state, backend=backend)
                for t, grad in enumerate(grads[:, runs]):
                    step(grad, t % 2, machine.ticket(machine.part, past[t - t % 2]).clone())
            except UnsupportedError as error:  # not everything is arithmetic, but everything can be traced
                _assert(backend == "loops", f"{name}: {error}")
                continue
            _assert(step.backend == backend, f"{name}: {step.backend} instead of {backend}")
            tolerance = 0.0 if backend == "eager" and runs != 0 else 1e-9
            _close(state, past[-1], f"{name}: the in-place update ({backend}) differs from the pure one",
                   tolerance, tolerance)  # fmt: skip


def _check_sweeps(rule: AnyRule[Any], dim: int, seed: int) -> None:
    """Whether two values of a hyper-parameter in one rule do what two rules do."""
    for name, option, value, change in _numbers(rule):
        values = value, 0.75 * value
        try:
            singles = [change(one) for one in values]
        except ValueError:  # not a valid value; the same one twice still tells the shapes
            singles = [rule, rule]
            values = value, value
        try:
            sweep = change(torch.tensor(values, dtype=torch.float64).unsqueeze(-1))
            got = _outputs(sweep, (2, dim), seed)
            _close(got, torch.stack([_outputs(one, (dim,), seed) for one in singles]), "the runs differ", 1e-9, 1e-12)
        except (AssertionError, RuntimeError, TypeError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            message = (f"rule {type(rule).__name__} cannot be swept over {name}: {reason} (a sweep makes it a tensor "
                       f"of shape (*runs, 1): compute with torch, in float64, with as_number(delay) of lategrad.rules "
                       f"for the delay, and branch on nothing)")  # fmt: skip
            if option.sweeps:
                raise AssertionError(message) from None
            warnings.warn(message, stacklevel=3)


def _outputs(rule: AnyRule[Any], shape: tuple[int, ...], seed: int) -> Tensor:
    """The output after three updates; every run gets the same gradients."""
    grads = _gradients(3, shape[-1:], seed)
    state = first_state(rule, _gradients(1, shape[-1:], seed + 1)[0].expand(shape))
    _assert(rule.query(state).shape == shape, f"the query has shape {tuple(rule.query(state).shape)}, not {shape}")
    for grad in grads:
        state = apply_update(rule, state, grad.expand(shape), torch.tensor(0), issue_ticket(rule, state))
    output = rule.output(state)
    _assert(output.shape == shape, f"the output has shape {tuple(output.shape)}, not {shape}")
    return output


def _numbers(part: Any) -> Iterator[tuple[str, Option, float, Callable[[Any], Any]]]:
    """Every number among the fields of a rule and of the learner inside it, and how to change it."""
    if not dataclasses.is_dataclass(part) or isinstance(part, type) or hasattr(part, "project"):
        return
    options = options_of(type(part))
    for field in dataclasses.fields(part):
        value, option = getattr(part, field.name), options.get(field.name)
        change = partial(_with_field, part, field.name)
        if option is not None and float in option.types and type(value) in (int, float):
            yield field.name, option, value, change
        elif field.init:
            for name, inner, number, change_inner in _numbers(value):
                yield name, inner, number, partial(_compose, change, change_inner)


def _with_field(part: Any, name: str, value: Any) -> Any:
    return dataclasses.replace(part, **{name: value})


def _compose(outer: Callable[[Any], Any], inner: Callable[[Any], Any], value: Any) -> Any:
    return outer(inner(value))


def _check_reference(points: list[Tensor], x0: Tensor, grads: Tensor, reference: Reference, message: str) -> None:
    want = torch.tensor(reference(x0.tolist(), grads.tolist()), dtype=torch.float64)
    _close(torch.stack(points), want, message, 1e-10, 1e-10)


def check_learner(
    learner: Learner[Any],
    *,
    dim: int = 6,
    seed: int = 0,
    reference: Reference | None = None,
    compile: bool = True,
) -> None:
    """Put an online learner through all generic checks.

    Args:
        learner: the learner, with plain numbers as hyper-parameters.
        dim: dimension of the test vectors; must fit the learner's domain.
        seed: of the random starts and gradients.
        reference: a plain transcription to be equal to on the first steps, called with the start and the
            gradients as lists (weights 1, 2, 3, ...; each gradient is the hint for the next round) and
            returning the plays :math:`w_1, w_2, \\dots`, one more than there are gradients.
        compile: also compare with ``torch.compile``; takes seconds.

    >>> import lategrad as lg
    >>> check_learner(lg.OGD(lr=0.5, domain=lg.Ball(1.0)), compile=False)
    """

    missing = [member for member in ("domain", "init", "predict", "update") if not hasattr(learner, member)]
    require("learner", type(learner).__name__, not missing, f"an online learner, with {', '.join(missing)}")

    def step(part: Any, state: Any, grad: Tensor, delay: Tensor, ticket: Tensor) -> Any:
        weight = torch.ones(*grad.shape[:-1], 1, dtype=torch.float64)
        return part.update(state, loss=Linear(weight, grad), hint=Linear(2 * weight, grad))

    machine = _Machine(
        kind="learner",
        part=learner,
        domain=learner.domain,
        step=step,
        points=lambda part, state: (part.predict(state),),
        ticket=lambda part, state: part.predict(state)[..., :0],
    )
    _check_machine(machine, dim, steps=6, seed=seed, compile=compile)
    if reference is not None:
        x0, grads = _gradients(1, (dim,), seed + 1)[0], _gradients(5, (dim,), seed)
        state = learner.init(x0)
        plays = [learner.predict(state)]
        for t, grad in enumerate(grads, start=1):
            loss = Linear(torch.tensor([float(t)], dtype=torch.float64), grad)
            hint = Linear(loss.weight + 1, grad)
            state = learner.update(state, loss, hint)
            plays.append(learner.predict(state))
        _check_reference(plays, x0, grads, reference, "learner: the first plays differ from the reference")


def check_rule(
    rule: AnyRule[Any] | str,
    *,
    dim: int = 6,
    seed: int = 0,
    undelayed: AnyRule[Any] | None = None,
    reference: Reference | None = None,
    compile: bool = True,
) -> None:
    """Put a server rule through all generic checks.

    A hyper-parameter that is annotated ``Scalar`` must also take a value for each run, so that a sweep is one rule. One
    that is annotated ``float`` may do without; a warning says so then.

    Args:
        rule: the rule, with plain numbers as hyper-parameters, or a text such as ``"my_rules.py:Mine:lr=0.1"``.
        dim: dimension of the test vectors; must fit the rule's domain.
        seed: of the random starts and gradients.
        undelayed: the rule that this one must equal when every delay is zero; by default itself, told of
            the zero delay as a number for every run instead of one for all.
        reference: a plain transcription to be equal to on the first steps, called with the start and the
            gradients as lists and returning the queries :math:`x_1, x_2, \\dots`, one more than there
            are gradients (all delays are zero).
        compile: also compare with ``torch.compile``; takes seconds.

    >>> import lategrad as lg
    >>> check_rule(lg.SGD(lr=0.5, domain=lg.Ball(1.0)), compile=False)
    """
    rule = as_rule(rule)
    machine = _Machine(
        kind="rule",
        part=rule,
        domain=rule.domain,
        step=apply_update,
        points=lambda part, state: (part.query(state), part.output(state)),
        ticket=issue_ticket,
    )
    _check_machine(machine, dim, steps=6, seed=seed, compile=compile)
    _check_sweeps(rule, dim, seed)

    x0, grads = _gradients(1, (2, dim), seed + 1)[0], _gradients(5, (2, dim), seed)
    state, other = rule.init(x0), (undelayed or rule).init(x0)
    start = rule.domain.project(x0)
    _close(rule.query(state), start, "rule: the first query is not the projected start")
    _close(rule.output(state), start, "rule: the output before any update is not the projected start")
    queries = [rule.query(state)]
    for grad in grads:
        before = state
        state = apply_update(rule, state, grad, torch.tensor(0), issue_ticket(rule, state))
        zeros, ticket = torch.zeros(2, 1, dtype=torch.int64), issue_ticket(undelayed or rule, other)
        with_int = apply_update(rule, before, grad, 0, issue_ticket(rule, before))
        _close(with_int, state, "rule: a delay that is an int gives something else than a tensor")
        other = apply_update(undelayed or rule, other, grad, zeros, ticket)
        queries.append(rule.query(state))
        _close(rule.query(state), (undelayed or rule).query(other), "rule: zero delay is not the undelayed rule")
    if reference is not None:
        first_run = [query[0] for query in queries]
        message = "rule: the first queries differ from the reference"
        _check_reference(first_run, x0[0], grads[:, 0], reference, message)


def check_set(domain: ConvexSet, *, dim: int = 6, seed: int = 0, compile: bool = True) -> None:
    r"""Put a convex set through all generic checks.

    The heart is the theorem that characterises the projection: :math:`p = \Pi_K(z)` if and only if p is in
    K and :math:`\langle z - p, u - p \rangle \le 0` for all u in K. The diameter D and the support function h
    must agree with it: :math:`\|u - v\| \le D` and :math:`\langle g, u \rangle \le h(g)` for all u, v in K,
    :math:`h(g) + h(-g) \le D \|g\|`, and, from the characterisation at :math:`p = \Pi_K(s g)`,
    :math:`h(g) \le \langle g, p \rangle + D \|p\| / s` for every s > 0.

    Args:
        domain: the set.
        dim: dimension of the test vectors; must fit the set.
        seed: of the random vectors.
        compile: also compare with ``torch.compile``; takes seconds.

    >>> import lategrad as lg
    >>> check_set(lg.Ball(2.0), compile=False)
    """
    name = f"set {type(domain).__name__}"
    project = domain.project
    for dtype, tol in ((torch.float32, 1e-4), (torch.float64, 1e-9)):
        z = _gradients(1, (40, dim), seed, dtype)[0]
        z = z * torch.logspace(-3, 6, 40, dtype=dtype).unsqueeze(-1)  # from well inside to far outside
        before = z.clone()
        p = project(z)
        _close(z, before, f"{name}: project changes its input")
        _close(project(z), p, f"{name}: the same input gives two outputs")
        _assert(p.dtype == dtype and p.shape == z.shape, f"{name}: project changes the dtype or the shape")
        _assert(bool(domain.contains(p).all()), f"{name}: a projection is not in the set")

        feasible = project(_gradients(1, (30, dim), seed + 1, dtype)[0])
        inner = ((z - p).double().unsqueeze(1) * (feasible.unsqueeze(0) - p.unsqueeze(1))).sum(-1)
        slack = tol * norm(z) * (norm(z) + norm(feasible).T)
        _assert(bool((inner <= slack).all()), f"{name}: the variational inequality fails")

        _close(project(p), p, f"{name}: projecting twice differs from once", tol, tol)
        _close(project(feasible), feasible, f"{name}: a point inside is moved", tol, tol)
        apart = norm(p.unsqueeze(0) - p.unsqueeze(1))
        limit = norm(z.unsqueeze(0) - z.unsqueeze(1)) + tol * (norm(z).unsqueeze(0) + norm(z).unsqueeze(1))
        _assert(bool((apart <= limit).all()), f"{name}: two points are further apart after projection")

        single = torch.stack([project(row) for row in z])
        _close(single, p, f"{name}: projecting one by one differs from a batch", tol, tol)
        folded = project(z.reshape(8, 5, dim)).reshape(40, dim)
        _close(folded, p, f"{name}: two run dimensions differ from one", tol, tol)

        for extreme in (torch.zeros(dim, dtype=dtype), torch.full((dim,), 1e30, dtype=dtype), z[0] * 1e33):
            point = project(extreme)
            _assert(bool(torch.isfinite(point).all()), f"{name}: not finite at {extreme.tolist()}")
            _assert(bool(domain.contains(point).all()), f"{name}: not in the set at {extreme.tolist()}")

        _check_size(name, domain, p, feasible, tol)
        copy = _pickled_copy(domain, name)
        _close(copy.project(z), p, f"{name}: a pickled copy behaves differently")
        if compile and dtype == torch.float32:  # where fused operations round most differently
            _close(Compiled(project)(z), p, f"{name}: the compiled projection differs", tol, tol)


def _check_size(name: str, domain: ConvexSet, points: Tensor, feasible: Tensor, tol: float) -> None:
    """The diameter and the support function, against the projection."""
    for member in ("diameter_in", "support"):
        _assert(hasattr(domain, member), f"{name}: has no {member}")
    dim = points.shape[-1]
    diameter = torch.as_tensor(domain.diameter_in(dim), dtype=torch.float64)
    apart = norm(points.unsqueeze(1) - feasible)
    _assert(
        bool((apart <= diameter * (1 + tol) + tol).all()), f"{name}: two points are further apart than the diameter"
    )

    directions = _gradients(1, (20, dim), 7, points.dtype)[0]
    far = domain.support(directions)
    kind = f"{far.dtype} {tuple(far.shape)}"
    _assert(far.dtype == torch.float64 and far.shape == (20, 1), f"{name}: support gives {kind}, not float64 (20, 1)")
    zero, twice = domain.support(torch.zeros_like(directions)), domain.support(2 * directions)
    _close(zero, torch.zeros_like(zero), f"{name}: the support function is not 0 at 0", 0.0, tol)
    _close(twice, 2 * far, f"{name}: the support function of twice a direction is not twice", tol, tol)
    size = norm(directions)
    reached = directions.double() @ feasible.double().T
    _assert(bool((reached <= far + tol * size * (1 + norm(feasible).T)).all()), f"{name}: support is too small")
    if bool(torch.isfinite(diameter).all()):
        width = far + domain.support(-directions)
        slack = tol * size * (1 + diameter + far.abs() / size)
        _assert(bool((width <= diameter * size + slack).all()), f"{name}: wider than its diameter")
        scale = 1e3
        p = domain.project(scale * directions.double())
        reach = (directions.double() * p).sum(-1, keepdim=True) + diameter * norm(p) / scale
        _assert(bool((far <= reach + slack).all()), f"{name}: support is larger than any point of the set reaches")
