"""The generic checks of a rule, with the warnings that they are expected to give."""

import re
import warnings

from lategrad.checks import check_rule

ONE_FOR_ALL_RUNS = {"momentum", "beta1", "beta2", "decay", "interpolation", "eps", "weight_decay", "momentum_decay",
                    "other_decay"}  # fmt: skip


def check_with_expected_warnings(rule, **options):
    """`check_rule` warns of the hyper-parameters that are one number for all runs, and of nothing else."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_rule(rule, **options)
    messages = [str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)]
    fixed = [re.match(rf"rule {type(rule).__name__} cannot be swept over (\w+): ", message) for message in messages]
    assert all(fixed), messages
    assert {match[1] for match in fixed} <= ONE_FOR_ALL_RUNS & set(vars(rule))
