r"""Online learners, the paper's :math:`\mathcal{A}`: algorithms that play against weighted linear losses."""

from lategrad.learners.adagrad import AdaGrad
from lategrad.learners.adagrad_norm import AdaGradNorm
from lategrad.learners.ftrl import FTRL
from lategrad.learners.learner import Learner, Linear
from lategrad.learners.ogd import OGD
from lategrad.learners.optimistic_ftrl import OptimisticFTRL
from lategrad.learners.optimistic_ogd import OptimisticOGD

__all__ = ["FTRL", "OGD", "AdaGrad", "AdaGradNorm", "Learner", "Linear", "OptimisticFTRL",
           "OptimisticOGD"]  # fmt: skip
