"""What delay can a training stand? The user's own training function, run at every delay, and the curve of it."""

from lategrad.tolerance_study.result import Point, Tolerance
from lategrad.tolerance_study.run import Run, Wrap
from lategrad.tolerance_study.study import tolerance

__all__ = ["Point", "Run", "Tolerance", "Wrap", "tolerance"]
