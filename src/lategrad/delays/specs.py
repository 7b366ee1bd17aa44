"""Delay models written as short texts, such as ``lognormal:7,0.4``, for command lines and tables."""

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from lategrad.delays import clocks
from lategrad.delays.base import DelayModel
from lategrad.delays.combinators import Regimes, UpdateQueue
from lategrad.delays.distributions import Constant, Cyclic, Geometric, LogNormal, Pareto, Uniform
from lategrad.support.options import Entry, Option, entry_of, parse_spec
from lategrad.support.validation import require

__all__ = ["DELAYS", "parse"]


def _number(name: str, text: str, *types: type) -> int | float:
    return Option(name, types).parse(text, "a delay")[0]  # type: ignore[no-any-return]


def _regimes(text: str) -> list[tuple[int | float | None, DelayModel]]:
    """``0.33*10;500*uniform:0,9;10``: lengths and models."""
    parts: list[tuple[int | float | None, DelayModel]] = []
    for part in text.split(";"):
        *length, model = part.split("*", 1)
        require("each part of regimes", model, not model.strip().startswith("regimes"), "a delay of another kind")
        parts.append((_number("length", length[0], int, float) if length else None, parse(model)))
    return parts


def _pair(name: str, text: str) -> tuple[float, float]:
    """``1x100``: two numbers."""
    first, _, second = text.partition("x")
    return _number(f"{name} (such as 1x100)", first, float), _number(f"{name} (such as 1x100)", second, float)


def _cluster(
    workers: int, speed: Literal["constant", "exponential", "lognormal", "pareto"] = "constant",
    spread: float | None = None, shape: float | None = None, slow: str = "0x1", late: str = "0x0",
    up: float | None = None, down: float | None = None, drift: float | None = None, swing: str | None = None,
) -> clocks.Cluster:  # fmt: skip
    for name, value, owner in (("spread", spread, "lognormal"), ("shape", shape, "pareto")):
        require(name, value, (value is not None) == (speed == owner), f"given with speed={owner}, and only then")
    require("down", down, down is None or up is not None, "given along with up")
    require("drift and swing", (drift, swing), drift is None or swing is None, "one of the two, not both")
    law: clocks.ComputeTime = clocks.ExponentialTime() if speed == "exponential" else clocks.ConstantTime()
    law = law if spread is None else clocks.LogNormalTime(spread)
    law = law if shape is None else clocks.ParetoTime(shape)
    factor: Callable[[float], float] | None = None if drift is None else clocks.LinearDrift(drift)
    factor = factor if swing is None else clocks.SineDrift(*_pair("swing", swing))
    worker = clocks.Worker(distribution=law, up=math.inf if up is None else up, down=down or 0.0, drift=factor)
    everyone = [worker] * workers
    (slow_count, slower), (late_count, start) = _pair("slow", slow), _pair("late", late)
    for name, count in (("slow", slow_count), ("late", late_count)):
        require(f"the workers of {name}", count, count in range(workers + 1), f"an integer in 0..{workers}")
    for i in range(workers - int(slow_count), workers):
        everyone[i] = replace(everyone[i], mean=slower)
    for i in range(int(late_count)):
        everyone[i] = replace(everyone[i], start=start)
    return clocks.Cluster(everyone)


def _whole(summary: str, make: type[DelayModel], convert: Callable[[str], Any], form: str) -> Entry[DelayModel]:
    """An entry whose one argument is all of the text."""
    name = next(iter(inspect.signature(make).parameters))
    return Entry(summary, make, {name: Option(name, convert=convert)}, form, whole=True)


DELAYS: dict[str, Entry[DelayModel]] = {
    "constant": entry_of("500 updates for every gradient; 500 alone says the same", Constant, "constant:500"),
    "uniform": entry_of("integers from 0 to 100, both included", Uniform, "uniform:0,100"),
    "geometric": entry_of("geometric on 0, 1, 2, ... with mean 50", Geometric, "geometric:50"),
    "lognormal": entry_of("exp of a normal with mean 7 and standard deviation 0.4, rounded down", LogNormal,
                          "lognormal:7,0.4"),
    "pareto": entry_of("heavy tail: P(delay >= k) = (k / 100)^-1.5 from 100 on", Pareto, "pareto:1.5,100"),
    "cyclic": _whole("0, 10, 100, 0, 10, 100, ...", Cyclic,
                     lambda text: [_number("sequence", part, int) for part in text.split(",")], "cyclic:0,10,100"),
    "regimes": _whole("a third of the run at 10, then 500 updates, then the rest", Regimes, _regimes,
                      "regimes:0.33*10;500*lognormal:7,0.4;10"),
    "queue": _whole("an update queue: each query's gradient arrives once, after such a delay", UpdateQueue,
                    lambda text: parse(text), "queue:lognormal:7,0.4"),
    "cluster": entry_of("50 workers, one of them 100 times slower", _cluster,
                        "cluster:workers=50,speed=lognormal,spread=0.4,slow=1x100"),
}  # fmt: skip
"""Every kind of delay that has a name; its form is an example, which the summary explains."""


def parse(text: str) -> DelayModel:
    """The delay model that a text describes.

    ===========================================  ========================================================
    ``500``, ``constant:500``                    :class:`~lategrad.delays.Constant`
    ``uniform:0,100``                            :class:`~lategrad.delays.Uniform`
    ``geometric:50``                             :class:`~lategrad.delays.Geometric`
    ``lognormal:7,0.4``                          :class:`~lategrad.delays.LogNormal`
    ``pareto:1.5,100``                           :class:`~lategrad.delays.Pareto` (shape, scale)
    ``cyclic:0,10,100``                          :class:`~lategrad.delays.Cyclic`
    ``regimes:0.33*10;500*uniform:0,9;10``       :class:`~lategrad.delays.Regimes`: length * any other
                                                 text, a fraction of the run where the length has a point
    ``queue:lognormal:7,0.4``                    :class:`~lategrad.delays.UpdateQueue` of any distribution above
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
    return Constant(int(text)) if text.strip().isdecimal() else parse_spec(text, "delay", DELAYS)
