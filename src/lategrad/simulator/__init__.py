"""The delayed oracle: any rule under any delays, many runs at once; see docs/simulate.md."""

from lategrad.simulator.oracle import Delays, Simulation, simulate

__all__ = ["Delays", "Simulation", "simulate"]
