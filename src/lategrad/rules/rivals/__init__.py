"""The rules that the library is measured against, each as its authors state it.

Delayed SGD itself is :class:`lategrad.SGD`. A rule whose paper has no constraints takes a ``domain`` all the
same, so that all can be compared on one problem; the projection is then ours and outside the rule's theory,
and its docstring says so.
"""

from lategrad.domains import take_texts
from lategrad.rules.rivals.ada_delay import AdaDelay
from lategrad.rules.rivals.adamw import AdamW
from lategrad.rules.rivals.adaptive_revision import AdaptiveRevision
from lategrad.rules.rivals.async_adagrad import AsyncAdaGrad
from lategrad.rules.rivals.clipped import ClippedSGD
from lategrad.rules.rivals.dana_slim import DANASlim
from lategrad.rules.rivals.dc_asgd import DCASGD, AdaptiveDCASGD
from lategrad.rules.rivals.delay_adaptive import DelayAdaptive
from lategrad.rules.rivals.delayed_nesterov import DelayedNesterov
from lategrad.rules.rivals.fed_async import FedAsync
from lategrad.rules.rivals.fed_buff import FedBuff
from lategrad.rules.rivals.gap_aware import GapAware
from lategrad.rules.rivals.momentum_look_ahead import MomentumLookAhead
from lategrad.rules.rivals.muon import Muon
from lategrad.rules.rivals.nadam import NAdam
from lategrad.rules.rivals.picky import PickySGD
from lategrad.rules.rivals.pipemare import PipeMare
from lategrad.rules.rivals.rennala import Rennala
from lategrad.rules.rivals.ringmaster import Ringmaster
from lategrad.rules.rivals.ringmaster_muon import RingmasterMuon
from lategrad.rules.rivals.schedule_free import ScheduleFree
from lategrad.rules.rivals.schedule_free_adamw import ScheduleFreeAdamW
from lategrad.rules.rivals.sgd_momentum import SGDMomentum
from lategrad.rules.rivals.staleness_aware import StalenessAware
from lategrad.rules.rivals.unixgrad import UniXGrad
from lategrad.rules.rivals.weight_prediction import WeightPrediction

__all__ = [
    "DCASGD",
    "AdaDelay",
    "AdamW",
    "AdaptiveDCASGD",
    "AdaptiveRevision",
    "AsyncAdaGrad",
    "ClippedSGD",
    "DANASlim",
    "DelayAdaptive",
    "DelayedNesterov",
    "FedAsync",
    "FedBuff",
    "GapAware",
    "MomentumLookAhead",
    "Muon",
    "NAdam",
    "PickySGD",
    "PipeMare",
    "Rennala",
    "Ringmaster",
    "RingmasterMuon",
    "SGDMomentum",
    "ScheduleFree",
    "ScheduleFreeAdamW",
    "StalenessAware",
    "UniXGrad",
    "WeightPrediction",
]

take_texts(vars())
