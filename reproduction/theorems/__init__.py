"""The four theorems, measured: settings, simulations, what they say, verdicts, figures, the report's section."""

from reproduction.theorems.summary import jobs, section, section_of

__all__ = ["jobs", "section", "section_of"]
