r"""The bounds of OnlineToNonconvex that docs/theory-online.md proves, as functions.

G bounds the gradient's norm, :math:`\sigma^2` the noise's variance, W the gradients in flight
(:func:`~lategrad.theory.largest_in_flight`); K is the rule's ``period``, D its ``radius``. All constants are explicit.
"""

import math
from typing import NamedTuple

from lategrad.support.validation import require, require_number

__all__ = ["OnlinePlan", "online_plan", "online_regret", "online_scale", "theorem_a"]


class OnlinePlan(NamedTuple):
    """Hyper-parameters of OnlineToNonconvex, and for how many updates it runs."""

    lr: float
    radius: float
    period: int
    updates: int


def online_scale(G: float, sigma: float, W: int) -> float:
    r""":math:`C = \sqrt{(\sigma + G \sqrt W)^2 + (1 + W) G^2}`, which W = 0 makes :math:`\sqrt{G^2 + \sigma^2}`."""
    for name, value in {"G": G, "sigma": sigma, "W": W}.items():
        require_number(name, value, low=0)
    return math.hypot(sigma + G * math.sqrt(W), G * math.sqrt(1 + W))


def online_regret(K: int, *, D: float, lr: float, G: float, sigma: float, W: int, unmatched: float) -> float:
    r"""A bound on the mean of :math:`\sum_n \langle \nabla f(w_n), \Delta_n - u \rangle` over K updates, for any
    :math:`\|u\| \le D`, which may depend on all of them: :math:`D^2 / (2\, \mathrm{lr}) + \mathrm{lr}\, K C^2 / 2 +
    D \sigma \sqrt K + 4 D G\, m` with m ``unmatched`` queries, whose gradients are not among those received.
    """
    require_number("K", K, low=1)
    for name, value in {"lr": lr, "D": D}.items():
        require_number(name, value, low=0, strict=True)
    require_number("unmatched", unmatched, low=0)
    learning = D**2 / (2 * lr) + lr * K * online_scale(G, sigma, W) ** 2 / 2
    return learning + D * sigma * math.sqrt(K) + 4 * D * G * unmatched


def theorem_a(
    updates: int, *, K: int, D: float, lr: float, gap: float, G: float, sigma: float, W: int,
    unmatched: float | None = None,
) -> float:  # fmt: skip
    r"""A bound on the mean of :math:`\| \frac1K \sum_n \nabla f(w_n) \|` over the periods of K updates.

    :math:`(f(x_1) - \inf f) / (D N)` and :func:`online_regret` divided by :math:`D K`. N is a multiple of K; m is W
    unless gradients are lost or repeated: a mean over the periods.

    >>> plan = online_plan(delta=1.0, eps=0.5, gap=1.0, G=1.0, sigma=1.0, W=7)
    >>> plan.period, plan.updates, round(plan.radius, 5)
    (1135, 3405, 0.00176)
    >>> round(theorem_a(plan.updates, K=1135, D=plan.radius, lr=plan.lr, gap=1.0, G=1.0, sigma=1.0, W=7), 3)
    0.358
    """
    require("updates", updates, updates >= K and updates % K == 0, f"a positive multiple of K = {K}")
    require_number("gap", gap, low=0)
    regret = online_regret(K, D=D, lr=lr, G=G, sigma=sigma, W=W, unmatched=W if unmatched is None else unmatched)
    return gap / (D * updates) + regret / (D * K)


def online_plan(*, delta: float, eps: float, gap: float, G: float, sigma: float, W: int) -> OnlinePlan:
    r"""What makes :func:`theorem_a` at most :math:`\epsilon` with queries within :math:`\delta` of their mean.

    :math:`K = \lceil 9 (C + \sigma)^2 / \epsilon^2 \rceil`, :math:`D = 2 \delta / (K + 1)`,
    :math:`\mathrm{lr} = D / (C \sqrt K)`, and :math:`K \max(1, \lceil 5\, \mathrm{gap} / (4 \delta \epsilon) \rceil)`
    updates. It needs :math:`\epsilon < G`: every point is G-stationary.
    """
    for name, value in {"delta": delta, "eps": eps}.items():
        require_number(name, value, low=0, strict=True)
    require_number("gap", gap, low=0)
    scale = online_scale(G, sigma, W)
    require("eps", eps, eps < G, f"below G = {G:g}, which bounds the gradient everywhere")
    K = math.ceil(9 * (scale + sigma) ** 2 / eps**2)
    D = 2 * delta / (K + 1)
    return OnlinePlan(D / (scale * math.sqrt(K)), D, K, K * max(1, math.ceil(5 * gap / (4 * delta * eps))))
