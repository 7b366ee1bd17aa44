"""A learning-rate schedule over server updates, for any rule that has an lr."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lategrad.rules.blocks import Blocks, fill_in
from lategrad.rules.rule import AnyRule, Delay, apply_update
from lategrad.sets import ConvexSet
from lategrad.support.options import Option, as_text, parse_options
from lategrad.support.runs import per_run
from lategrad.support.validation import Count, UpToOne, Validated, require, require_choice

_SHAPES = ("constant", "linear", "cosine")
_OPTIONS = {option.name: option for option in (Option("warmup", (int,), 0), Option("floor", (float,), 0.0),
                                               Option("total", (int,)))}  # fmt: skip

Share = Callable[[Tensor], Tensor]
"""From t, a tensor, to a share of the learning rate, a tensor of the same shape."""


class ScheduledState(NamedTuple):
    rule: Any
    t: Tensor  # updates so far


@dataclass(frozen=True, eq=False)
class Scheduled(Validated):
    r"""A rule whose learning rate at update t is :math:`s_t` times its own: a warm-up, then a decay.

    :math:`s_t = \min(1, t/\mathrm{warmup})` times the decay, which goes from 1 at the end of the warm-up to ``floor``
    at update ``total`` along a line or half a cosine, and stays there. It multiplies the rule's (or its learner's)
    ``lr``, whatever else the rule does with it; t counts the server's updates.

    Args:
        rule: any server rule with an ``lr``.
        warmup: updates of the warm-up.
        shape: of the decay, "constant" (none), "linear" or "cosine"; or a function from t to :math:`s_t`, both tensors,
            instead of the decay. It must not branch on its values (``torch.where`` instead).
        total: the update at which the decay ends.
        floor: the share of the learning rate that remains then, in [0, 1].

    >>> import lategrad as lg
    >>> rule = Scheduled(lg.SGD(lr=1.0), warmup=2, shape="linear", total=4)
    >>> state, moves = rule.init(torch.zeros(1)), []
    >>> for _ in range(5):
    ...     before = rule.query(state)
    ...     state = rule.update(state, torch.tensor([-1.0]), delay=torch.tensor(0))
    ...     moves.append((rule.query(state) - before).item())
    >>> moves
    [0.5, 1.0, 0.5, 0.0, 0.0]

    Must know: what its rule must know; for a decay, the number of updates.

    Guarantee: none of its own.

    Reference: none; it wraps any rule.
    """

    rule: AnyRule[Any]
    warmup: Count = 0
    shape: str | Share = "constant"
    total: int | None = None
    floor: UpToOne[float] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.shape, str):
            require_choice("shape", self.shape, _SHAPES)
        else:
            _require_share(self.shape)
        require("rule", type(self.rule).__name__, has_lr(self.rule), "a rule with an lr")
        if self.shape not in ("linear", "cosine"):
            require("total", self.total, self.total is None, "None unless the learning rate decays")
        else:
            valid = isinstance(self.total, int) and self.total > self.warmup
            require("total", self.total, valid, f"an integer > warmup = {self.warmup}")

    @property
    def domain(self) -> ConvexSet:
        return self.rule.domain

    def __getattr__(self, name: str) -> Any:
        if name not in ("blocks", "delay_blocks", "ticket"):
            raise AttributeError(name)
        member = getattr(self.__dict__["rule"], name)  # only where the rule has one
        return member if name != "ticket" else lambda state: member(state.rule)

    def with_blocks(self, blocks: Blocks, field: str) -> "Scheduled":
        return dataclasses.replace(self, rule=fill_in(self.rule, blocks, field))

    def share(self, t: Tensor) -> Tensor:
        """:math:`s_t`."""
        share = torch.clamp(t / self.warmup, max=1.0) if self.warmup else torch.ones_like(t)
        if not isinstance(self.shape, str):
            return share * self.shape(t)
        if self.total is None:
            return share
        way = torch.clamp((t - self.warmup) / (self.total - self.warmup), 0.0, 1.0)
        left = 1 - way if self.shape == "linear" else (1 + torch.cos(math.pi * way)) / 2
        return share * (self.floor + (1 - self.floor) * left)

    def init(self, x0: Tensor) -> ScheduledState:
        inner = self.rule.init(x0)
        return ScheduledState(inner, per_run(self.rule.query(inner), 0))

    def query(self, state: ScheduledState) -> Tensor:
        return self.rule.query(state.rule)

    def update(self, state: ScheduledState, grad: Tensor, delay: Delay, *ticket: Tensor) -> ScheduledState:
        t = state.t + 1
        rule = _with_lr(self.rule, self.share(t))
        return ScheduledState(apply_update(rule, state.rule, grad, delay, *(ticket or (grad[..., :0],))), t)

    def output(self, state: ScheduledState) -> Tensor:
        return self.rule.output(state.rule)


def _require_share(function: Any) -> None:
    """Require a function that maps tensors to tensors, whatever is in them."""
    valid = "'constant', 'linear', 'cosine' or a function from t, a tensor, to a tensor of its shape"
    require("schedule", function, callable(function), valid)
    t = torch.tensor([[1.0], [1000.0]], dtype=torch.float64)
    try:
        share = function(t)
    except (TypeError, ValueError, RuntimeError) as error:  # as tensors raise where a number is needed
        raise ValueError(f"schedule must be a function of t, a tensor, with torch's functions and without branches "
                         f"(torch.where instead); {function!r} raised {error}") from error  # fmt: skip
    same = isinstance(share, Tensor) and share.shape == t.shape
    require("what schedule returns", share, same, "a tensor of the shape of t, which is a tensor")


def complete_schedule(text: str, steps: int) -> str:
    """A schedule as text, completed by the update at which it ends: by default the last one.

    >>> complete_schedule("cosine:warmup=100", 20_000)
    'cosine:warmup=100,total=20000'
    >>> complete_schedule("constant:warmup=100", 20_000)
    'constant:warmup=100'
    """
    shape, options = _parse(text)
    if shape != "constant":
        options.setdefault("total", steps)
    arguments = ",".join(f"{name}={as_text(value)}" for name, value in options.items())
    return f"{shape}:{arguments}" if arguments else shape


def _parse(text: str) -> tuple[str, dict[str, Any]]:
    shape, _, options = text.partition(":")
    require_choice("schedule", shape, _SHAPES)
    return shape, {name: value for name, (value,) in parse_options(options, _OPTIONS, f"schedule {shape!r}").items()}


def with_schedule(rule: AnyRule[Any], schedule: str | Share | None) -> AnyRule[Any]:
    """A rule with a complete schedule as text or a function; without a schedule, the rule itself.

    >>> import lategrad as lg
    >>> with_schedule(lg.SGD(lr=0.1), "linear:warmup=10,total=500").total
    500
    """
    if schedule is None:
        return rule
    shape, options = _parse(schedule) if isinstance(schedule, str) else (schedule, {})
    return Scheduled(rule, shape=shape, **options)


def has_lr(rule: Any) -> bool:
    """Whether a rule has an lr, of its own or of its learner's, that a schedule can multiply."""
    return _owner_of_lr(rule) is not None


def _owner_of_lr(rule: Any) -> str | None:
    """Where the lr is: in the rule itself (``""``) or in one of its fields; None if nowhere."""
    if hasattr(rule, "lr"):
        return ""
    names = [field.name for field in dataclasses.fields(rule)] if dataclasses.is_dataclass(rule) else []
    return next((name for name in names if hasattr(getattr(rule, name), "lr")), None)


def _with_lr(rule: Any, share: Tensor) -> Any:
    """A copy of a rule with a share of its lr, which was checked when the rule was constructed."""
    owner = _owner_of_lr(rule)
    name, value = (owner, _with_lr(getattr(rule, owner), share)) if owner else ("lr", rule.lr * share)
    copied = object.__new__(type(rule))
    for field in dataclasses.fields(rule):
        object.__setattr__(copied, field.name, value if field.name == name else getattr(rule, field.name))
    return copied
