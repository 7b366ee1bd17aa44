"""Server rules: what to do with a gradient that was computed somewhere else, some time ago."""

from lategrad.rules.anytime import Anytime
from lategrad.rules.rule import Rule
from lategrad.rules.sgd import SGD
from lategrad.rules.strongly_convex import StronglyConvexOGD

__all__ = ["SGD", "Anytime", "Rule", "StronglyConvexOGD"]
