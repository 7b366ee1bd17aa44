"""Figure 2: accuracy against the step at a constant delay of 500."""

from reproduction.step_range import StepRange

CONFIG = StepRange(
    name="fig2",
    title="Figure 2. Accuracy against the step at delay 500",
    delays={"fig2": 500},
    shown={"fig2": "delay 500"},
    claim="Anytime SGD is accurate on a wide range of steps, SGD on a narrow one",
    quote="anytime SGD achieves high accuracy on a wide range of learning rates, whereas SGD achieves its top "
    "accuracy on "
    "a very narrow range",
    finding=True,
)
