r"""Delay models: how late each gradient is when the server applies it.

At update t = 1..T the server receives the gradient of the past query :math:`x_{t - \tau_t}`. A model's
``draw(steps, seed, labels)`` gives :math:`\tau_1, \dots, \tau_T`, never more than t - 1 (:func:`cap`), and
depends on nothing but its arguments. A longer draw starts with the shorter one, unless a model says not.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lategrad.validation import require, require_choice, require_number

__all__ = ["Arrivals", "ByClass", "Constant", "Cyclic", "DelayModel", "DelaySummary", "FromFunction",
           "Geometric", "Histogram", "Law", "LogNormal", "Pareto", "Recorded", "Regimes", "Uniform", "cap",
           "summarise"]  # fmt: skip

_DELAYS, _PARTS = 0x64656C6179, 0x7061727473  # tags: delays share no random numbers with other draws
_HISTOGRAM_BINS = 50


class Arrivals(NamedTuple):
    """What the server receives, one entry for every update t = 1..T."""

    delays: Tensor
    r"""int64 ``(T,)``: :math:`\tau_t \le t - 1`."""
    time: Tensor | None = None
    """float64 ``(T,)``: virtual seconds at which update t was applied."""
    worker: Tensor | None = None
    """int64 ``(T,)``: who sent the gradient."""


@runtime_checkable
class DelayModel(Protocol):
    """Where delays come from."""

    @property
    def needs_labels(self) -> bool:
        """Whether ``draw`` must be given the class labels of every update's samples."""
        ...

    def draw(self, steps: int, seed: int, labels: Tensor | None = None) -> Arrivals:
        """The arrivals of ``steps`` updates; labels are integers of shape ``(steps, batch)``."""
        ...


def cap(raw: NDArray[Any]) -> Tensor:
    r"""Integer delays that exist: :math:`\tau_t = \min(\lfloor \mathrm{raw}_t \rfloor, t - 1)`, t from 1.

    >>> cap(np.array([2.5, 2.5, 2.5, 2.5, np.inf]))
    tensor([0, 1, 2, 2, 4])
    """
    return torch.from_numpy(np.minimum(raw, np.arange(len(raw))).astype(np.int64))


def require_count(name: str, value: int, low: int = 0) -> None:
    """Require an integer >= ``low``."""
    is_int = isinstance(value, int | np.integer) and not isinstance(value, bool)
    require(name, value, is_int and value >= low, f"an integer >= {low}")


def check_draw(steps: int, seed: int) -> None:
    """Require a number of updates and a seed."""
    require_count("steps", steps, low=1)
    require_count("seed", seed)


def generator(*key: int) -> np.random.Generator:
    """Random numbers that depend on ``key`` alone."""
    return np.random.default_rng(np.random.SeedSequence(key))


class Law(ABC):
    """A delay model whose values depend on nothing but their position: also a law for pauses, uncapped."""

    needs_labels: ClassVar[bool] = False

    @abstractmethod
    def raw(self, steps: int, seed: int) -> NDArray[Any]:
        """``steps`` values >= 0, before they are capped at t - 1 and rounded down."""

    def draw(self, steps: int, seed: int, labels: Tensor | None = None) -> Arrivals:
        """The values as delays: rounded down, and at most t - 1."""
        check_draw(steps, seed)
        return Arrivals(cap(self.raw(steps, seed)))


def _own_seed(seed: int, part: int) -> int:
    """The seed of one of the models inside a model."""
    return int(generator(seed, _PARTS, part).integers(2**63))


def _as_model(name: str, value: DelayModel | int) -> DelayModel:
    """An integer stands for a constant delay."""
    if isinstance(value, DelayModel):
        return value
    is_int = isinstance(value, int) and not isinstance(value, bool)
    require(name, value, is_int, "a delay model, or an integer for a constant delay")
    return Constant(value)


@dataclass(frozen=True, eq=False)
class Constant(Law):
    r"""The same delay at every update, :math:`\tau_t = \min(\mathrm{delay}, t - 1)`.

    >>> Constant(2).draw(steps=5, seed=0).delays
    tensor([0, 1, 2, 2, 2])
    """

    delay: int

    def __post_init__(self) -> None:
        require_count("delay", self.delay)

    def raw(self, steps: int, seed: int) -> NDArray[Any]:
        """Nothing is random."""
        return np.full(steps, self.delay)


@dataclass(frozen=True, eq=False)
class Uniform(Law):
    r"""Independent delays, uniform on the integers low, ..., high (both included).

    >>> Uniform(2, 3).draw(steps=1000, seed=0).delays[3:].unique()
    tensor([2, 3])
    """

    low: int
    high: int

    def __post_init__(self) -> None:
        require_count("low", self.low)
        require_count("high", self.high)
        require("low", self.low, self.low <= self.high, f"<= high = {self.high!r}")

    def raw(self, steps: int, seed: int) -> NDArray[Any]:
        """One integer for each update."""
        return generator(seed, _DELAYS).integers(self.low, self.high, steps, endpoint=True)


@dataclass(frozen=True, eq=False)
class Geometric(Law):
    r"""Independent geometric delays, :math:`P(\tau = k) = p(1-p)^k` for k = 0, 1, ..., with mean m = 1/p - 1.

    The standard deviation is :math:`\sqrt{m(m+1)}`, a little more than the mean.

    >>> Geometric(0.0).draw(steps=4, seed=0).delays
    tensor([0, 0, 0, 0])
    """

    mean: float

    def __post_init__(self) -> None:
        require_number("mean", self.mean, low=0)

    def raw(self, steps: int, seed: int) -> NDArray[Any]:
        """Failures before the first success, one count for each update."""
        return generator(seed, _DELAYS).geometric(1 / (1 + self.mean), steps) - 1


@dataclass(frozen=True, eq=False)
class LogNormal(Law):
    r"""Independent delays :math:`\lfloor e^z \rfloor` with :math:`z \sim N(\mu, \sigma^2)`.

    Up to the floor and the cap, the median is :math:`e^\mu` and the mean :math:`e^{\mu + \sigma^2/2}`:
    ``LogNormal(7, 0.4)`` has median 1097, mean 1188, standard deviation 495 and 99th percentile 2781.

    >>> LogNormal(1.0, 0.0).draw(steps=5, seed=0).delays
    tensor([0, 1, 2, 2, 2])
    """

    mu: float
    sigma: float

    def __post_init__(self) -> None:
        is_number = isinstance(self.mu, int | float) and not isinstance(self.mu, bool)
        require("mu", self.mu, is_number and math.isfinite(self.mu), "a finite number")
        require_number("sigma", self.sigma, low=0)

    def raw(self, steps: int, seed: int) -> NDArray[Any]:
        """One exponential of a normal for each update."""
        z = generator(seed, _DELAYS).standard_normal(steps)
        with np.errstate(over="ignore"):  # inf is a delay like any other: it is capped
            return np.exp(self.mu + self.sigma * z)


@dataclass(frozen=True, eq=False)
class Pareto(Law):
    r"""Independent heavy-tailed delays :math:`\lfloor \mathrm{scale} \cdot U^{-1/\mathrm{shape}} \rfloor`.

    :math:`P(\tau \ge k) = (k / \mathrm{scale})^{-\mathrm{shape}}` for integers k >= scale. Before the cap
    the mean is infinite for shape <= 1 and the variance for shape <= 2.

    >>> Pareto(shape=1.5, scale=3.0).draw(steps=1000, seed=0).delays[3:].min()
    tensor(3)
    """

    shape: float
    scale: float

    def __post_init__(self) -> None:
        require_number("shape", self.shape, low=0, strict=True)
        require_number("scale", self.scale, low=0, strict=True)

    def raw(self, steps: int, seed: int) -> NDArray[Any]:
        """One power of a uniform number for each update."""
        u = 1 - generator(seed, _DELAYS).random(steps)  # in (0, 1]
        with np.errstate(over="ignore"):
            return self.scale * u ** (-1 / self.shape)


@dataclass(frozen=True, eq=False)
class Cyclic(Law):
    r"""A sequence repeated for ever: :math:`\tau_t` = sequence[(t - 1) mod its length].

    >>> Cyclic((0, 1, 4)).draw(steps=7, seed=0).delays
    tensor([0, 1, 2, 0, 1, 4, 0])
    """

    sequence: Sequence[int]

    def __post_init__(self) -> None:
        require("sequence", self.sequence, len(self.sequence) > 0, "at least one delay")
        for delay in self.sequence:
            require_count("each delay of sequence", delay)

    def raw(self, steps: int, seed: int) -> NDArray[Any]:
        """Nothing is random."""
        return np.resize(self.sequence, steps)


@dataclass(frozen=True, eq=False)
class FromFunction:
    r"""Delays chosen by an adversary, :math:`\tau_t = \min(\mathrm{function}(t), t - 1)`, t from 1.

    The adversary is oblivious: it fixes all delays in advance and sees neither gradients nor samples, so
    the delays stay independent of the data, as the paper assumes.

    >>> FromFunction(lambda t: t // 2).draw(steps=6, seed=0).delays
    tensor([0, 1, 1, 2, 2, 3])
    """

    function: Callable[[int], int]
    needs_labels: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require("function", self.function, callable(self.function), "a function of t that gives a delay")

    def draw(self, steps: int, seed: int, labels: Tensor | None = None) -> Arrivals:
        """Ask the function once for each update."""
        check_draw(steps, seed)
        delays = [self.function(t) for t in range(1, steps + 1)]
        for t, delay in enumerate(delays, start=1):
            require_count(f"function({t})", delay)
        return Arrivals(cap(np.array([min(delay, steps) for delay in delays])))


@dataclass(frozen=True, eq=False)
class Recorded:
    """A trace that was recorded somewhere; ``Recorded(*arrivals)`` replays a draw of another model.

    Nothing is capped: a delay above t - 1 means that the trace does not start at update 1, and raises.

    Args:
        delays: integers ``(T,)``.
        time: when each update was applied, finite and never decreasing, ``(T,)``.
        worker: who sent each gradient, integers ``(T,)``.

    >>> Recorded(torch.tensor([0, 0, 2, 1])).draw(steps=3, seed=0).delays
    tensor([0, 0, 2])
    """

    delays: Tensor
    time: Tensor | None = None
    worker: Tensor | None = None
    needs_labels: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _require_integers("delays", self.delays)
        require("delays", tuple(self.delays.shape), self.delays.dim() == 1, "of shape (T,)")
        most = torch.arange(len(self.delays), device=self.delays.device)
        for i in _first((self.delays < 0) | (self.delays > most)):
            valid = f"in 0..{i}: update t = {i + 1} has t - 1 = {i}"
            require(f"delays[{i}]", int(self.delays[i]), False, valid)
        for name, value in (("time", self.time), ("worker", self.worker)):
            if value is not None:
                same = value.shape == self.delays.shape
                require(name, tuple(value.shape), same, f"as long as delays, {tuple(self.delays.shape)}")
        if self.time is not None:
            steady = torch.isfinite(self.time)
            steady[1:] &= self.time[1:] >= self.time[:-1]
            for i in _first(~steady):
                require(f"time[{i}]", float(self.time[i]), False, "finite and no earlier than the one before")
        if self.worker is not None:
            _require_integers("worker", self.worker)

    def draw(self, steps: int, seed: int, labels: Tensor | None = None) -> Arrivals:
        """The first ``steps`` updates of the trace."""
        check_draw(steps, seed)
        require("steps", steps, steps <= len(self.delays), f"<= {len(self.delays)}, the length of the trace")
        return Arrivals(
            delays=_copy(self.delays, steps, torch.int64),
            time=None if self.time is None else _copy(self.time, steps, torch.float64),
            worker=None if self.worker is None else _copy(self.worker, steps, torch.int64),
        )


def _require_integers(name: str, value: Tensor) -> None:
    require(name, value, isinstance(value, Tensor), "a tensor of integers")
    no_integers = value.is_floating_point() or value.is_complex() or value.dtype == torch.bool
    require(name, value.dtype, not no_integers, "a tensor of integers")


def _first(mask: Tensor) -> list[int]:
    """The first position where the mask holds, if any."""
    return [int(i) for i in mask.nonzero()[:1]]


def _copy(x: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    return x[:steps].to(device="cpu", dtype=dtype, copy=True)


@dataclass(frozen=True, eq=False)
class Regimes:
    r"""Delays that change their nature in mid-run: one model after another.

    At update t the delay is what the part in force gives at update t of the whole run, so a part that
    starts late is not capped anew.

    Args:
        parts: pairs ``(length, model)``. A float length in (0, 1] is a fraction of the run, and the part
            ends at the rounded sum of the fractions so far; an integer length is a number of updates. The
            last part lasts to the end whatever its length, which may be None. A model may be an integer,
            for a constant delay. Only with integer lengths does a longer draw start with the shorter one.

    >>> Regimes(((4, 0), (0.2, 3), (None, Cyclic((1, 2))))).draw(steps=10, seed=0).delays
    tensor([0, 0, 0, 0, 3, 3, 1, 2, 1, 2])
    """

    parts: Sequence[tuple[float | int | None, DelayModel | int]]

    def __post_init__(self) -> None:
        require("parts", self.parts, len(self.parts) > 0, "at least one pair (length, model)")
        for i, part in enumerate(self.parts):
            require("parts", part, isinstance(part, tuple) and len(part) == 2, "pairs (length, model)")
            length, model = part
            valid = "an integer >= 1 (updates) or a float in (0, 1] (fraction of the run)"
            if isinstance(length, int) and not isinstance(length, bool):
                require(f"the length of part {i + 1}", length, length >= 1, valid)
            elif isinstance(length, float):
                require(f"the length of part {i + 1}", length, 0 < length <= 1, valid)
            else:
                is_last = i == len(self.parts) - 1
                require(f"the length of part {i + 1}", length, length is None and is_last, valid)
            _as_model(f"the model of part {i + 1}", model)
        fractions = [length for length, _ in self.parts if isinstance(length, float)]
        require("the fractions of parts", fractions, sum(fractions) <= 1 + 1e-9, "at most 1 together")

    @property
    def needs_labels(self) -> bool:
        """Whether any part does."""
        return any(_as_model("model", model).needs_labels for _, model in self.parts)

    def _ends(self, steps: int) -> list[int]:
        """How many updates have been made when each part ends."""
        ends, updates, fraction = [], 0, 0.0
        for length, _ in self.parts[:-1]:
            if isinstance(length, float):
                fraction += length
            else:
                updates += length or 0
            ends.append(min(updates + round(fraction * steps), steps))
        return [*ends, steps]

    def draw(self, steps: int, seed: int, labels: Tensor | None = None) -> Arrivals:
        """Each part is drawn from update 1 to its own end, and in force after the end of the one before."""
        check_draw(steps, seed)
        pieces, start = [], 0
        for i, ((_, model), end) in enumerate(zip(self.parts, self._ends(steps), strict=True)):
            if end > start:
                seen = None if labels is None else labels[:end]
                pieces.append(_as_model("model", model).draw(end, _own_seed(seed, i), seen).delays[start:])
            start = end
        return Arrivals(torch.cat(pieces))


@dataclass(frozen=True, eq=False)
class ByClass:
    r"""Delays that depend on the samples: some classes are late, such as those a slow site collects.

    Every class has a delay at every update, drawn from its own model with its own random numbers; the
    delay of an update is the largest over its batch (the batch waits for its latest sample).

    This breaks the paper's assumption that the delays are independent of the data: stale gradients then
    come from other classes than fresh ones, and no theorem applies.

    Args:
        by_class: a model for each class, or an integer for a constant delay; a mapping from class to
            model, or a sequence with the model of class k at position k.
        reduce: "max", or "mean" for the average over the batch, rounded down.

    >>> slow_ones = ByClass((0, 3))
    >>> slow_ones.draw(steps=6, seed=0, labels=torch.tensor([[1], [1], [1], [1], [0], [1]])).delays
    tensor([0, 1, 2, 3, 0, 3])
    """

    by_class: Mapping[int, DelayModel | int] | Sequence[DelayModel | int]
    reduce: str = "max"
    needs_labels: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require("by_class", self.by_class, len(self.by_class) > 0, "a delay model for at least one class")
        for k in self._models():
            require_count("each class of by_class", k)
        require_choice("reduce", self.reduce, ("max", "mean"))

    def _models(self) -> dict[int, DelayModel]:
        models = self.by_class
        pairs = models.items() if isinstance(models, Mapping) else enumerate(models)
        return {k: _as_model(f"by_class[{k!r}]", model) for k, model in pairs}

    def draw(self, steps: int, seed: int, labels: Tensor | None = None) -> Arrivals:
        """Look every sample's class up; classes that are in no batch cost nothing."""
        check_draw(steps, seed)
        valid = f"integers of shape (steps = {steps}, batch), the class of every sample of every update"
        if labels is None:
            raise ValueError(f"labels must be {valid}, got None")
        _require_integers("labels", labels)
        shape = tuple(labels.shape)
        require("labels", shape, len(shape) == 2 and shape[0] == steps and shape[1] > 0, valid)
        models, labels = self._models(), labels.cpu()
        classes = np.unique(labels.numpy()).tolist()
        unknown = sorted(set(classes) - set(models))
        require("labels", unknown, not unknown, f"among the classes of by_class, {sorted(models)}")
        late = torch.zeros(shape, dtype=torch.int64)
        for k in classes:
            of_class = models[k].draw(steps, _own_seed(seed, k), labels).delays
            late = torch.where(labels == k, of_class[:, None], late)
        return Arrivals(late.amax(1) if self.reduce == "max" else late.sum(1) // shape[1])


class Histogram(NamedTuple):
    """How many delays are in each bin [edges[i], edges[i + 1])."""

    counts: Tensor
    """int64 ``(bins,)``."""
    edges: Tensor
    """int64 ``(bins + 1,)``: 0, then equally spaced integers, the last one above every delay."""


class DelaySummary(NamedTuple):
    """What :func:`summarise` says of a run's delays."""

    mean: float
    std: float
    """Of the population: the root of the mean squared deviation."""
    median: float
    p95: float
    p99: float
    max: int
    histogram: Histogram


def summarise(delays: Tensor) -> DelaySummary:
    r"""The moments, percentiles (interpolated between neighbours) and histogram of the delays of a run.

    The theory sees the mean :math:`\mu_\tau` and the standard deviation :math:`\sigma_\tau` only.

    >>> summarise(torch.tensor([0, 1, 2, 5]))[:3]
    (2.0, 1.8708286933869707, 1.5)
    >>> summarise(torch.tensor([0, 1, 2, 2])).histogram.counts
    tensor([1, 1, 2])
    """
    _require_integers("delays", delays)
    require("delays", tuple(delays.shape), delays.numel() > 0, "at least one delay")
    values = delays.cpu().numpy().ravel()
    require("delays", int(values.min()), int(values.min()) >= 0, ">= 0")
    median, p95, p99 = np.percentile(values, [50, 95, 99]).tolist()
    largest = int(values.max())
    width = largest // _HISTOGRAM_BINS + 1
    counts = np.bincount(values // width)
    return DelaySummary(
        mean=float(values.mean()),
        std=float(values.std()),
        median=median,
        p95=p95,
        p99=p99,
        max=largest,
        histogram=Histogram(torch.from_numpy(counts), torch.arange(len(counts) + 1) * width),
    )
