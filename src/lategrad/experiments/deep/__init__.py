"""Deep models under delay: the rules that survive it, those that do not, and synchronous training beside them."""

from lategrad.experiments.deep.setup import CONFIGS
from lategrad.experiments.deep.summary import section

__all__ = ["CONFIGS", "section"]
