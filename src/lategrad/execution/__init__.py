"""A pure rule as an in-place step: one door, and few backends behind it."""

from lategrad.execution.backend import BACKENDS, OneCall
from lategrad.execution.in_place import StateStep, WithGradient, in_place
from lategrad.execution.parameter_state import StateBeside, TensorsStep
from lategrad.execution.unsupported import UnsupportedError

__all__ = [
    "BACKENDS",
    "OneCall",
    "StateBeside",
    "StateStep",
    "TensorsStep",
    "UnsupportedError",
    "WithGradient",
    "in_place",
]
