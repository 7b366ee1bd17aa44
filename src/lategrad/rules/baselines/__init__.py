"""The published rules that the library is measured against.

Which source each one was checked against, what is its authors' and what is ours: the site's page "Sources of the
baselines", and in short the paragraph "Source" of each docstring. Delayed SGD itself is :class:`lategrad.SGD`. A rule
whose paper has no constraints takes a ``domain`` all the same, so that all can be compared on one problem; the
projection is then ours and outside the rule's theory.
"""

from lategrad.rules.baselines.ada_delay import AdaDelay
from lategrad.rules.baselines.adamw import AdamW
from lategrad.rules.baselines.adaptive_revision import AdaptiveRevision, AsyncAdaGrad
from lategrad.rules.baselines.clipped import ClippedSGD
from lategrad.rules.baselines.dc_asgd import DCASGD, AdaptiveDCASGD
from lategrad.rules.baselines.delay_adaptive import DelayAdaptive, StalenessAware
from lategrad.rules.baselines.delayed_nesterov import DelayedNesterov
from lategrad.rules.baselines.federated import FedAsync, FedBuff
from lategrad.rules.baselines.gap_aware import GapAware
from lategrad.rules.baselines.muon import Muon
from lategrad.rules.baselines.pipelines import NAdam, PipeMare, WeightPrediction
from lategrad.rules.baselines.ringmaster import Rennala, Ringmaster, RingmasterMuon
from lategrad.rules.baselines.rotated_adam import RotatedAdam
from lategrad.rules.baselines.schedule_free import ScheduleFree, ScheduleFreeAdamW
from lategrad.rules.baselines.sgd_momentum import MomentumLookAhead, SGDMomentum
from lategrad.rules.baselines.unixgrad import UniXGrad

__all__ = ["DCASGD", "AdaDelay", "AdamW", "AdaptiveDCASGD", "AdaptiveRevision", "AsyncAdaGrad", "ClippedSGD",
           "DelayAdaptive", "DelayedNesterov", "FedAsync", "FedBuff", "GapAware", "MomentumLookAhead", "Muon", "NAdam",
           "PipeMare", "Rennala", "Ringmaster", "RingmasterMuon", "RotatedAdam", "SGDMomentum", "ScheduleFree",
           "ScheduleFreeAdamW", "StalenessAware", "UniXGrad", "WeightPrediction"]  # fmt: skip
