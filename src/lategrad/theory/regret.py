"""Regret bounds of the learners, explicit, on any losses. D bounds the distance from the start to any point of K."""

import math

from torch import Tensor


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
