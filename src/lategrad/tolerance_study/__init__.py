"""The delay that a training tolerates: the user's training function run at every delay; and a record of real delays."""

from lategrad.tolerance_study.delay_recorder import DelayRecorder, DelayReport
from lategrad.tolerance_study.result import Point, Tolerance
from lategrad.tolerance_study.run import Run, Wrap
from lategrad.tolerance_study.study import tolerance

__all__ = ["DelayRecorder", "DelayReport", "Point", "Run", "Tolerance", "Wrap", "tolerance"]
