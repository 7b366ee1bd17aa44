"""The public names, which :mod:`lategrad` imports when the first of them is used."""

from typing import TYPE_CHECKING

from lategrad import delays, problems, serve, theory
from lategrad.checks.synchronous import check_synchronous
from lategrad.delays import clocks
from lategrad.execution import in_place
from lategrad.gates import DelayGate
from lategrad.learners import *
from lategrad.registry import parse_rule, parse_set
from lategrad.replays import replay
from lategrad.rules import *
from lategrad.serve.training import resume, train
from lategrad.sets import *
from lategrad.simulator import simulate
from lategrad.tolerance_study import DelayRecorder, Tolerance, tolerance
from lategrad.trace import Trace

if TYPE_CHECKING:
    from lategrad import optim as optim
    from lategrad import pipeline as pipeline

__all__ = ["FTRL", "OGD", "SGD", "AdaGrad", "AdaGradNorm", "Anytime", "Ball", "Blocks", "Box", "CenteredClipping",
           "DelayGate", "DelayRecorder", "HalfSpace", "L1Ball", "OnlineToNonconvex", "OptimisticFTRL", "OptimisticOGD",
           "Product", "Scheduled", "Simplex", "Steady", "SteadyAdam", "SteadyMixing", "SteadyMuon", "SteadyShort",
           "StronglyConvexOGD", "Tolerance", "Trace", "WholeSpace", "baselines", "check_synchronous",
           "clocks", "delays", "in_place", "optim", "parse_rule", "parse_set", "pipeline", "problems",
           "replay", "resume", "serve", "simulate", "theory", "tolerance", "train"]  # fmt: skip
