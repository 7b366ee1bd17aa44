"""The published rules that the library is measured against.

Which source each one was checked against, what is its authors' and what is ours: the site's page "Sources of the
baselines", and in short the paragraph "Source" of each docstring. Delayed SGD itself is :class:`lategrad.SGD`. A rule
whose paper has no constraints takes a ``domain`` all the same, so that all can be compared on one problem; the
projection is then ours and outside the rule's theory.
"""

from lategrad.rules.baselines.ada_delay import AdaDelay
from lategrad.rules.baselines.adamw import AdamW
from lategrad.rules.baselines.adaptive_revision import AdaptiveRevision
from lategrad.rules.baselines.async_adagrad import AsyncAdaGrad
from lategrad.rules.baselines.clipped import ClippedSGD
from lategrad.rules.baselines.dc_asgd import DCASGD, AdaptiveDCASGD
from lategrad.rules.baselines.delay_adaptive import DelayAdaptive
from lategrad.rules.baselines.delayed_nesterov import DelayedNesterov
from lategrad.rules.baselines.fed_async import FedAsync
from lategrad.rules.baselines.fed_buff import FedBuff
from lategrad.rules.baselines.gap_aware import GapAware
from lategrad.rules.baselines.momentum_look_ahead import MomentumLookAhead
from lategrad.rules.baselines.muon import Muon
from lategrad.rules.baselines.nadam import NAdam
from lategrad.rules.baselines.pipemare import PipeMare
from lategrad.rules.baselines.rennala import Rennala
from lategrad.rules.baselines.ringmaster import Ringmaster, RingmasterMuon
from lategrad.rules.baselines.schedule_free import ScheduleFree, ScheduleFreeAdamW
from lategrad.rules.baselines.sgd_momentum import SGDMomentum
from lategrad.rules.baselines.staleness_aware import StalenessAware
from lategrad.rules.baselines.unixgrad import UniXGrad
from lategrad.rules.baselines.weight_prediction import WeightPrediction

__all__ = ["DCASGD", "AdaDelay", "AdamW", "AdaptiveDCASGD", "AdaptiveRevision", "AsyncAdaGrad", "ClippedSGD",
           "DelayAdaptive", "DelayedNesterov", "FedAsync", "FedBuff", "GapAware", "MomentumLookAhead", "Muon", "NAdam",
           "PipeMare", "Rennala", "Ringmaster", "RingmasterMuon", "SGDMomentum", "ScheduleFree", "ScheduleFreeAdamW",
           "StalenessAware", "UniXGrad", "WeightPrediction"]  # fmt: skip
