"""Delay models made of a function, of a record, or of other models: in turn, by class, or in a queue."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lategrad.delays.base import Arrivals, DelayModel, Distribution, as_delay_model, check_draw, require_integers
from lategrad.support.seeds import Stream, generator
from lategrad.support.validation import Validated, require, require_count

_NEVER = 2**62  # a delay, in ticks


def _part_seed(seed: int, part: int) -> int:
    return int(generator(seed, Stream.PARTS, part).integers(2**63))


def _largest(models: Iterable[DelayModel]) -> int | None:
    largest = [model.largest for model in models]
    return None if None in largest else max(delay for delay in largest if delay is not None)


@dataclass(frozen=True, eq=False)
class FromFunction(Distribution):
    r"""Delays chosen by an adversary, :math:`\tau_t = \min(\mathrm{function}(t), t - 1)`, t from 1.

    The adversary is oblivious: it fixes all delays in advance and sees neither gradients nor samples, so
    the delays stay independent of the data, as the paper assumes.

    >>> FromFunction(lambda t: t // 2).draw(steps=6, seed=0).delays
    tensor([0, 1, 1, 2, 2, 3])
    """

    function: Callable[[int], int]

    def __post_init__(self) -> None:
        require("function", self.function, callable(self.function), "a function of t that gives a delay")

    def raw(self, steps: int, seed: int) -> NDArray[Any]:
        delays = [self.function(t) for t in range(1, steps + 1)]
        for t, delay in enumerate(delays, start=1):
            require_count(f"function({t})", delay)
        return np.array([min(delay, _NEVER) for delay in delays])


_DTYPES = {"delays": torch.int64, "time": torch.float64, "worker": torch.int64, "local_steps": torch.int64,
           "fresh": torch.bool}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Recorded:
    """A recorded trace; ``Recorded(*arrivals)`` replays a draw of another model.

    Nothing is capped: a delay above t - 1 means that the trace does not start at update 1, and raises.

    Args:
        delays: integers ``(T,)``.
        time: when each update was applied, finite and never decreasing, ``(T,)``.
        worker: the sender of each gradient, integers ``(T,)``.
        local_steps: number of local steps of each sender, integers >= 1, ``(T,)``.
        fresh: whether each sender lost its state before the job, ``(T,)``.

    >>> Recorded(torch.tensor([0, 0, 2, 1])).draw(steps=3, seed=0).delays
    tensor([0, 0, 2])
    """

    delays: Tensor
    time: Tensor | None = None
    worker: Tensor | None = None
    local_steps: Tensor | None = None
    fresh: Tensor | None = None
    needs_labels: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require_integers("delays", self.delays)
        require("delays", tuple(self.delays.shape), self.delays.dim() == 1, "of shape (T,)")
        most = torch.arange(len(self.delays), device=self.delays.device)
        for i in _first((self.delays < 0) | (self.delays > most)):
            require(f"delays[{i}]", int(self.delays[i]), False, f"in 0..{i}: update t = {i + 1} has t - 1 = {i}")
        shape = self.delays.shape
        for name, value in self._columns().items():
            require(name, tuple(value.shape), value.shape == shape, f"as long as delays, {tuple(shape)}")
            if _DTYPES[name] == torch.int64:
                require_integers(name, value)
        if self.time is not None:
            in_order = torch.isfinite(self.time)
            in_order[1:] &= self.time[1:] >= self.time[:-1]
            for i in _first(~in_order):
                require(f"time[{i}]", float(self.time[i]), False, "finite and no earlier than the one before")
        if self.local_steps is not None:
            for i in _first(self.local_steps < 1):
                require(f"local_steps[{i}]", int(self.local_steps[i]), False, ">= 1")

    def _columns(self) -> dict[str, Tensor]:
        return {name: value for name in _DTYPES if (value := getattr(self, name)) is not None}

    @property
    def largest(self) -> int:
        return int(self.delays.max()) if len(self.delays) else 0

    def draw(self, steps: int, seed: int, labels: Tensor | None = None) -> Arrivals:
        check_draw(steps, seed)
        require("steps", steps, steps <= len(self.delays), f"<= {len(self.delays)}, the length of the trace")
        columns = {name: value[:steps].to("cpu", _DTYPES[name], copy=True) for name, value in self._columns().items()}
        return Arrivals(**columns)


def _first(mask: Tensor) -> list[int]:
    return [int(i) for i in mask.nonzero()[:1]]


@dataclass(frozen=True, eq=False)
class Regimes:
    r"""Delays that change in mid-run: one model after another.

    At update t the delay is that of the current part at update t of the whole run, so a part that starts late is not
    capped again.

    Args:
        parts: pairs ``(length, model)``. A float length in (0, 1] is a fraction of the run, and the part ends at the
            rounded sum of the fractions so far; an integer length is a number of updates. The last part lasts to the
            end; its length may be None. A model may be an integer, for a constant delay, or a text. Only with integer
            lengths does a longer draw start with the shorter one.

    >>> from lategrad.delays import Cyclic
    >>> Regimes(((4, 0), (0.2, 3), (None, Cyclic((1, 2))))).draw(steps=10, seed=0).delays
    tensor([0, 0, 0, 0, 3, 3, 1, 2, 1, 2])
    """

    parts: Sequence[tuple[float | int | None, DelayModel | int | str]]

    def __post_init__(self) -> None:
        require("parts", self.parts, len(self.parts) > 0, "at least one pair (length, model)")
        for i, part in enumerate(self.parts):
            require("parts", part, isinstance(part, tuple) and len(part) == 2, "pairs (length, model)")
            length, model = part
            is_count = isinstance(length, int) and not isinstance(length, bool) and length >= 1
            is_share = isinstance(length, float) and 0 < length <= 1
            is_rest = length is None and i == len(self.parts) - 1
            require(f"the length of part {i + 1}", length, is_count or is_share or is_rest,
                    "an integer >= 1 (updates) or a float in (0, 1] (fraction of the run)")  # fmt: skip
            as_delay_model(model, f"the model of part {i + 1}")
        fractions = [length for length, _ in self.parts if isinstance(length, float)]
        require("the fractions of parts", fractions, sum(fractions) <= 1 + 1e-9, "at most 1 together")

    @property
    def needs_labels(self) -> bool:
        return any(model.needs_labels for model in self._models())

    @property
    def largest(self) -> int | None:
        return _largest(self._models())

    def _models(self) -> list[DelayModel]:
        return [as_delay_model(model) for _, model in self.parts]

    def _ends(self, steps: int) -> list[int]:
        """The number of updates at the end of each part."""
        ends, updates, fraction = [], 0, 0.0
        for length, _ in self.parts[:-1]:
            if isinstance(length, float):
                fraction += length
            else:
                updates += length or 0
            ends.append(min(updates + round(fraction * steps), steps))
        return [*ends, steps]

    def draw(self, steps: int, seed: int, labels: Tensor | None = None) -> Arrivals:
        """Each part is drawn from update 1 to its own end, and used after the end of the one before."""
        check_draw(steps, seed)
        pieces, start = [], 0
        for i, (model, end) in enumerate(zip(self._models(), self._ends(steps), strict=True)):
            if end > start:
                part_labels = None if labels is None else labels[:end]
                pieces.append(model.draw(end, _part_seed(seed, i), part_labels).delays[start:])
            start = end
        return Arrivals(torch.cat(pieces))


@dataclass(frozen=True, eq=False)
class ByClass(Validated):
    r"""Delays that depend on the samples: some classes are late, such as those that a slow site collects.

    Every class has a delay at every update, drawn from its own model with its own random numbers; the delay of an
    update is the largest over its batch (the batch waits for its latest sample).

    This breaks the paper's assumption that the delays are independent of the data: gradients with long delays come from
    other classes than those with short ones, and no theorem applies.

    Args:
        by_class: a model for each class, or an integer for a constant delay; a mapping from class to model, or a
            sequence with the model of class k at position k.
        reduce: "max", or "mean" for the average over the batch, rounded down.

    >>> slow_ones = ByClass((0, 3))
    >>> slow_ones.draw(steps=6, seed=0, labels=torch.tensor([[1], [1], [1], [1], [0], [1]])).delays
    tensor([0, 1, 2, 3, 0, 3])
    """

    by_class: Mapping[int, DelayModel | int | str] | Sequence[DelayModel | int | str]
    reduce: Literal["max", "mean"] = "max"
    needs_labels: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require("by_class", self.by_class, len(self.by_class) > 0, "a delay model for at least one class")
        for k in self._models():
            require_count("each class of by_class", k)

    @property
    def largest(self) -> int | None:
        return _largest(self._models().values())

    def _models(self) -> dict[int, DelayModel]:
        models = self.by_class
        pairs = models.items() if isinstance(models, Mapping) else enumerate(models)
        return {k: as_delay_model(model, f"by_class[{k!r}]") for k, model in pairs}

    def draw(self, steps: int, seed: int, labels: Tensor | None = None) -> Arrivals:
        check_draw(steps, seed)
        valid = f"integers of shape (steps = {steps}, batch), the class of every sample of every update"
        if labels is None:
            raise ValueError(f"labels must be {valid}, got None")
        require_integers("labels", labels)
        shape = tuple(labels.shape)
        require("labels", shape, len(shape) == 2 and shape[0] == steps and shape[1] > 0, valid)
        models, labels = self._models(), labels.cpu()
        classes = np.unique(labels.numpy()).tolist()
        unknown = sorted(set(classes) - set(models))
        require("labels", unknown, not unknown, f"among the classes of by_class, {sorted(models)}")
        delays = torch.zeros(shape, dtype=torch.int64)
        for k in classes:  # classes that are in no batch cost nothing
            class_delays = models[k].draw(steps, _part_seed(seed, k), labels).delays
            delays = torch.where(labels == k, class_delays[:, None], delays)
        return Arrivals(delays.amax(1) if self.reduce == "max" else delays.sum(1) // shape[1])


@dataclass(frozen=True, eq=False)
class UpdateQueue:
    r"""At every tick a query is handed out with its own delay d, and its gradient is applied d ticks later.

    The other models look back: update t draws :math:`\tau_t` and takes the gradient at :math:`x_{t-\tau_t}`, so that
    one query may serve several updates and another none. Here each query serves exactly one update. Several gradients
    may arrive in one tick, and none in another: a delay of d ticks is one of about d updates. At the start nothing
    arrives for a while, and many queries are :math:`x_1`.

    Args:
        distribution: of the delays, in ticks, each drawn when its query is handed out.

    >>> from lategrad.delays import Constant, Cyclic
    >>> UpdateQueue(Constant(2)).draw(steps=5, seed=0).delays  # the same as looking back
    tensor([0, 1, 2, 2, 2])
    >>> UpdateQueue(Cyclic((0, 3))).draw(steps=6, seed=0).delays  # queries 1, 3, 2, 5, 4, 7, each of them once
    tensor([0, 0, 1, 1, 2, 1])
    """

    distribution: Distribution
    needs_labels: ClassVar[bool] = False
    largest: ClassVar[None] = None

    def __post_init__(self) -> None:
        is_valid = isinstance(self.distribution, Distribution)
        require("distribution", self.distribution, is_valid, "a distribution of delays, such as LogNormal(7, 0.4)")

    def draw(self, steps: int, seed: int, labels: Tensor | None = None) -> Arrivals:
        check_draw(steps, seed)
        ticks = 2 * steps
        while True:
            handed_out = np.arange(1, ticks + 1)
            due = handed_out + np.minimum(self.distribution.raw(ticks, seed), _NEVER).astype(np.int64)
            order = np.argsort(due, kind="stable")[:steps]
            if due[order[-1]] <= ticks:  # no query that is handed out later can arrive before
                break
            ticks *= 2
            require("distribution", self.distribution, ticks < _NEVER // 2, "delays that end")
        updates_before = np.searchsorted(due[order], handed_out[order], side="left")
        return Arrivals(torch.from_numpy(np.arange(steps) - updates_before))
