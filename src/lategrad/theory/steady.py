r"""The bounds of Steady that docs/steady.md proves, as functions.

On a set K of diameter D, with update t receiving a gradient :math:`g_t` of the query of time
:math:`s_t = t - \tau_t`, and :math:`S_t = \sum_{i \le t} i^2 \|g_i\|^2`. All constants are explicit.
"""

import math

import torch
from torch import Tensor

from lategrad.theory.paper import largest_in_flight

__all__ = ["steady_activity", "steady_drift", "steady_in_constant_delay", "steady_in_random_delays", "steady_reach",
           "steady_regret", "steady_regret_in_constant_delay", "steady_short_in_constant_delay",
           "steady_shortening"]  # fmt: skip


def steady_reach(lr: float, D: float) -> float:
    """m: the updates of one delay move the iterate by at most 2 lr or a tenth of the set."""
    return min(2 * lr, D / 10)


def steady_activity(squares: Tensor) -> float:
    r"""A bound on :math:`\sum_{t \le T} t^2 \|g_t\|^2 / S_t` from :math:`S_1, \dots, S_T`.

    :math:`\min_n\, (n + \ln (S_T / S_n))` over the n with :math:`S_n > 0`, on any gradients; 0 if all are zero. It
    grows as ln T, and a first gradient that is nearly zero adds one, not its logarithm.

    >>> squares = (torch.arange(1, 1001).double() ** 2).cumsum(0)  # gradients of norm 1
    >>> round(steady_activity(squares), 2)
    19.99
    """
    seen = squares.double() > 0
    if not seen.any():
        return 0.0
    count = torch.arange(1, len(squares) + 1, dtype=torch.float64)
    return (count + (squares[-1].double() / squares.double()).log())[seen].min().item()


def steady_drift(delays: Tensor, *, lr: float, c: float, activity: float) -> float:
    r"""A bound on :math:`\sum_t s_t \theta_t \|w_t - w_{s_t}\|`, on any gradients and any delays.

    :math:`c\, \mathrm{lr} \sqrt{A\, F \sum_t t\, \tau_t}` with the activity A and the largest number F of gradients in
    flight; at most :math:`c\, \mathrm{lr}\, \tau \sqrt{A\, T (T+1) / 2}` for ordered delays of at most :math:`\tau`.
    """
    updates = torch.arange(1, len(delays) + 1, dtype=torch.float64)
    moment = (updates * delays.double()).sum().item()
    return c * lr * math.sqrt(activity * largest_in_flight(delays) * moment)


def steady_regret(D: float, lr: float, squares: float) -> float:
    r"""Weighted regret :math:`\sum_t \lambda_t s_t \langle g_t, w_t - u \rangle \le (D^2 / (2\, \mathrm{lr}) +
    \mathrm{lr}) \sqrt{S_T}`, with :math:`\lambda_t = \mathrm{lr}_t / \mathrm{lr}`, on any gradients and any delays.
    """
    return (D**2 / (2 * lr) + lr) * math.sqrt(squares)


def steady_regret_in_constant_delay(T: int, *, D: float, lr: float, squares: float, gradient: float, tau: int) -> float:
    r"""A bound on :math:`\sum_t s_t \langle g_t, w_t - u \rangle` for :math:`\tau_t = \min(\tau, t - 1)`.

    For gradients of norm at most G: :func:`steady_regret` and, for the reduced learning rates,
    :math:`D^2 (1 + \tau)\, G\, (T + 2) / (\sqrt3\, m)`.
    """
    shortened = D**2 * (1 + tau) * gradient * (T + 2) / (math.sqrt(3) * steady_reach(lr, D))
    return steady_regret(D, lr, squares) + shortened


def steady_shortening(delay: float, *, lr: float, D: float) -> float:
    r"""A bound on :math:`\sum_{t \ge 1} t\, (1 - \lambda_t)` for delays of at most :math:`\tau`, whatever the horizon.

    :math:`u^4 / 10 + 4 u^2 / 27` with :math:`u = (1 + \tau)\, \mathrm{lr} / m`. For random delays take the mean of it.
    """
    u = (1 + delay) * lr / steady_reach(lr, D)
    return u**4 / 10 + 4 * u**2 / 27


def steady_in_constant_delay(
    T: int, *, L: float, D: float, G: float, sigma: float, lr: float, c: float, tau: int, activity: float
) -> float:
    r"""A bound on :math:`E[f(x_T) - f^*]` for :math:`\tau_t = \min(\tau, t - 1)`; after T updates the code returns
    :math:`x_{T+1}`, so take it at T + 1.

    With :math:`\tilde G^2 = G^2 + \sigma^2` and the activity A (in expectation: :math:`E \sqrt A` for its root),

    .. math:: \Big(\frac{D^2}{2\,\mathrm{lr}} + \mathrm{lr}\Big) \frac{2 \tilde G}{\sqrt{3T}}
        + \frac{2 \tau D (G + 2 L D)}{T+1} + \frac{4 c L D^2 \tau}{\sqrt T (T+1)}
        + \frac{\sqrt2\, c\, L D\, \mathrm{lr}\, \tau \sqrt A}{T}
        + \frac{2 D^2 \tilde G (1 + \tau)(T+2)}{\sqrt3\, m\, T (T+1)}
    """
    gradient = math.hypot(G, sigma)
    noise = (D**2 / (2 * lr) + lr) * 2 * gradient / math.sqrt(3 * T)
    late = 2 * tau * D * (G + 2 * L * D) / (T + 1) + 4 * c * L * D**2 * tau / (math.sqrt(T) * (T + 1))
    leaning = math.sqrt(2) * c * L * D * lr * tau * math.sqrt(activity) / T
    shortened = 2 * D**2 * gradient * (1 + tau) * (T + 2) / (math.sqrt(3) * steady_reach(lr, D) * T * (T + 1))
    return noise + late + leaning + shortened


def steady_in_random_delays(
    T: int, *, L: float, D: float, G: float, sigma: float, lr: float, c: float, mu: float, in_flight: int,
    activity: float, shortening: float,
) -> float:  # fmt: skip
    r"""A bound on :math:`E[f(x_T) - f^*]` for varying delays, independent of the data, with means of at most ``mu``.

    :func:`steady_in_constant_delay` with :math:`\mu` for :math:`\tau`, :math:`\sqrt{\mu F}` for it in the term with A,
    and for the reduced learning rates :math:`2 G D / (T (T+1))` times the mean of :func:`steady_shortening`.

    Args:
        T, L, D, G, sigma, lr, c: as there.
        mu: bound on the mean of every delay.
        in_flight: F, the largest number of gradients in flight (:func:`~lategrad.theory.largest_in_flight`).
        activity: A, its mean.
        shortening: the mean of :func:`steady_shortening` over the delays.
    """
    noise = (D**2 / (2 * lr) + lr) * 2 * math.hypot(G, sigma) / math.sqrt(3 * T)
    late = 2 * mu * D * (G + 2 * L * D) / (T + 1) + 4 * c * L * D**2 * mu / (math.sqrt(T) * (T + 1))
    leaning = math.sqrt(2) * c * L * D * lr * math.sqrt(mu * in_flight * activity) / T
    return noise + late + leaning + 2 * G * D * shortening / (T * (T + 1))


def steady_short_in_constant_delay(
    T: int, *, L: float, D: float, G: float, sigma: float, lr: float, c: float, tau: int, activity: float
) -> float:
    r"""A bound on :math:`E[f(x_T) - f^*]` of SteadyShort for :math:`\tau_t = \min(\tau, t - 1)` and
    :math:`T \ge 2 (\tau + 3)`.

    With :math:`N = \tau + 3`, the first time that is averaged, and the rest as in :func:`steady_in_constant_delay`, it
    is :math:`2 / (T(T+1) - N(N-1))` times

    .. math:: \Big(\frac{D^2}{2\,\mathrm{lr}} + \mathrm{lr}\Big) \tilde G (T+1) \sqrt{T/3}
        + \frac{D^2 \tilde G (1 + \tau)(T+2)}{\sqrt3\, m}
        + L D \Big(\tfrac32 N^2 D + \tfrac83 \tau D\, T + 4 c \tau D \sqrt T
        + c\, \mathrm{lr}\, \tau \sqrt{A\, T(T+1)/2}\Big)
    """
    first = tau + 3
    if 2 * first > T:
        raise ValueError(f"T must be at least 2 (tau + 3) = {2 * first}, got {T}")
    gradient = math.hypot(G, sigma)
    squares = gradient**2 * (T + 1) ** 2 * T / 3
    regret = steady_regret_in_constant_delay(T, D=D, lr=lr, squares=squares, gradient=gradient, tau=tau)
    moved = 1.5 * first**2 * D + 8 / 3 * tau * D * T + 4 * c * tau * D * math.sqrt(T)
    leaning = c * lr * tau * math.sqrt(activity * T * (T + 1) / 2)
    return 2 * (regret + L * D * (moved + leaning)) / (T * (T + 1) - first * (first - 1))
