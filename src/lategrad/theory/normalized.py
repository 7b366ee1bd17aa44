r"""The bounds of normalised momentum under delay that docs/theory-deep.md proves, as functions.

f is L-smooth in a norm with dual :math:`\|\cdot\|_*`; the noise has variance at most :math:`\sigma^2` in the Euclidean
norm and :math:`\|v\|_* \le \rho \|v\|_2`. A step is :math:`x_{t+1} = x_t + D_t u_t` with :math:`\|u_t\| \le B` and
:math:`\langle m_t, -u_t \rangle \ge A \|m_t\|_*`, where :math:`m_t` is a moving average of memory M of the gradients in
the order in which they arrive. All constants are explicit.
"""

import math
from typing import NamedTuple

from torch import Tensor

from lategrad.support.validation import require, require_choice, require_number

__all__ = ["NormalizedPlan", "dual_ratio", "momentum_age", "momentum_noise", "normalized_descent", "normalized_lr",
           "normalized_momentum", "normalized_plan", "orthogonal_alignment"]  # fmt: skip


def dual_ratio(norm: str, shape: tuple[int, ...]) -> float:
    r""":math:`\rho`, the largest :math:`\|v\|_* / \|v\|_2`, for "euclidean", "sign" or "spectral" steps.

    Blocks with steps of lengths :math:`s_b` have :math:`\rho^2 = \sum_b s_b^2 \rho_b^2`.

    >>> dual_ratio("euclidean", (64, 36)), dual_ratio("sign", (64, 36)), dual_ratio("spectral", (64, 36))
    (1.0, 48.0, 6.0)
    """
    require_choice("norm", norm, ("euclidean", "sign", "spectral"))
    require("shape", shape, norm != "spectral" or len(shape) == 2, "(rows, columns) for the spectral norm")
    return math.sqrt({"euclidean": 1, "sign": math.prod(shape), "spectral": min(shape)}[norm])


def orthogonal_alignment(rank: int, level: float = 0.84) -> float:
    r"""A of an orthogonalised step of matrices whose shorter side is ``rank``.

    For singular values above 1/500 that become at least 1.00001 ``level``, and smaller ones that are multiplied by at
    least 500 times as much: :math:`2\,\mathrm{level} / (1 + \sqrt{1 + (\mathrm{rank} - 1) / 500})`.
    """
    require("rank", rank, 1 <= rank <= 10**6, "between 1 and 1,000,000, for which it is proved")
    return 2 * level / (1 + math.sqrt(1 + (rank - 1) / 500))


def momentum_age(memory: float, nesterov: bool = False) -> float:
    r"""The mean age of a gradient in the momentum: at most M - 1, in Nesterov's form :math:`(M - 1)^2 / M`."""
    require_number("memory", memory, low=1)
    return (memory - 1) ** 2 / memory if nesterov else memory - 1


def momentum_noise(N: int, memory: float, nesterov: bool = False) -> float:
    r"""A bound on the mean over N updates of the root of the sum of the squared weights of the momentum.

    :math:`\sqrt\kappa\, (1 + M (1 + \ln(1 + M)) / N)` with :math:`\kappa = 1 / (2M - 1)`, in Nesterov's form
    :math:`(1 - \beta^2)^2 + \beta^4 / (2M - 1)` with :math:`\beta = 1 - 1/M`. The second term is the start.
    """
    require_number("memory", memory, low=1)
    beta = 1 - 1 / memory
    kappa = (1 - beta**2) ** 2 + beta**4 / (2 * memory - 1) if nesterov else 1 / (2 * memory - 1)
    return math.sqrt(kappa) * (1 + memory * (1 + math.log1p(memory)) / N)


def normalized_descent(lrs: Tensor, errors: Tensor, *, decrease: float, L: float, A: float = 1, B: float = 1) -> float:
    r"""A bound on :math:`\sum_t D_t \|\nabla f(x_t)\|_* / \sum_t D_t`, on any gradients.

    :math:`(\delta + (A + B) \sum_t D_t e_t + \frac{L B^2}{2} \sum_t D_t^2) / (A \sum_t D_t)` with the decrease
    :math:`\delta = f(x_1) - f(x_{N+1})` and the errors :math:`e_t \ge \|\nabla f(x_t) - m_t\|_*`. It is Theorem C of
    docs/theory-deep.md where the errors are :math:`\rho \sigma s_t + L V_t`: in a run at given delays, :math:`s_t` is
    the root of the sum of the squared weights :math:`w_{ti}` of the momentum, and :math:`V_t = \sum_i w_{ti} \|x_t -
    q_i\|` the mean distance between the queries :math:`q_i` and the point at which their gradients are used.
    """
    steps, wrong = lrs.double(), (lrs.double() * errors.double()).sum().item()
    total = decrease + (A + B) * wrong + L * B**2 / 2 * (steps**2).sum().item()
    return total / (A * steps.sum().item())


def normalized_momentum(
    N: int, *, L: float, Delta: float, sigma: float, rho: float, lr: float, memory: float, outstanding: int,
    A: float = 1, B: float = 1, nesterov: bool = False,
) -> float:  # fmt: skip
    r"""Theorem B: a bound on the mean of :math:`E \|\nabla f(x_t)\|_*` over N updates, for gradients of the iterates.

    At most W gradients are ``outstanding``, the arriving one included; delays independent of the samples; none dropped:

    .. math:: \frac{\Delta}{A D N} + \Big(1 + \frac BA\Big) \big(\rho \sigma\, \text{momentum\_noise} + L D B\,
        (\text{momentum\_age} + W - 1)\big) + \frac{L D B^2}{2 A}
    """
    noise = rho * sigma * momentum_noise(N, memory, nesterov)
    return (Delta / (lr * N) + (A + B) * noise + lr * _growth(L, memory, outstanding, A, B, nesterov)) / A


def normalized_lr(
    N: int, *, L: float, Delta: float, memory: float, outstanding: int, A: float = 1, B: float = 1,
    nesterov: bool = False,
) -> float:  # fmt: skip
    """The learning rate D with the smallest :func:`normalized_momentum`; the noise does not enter."""
    return math.sqrt(Delta / (N * _growth(L, memory, outstanding, A, B, nesterov)))


def _growth(L: float, memory: float, outstanding: int, A: float, B: float, nesterov: bool) -> float:
    """A times what the bound grows by with each unit of the learning rate: drift and curvature."""
    require_number("outstanding", outstanding, low=1)
    return L * B * ((A + B) * (momentum_age(memory, nesterov) + outstanding - 1) + B / 2)


class NormalizedPlan(NamedTuple):
    """What Theorem B asks for."""

    N: int
    lr: float
    memory: int


def normalized_plan(
    eps: float, *, L: float, Delta: float, sigma: float, rho: float, outstanding: int
) -> NormalizedPlan:
    r"""Updates, learning rate and memory for a mean of at most ``eps`` (A = B = 1, no Nesterov).

    :math:`M = \max(1, \lceil 36 \rho^2 \sigma^2 / \epsilon^2 \rceil)` and :math:`N = \lceil \max(32 L \Delta (M + W) /
    \epsilon^2,\; 2 M (1 + \ln(1 + M))) \rceil`.
    """
    require_number("eps", eps, low=0, strict=True)
    require_number("outstanding", outstanding, low=1)
    memory = max(1, math.ceil(36 * (rho * sigma / eps) ** 2))
    size = memory + outstanding
    N = math.ceil(max(32 * L * Delta * size / eps**2, 2 * memory * (1 + math.log1p(memory))))
    return NormalizedPlan(N, math.sqrt(Delta / (2 * L * N * size)), memory)
