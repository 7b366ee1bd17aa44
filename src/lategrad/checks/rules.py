"""Checks for server rules."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lategrad.checks.comparing import Reference, assert_close, assert_true, check_reference, gradients
from lategrad.checks.machine import Machine, check_machine
from lategrad.registry import as_rule
from lategrad.rules.rule import AnyRule, apply_update, first_state, issue_ticket
from lategrad.support.options import Option, options_of


def check_rule(
    rule: AnyRule[Any] | str,
    *,
    dim: int = 6,
    seed: int = 0,
    undelayed: AnyRule[Any] | None = None,
    reference: Reference | None = None,
    compile: bool = True,
) -> None:
    """Run all generic checks on a server rule.

    A hyper-parameter that is annotated ``Scalar`` must also take a value for each run, so that a sweep is one rule. One
    that is annotated ``float`` need not; a warning is issued then.

    Args:
        rule: the rule, with plain numbers as hyper-parameters, or a text such as ``"my_rules.py:Mine:lr=0.1"``.
        dim: dimension of the test vectors; must fit the rule's constraint set.
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
    machine = Machine(
        kind="rule",
        part=rule,
        domain=rule.domain,
        update=apply_update,
        points=lambda part, state: (part.query(state), part.output(state)),
        ticket=issue_ticket,
    )
    check_machine(machine, dim, steps=6, seed=seed, compile=compile)
    _check_sweeps(rule, dim, seed)

    x0, grads = gradients(1, (2, dim), seed + 1)[0], gradients(5, (2, dim), seed)
    state, other = rule.init(x0), (undelayed or rule).init(x0)
    start = rule.domain.project(x0)
    assert_close(rule.query(state), start, "rule: the first query is not the projected start")
    assert_close(rule.output(state), start, "rule: the output before any update is not the projected start")
    queries = [rule.query(state)]
    for grad in grads:
        before = state
        state = apply_update(rule, state, grad, torch.tensor(0), issue_ticket(rule, state))
        zeros, ticket = torch.zeros(2, 1, dtype=torch.int64), issue_ticket(undelayed or rule, other)
        with_int = apply_update(rule, before, grad, 0, issue_ticket(rule, before))
        assert_close(with_int, state, "rule: a delay that is an int gives something else than a tensor")
        other = apply_update(undelayed or rule, other, grad, zeros, ticket)
        queries.append(rule.query(state))
        assert_close(rule.query(state), (undelayed or rule).query(other), "rule: zero delay is not the undelayed rule")
    if reference is not None:
        first_run = [query[0] for query in queries]
        message = "rule: the first queries differ from the reference"
        check_reference(first_run, x0[0], grads[:, 0], reference, message)


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
            assert_close(
                got, torch.stack([_outputs(one, (dim,), seed) for one in singles]), "the runs differ", 1e-9, 1e-12
            )
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
    grads = gradients(3, shape[-1:], seed)
    state = first_state(rule, gradients(1, shape[-1:], seed + 1)[0].expand(shape))
    assert_true(rule.query(state).shape == shape, f"the query has shape {tuple(rule.query(state).shape)}, not {shape}")
    for grad in grads:
        state = apply_update(rule, state, grad.expand(shape), torch.tensor(0), issue_ticket(rule, state))
    output = rule.output(state)
    assert_true(output.shape == shape, f"the output has shape {tuple(output.shape)}, not {shape}")
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
