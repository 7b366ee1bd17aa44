r"""The theorems as functions: bounds that a correct run satisfies.

Every function states which of its constants are explicit. The derivations, and the places where the
printed constants of the paper do not follow from the printed argument, are in docs/theory.md; those of our own
rules are in docs/steady.md, docs/theory-deep.md and docs/theory-online.md. Symbols: T updates, L smoothness, H strong
convexity, D diameter of the set, G bound on the gradient's norm, :math:`\sigma^2` bound on the noise's variance,
:math:`\mu_\tau` and :math:`\sigma_\tau` mean and standard deviation of the delays.
"""

from lategrad.theory import normalized, online, paper, steady
from lategrad.theory.normalized import *
from lategrad.theory.online import *
from lategrad.theory.paper import *
from lategrad.theory.steady import *

__all__ = [*normalized.__all__, *online.__all__, *paper.__all__, *steady.__all__]
