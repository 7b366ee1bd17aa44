"""Train from late gradients: server rules that adapt to unknown, changing delays."""

from lategrad import theory
from lategrad.inplace import in_place
from lategrad.learners import FTRL, OGD, AdaGrad, AdaGradNorm, OptimisticFTRL, OptimisticOGD
from lategrad.rules import SGD, Anytime, StronglyConvexOGD
from lategrad.sets import Ball, Box, HalfSpace, L1Ball, Product, Simplex, WholeSpace

__version__ = "0.1.0"

__all__ = [
    "FTRL",
    "OGD",
    "SGD",
    "AdaGrad",
    "AdaGradNorm",
    "Anytime",
    "Ball",
    "Box",
    "HalfSpace",
    "L1Ball",
    "OptimisticFTRL",
    "OptimisticOGD",
    "Product",
    "Simplex",
    "StronglyConvexOGD",
    "WholeSpace",
    "in_place",
    "theory",
]
