"""When compiling pays: one estimate for simulator, server and optimizers.

Compiling costs seconds once and saves time at every update: some for the calls, and some for every entry of every
run, mostly for fresh memory. ``benchmarks/bench_compiling.py`` prints what both are. For the simulator compiling
paid from 100,000 updates at 10 entries, from 40,000 at 2,000, from 10,000 at 130,000.
"""

from __future__ import annotations

SECONDS = {"loops": 1.0, "compile": 6.0}
"""What compiling takes on one core with nothing in torch's caches."""

SAVED_PER_UPDATE, SAVED_PER_ENTRY = 60e-6, 5e-9
"""Seconds that a compiled update is faster."""

STEPS_OF_AN_OPTIMIZER = 1_000
"""An optimizer is not told how many steps there will be: so many at least."""


def compiling_pays(updates: int, entries: int, *, backend: str = "compile") -> bool:
    """Whether compiling is worth its time.

    Args:
        updates: that will be made.
        entries: of a vector, times the runs that are made at once.
        backend: what would be compiled for.

    >>> compiling_pays(2_500, 10 * 36), compiling_pays(20_000, 10 * 7_850)
    (False, True)
    """
    return updates * (SAVED_PER_UPDATE + SAVED_PER_ENTRY * entries) > SECONDS[backend]
