"""Delay models: the delay of each gradient when the server applies it; see :class:`DelayModel`."""

from lategrad.delays import clocks
from lategrad.delays.base import Arrivals, DelayModel, Distribution, as_delay_model, cap
from lategrad.delays.combinators import ByClass, FromFunction, Recorded, Regimes, UpdateQueue
from lategrad.delays.distributions import Constant, Cyclic, Geometric, LogNormal, Pareto, Uniform
from lategrad.delays.specs import parse
from lategrad.delays.stages import StageDelays, by_stage
from lategrad.delays.summary import DelaySummary, Histogram, summarise

__all__ = ["Arrivals", "ByClass", "Constant", "Cyclic", "DelayModel", "DelaySummary", "Distribution", "FromFunction",
           "Geometric", "Histogram", "LogNormal", "Pareto", "Recorded", "Regimes", "StageDelays", "Uniform",
           "UpdateQueue", "as_delay_model", "by_stage", "cap", "clocks", "parse", "summarise"]  # fmt: skip
