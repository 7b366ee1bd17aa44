"""Deep models under delay: the rules that survive it, those that do not, and synchronous training beside them."""

from reproduction.deep.setup import CONFIGS
from reproduction.deep.summary import jobs, section, section_of

__all__ = ["CONFIGS", "jobs", "section", "section_of"]
