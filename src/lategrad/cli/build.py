"""What options name: a problem, rules with their numbers, a set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lategrad.problems import Dataset, Problem, Quadratic, load
from lategrad.problems.linear import MODELS
from lategrad.registry import RuleSpec, parse_set, read_rule
from lategrad.sets import ConvexSet
from lategrad.support.options import as_text, load_object, options_of, own_target, parse_options
from lategrad.support.validation import did_you_mean

PROBLEMS = {
    "digits": "8x8 handwritten digits, bundled (the default: works offline)",
    "fashion-mnist": "28x28 images of clothes, 60,000 + 10,000",
    "quadratic": "noisy quadratic with a known optimum",
    "FILE": "your own .npz, .csv or libsvm file",
    "MODULE:CLASS": "your own problem, package.module:Class or file.py:Class, and :option=value,... after it",
}
_LR = 0.1
"""The step of rules that have one, and no default of their own."""
_OWN_DATA = ("softmax", None, 64, "iid", 0.0)
"""The defaults of the options that say what is done with data."""


def problem_from(name: str, model: str, preprocess: str | None, batch: int, sampling: str, l2: float) -> Problem:
    """The problem of --problem, with what the other options do with its data."""
    own = None if Path(name).is_file() else own_target(name)
    if (name == "quadratic" or own) and (model, preprocess, batch, sampling, l2) != _OWN_DATA:
        raise ValueError(f"--model, --preprocess, --batch, --sampling and --l2 do not apply to --problem {name}")
    if name == "quadratic":
        return Quadratic()
    if own:
        return _own_problem(*own)
    if model not in MODELS:
        choices = ", ".join(map(repr, MODELS))
        raise ValueError(f"--model must be one of {choices}, got {model!r}{did_you_mean(model, MODELS)}")
    images = name in ("digits", "fashion-mnist")  # whose pixels have one scale
    data: Dataset = load(name, preprocess or ("standardise-globally" if images else "standardise"))
    return MODELS[model](data, batch=batch, sampling=sampling, l2=l2)


def _own_problem(module: str, name: str, options: str) -> Problem:
    make = load_object(module, name)
    if not callable(make):
        raise ValueError(f"--problem {module}:{name} must be a class, or a function that makes a problem")
    given = parse_options(options, options_of(make), f"problem {name!r}")
    for option, values in given.items():
        if len(values) > 1:
            raise ValueError(f"{option} of problem {name!r} takes one value: rules sweep, problems do not")
    made = make(**{option: value for option, (value,) in given.items()})
    missing = [member for member in _PROBLEM_MEMBERS if not hasattr(made, member)]
    if missing:
        raise ValueError(f"--problem {module}:{name} made a {type(made).__name__}, which has no {', '.join(missing)}")
    problem: Problem = made
    return problem


_PROBLEM_MEMBERS = ("dim", "start", "samples", "labels", "gradient", "loss", "accuracy", "to")


def rules_from(texts: Sequence[str], lrs: Sequence[float]) -> dict[str, RuleSpec]:
    """The rules of a command line, by what was written; ``--lr`` is for those that have an lr and do not say it."""
    twice = [text for text, count in Counter(texts).items() if count > 1]
    if twice:
        raise ValueError(f"--rule {twice[0]} is given twice")
    rules, used = {}, False
    for text in texts:
        spec = read_rule(text)
        label = ",".join(f"{name}={as_text(value)}" for name, value in single_values(spec).items())
        label = f"{spec.name}:{label}" if label else spec.name  # a sweep's values are on its axes
        label = text if spec.domain is not None else label
        options, number = spec.entry.options, spec.entry.parameter
        if "lr" in options and "lr" not in spec.given:
            if lrs:
                spec, used = spec.with_option("lr", *lrs), True
            elif options["lr"].required:
                spec = spec.with_option("lr", _LR)
        elif "lr" not in options and lrs and number not in spec.given:
            value = as_text(lrs[0])
            raise ValueError(f"--lr is not an option of rule {spec.name!r}: its number is {number}, "
                             f"write --rule {spec.name}:{number}={value}")  # fmt: skip
        rules[label if label not in rules else text] = spec
    if lrs and not used:
        raise ValueError(f"--lr {as_text(lrs[0])} is of no use: every rule says its own numbers")
    return rules


def single_values(spec: RuleSpec) -> dict[str, Any]:
    """The options with one value."""
    return {name: values[0] for name, values in spec.given.items() if len(values) == 1}


def set_from(text: str) -> ConvexSet | None:
    """The set of --domain; None for the default, which leaves the word to the rule."""
    return None if text == "whole" else parse_set(text)
