"""Figure 4: accuracy against the step under heavy-tailed delays."""

from lategrad.experiments.step_range import StepRange
from lategrad.experiments.sweep import LOGNORMAL

CONFIG = StepRange(
    name="fig4",
    title="Figure 4. Accuracy against the step under Lognormal(7, 0.4²) delays",
    delay=LOGNORMAL,
    claim="Anytime SGD is robust under heavy-tailed delays",
)
