"""Train from late gradients: server rules that adapt to unknown, changing delays."""

from typing import TYPE_CHECKING, Any

from lategrad import delays, problems, serve, theory
from lategrad.checks.synchronous import check_synchronous
from lategrad.delays import clocks
from lategrad.execution import in_place
from lategrad.gates import DelayGate
from lategrad.learners import FTRL, OGD, AdaGrad, AdaGradNorm, OptimisticFTRL, OptimisticOGD
from lategrad.registry import parse_rule, parse_set
from lategrad.replay import replay
from lategrad.rules import (
    SGD,
    Anytime,
    Blocks,
    CenteredClipping,
    Scheduled,
    Steady,
    SteadyAdam,
    SteadyMuon,
    SteadyShort,
    StronglyConvexOGD,
    baselines,
)
from lategrad.serve.training import resume, train
from lategrad.sets import Ball, Box, HalfSpace, L1Ball, Product, Simplex, WholeSpace
from lategrad.simulator import simulate
from lategrad.tolerance_study import DelayRecorder, Tolerance, tolerance
from lategrad.trace import Trace

if TYPE_CHECKING:
    from lategrad import optim, pipeline

__version__ = "0.2.0"

__all__ = ["FTRL", "OGD", "SGD", "AdaGrad", "AdaGradNorm", "Anytime", "Ball", "Blocks", "Box", "CenteredClipping",
           "DelayGate", "DelayRecorder", "HalfSpace", "L1Ball", "OptimisticFTRL", "OptimisticOGD",
           "Product", "Scheduled", "Simplex", "Steady", "SteadyAdam", "SteadyMuon", "SteadyShort",
           "StronglyConvexOGD", "Tolerance", "Trace", "WholeSpace", "baselines", "check_synchronous",
           "clocks", "delays", "in_place", "optim", "parse_rule", "parse_set", "pipeline", "problems", "replay",
           "resume", "serve", "simulate", "theory", "tolerance", "train"]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "optim":  # imported when it is first used: it brings torch's compiler along, which takes a second
        import lategrad.optim as optim

        return optim
    if name == "pipeline":
        import lategrad.pipeline as pipeline

        return pipeline
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
