"""Checks that every rule, learner and set must pass, shipped so that you can run them on your own.

Each check raises an AssertionError that says which property failed. They test properties, not numbers:
purity, pickling, stable dtypes and shapes, runs that do not see each other, feasibility, agreement of the
pure, in-place and compiled forms, and a state that can be saved without pickle.
"""

from lategrad.checks.learners import check_learner
from lategrad.checks.rules import check_rule
from lategrad.checks.sets import check_set

__all__ = ["check_learner", "check_rule", "check_set"]
