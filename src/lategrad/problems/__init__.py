"""Problems: data, an objective, and a stochastic gradient oracle for many runs at once."""

from lategrad.problems.data import Dataset, load
from lategrad.problems.language import LanguageProblem, Text, load_text
from lategrad.problems.linear import LeastSquares, SmoothedSVM, SoftmaxRegression
from lategrad.problems.local_steps import LocalSteps
from lategrad.problems.module import ModuleProblem
from lategrad.problems.optimum import Optimum, minimum
from lategrad.problems.problem import Problem
from lategrad.problems.quadratic import Quadratic
from lategrad.problems.rounds import Synchronous
from lategrad.problems.sources import NpyRows

__all__ = ["Dataset", "LanguageProblem", "LeastSquares", "LocalSteps", "ModuleProblem", "NpyRows", "Optimum", "Problem",
           "Quadratic", "SmoothedSVM", "SoftmaxRegression", "Synchronous", "Text", "load", "load_text",
           "minimum"]  # fmt: skip
