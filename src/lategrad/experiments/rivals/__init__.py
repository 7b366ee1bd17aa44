"""The paper's rules, Steady and every rival under constant, random, changing and data-dependent delays.

Each rule is tuned twice: at delay 0 and then frozen (the headline), and anew for every kind of delay (the oracle).
Tuning looks at the training loss; the test accuracy is only reported.
"""

from lategrad.experiments.rivals.judging import Result, results
from lategrad.experiments.rivals.measuring import jobs, measure
from lategrad.experiments.rivals.setup import (
    CONFIGS,
    CONTENDERS,
    SCENARIOS,
    UNSEEN,
    Config,
    Contender,
    Setting,
    scenarios_for,
)
from lategrad.experiments.rivals.summary import section, section_of, table

__all__ = [
    "CONFIGS",
    "CONTENDERS",
    "SCENARIOS",
    "UNSEEN",
    "Config",
    "Contender",
    "Result",
    "Setting",
    "jobs",
    "measure",
    "results",
    "scenarios_for",
    "section",
    "section_of",
    "table",
]
