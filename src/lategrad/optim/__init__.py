"""Drop-in optimizers for PyTorch loops, made from the server rules, and late gradients for any optimizer."""

from lategrad.optim.delayed import Delayed
from lategrad.optim.drop_ins import AnytimeSGD, OptimisticAnytime, StronglyConvexSGD
from lategrad.optim.from_rule import FromRule
from lategrad.optim.steady import SteadyAdam, SteadyMuon

__all__ = ["AnytimeSGD", "Delayed", "FromRule", "OptimisticAnytime", "SteadyAdam", "SteadyMuon", "StronglyConvexSGD"]
