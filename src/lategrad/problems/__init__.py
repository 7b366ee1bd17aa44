"""Problems: data, an objective, and a stochastic gradient oracle for many runs at once."""

from lategrad.problems.data import Dataset, load
from lategrad.problems.linear import LeastSquares, SmoothedSVM, SoftmaxRegression
from lategrad.problems.module import ModuleProblem
from lategrad.problems.optimum import Optimum, minimum
from lategrad.problems.problem import Problem
from lategrad.problems.quadratic import Quadratic

__all__ = [
    "Dataset",
    "LeastSquares",
    "ModuleProblem",
    "Optimum",
    "Problem",
    "Quadratic",
    "SmoothedSVM",
    "SoftmaxRegression",
    "load",
    "minimum",
]
