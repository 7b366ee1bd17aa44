"""Algorithms 3 and 4: Theorems 3 and 4, and the lemmas they rest on."""

from torch import Tensor

from lategrad.theory.delays import DelayStatistics
from lategrad.theory.regret import gradient_bound


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
