"""A pure rule as an in-place step: :func:`in_place`, and the few backends behind it."""

from lategrad.execution.backend import BACKENDS, UnsupportedError, compiling_pays
from lategrad.execution.in_place import StateStep, in_place
from lategrad.execution.parameter_state import ParameterState, ParameterStep

__all__ = ["BACKENDS", "ParameterState", "ParameterStep", "StateStep", "UnsupportedError", "compiling_pays", "in_place"]
