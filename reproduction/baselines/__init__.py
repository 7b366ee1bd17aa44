"""The paper's rules, Steady and every baseline under constant, random, changing and data-dependent delays.

Each rule is tuned twice: at delay 0 and then frozen (the headline), and anew for every kind of delay (the oracle).
Tuning looks at the training loss; the test accuracy is only reported.
"""

from reproduction.baselines.judging import Result, results
from reproduction.baselines.measuring import jobs, measure
from reproduction.baselines.setup import (
    CONFIGS,
    CONTENDERS,
    SCENARIOS,
    UNSEEN,
    Config,
    Contender,
    Setting,
    scenarios_for,
)
from reproduction.baselines.summary import section, section_of, table

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
