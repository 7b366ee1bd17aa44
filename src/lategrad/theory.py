r"""The paper's theorems as functions: what to expect, and what a correct run stays under.

Every function states which of its constants are explicit. The derivations, and the places where the
printed constants do not follow from the printed argument, are in docs/theory.md. Symbols: T updates,
L smoothness, H strong convexity, D diameter of the set, G bound on the gradient's norm,
:math:`\sigma^2` bound on the noise's variance, :math:`\mu_\tau` and :math:`\sigma_\tau` mean and
standard deviation of the delays.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

__all__ = [
    "DelayStatistics",
    "anytime_displacement",
    "delay_statistics",
    "ogd_regret",
    "optimistic_ogd_regret",
    "strongly_convex_displacement",
    "theorem_1",
    "theorem_2",
    "theorem_3",
    "theorem_4",
]


class DelayStatistics(NamedTuple):
    """Mean and standard deviation of a sequence of delays."""

    mu: float
    sigma: float


def delay_statistics(delays: Tensor) -> DelayStatistics:
    r"""The paper's :math:`\mu_\tau` and :math:`\sigma_\tau` (population, not sample) of delays.

    >>> import torch
    >>> delay_statistics(torch.tensor([0, 1, 2, 3]))
    DelayStatistics(mu=1.5, sigma=1.118033988749895)
    """
    values = delays.double()
    return DelayStatistics(mu=values.mean().item(), sigma=values.std(correction=0).item())


def gradient_bound(G: float, sigma: float) -> float:
    r""":math:`\tilde G = \sqrt{2 G^2 + 2 \sigma^2}`, the paper's bound on a noisy gradient's norm."""
    return math.sqrt(2 * G**2 + 2 * sigma**2)


def anytime_displacement(t: int, tau: int, D: float) -> float:
    r""":math:`\|x_t - x_{t-\tau}\| \le 8 \tau D / t` for Algorithm 1 with :math:`\alpha_t = t`.

    Explicit, and true for any gradients whatever.

    >>> anytime_displacement(t=100, tau=5, D=2.0)
    0.8
    """
    return 8 * tau * D / t


def strongly_convex_displacement(t: int, tau: int, H: float, gradient: float) -> float:
    r""":math:`\|x_t - x_{t-\tau}\| \le 48 \tilde G (\tau + 2) / (H t)` for Algorithm 4.

    Explicit, for gradients of norm at most :math:`\tilde G` (``gradient``). For :math:`t \ge 2\tau + 2` it holds
    on any set; below that it needs a set of diameter at most :math:`24 \tilde G / H`, which every set is
    on which f is H-strongly convex with gradients up to :math:`\tilde G` (its diameter is at most 2G/H).
    """
    return 48 * gradient * (tau + 2) / (H * t)


def ogd_regret(steps: int, D: float, gradient: float, power: int = 1) -> float:
    r"""Weighted regret of OGD with :math:`\mathrm{lr} = D / \tilde G` after T rounds.

    :math:`D \tilde G\, T^{3/2}` for :math:`\alpha_t = t` (power 1), :math:`\tfrac32 D \tilde G \sqrt T` for
    :math:`\alpha_t = 1` (power 0). Explicit. With :math:`\tilde G^2 = 2G^2 + 2\sigma^2` it holds in
    expectation; with :math:`\tilde G` a bound on every gradient received it holds on every sequence.
    """
    if power == 1:
        return D * gradient * math.pow(steps, 1.5)
    if power == 0:
        return 1.5 * D * gradient * math.sqrt(steps)
    raise ValueError(f"power must be 0 or 1 (the paper's two cases), got {power!r}")


def optimistic_ogd_regret(D: float, surprise: float) -> float:
    r"""Weighted regret of OptimisticOGD: :math:`2 D \sqrt{1 + \sum_t \alpha_t^2 \|g_t - M_t\|^2}`.

    Explicit, on every sequence. The paper states the order; the constant is ours.
    """
    return 2 * D * math.sqrt(1 + surprise)


def theorem_1(steps: int, *, L: float, D: float, mu: float, regret: float) -> float:
    r"""Algorithm 1 with :math:`\alpha_t = t`: :math:`2 \mathrm{Reg}_T / T^2 + 16 L D^2 \mu_\tau / (T+1)`.

    Bounds :math:`E[f(x_T) - f^*]`. All constants are the proof's, explicit.

    >>> round(theorem_1(100, L=1.0, D=1.0, mu=10.0, regret=ogd_regret(100, D=1.0, gradient=1.0)), 3)
    1.784
    """
    return 2 * regret / steps**2 + 16 * L * D**2 * mu / (steps + 1)


def theorem_2(steps: int, *, L: float, D: float, G: float, sigma: float, delays: DelayStatistics) -> float:
    r"""Algorithm 2 with OptimisticOGD and :math:`\alpha_t = t`; bounds :math:`E[f(x_T) - f^*]`.

    Theorem 1 with the regret of the proof of Theorem 2,

    .. math::

        \mathrm{Reg}_T \le \sqrt2 \left(13 L D^2 \sqrt T + 57 L D^2 \sqrt{T(\sigma_\tau^2 + \mu_\tau^2)}
        + 5 D \sigma (T+1)^{3/2}\right) + 2 D \sqrt{1 + 2G^2 + 2\sigma^2}.

    The three constants in the bracket are the proof's. The factor :math:`\sqrt2` and the last term are
    ours: OptimisticOGD's regret constant is 2 where the proof assumes :math:`\sqrt2`, and the first round
    has no hint, which the proof passes over. All explicit.
    """
    spread = math.sqrt(steps * (delays.sigma**2 + delays.mu**2))
    printed = 13 * L * D**2 * math.sqrt(steps) + 57 * L * D**2 * spread + 5 * D * sigma * (steps + 1) ** 1.5
    first_round = 2 * D * math.sqrt(1 + gradient_bound(G, sigma) ** 2)
    return theorem_1(steps, L=L, D=D, mu=delays.mu, regret=math.sqrt(2) * printed + first_round)


def _total_weight(steps: int) -> float:
    r""":math:`\alpha_{1:T}` for :math:`\alpha_t = t^2`."""
    return steps * (steps + 1) * (2 * steps + 1) / 6


def theorem_3(steps: int, *, L: float, H: float, D: float, G: float, sigma: float) -> float:
    r"""Algorithm 3 (no delays); bounds :math:`E[f(\bar x_T) - f^*]`.

    .. math::

        \frac{1}{\alpha_{1:T}} \left(240 \tfrac{L}{H} G D\, n(n+1) + \tfrac{240 \sigma^2 T(T+1)}{H}
        + \tfrac{(576 T + 16)(G^2 + \sigma^2)}{H} + \tfrac{H D^2}{4}\right),
        \quad n = \min(T, 480 L/H)

    The theorem gives the order :math:`(G^2+\sigma^2)/(H T^2) + \sigma^2/(H T)` only. These constants are
    ours, from the proof's own steps; its printed :math:`t^* \le 160 L/H` should read 480 L/H.
    """
    n = min(steps, 480 * L / H)
    early = 240 * L / H * G * D * n * (n + 1)
    noise = 240 * sigma**2 * steps * (steps + 1) / H
    drift = (576 * steps + 16) * (G**2 + sigma**2) / H
    return (early + noise + drift + H * D**2 / 4) / _total_weight(steps)


def theorem_4(steps: int, *, L: float, H: float, D: float, G: float, sigma: float, delays: DelayStatistics) -> float:
    r"""Algorithm 4 (late gradients); bounds :math:`E[f(\bar x_T) - f^*]`.

    .. math::

        \frac{1}{\alpha_{1:T}} \Big(1200 \tfrac{L}{H} G D\, n(n+1)
        + 2783232 \tfrac{L^2 \tilde G^2}{H^3} T (\sigma_\tau^2 + \mu_\tau^2 + 4\mu_\tau + 4)
        + \tfrac{240 \sigma^2 T(T+1)}{H} + \tfrac{(576 T + 16) \tilde G^2}{H} + \tfrac{H D^2}{2}\Big)

    with :math:`n = \min(T, 1200 L/H)` and :math:`\tilde G^2 = 2G^2 + 2\sigma^2`. The theorem gives orders
    only; these constants are ours, from the proof's own steps. They are far from tight.
    """
    G2 = gradient_bound(G, sigma) ** 2
    n = min(steps, 1200 * L / H)
    early = 1200 * L / H * G * D * n * (n + 1)
    lateness = delays.sigma**2 + delays.mu**2 + 4 * delays.mu + 4
    late = 2783232 * L**2 * G2 / H**3 * steps * lateness
    noise = 240 * sigma**2 * steps * (steps + 1) / H
    drift = (576 * steps + 16) * G2 / H
    return (early + late + noise + drift + H * D**2 / 2) / _total_weight(steps)
