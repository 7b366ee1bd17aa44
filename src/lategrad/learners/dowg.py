"""DoWG (Khaled, Mishchenko & Jin 2023): DoG with gradients weighted by the distance. Experimental."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from lategrad.learners.learner import Linear, first_play, safe_ratio, squared_norm
from lategrad.sets import ConvexSet, WholeSpace, norm
from lategrad.support.runs import per_run
from lategrad.support.validation import Scalar, require_number


class DoWGState(NamedTuple):
    """State of :class:`DoWG`."""

    w: Tensor
    start: Tensor
    """:math:`w_1`."""
    travelled: Tensor
    r""":math:`\bar r_t`, the largest distance of a play from the start, at least :math:`r_\epsilon`."""
    squares: Tensor
    r""":math:`v_t = \sum_i \bar r_i^2 \alpha_i^2 \|g_i\|^2`."""


@dataclass(frozen=True, eq=False)
class DoWG:
    r"""Distance over weighted gradients. Experimental inside Anytime.

    .. math::

        w_{t+1} = \Pi_K(w_t - \eta_t \alpha_t g_t), \qquad
        \eta_t = \frac{\bar r_t^2}{\sqrt{\sum_{i \le t} \bar r_i^2 \alpha_i^2 \|g_i\|^2}}, \qquad
        \bar r_t = \max(r_\epsilon, \max_{i \le t} \|w_i - w_1\|)

    There is no step to tune. Whatever the gradients, weights and delays, for every u in K (the proof is that
    of the paper with :math:`\alpha_t g_t` for the gradient; :math:`d` is the largest distance from u of
    :math:`w_1, \dots, w_{T+1}`)

    .. math::

        \sum_t \bar r_t^2\, \alpha_t \langle g_t, w_t - u \rangle \le
        \bar r_{T+1} (2 d + \bar r_{T+1}) \sqrt{\textstyle\sum_t \bar r_t^2 \alpha_t^2 \|g_t\|^2} .

    As for :class:`DoG` this is not a regret bound for the weights :math:`\alpha_t` that Anytime averages
    with: Theorem 1 of the paper does not apply as it stands, and the guarantees of DoWG's authors do not
    carry over. On a bounded set the queries of Anytime move by at most :math:`8 \tau D / t`, as for any
    plays. Without one, late gradients make it diverge even on a quadratic (tested).

    Args:
        initial_distance: :math:`r_\epsilon > 0`, the first movement; small against the distance to travel.
        domain: K.

    >>> import torch, lategrad as lg
    >>> learner = lg.DoWG(initial_distance=0.1)
    >>> state = learner.init(torch.zeros(2))
    >>> state = learner.update(state, Linear(torch.ones(1), torch.tensor([3.0, 4.0])))
    >>> learner.predict(state)  # the first step has length 0.1
    tensor([-0.0600, -0.0800])

    Reference: A. Khaled, K. Mishchenko and C. Jin, DoWG unleashed: an efficient universal parameter-free
    gradient descent method, 2023.
    """

    initial_distance: Scalar = 1e-4
    domain: ConvexSet = WholeSpace()
    optimistic: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require_number("initial_distance", self.initial_distance, low=0, strict=True)

    def init(self, w1: Tensor) -> DoWGState:
        """Start at the projection of ``w1``."""
        w = first_play(self, w1)
        travelled = self.initial_distance * per_run(w, 1)
        return DoWGState(w=w, start=w.clone(), travelled=travelled, squares=per_run(w, 0))

    def predict(self, state: DoWGState) -> Tensor:
        """The iterate itself."""
        return state.w

    def update(self, state: DoWGState, loss: Linear, hint: Linear | None = None) -> DoWGState:
        """One projected step; no step while all gradients were zero."""
        squares = state.squares + (state.travelled * loss.weight) ** 2 * squared_norm(loss.grad)
        step = safe_ratio(state.travelled**2, squares.sqrt()) * loss.weight
        w = self.domain.project(state.w - step.to(state.w.dtype) * loss.grad)
        travelled = torch.maximum(state.travelled, norm(w - state.start))
        return DoWGState(w=w, start=state.start, travelled=travelled, squares=squares)
