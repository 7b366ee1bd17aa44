"""The rules that the library is measured against, each as its authors state it.

Delayed SGD itself is :class:`lategrad.SGD`. A rule whose paper has no constraints takes a ``domain`` all the
same, so that all can be compared on one problem; the projection is then ours and outside the rule's theory,
and its docstring says so.
"""

from lategrad.rules.rivals.ada_delay import AdaDelay
from lategrad.rules.rivals.adaptive_revision import AdaptiveRevision
from lategrad.rules.rivals.async_adagrad import AsyncAdaGrad
from lategrad.rules.rivals.clipped import ClippedSGD
from lategrad.rules.rivals.dc_asgd import DCASGD, AdaptiveDCASGD
from lategrad.rules.rivals.delay_adaptive import DelayAdaptive
from lategrad.rules.rivals.picky import PickySGD
from lategrad.rules.rivals.rennala import Rennala
from lategrad.rules.rivals.ringmaster import Ringmaster
from lategrad.rules.rivals.schedule_free import ScheduleFree
from lategrad.rules.rivals.staleness_aware import StalenessAware
from lategrad.rules.rivals.unixgrad import UniXGrad

__all__ = [
    "DCASGD",
    "AdaDelay",
    "AdaptiveDCASGD",
    "AdaptiveRevision",
    "AsyncAdaGrad",
    "ClippedSGD",
    "DelayAdaptive",
    "PickySGD",
    "Rennala",
    "Ringmaster",
    "ScheduleFree",
    "StalenessAware",
    "UniXGrad",
]
