"""The paper's theorems, with the statistics of delays and the regret bounds that they rest on."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lategrad.support.validation import require

__all__ = ["DelayStatistics", "anytime_displacement", "delay_statistics", "ftrl_regret", "gradient_bound",
           "gradient_difference", "largest_in_flight", "ogd_regret", "optimistic_ftrl_regret",
           "optimistic_ogd_regret", "strongly_convex_displacement", "strongly_convex_lr", "strongly_convex_regret",
           "theorem_1", "theorem_2", "theorem_3", "theorem_4"]  # fmt: skip

# ---- Delays


class DelayStatistics(NamedTuple):
    r"""The mean and the standard deviation of delays, and :math:`\sum_t (\tau_t + 2)^2 / t` (None if unknown)."""

    mu: float
    sigma: float
    early: float | None = None


def delay_statistics(delays: Tensor | Sequence[int]) -> DelayStatistics:
    r"""The paper's :math:`\mu_\tau` and :math:`\sigma_\tau` (population, not sample) of delays.

    >>> import torch
    >>> delay_statistics(torch.tensor([0, 1, 2, 3]))
    DelayStatistics(mu=1.5, sigma=1.118033988749895, early=20.08...)
    """
    values = torch.as_tensor(delays).double()
    require("delays", delays, values.dim() == 1 and len(values) > 0 and (values >= 0), "a list of numbers >= 0")
    early = ((values + 2) ** 2 / torch.arange(1, len(values) + 1)).sum().item()
    return DelayStatistics(mu=values.mean().item(), sigma=values.std(correction=0).item(), early=early)


def largest_in_flight(delays: Tensor) -> int:
    r"""The largest number of gradients in flight at once: those of updates t with :math:`t - \tau_t \le i < t`.

    For a constant delay it is the delay; for workers that hold one query each, their number less one.

    >>> largest_in_flight(torch.tensor([0, 1, 2, 0, 2, 2]))  # after the first query: updates 2 and 3
    2
    """
    updates = torch.arange(1, len(delays) + 1)
    begins, ends = (torch.bincount(times, minlength=len(delays) + 2) for times in (updates - delays, updates))
    return int((begins - ends).cumsum(0).max())


# ---- Regret of the learners, explicit, on any losses; D bounds the distance from the start to any point of K


def gradient_bound(G: float, sigma: float) -> float:
    r""":math:`\tilde G = \sqrt{2 G^2 + 2 \sigma^2}`, the paper's bound on a noisy gradient's norm."""
    return math.sqrt(2 * G**2 + 2 * sigma**2)


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


def ftrl_regret(weights: Tensor, *, D: float, gradient: float, lr: float) -> float:
    r"""Weighted regret of FTRL with weights :math:`\alpha_1, \dots, \alpha_T` on gradients of norm at most G.

    .. math:: \frac{D^2}{2\,\mathrm{lr}} \sqrt{A_T} + \frac{\mathrm{lr}\, G^2}{2}
        \Big(\alpha_1 + \sum_{t=2}^T \frac{\alpha_t^2}{\sqrt{A_{t-1}}}\Big), \qquad A_t = \sum_{i \le t} \alpha_i^2

    Explicit, on every sequence (docs/theory.md). Round t uses the learning rate of round t - 1, hence the index.

    >>> import torch
    >>> round(ftrl_regret(torch.ones(100), D=1.0, gradient=1.0, lr=1.0), 2)  # of order sqrt(T)
    14.74
    """
    squares = weights.double() ** 2
    totals = squares.cumsum(0).sqrt()
    total = (squares[0] / totals[0] + (squares[1:] / totals[:-1]).sum()).item()
    return D**2 / (2 * lr) * totals[-1].item() + lr * gradient**2 / 2 * total


def optimistic_ogd_regret(D: float, surprise: float) -> float:
    r"""Weighted regret of OptimisticOGD: :math:`2 D \sqrt{1 + \sum_t \alpha_t^2 \|g_t - M_t\|^2}`.

    Explicit, on every sequence. The paper states the order; the constant is ours.
    """
    return 2 * D * math.sqrt(1 + surprise)


def optimistic_ftrl_regret(D: float, surprise: float) -> float:
    r"""Weighted regret of OptimisticFTRL: :math:`2 D \sqrt{1 + \sum_t \alpha_t^2 \|g_t - M_t\|^2}`.

    Explicit, on every sequence; the same as :func:`optimistic_ogd_regret`, by another proof (docs/theory.md).
    """
    return optimistic_ogd_regret(D, surprise)


# ---- Algorithms 1 and 2: Theorems 1 and 2


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


# ---- Algorithms 3 and 4: Theorems 3 and 4, and the lemmas they rest on


def strongly_convex_displacement(t: int, tau: int, H: float, gradient: float) -> float:
    r""":math:`\|x_t - x_{t-\tau}\| \le 48 \tilde G (\tau + 2) / (H t)` for Algorithm 4.

    Explicit, for gradients of norm at most :math:`\tilde G` (``gradient``). For :math:`t \ge 2\tau + 2` it holds
    on any set; below that it needs a set of diameter at most :math:`24 \tilde G / H`, which every set is
    on which f is H-strongly convex with gradients up to :math:`\tilde G` (its diameter is at most 2G/H).
    """
    return 48 * gradient * (tau + 2) / (H * t)


def strongly_convex_lr(t: int, H: float) -> float:
    r""":math:`\eta_t = 8 / (H \alpha_{1:t})` for :math:`\alpha_t = t^2`.

    The paper's lemma: :math:`\alpha_t \eta_t` never grows, and :math:`\alpha_t^2 \eta_t \le
    4 \alpha_{t-1}^2 \eta_{t-1}` from t = 2 on. Besides, :math:`\alpha_t^2 \eta_t \le 24 t / H`.
    """
    return 8 / (H * _total_weight(t))


def gradient_difference(L: float, inner: float) -> float:
    r""":math:`\|\nabla f(x) - \nabla f(y)\|^2 \le L \langle \nabla f(x) - \nabla f(y), x - y \rangle`.

    ``inner`` is the inner product. True for f convex and L-smooth on the whole space; on K alone it is not.
    """
    return L * inner


def strongly_convex_regret(H: float, D: float, *, surprise: Tensor, to_comparator: Tensor, ahead: Tensor) -> float:
    r"""The paper's lemma on :math:`\sum_t \alpha_t \langle g_t, x_t - u \rangle` of Algorithms 3 and 4.

    .. math:: \sum_{t \le T} \frac{\alpha_t^2 \eta_t}{2} \|g_t - M_t\|^2 + 2 \sum_{t=2}^{T}
        \Big(\frac{1}{\eta_t} - \frac{1}{\eta_{t-1}}\Big) \big(\|x_t - u\|^2 + \|x_t - y_{t-1}\|^2\big)
        + \frac{D^2}{\eta_1}

    Explicit, on every sequence of gradients and for every u in K.

    Args:
        H: strong convexity, which sets the learning rates.
        D: diameter of K.
        surprise: :math:`\|g_t - M_t\|` for t = 1, ..., T.
        to_comparator: :math:`\|x_t - u\|` for t = 1, ..., T.
        ahead: :math:`\|x_t - y_{t-1}\|` for t = 1, ..., T.
    """
    eta = [strongly_convex_lr(t, H) for t in range(1, len(surprise) + 1)]
    away: list[float] = (to_comparator.double() ** 2 + ahead.double() ** 2).tolist()
    learning: float = sum((t + 1) ** 4 * eta[t] / 2 * gap**2 for t, gap in enumerate(surprise.tolist()))
    return D**2 / eta[0] + learning + 2 * sum((1 / eta[t] - 1 / eta[t - 1]) * away[t] for t in range(1, len(eta)))


def _total_weight(steps: int) -> float:
    r""":math:`\alpha_{1:T}` for :math:`\alpha_t = t^2`."""
    return steps * (steps + 1) * (2 * steps + 1) / 6


def theorem_3(steps: int, *, L: float, H: float, D: float, G: float, sigma: float) -> float:
    r"""Algorithm 3 (no delays); bounds :math:`E[f(\bar x_T) - f^*]` for f convex and L-smooth also beyond K.

    .. math:: \frac{1}{\alpha_{1:T}} \left(240 \tfrac{L}{H} G D\, n(n+1) + \tfrac{240 \sigma^2 T(T+1)}{H}
        + \tfrac{(576 T + 16)(G^2 + \sigma^2)}{H} + \tfrac{H D^2}{4}\right),
        \quad n = \min(T, 480 L/H)

    The theorem gives the order :math:`(G^2+\sigma^2)/(H T^2) + \sigma^2/(H T)` only. These constants are
    ours, from the proof's own steps; its printed :math:`t^* \le 160 L/H` should read 480 L/H. The proof uses
    :func:`gradient_difference`, which smoothness on K alone does not give.
    """
    n = min(steps, 480 * L / H)
    early = 240 * L / H * G * D * n * (n + 1)
    noise = 240 * sigma**2 * steps * (steps + 1) / H
    drift = (576 * steps + 16) * (G**2 + sigma**2) / H
    return (early + noise + drift + H * D**2 / 4) / _total_weight(steps)


def theorem_4(steps: int, *, L: float, H: float, D: float, G: float, sigma: float, delays: DelayStatistics) -> float:
    r"""Algorithm 4 (delayed gradients); bounds :math:`E[f(\bar x_T) - f^*]` for f convex and L-smooth also beyond K.

    .. math:: \frac{1}{\alpha_{1:T}} \Big(1200 \tfrac{L}{H} G D\, n(n+1)
        + \tfrac{L^2 \tilde G^2}{H^3} \big(2764800 \textstyle\sum_t \tfrac{(\tau_t + 2)^2}{t}
        + 18432\, T (\sigma_\tau^2 + \mu_\tau^2 + 4\mu_\tau + 4)\big)
        + \tfrac{240 \sigma^2 T(T+1)}{H} + \tfrac{(576 T + 16) \tilde G^2}{H} + \tfrac{H D^2}{2}\Big)

    with :math:`n = \min(T, 1200 L/H)` and :math:`\tilde G^2 = 2G^2 + 2\sigma^2`. The theorem gives orders
    only; these constants are ours, from the proof's own steps. They are far from tight. Where the sum over t is
    not known (``delays.early``), :math:`\tau_t \le t - 1` bounds it by :math:`2 T (\mu_\tau + 2)`.
    """
    G2 = gradient_bound(G, sigma) ** 2
    n = min(steps, 1200 * L / H)
    start = 1200 * L / H * G * D * n * (n + 1)
    second_moment = delays.sigma**2 + delays.mu**2 + 4 * delays.mu + 4  # of delay + 2
    early_delays = 2 * steps * (delays.mu + 2) if delays.early is None else delays.early
    late = L**2 * G2 / H**3 * (2764800 * early_delays + 18432 * steps * second_moment)
    noise = 240 * sigma**2 * steps * (steps + 1) / H
    drift = (576 * steps + 16) * G2 / H
    return (start + late + noise + drift + H * D**2 / 2) / _total_weight(steps)
