"""When compiling pays: one estimate for simulator, server and optimizers.

Compiling costs seconds once and saves time at every update. What an eager update costs beyond a compiled one is
about 40 microseconds for its calls and 6 nanoseconds for every entry of every run, mostly for fresh memory.
"""

from __future__ import annotations

SECONDS = {"loops": 1.0, "compile": 6.0}
"""What compiling takes, on one core with nothing in torch's caches."""

SAVED_PER_UPDATE, SAVED_PER_ENTRY = 40e-6, 6e-9
"""Seconds."""

STEPS_OF_AN_OPTIMIZER = 1_000
"""An optimizer is not told how many steps there will be: so many at least."""


def compiling_pays(updates: int, entries: int, *, backend: str = "compile") -> bool:
    """Whether compiling is worth its time.

    Args:
        updates: that will be made.
        entries: of a vector, times the runs that are made at once.
        backend: what would be compiled for.

    >>> compiling_pays(2_500, 10 * 36), compiling_pays(100_000, 10 * 7_850)
    (False, True)
    """
    return updates * (SAVED_PER_UPDATE + SAVED_PER_ENTRY * entries) > SECONDS[backend]
