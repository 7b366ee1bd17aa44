r"""The theorems as functions: bounds that a correct run satisfies.

Every function states which of its constants are explicit. The derivations, and the places where the
printed constants of the paper do not follow from the printed argument, are in docs/theory.md; those of our own
rules are in docs/steady.md, docs/theory-deep.md and docs/theory-online.md. Symbols: T updates, L smoothness, H strong
convexity, D diameter of the set, G bound on the gradient's norm, :math:`\sigma^2` bound on the noise's variance,
:math:`\mu_\tau` and :math:`\sigma_\tau` mean and standard deviation of the delays.
"""

from lategrad.theory.delays import DelayStatistics, delay_statistics, largest_in_flight
from lategrad.theory.normalized import (
    NormalizedPlan,
    dual_ratio,
    momentum_age,
    momentum_noise,
    normalized_descent,
    normalized_lr,
    normalized_momentum,
    normalized_plan,
    orthogonal_alignment,
)
from lategrad.theory.online import OnlinePlan, online_plan, online_regret, online_scale, theorem_a
from lategrad.theory.paper import (
    anytime_displacement,
    ftrl_regret,
    gradient_bound,
    gradient_difference,
    ogd_regret,
    optimistic_ftrl_regret,
    optimistic_ogd_regret,
    strongly_convex_displacement,
    strongly_convex_lr,
    strongly_convex_regret,
    theorem_1,
    theorem_2,
    theorem_3,
    theorem_4,
)
from lategrad.theory.steady import (
    steady_activity,
    steady_drift,
    steady_in_constant_delay,
    steady_in_random_delays,
    steady_reach,
    steady_regret,
    steady_regret_in_constant_delay,
    steady_short_in_constant_delay,
    steady_shortening,
)

__all__ = ["DelayStatistics", "NormalizedPlan", "OnlinePlan", "anytime_displacement", "delay_statistics", "dual_ratio",
           "ftrl_regret", "gradient_bound", "gradient_difference", "largest_in_flight", "momentum_age",
           "momentum_noise", "normalized_descent", "normalized_lr", "normalized_momentum", "normalized_plan",
           "ogd_regret", "online_plan", "online_regret", "online_scale", "optimistic_ftrl_regret",
           "optimistic_ogd_regret", "orthogonal_alignment", "steady_activity", "steady_drift",
           "steady_in_constant_delay", "steady_in_random_delays", "steady_reach", "steady_regret",
           "steady_regret_in_constant_delay", "steady_short_in_constant_delay", "steady_shortening",
           "strongly_convex_displacement", "strongly_convex_lr", "strongly_convex_regret", "theorem_1", "theorem_2",
           "theorem_3", "theorem_4", "theorem_a"]  # fmt: skip
