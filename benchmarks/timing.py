"""Side-by-side timing: contenders take turns in one process, so that a noisy machine disturbs all alike."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable


def side_by_side(
    contenders: dict[str, Callable[[], object]], rounds: int = 15, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Median seconds per call of each contender, after one warm-up call each.

    On a busy machine ``clock=time.thread_time``, the processor time of this thread, is steadier.
    """
    for run in contenders.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            begin = clock()
            run()
            times[name].append(clock() - begin)
    return {name: statistics.median(values) for name, values in times.items()}


def report(title: str, seconds: dict[str, float], baseline: str) -> None:
    """Print each contender's time and its ratio to the baseline's."""
    print(title)
    for name, value in seconds.items():
        print(f"  {name:<40} {value * 1e3:9.3f} ms   {value / seconds[baseline]:6.2f}x of {baseline}")


def verdict(claim: str, holds: bool) -> None:
    """Print whether a claim of ours held in this run."""
    print(f"  {'holds' if holds else 'FAILS'}: {claim}")


def require_value(claim: str, holds: bool) -> None:
    """The same for values, which do not depend on the machine: a wrong one ends the benchmark with an error."""
    verdict(claim, holds)
    if not holds:
        sys.exit(f"wrong values: {claim}")
