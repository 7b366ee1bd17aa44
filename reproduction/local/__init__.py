"""Workers of different speed that take local steps: outer rules in virtual time, and synchronous rounds."""

from reproduction.local.setup import CONFIGS
from reproduction.local.summary import jobs, section, section_of

__all__ = ["CONFIGS", "jobs", "section", "section_of"]
