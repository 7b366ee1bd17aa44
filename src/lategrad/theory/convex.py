"""Algorithms 1 and 2: Theorems 1 and 2."""

import math

from lategrad.theory.delays import DelayStatistics
from lategrad.theory.regret import gradient_bound


def anytime_displacement(t: int, tau: int, D: float) -> float:
    r""":math:`\|x_t - x_{t-\tau}\| \le 2 \tau D / (t+1)` for Algorithm 1 with :math:`\alpha_t = t`.

    Explicit, and true for any gradients. The paper's proof has :math:`8 \tau D / t`.

    >>> anytime_displacement(t=99, tau=5, D=2.0)
    0.2
    """
    return 2 * tau * D / (t + 1)


def theorem_1(steps: int, *, L: float, D: float, mu: float, regret: float) -> float:
    r"""Algorithm 1 with :math:`\alpha_t = t`: :math:`2 \mathrm{Reg}_T / T^2 + 4 L D^2 \mu_\tau / (T+1)`.

    Bounds :math:`E[f(x_T) - f^*]`; after T updates the library returns :math:`x_{T+1}`, so take it at T + 1. Explicit:
    the proof's steps, with :func:`anytime_displacement` instead of its :math:`8 \tau D / t`, which would give 16 for 4.

    >>> from lategrad.theory import ogd_regret
    >>> round(theorem_1(100, L=1.0, D=1.0, mu=10.0, regret=ogd_regret(100, D=1.0, gradient=1.0)), 3)
    0.596
    """
    return 2 * regret / steps**2 + 4 * L * D**2 * mu / (steps + 1)


def theorem_2(steps: int, *, L: float, D: float, G: float, sigma: float, delays: DelayStatistics) -> float:
    r"""Algorithm 2 with OptimisticOGD and :math:`\alpha_t = t`; bounds :math:`E[f(x_T) - f^*]`.

    Theorem 1 with the regret of the proof of Theorem 2,

    .. math:: \mathrm{Reg}_T \le \sqrt2 \left(13 L D^2 \sqrt T + 57 L D^2 \sqrt{T(\sigma_\tau^2 + \mu_\tau^2)}
        + 5 D \sigma (T+1)^{3/2}\right) + 2 D \sqrt{1 + 2G^2 + 2\sigma^2}.

    The three constants in the bracket are the proof's. The factor :math:`\sqrt2` and the last term are
    ours: OptimisticOGD's regret constant is 2 where the proof assumes :math:`\sqrt2`, and the first round
    has no hint, which the proof ignores. All explicit.
    """
    spread = math.sqrt(steps * (delays.sigma**2 + delays.mu**2))
    printed = 13 * L * D**2 * math.sqrt(steps) + 57 * L * D**2 * spread + 5 * D * sigma * (steps + 1) ** 1.5
    first_round = 2 * D * math.sqrt(1 + gradient_bound(G, sigma) ** 2)
    return theorem_1(steps, L=L, D=D, mu=delays.mu, regret=math.sqrt(2) * printed + first_round)
