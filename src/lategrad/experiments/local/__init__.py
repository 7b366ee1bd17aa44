"""Workers of different speed that take local steps: outer rules in virtual time, and synchronous rounds."""

from lategrad.experiments.local.setup import CONFIGS
from lategrad.experiments.local.summary import jobs, section, section_of

__all__ = ["CONFIGS", "jobs", "section", "section_of"]
