"""The delayed oracle: any rule under any delays, many runs at once; see :mod:`lategrad.simulate.oracle`."""

from lategrad.simulate.oracle import Delays, Simulation, simulate

__all__ = ["Delays", "Simulation", "simulate"]
