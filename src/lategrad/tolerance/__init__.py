"""What delay can a training stand? The user's own training function, run at every delay, and the curve of it."""

from lategrad.tolerance.result import Point, Tolerance
from lategrad.tolerance.run import Run, Wrap
from lategrad.tolerance.study import tolerance

__all__ = ["Point", "Run", "Tolerance", "Wrap", "tolerance"]
