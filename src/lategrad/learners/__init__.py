r"""Online learners, the paper's :math:`\mathcal{A}`: algorithms that play against weighted linear losses."""

from lategrad.learners.adagrad import AdaGrad, AdaGradNorm
from lategrad.learners.ftrl import FTRL, OptimisticFTRL
from lategrad.learners.learner import Learner, Linear
from lategrad.learners.ogd import OGD, OptimisticOGD

__all__ = ["FTRL", "OGD", "AdaGrad", "AdaGradNorm", "Learner", "Linear", "OptimisticFTRL", "OptimisticOGD"]
