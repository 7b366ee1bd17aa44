"""Checks for server rules."""

import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lategrad.checks.comparing import Reference, assert_close, assert_true, check_reference, gradients
from lategrad.checks.machine import check_machine
from lategrad.registry import as_rule
from lategrad.rules.blocks import Block, Blocks, fill_in
from lategrad.rules.rule import AnyRule, apply_update, first_state, issue_ticket
from lategrad.sets import WholeSpace
from lategrad.support.options import Option, options_of


def check_rule(
    rule: AnyRule[Any] | str, *, dim: int = 6, seed: int = 0, undelayed: AnyRule[Any] | None = None,
    reference: Reference | None = None, compile: bool = True,
) -> None:  # fmt: skip
    """Run all generic checks on a server rule.

    A hyper-parameter that is annotated ``Scalar`` must also take a value for each run, so that a sweep is one rule. One
    that is annotated ``float`` need not; a warning is issued then. With ``delay_blocks``, equal delays of all blocks
    must be one delay, and what is not projected must depend on the delay of its own block alone.

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
    check_machine(rule, "rule", type(rule).__name__, dim, steps=6, seed=seed, compile=compile)
    _check_sweeps(rule, dim, seed)
    if hasattr(rule, "delay_blocks"):
        _check_block_delays(rule, dim, seed)

    undelayed = undelayed or rule
    x0, grads, zeros = gradients(1, (2, dim), seed + 1)[0], gradients(5, (2, dim), seed), torch.zeros(2, 1).long()
    state, other, start = rule.init(x0), undelayed.init(x0), rule.domain.project(x0)
    assert_close(rule.query(state), start, "rule: the first query is not the projected start")
    assert_close(rule.output(state), start, "rule: the output before any update is not the projected start")
    queries = [rule.query(state)]
    for grad in grads:
        ticket = issue_ticket(rule, state)
        with_int = apply_update(rule, state, grad, 0, ticket)
        state = apply_update(rule, state, grad, torch.tensor(0), ticket)
        assert_close(with_int, state, "rule: a delay that is an int gives something else than a tensor")
        other = apply_update(undelayed, other, grad, zeros, issue_ticket(undelayed, other))
        queries.append(rule.query(state))
        assert_close(rule.query(state), undelayed.query(other), "rule: zero delay is not the undelayed rule")
    if reference is not None:
        first_run = [query[0] for query in queries]
        check_reference(first_run, x0[0], grads[:, 0], reference, "rule: the first queries differ from the reference")


def _check_sweeps(rule: AnyRule[Any], dim: int, seed: int) -> None:
    """Whether two values of a hyper-parameter in one rule do what two rules do."""
    for path, option, value in _numbers(rule):
        values = value, 0.75 * value
        try:
            singles = [_with_number(rule, path, one) for one in values]
        except ValueError:  # not a valid value; the same one twice still tells the shapes
            singles, values = [rule, rule], (value, value)
        try:
            sweep = _with_number(rule, path, torch.tensor(values, dtype=torch.float64).unsqueeze(-1))
            expected = torch.stack([_outputs(one, (dim,), seed) for one in singles])
            assert_close(_outputs(sweep, (2, dim), seed), expected, "the runs differ", 1e-9, 1e-12)
        except (AssertionError, RuntimeError, TypeError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            message = (f"rule {type(rule).__name__} cannot be swept over {path[-1]}: {reason} (a sweep makes it a "
                       f"tensor of shape (*runs, 1): compute with torch, in float64, with as_number(delay) of "
                       f"lategrad.rules for the delay, and branch on nothing)")  # fmt: skip
            if option.sweeps:
                raise AssertionError(message) from None
            warnings.warn(message, stacklevel=3)


def _check_block_delays(rule: AnyRule[Any], dim: int, seed: int) -> None:
    """Whether each block does what it does under a rule that is told its delay for all."""
    halves = Blocks(tuple(Block(str(size), (size,), "other") for size in (dim // 2, dim - dim // 2)))
    blocks: Blocks = getattr(rule, "delay_blocks", None) or getattr(rule, "blocks", None) or halves
    x0, grads = gradients(1, (2, dim), seed + 1)[0], gradients(5, (2, dim), seed)

    def run(rule: AnyRule[Any], delays: list[int]) -> Tensor:
        state = rule.init(x0)
        for t, grad in enumerate(grads):
            state = apply_update(rule, state, grad, torch.tensor(delays).clamp_max(t), issue_ticket(rule, state))
        return torch.stack([rule.query(state), rule.output(state)])

    for_each, numbers = fill_in(rule, blocks, "delay_blocks"), list(range(len(blocks.parts)))
    equal = run(for_each, [3 for _ in numbers])
    assert_close(equal, run(rule, [3]), "rule: equal delays of all blocks are not one delay")
    if isinstance(rule.domain, WholeSpace):
        different = blocks.split(run(for_each, numbers))
        for i in numbers:
            alone = blocks.split(run(rule, [i]))[i]
            assert_close(different[i], alone, "rule: a block depends on the delay of another one")


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


def _numbers(part: Any) -> Iterator[tuple[tuple[str, ...], Option, float]]:
    """Every number among the fields of a rule and of the learner inside it: the names that lead to it, and it."""
    if not dataclasses.is_dataclass(part) or isinstance(part, type) or hasattr(part, "project"):
        return
    options = options_of(type(part))
    for field in dataclasses.fields(part):
        value, option = getattr(part, field.name), options.get(field.name)
        if option is not None and float in option.types and type(value) in (int, float):
            yield (field.name,), option, value
        elif field.init:
            for path, inner, number in _numbers(value):
                yield (field.name, *path), inner, number


def _with_number(part: Any, path: tuple[str, ...], value: Any) -> Any:
    if len(path) > 1:
        value = _with_number(getattr(part, path[0]), path[1:], value)
    return dataclasses.replace(part, **{path[0]: value})
