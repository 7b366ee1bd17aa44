"""The delayed oracle: any rule under any delays, many runs at once; see docs/simulate.md."""

from lategrad.simulator.run import Simulation
from lategrad.simulator.simulate import Delays, simulate

__all__ = ["Delays", "Simulation", "simulate"]
