"""Checks that every rule, learner, constraint set and optimizer must pass; run them on your own classes.

Each check raises an AssertionError that says which property failed. They test properties, not numbers:
purity, pickling, stable dtypes and shapes, independent runs, feasibility, agreement of the pure, in-place and
compiled forms, and a state that can be saved without pickle.
"""

from lategrad.checks.learners import check_learner
from lategrad.checks.optimizer import check_optimizer
from lategrad.checks.rules import check_rule
from lategrad.checks.sets import check_set
from lategrad.checks.synchronous import check_synchronous

__all__ = ["check_learner", "check_optimizer", "check_rule", "check_set", "check_synchronous"]
