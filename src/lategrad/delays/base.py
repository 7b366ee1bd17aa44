r"""The contract of a delay model: the delay of each gradient when the server applies it.

At update t = 1..T the server receives the gradient of the past query :math:`x_{t - \tau_t}`. A model's
``draw(steps, seed, labels)`` gives :math:`\tau_1, \dots, \tau_T`, never more than t - 1 (:func:`cap`), and
depends on its arguments only. A longer draw starts with the shorter one, unless a model says otherwise.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple, Protocol, cast, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lategrad.support.validation import Validated, require, require_count


class Arrivals(NamedTuple):
    """The gradients that the server receives, one entry for every update t = 1..T."""

    delays: Tensor  #: int64 ``(T,)``: :math:`\tau_t \le t - 1`.
    time: Tensor | None = None  #: float64 ``(T,)``: virtual seconds at which update t was applied.
    worker: Tensor | None = None  #: int64 ``(T,)``: the worker that sent the gradient.
    local_steps: Tensor | None = None
    """int64 ``(T,)``: the number of local steps of the sender, where arrivals decide it."""
    fresh: Tensor | None = None
    """bool ``(T,)``: whether the sender lost its state before the job; None where no worker did."""


@runtime_checkable
class DelayModel(Protocol):
    """A source of delays."""

    @property
    def needs_labels(self) -> bool:
        """Whether ``draw`` needs the class labels of every update's samples."""

    @property
    def largest(self) -> int | None:
        """The largest possible delay; None if there is no bound, or none is known."""

    def draw(self, steps: int, seed: int, labels: Tensor | None = None) -> Arrivals:
        """The arrivals of ``steps`` updates; labels are integers of shape ``(steps, batch)``."""


_MEMBERS = ("needs_labels", "largest", "draw")


def as_delay_model(value: DelayModel | int | str, name: str = "delays") -> DelayModel:
    """A delay model from a model, an integer for a constant delay, or a text; ``name`` is for messages.

    >>> as_delay_model(500), as_delay_model("lognormal:7,0.4")
    (Constant(delay=500), LogNormal(mu=7.0, sigma=0.4))
    """
    from lategrad.delays.distributions import Constant  # here: both import this module
    from lategrad.delays.specs import parse

    if isinstance(value, str):
        return parse(value)
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return Constant(int(value))
    missing = [member for member in _MEMBERS if not hasattr(value, member)]
    is_model = not missing and not isinstance(value, type)
    lacks = f" (it has no {', '.join(missing)})" if 0 < len(missing) < len(_MEMBERS) else ""
    require(name, value, is_model, f"a delay model, an integer, or a text such as 'uniform:0,16'{lacks}")
    return cast(DelayModel, value)


def cap(raw: NDArray[Any]) -> Tensor:
    r"""Integer delays that exist: :math:`\tau_t = \min(\lfloor \mathrm{raw}_t \rfloor, t - 1)`, t from 1.

    >>> cap(np.array([2.5, 2.5, 2.5, 2.5, np.inf]))
    tensor([0, 1, 2, 2, 4])
    """
    return torch.from_numpy(np.minimum(raw, np.arange(len(raw))).astype(np.int64))


def check_draw(steps: int, seed: int) -> None:
    require_count("steps", steps, low=1)
    require_count("seed", seed)


class Distribution(Validated, ABC):
    """A delay model whose values depend on their position only; uncapped, also a distribution of pauses."""

    needs_labels: ClassVar[bool] = False

    @property
    def largest(self) -> int | None:
        return None

    @abstractmethod
    def raw(self, steps: int, seed: int) -> NDArray[Any]:
        """``steps`` values >= 0, before they are capped at t - 1 and rounded down."""

    def draw(self, steps: int, seed: int, labels: Tensor | None = None) -> Arrivals:
        check_draw(steps, seed)
        return Arrivals(cap(self.raw(steps, seed)))


def require_integers(name: str, value: Tensor) -> None:
    require(name, value, isinstance(value, Tensor), "a tensor of integers")
    no_integers = value.is_floating_point() or value.is_complex() or value.dtype == torch.bool
    require(name, value.dtype, not no_integers, "a tensor of integers")
