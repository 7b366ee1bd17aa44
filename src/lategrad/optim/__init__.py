"""Drop-in optimizers for PyTorch loops, made from the server rules, and late gradients for any optimizer."""

from lategrad.optim.deep import SteadyAdam, SteadyMuon
from lategrad.optim.delayed import Delayed
from lategrad.optim.from_rule import FromRule
from lategrad.optim.output_mode import output_of
from lategrad.optim.paper import AnytimeSGD, OptimisticAnytime, StronglyConvexSGD

__all__ = ["AnytimeSGD", "Delayed", "FromRule", "OptimisticAnytime", "SteadyAdam", "SteadyMuon", "StronglyConvexSGD",
           "output_of"]  # fmt: skip
