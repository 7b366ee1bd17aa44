"""Figure 2: accuracy against the step at a constant delay of 500."""

from lategrad.experiments.step_range import StepRange

CONFIG = StepRange(
    name="fig2",
    title="Figure 2. Accuracy against the step at delay 500",
    delay=500,
    claim="At delay 500 anytime SGD is accurate on a wide range of steps, SGD on a narrow one",
)
