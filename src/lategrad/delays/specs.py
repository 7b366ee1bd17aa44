"""Delay models written as short texts, such as ``lognormal:7,0.4``, for command lines and tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from lategrad.delays.base import DelayModel, Distribution
from lategrad.delays.clocks import (
    Cluster,
    ComputeTime,
    ConstantTime,
    ExponentialTime,
    LinearDrift,
    LogNormalTime,
    ParetoTime,
    SineDrift,
    Worker,
)
from lategrad.delays.combinators import Regimes, UpdateQueue
from lategrad.delays.distributions import Constant, Cyclic, Geometric, LogNormal, Pareto, Uniform
from lategrad.support.validation import require, require_choice

__all__ = ["FORMS", "parse"]

Number = TypeVar("Number", int, float)

FORMS: dict[str, str] = {
    "constant": "constant:500 - every gradient is 500 updates late; 500 alone says the same",
    "uniform": "uniform:0,100 - integers from 0 to 100, both included",
    "geometric": "geometric:50 - geometric on 0, 1, 2, ... with mean 50",
    "lognormal": "lognormal:7,0.4 - exp of a normal with mean 7 and standard deviation 0.4, rounded down",
    "pareto": "pareto:1.5,100 - heavy tail: P(delay >= k) = (k / 100)^-1.5 from 100 on",
    "cyclic": "cyclic:0,10,100 - 0, 10, 100, 0, 10, 100, ...",
    "regimes": "regimes:0.33*10;500*lognormal:7,0.4;10 - a third at 10, 500 updates, the rest",
    "queue": "queue:lognormal:7,0.4 - an update queue: each query's gradient arrives once, so much later",
    "cluster": "cluster:workers=50,speed=lognormal,spread=0.4,slow=1x100 - 50 workers, one 100 times slower",
}
"""Every kind of spec: an example (no spaces), a dash, and what the example means."""


def _values(text: str, number: Callable[[str], Number], count: int) -> list[Number]:
    values = [number(part) for part in text.split(",")]
    require("the number of values", len(values), len(values) == count, str(count))
    return values


def _part(text: str) -> tuple[float | int | None, DelayModel]:
    *length, spec = text.split("*", 1)
    require("a part of regimes", spec, not spec.strip().startswith("regimes"), "a spec of another kind")
    if not length:
        return None, _parse(spec)
    return int(length[0]) if length[0].strip().isdecimal() else float(length[0]), _parse(spec)


def _queue(text: str) -> UpdateQueue:
    law = _parse(text)
    valid = "one value after another, such as lognormal:7,0.4"
    require("the law of a queue", text, isinstance(law, Distribution), valid)
    return UpdateQueue(law)  # type: ignore[arg-type]


def _times(text: str) -> tuple[int, float]:
    """``1x100``: one worker, 100."""
    count, _, amount = text.partition("x")
    return int(count), float(amount)


_OPTIONS = ("workers", "speed", "spread", "shape", "slow", "late", "up", "down", "drift", "swing")
_SPEEDS = ("constant", "exponential", "lognormal", "pareto")


def _law(options: dict[str, str]) -> ComputeTime:
    speed = options.get("speed", "constant")
    require_choice("speed", speed, _SPEEDS)
    for name, owner in (("spread", "lognormal"), ("shape", "pareto")):
        goes_with = (name in options) == (speed == owner)
        require(name, options.get(name), goes_with, f"given with speed={owner}, and only then")
    if speed == "lognormal":
        return LogNormalTime(float(options["spread"]))
    if speed == "pareto":
        return ParetoTime(float(options["shape"]))
    return ExponentialTime() if speed == "exponential" else ConstantTime()


def _drift(options: dict[str, str]) -> LinearDrift | SineDrift | None:
    require("drift and swing", options, not {"drift", "swing"} <= set(options), "one of the two, not both")
    if "drift" in options:
        return LinearDrift(float(options["drift"]))
    if "swing" in options:
        amplitude, _, period = options["swing"].partition("x")
        return SineDrift(float(amplitude), float(period))
    return None


def _cluster(text: str) -> Cluster:
    pairs = [part.partition("=") for part in text.split(",")]
    options = {name.strip(): value.strip() for name, _, value in pairs}
    for name in options:
        require_choice("each option of cluster", name, _OPTIONS)
    once = len(options) == len(pairs) and "workers" in options
    require("the options of cluster", text, once, "given once each, workers=... among them")
    require("down", options.get("down"), "up" in options or "down" not in options, "given along with up")
    up, down = float(options.get("up", "inf")), float(options.get("down", "0"))
    worker = Worker(distribution=_law(options), up=up, down=down, drift=_drift(options))
    workers = [worker] * int(options["workers"])
    slow, slower = _times(options.get("slow", "0x1"))
    late, start = _times(options.get("late", "0x0"))
    for name, count in (("slow", slow), ("late", late)):
        require(f"the workers of {name}", count, 0 <= count <= len(workers), f"in 0..{len(workers)}")
    for i in range(len(workers) - slow, len(workers)):
        workers[i] = replace(workers[i], mean=slower)
    for i in range(late):
        workers[i] = replace(workers[i], start=start)
    return Cluster(workers)


_BUILDERS: dict[str, Callable[[str], DelayModel]] = {
    "constant": lambda text: Constant(int(text)),
    "uniform": lambda text: Uniform(*_values(text, int, 2)),
    "geometric": lambda text: Geometric(*_values(text, float, 1)),
    "lognormal": lambda text: LogNormal(*_values(text, float, 2)),
    "pareto": lambda text: Pareto(*_values(text, float, 2)),
    "cyclic": lambda text: Cyclic([int(part) for part in text.split(",")]),
    "regimes": lambda text: Regimes([_part(part) for part in text.split(";")]),
    "queue": _queue,
    "cluster": _cluster,
}


def _parse(spec: str) -> DelayModel:
    if spec.strip().isdecimal():
        return Constant(int(spec))
    name, _, text = spec.strip().partition(":")
    require_choice("the kind of delay", name, tuple(FORMS))
    return _BUILDERS[name](text)


def parse(spec: str) -> DelayModel:
    """The delay model that a text describes.

    ===========================================  ========================================================
    ``500``, ``constant:500``                    :class:`~lategrad.delays.Constant`
    ``uniform:0,100``                            :class:`~lategrad.delays.Uniform`
    ``geometric:50``                             :class:`~lategrad.delays.Geometric`
    ``lognormal:7,0.4``                          :class:`~lategrad.delays.LogNormal`
    ``pareto:1.5,100``                           :class:`~lategrad.delays.Pareto` (shape, scale)
    ``cyclic:0,10,100``                          :class:`~lategrad.delays.Cyclic`
    ``regimes:0.33*10;500*uniform:0,9;10``       :class:`~lategrad.delays.Regimes`: length * any other
                                                 spec, a fraction of the run where the length has a point
    ``queue:lognormal:7,0.4``                    :class:`~lategrad.delays.UpdateQueue` of any law above
    ``cluster:workers=50,option=value,...``      :class:`~lategrad.delays.clocks.Cluster`
    ===========================================  ========================================================

    The options of a cluster, whose workers take 1 virtual second for a gradient on average:

    ===============================  ====================================================================
    ``speed=constant``               or ``exponential``, or ``lognormal`` with ``spread=0.4``, or
                                     ``pareto`` with ``shape=1.5``
    ``slow=2x100``                   the last 2 workers are 100 times slower
    ``late=3x60``                    the first 3 workers join at second 60
    ``up=100,down=10``               preempted after 100 seconds, back after 10 more, on average
    ``drift=0.01``                   a gradient takes 1 + 0.01 s times as long at second s
    ``swing=0.5x100``                a gradient takes 1 + 0.5 sin(2 pi s / 100) times as long
    ===============================  ====================================================================

    >>> parse("lognormal:7,0.4")
    LogNormal(mu=7.0, sigma=0.4)
    >>> parse("regimes:2*0;0.5*3;1").draw(steps=8, seed=0).delays
    tensor([0, 0, 2, 3, 3, 3, 1, 1])
    """
    try:
        return _parse(spec)
    except ValueError as error:
        examples = ", ".join(form.split()[0] for form in FORMS.values())
        raise ValueError(f"delay spec {spec!r} does not parse ({error}); valid forms: 500, {examples}") from None
