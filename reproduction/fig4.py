"""Figure 4: accuracy against the step under heavy-tailed delays, which look back or run forward."""

from reproduction.step_range import StepRange
from reproduction.sweep import FORWARD, LOGNORMAL

CONFIG = StepRange(
    name="fig4",
    title="Figure 4. Accuracy against the step under Lognormal(7, 0.4²) delays",
    delays={"fig4": LOGNORMAL, "fig4-forward": FORWARD},
    shown={"fig4": "Lognormal(7, 0.4²) delays that look back", "fig4-forward": "the same delays in an update queue"},
    claim="Anytime SGD is robust under heavy-tailed delays",
    quote="in Figure 4 the delay is distributed Lognormal(7, 0.4²), a heavy-tail distribution. This shows that "
    "anytime SGD "
    "performs better when a high maximal delay, but reasonable mean, is present",
)

ABOUT = (
    "Delays that look back are drawn at the update: it takes the gradient at the query of so many updates ago, so that "
    "one query may serve several updates and another none. In an update queue, which the paper says that it used, they "
    "run forward: a delay is drawn as a query is handed out, and its gradient arrives once, so much later.",
)
