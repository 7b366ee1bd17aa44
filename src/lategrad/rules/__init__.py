"""Server rules: what a server does with a gradient that a worker computed at an earlier point."""

from lategrad.rules import baselines, rule
from lategrad.rules.anytime import Anytime
from lategrad.rules.blocks import Block, Blocks
from lategrad.rules.centered_clipping import CenteredClipping
from lategrad.rules.online_to_nonconvex import OnlineToNonconvex
from lategrad.rules.rule import *
from lategrad.rules.scheduled import Scheduled
from lategrad.rules.sgd import SGD
from lategrad.rules.steady import Steady
from lategrad.rules.steady_adam import SteadyAdam
from lategrad.rules.steady_mixing import SteadyMixing
from lategrad.rules.steady_muon import SteadyMuon
from lategrad.rules.steady_short import SteadyShort
from lategrad.rules.strongly_convex import StronglyConvexOGD

__all__ = ["SGD", "Anytime", "Block", "Blocks", "CenteredClipping", "OnlineToNonconvex", "Scheduled", "Steady",
           "SteadyAdam", "SteadyMixing", "SteadyMuon", "SteadyShort", "StronglyConvexOGD", "baselines",
           *rule.__all__]  # fmt: skip
