"""Objects from the options of a command: a problem, rules, a constraint set."""

from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from lategrad.problems import LocalSteps, Problem, Quadratic, load
from lategrad.problems.linear import MODELS
from lategrad.problems.problem import as_problem
from lategrad.registry import RuleSpec, parse_set, read_rule
from lategrad.sets import ConvexSet
from lategrad.support.options import Entry, as_text, entry_of, own_target, read_spec
from lategrad.support.validation import require_choice

PROBLEMS = {
    "digits": "8x8 handwritten digits, bundled (the default: works offline)",
    "fashion-mnist": "28x28 images of clothes, 60,000 + 10,000",
    "quadratic": "noisy quadratic with a known optimum, such as quadratic:dim=50,noise=0.1",
    "FILE": "your own .npz, .csv or libsvm file",
    "MODULE:CLASS": "your own class, or a function that makes a problem: package.module:NAME or file.py:NAME, and "
    ":option=value,... after it",
}
INNER = "adamw:lr=0.001"  # the default optimizer of local steps
_WITHOUT_DATA: dict[str, Entry[Problem]] = {"quadratic": entry_of(PROBLEMS["quadratic"], Quadratic)}
_DEFAULT_LR = 0.1  # of rules that have an lr, and no default for it
_DATA_DEFAULTS = ("softmax", None, 64, "iid", 0.0)


def is_own_code(text: str, known: Collection[str]) -> bool:
    """Whether a text names code of the user's own; a known name with a suffix does not."""
    return text.partition(":")[0].strip() not in known and own_target(text) is not None


def is_own_problem(name: str) -> bool:
    return not Path(name).is_file() and is_own_code(name, PROBLEMS)


def problem_from(name: str, model: str, preprocess: str | None, batch: int, sampling: str, l2: float) -> Problem:
    """The problem of --problem; the other options say what is fitted to its data, and how."""
    is_data = Path(name).is_file()
    if not is_data and (name.partition(":")[0] in _WITHOUT_DATA or is_own_problem(name)):
        if (model, preprocess, batch, sampling, l2) != _DATA_DEFAULTS:
            raise ValueError(f"--model, --preprocess, --batch, --sampling and --l2 do not apply to --problem {name}")
        spec = read_spec(name, "problem", _WITHOUT_DATA)
        if spec.swept:
            raise ValueError(f"{spec.swept[0]} of --problem {name} takes one value: rules sweep, problems do not")
        return as_problem(spec.build())
    require_choice("--model", model, tuple(MODELS))
    images = name in ("digits", "fashion-mnist")  # whose pixels have one scale
    data = load(name, preprocess or ("standardise-globally" if images else "standardise"))
    return MODELS[model](data, batch=batch, sampling=sampling, l2=l2)


def with_local_steps(problem: Problem, local_steps: int | None, inner: str | None, scaled: bool,
                     seconds: float | None = None, names: str = "--inner and --scaled") -> Problem:  # fmt: skip
    """The problem with the local steps of --local-steps and of the options in ``names``."""
    if local_steps is not None:
        return LocalSteps(problem, local_steps, inner or INNER, scaled, seconds)
    if (inner, scaled, seconds) != (None, False, None):
        raise ValueError(f"{names} need --local-steps, such as 50")
    return problem


def rules_from(texts: Sequence[str], lrs: Sequence[float]) -> dict[str, RuleSpec]:
    """The rules of --rule by label; --lr applies to those that have an lr and do not set it."""
    if twice := [text for text, count in Counter(texts).items() if count > 1]:
        raise ValueError(f"--rule {twice[0]} is given twice")
    rules: dict[str, RuleSpec] = {}
    used = False
    for text in texts:
        spec = read_rule(text)
        label = ",".join(f"{name}={as_text(value)}" for name, value in single_values(spec).items())
        label = f"{spec.name}:{label}" if label else spec.name  # a sweep's values are on its axes
        label = text if "domain" in spec.values else label
        options, number = spec.entry.options, spec.entry.parameter
        if "lr" in options and "lr" not in spec.values:
            if lrs:
                spec, used = spec.with_option("lr", *lrs), True
            elif options["lr"].required:
                spec = spec.with_option("lr", _DEFAULT_LR)
        elif "lr" not in options and lrs and number not in spec.values:
            hint = f": its number is {number}, write --rule {spec.name}:{number}={as_text(lrs[0])}" if number else ""
            raise ValueError(f"--lr is not an option of rule {spec.name!r}{hint}")
        rules[label if label not in rules else text] = spec
    if lrs and not used:
        raise ValueError(f"--lr {as_text(lrs[0])} is of no use: every rule sets its own, or has none")
    return rules


def single_values(spec: RuleSpec) -> dict[str, Any]:
    """The options with one value, which no axis of the results shows."""
    return {name: values[0] for name, values in spec.values.items() if len(values) == 1 and name != "domain"}


def set_from(text: str) -> ConvexSet | None:
    """The constraint set of --domain; None for the default, so that a rule may have its own."""
    return None if text == "whole" else parse_set(text)
