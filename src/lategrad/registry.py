"""Every learner and rule by its name, with its options: ``parse_rule("steady:lr=1,c=20", domain="ball:5")``.

A rule joins with one line in :data:`RULES`; its options are read off the fields of its class. The grammar of the texts,
shared with constraint sets, delays and problems, is described in :mod:`lategrad.support.options`.
"""

from typing import Any

from torch.optim.optimizer import Optimizer

from lategrad.learners import FTRL, OGD, AdaGrad, AdaGradNorm, Learner, OptimisticFTRL, OptimisticOGD
from lategrad.rules import (
    SGD,
    Anytime,
    CenteredClipping,
    Steady,
    SteadyAdam,
    SteadyMixing,
    SteadyMuon,
    SteadyShort,
    baselines,
)
from lategrad.rules.online_to_nonconvex import OnlineToNonconvex
from lategrad.rules.rule import AnyRule
from lategrad.rules.strongly_convex import StronglyConvexOGD
from lategrad.sets import SETS as SETS
from lategrad.sets import ConvexSet, as_set
from lategrad.sets import parse_set as parse_set
from lategrad.support.options import Entry, Option, Spec, entry_of, options_of, read_spec
from lategrad.support.validation import Scalar

LEARNERS: dict[str, Entry[Learner[Any]]] = {
    "ogd": entry_of("online gradient descent, learning rate lr/sqrt(t)", OGD),
    "ftrl": entry_of("follow the regularised leader (dual averaging)", FTRL),
    "adagrad-norm": entry_of("OGD, its learning rate set by all past gradients", AdaGradNorm),
    "adagrad": entry_of("OGD with a learning rate for every coordinate", AdaGrad),
    "optimistic-ogd": entry_of("adaptive optimistic OGD", OptimisticOGD),
    "optimistic-ftrl": entry_of("adaptive optimistic FTRL", OptimisticFTRL),
}


def _anytime(learner: str, summary: str) -> Entry[AnyRule[Any]]:
    """Anytime averaging around a learner; the options of both."""
    inner, own = LEARNERS[learner], options_of(Anytime)

    def make(**values: Any) -> AnyRule[Any]:
        outer = {name: values.pop(name) for name in own if name in values}
        return Anytime(inner.make(**values), **outer)

    return Entry(summary, make, {**inner.options, **own})


RULES: dict[str, Entry[AnyRule[Any]]] = {
    "anytime-sgd": _anytime("ogd", "Algorithm 1 with OGD, the paper's anytime SGD"),
    "anytime-ftrl": _anytime("ftrl", "Algorithm 1 with FTRL"),
    "anytime-adagrad-norm": _anytime("adagrad-norm", "Algorithm 1 with AdaGrad-norm"),
    "anytime-adagrad": _anytime("adagrad", "Algorithm 1 with AdaGrad"),
    "optimistic-anytime": _anytime("optimistic-ogd", "Algorithm 2 with optimistic OGD"),
    "optimistic-anytime-ftrl": _anytime("optimistic-ftrl", "Algorithm 2 with optimistic FTRL"),
    "strongly-convex": entry_of("Algorithms 3 and 4, for strongly convex objectives", StronglyConvexOGD),
    "sgd": entry_of("SGD with a constant learning rate, last iterate", SGD),
    "sgd-uniform": entry_of("SGD with a constant learning rate, uniform average", SGD, average="uniform"),
    "sgd-linear": entry_of("SGD with a constant learning rate, linearly weighted average", SGD, average="linear"),
    "centered-clipping": entry_of("SGD along a momentum no single worker can move far", CenteredClipping, radius=1.0),
    "online-to-nonconvex": entry_of("steps chosen by an online learner, proved", OnlineToNonconvex, radius=0.1),
    "steady": entry_of("our own: anytime averaging for long delays", Steady),
    "steady-coordinate": entry_of("our own, with a learning rate for every coordinate", Steady, per_coordinate=True),
    "steady-short": entry_of("our own, for runs that are short relative to the delay", SteadyShort),
    "steady-adam": entry_of("our own, for deep models: Adam's direction, averaged, damped by the delay", SteadyAdam),
    "steady-muon": entry_of("our own, for deep models: orthogonalised momentum that looks ahead", SteadyMuon),
    "steady-mixing": entry_of("our own, outer: workers' models mixed in, queries that look ahead", SteadyMixing),
    "adaptive-revision": entry_of("AdaptiveRevision, uniform average", baselines.AdaptiveRevision),
    "async-adagrad": entry_of("asynchronous AdaGrad, uniform average", baselines.AsyncAdaGrad),
    "ada-delay": entry_of("AdaDelay per coordinate, L = 1", baselines.AdaDelay),
    "dc-asgd": entry_of("SGD with delay compensation, lambda = 0.04", baselines.DCASGD),
    "dc-asgd-a": entry_of("SGD with adaptive delay compensation, lambda_0 = 2", baselines.AdaptiveDCASGD),
    "staleness-aware": entry_of("SGD, learning rate lr/max(1, delay)", baselines.StalenessAware),
    "delay-adaptive": entry_of("delay-adaptive SGD, the number of workers estimated", baselines.DelayAdaptive),
    "ringmaster": entry_of("Ringmaster ASGD, SGD on delays below 10", baselines.Ringmaster),
    "rennala": entry_of("Rennala SGD, minibatches of 10 gradients at the current point", baselines.Rennala),
    "clipped-sgd": entry_of("SGD on gradients clipped to norm 1", baselines.ClippedSGD),
    "schedule-free": entry_of("Schedule-Free SGD, interpolation 0.9", baselines.ScheduleFree),
    "unixgrad": entry_of("UniXGrad, two gradients a round", baselines.UniXGrad),
    "sgd-momentum": entry_of("SGD with momentum 0.9", baselines.SGDMomentum),
    "adamw": entry_of("AdamW, torch's constants", baselines.AdamW),
    "nadam": entry_of("NAdam with beta1 = 0.99, for asynchronous pipelines", baselines.NAdam),
    "schedule-free-adamw": entry_of("Schedule-Free AdamW, the package's constants", baselines.ScheduleFreeAdamW),
    "muon": entry_of("Muon on matrices, AdamW on the rest", baselines.Muon),
    "muon-prediction": entry_of("Muon with predicted weights, for pipelines", baselines.Muon, prediction=True),
    "rotated-adam": entry_of("Adam in the eigenbasis of the gradients' covariance", baselines.RotatedAdam),
    "gap-aware": entry_of("Gap-Aware SGD, momentum 0.9", baselines.GapAware),
    "pipemare": entry_of("AdamW with PipeMare's learning rates", baselines.PipeMare),
    "weight-prediction": entry_of("AdamW with predicted weights, as in XPipe", baselines.WeightPrediction),
    "ringmaster-muon": entry_of("Ringmaster Muon, delays below 2", baselines.RingmasterMuon),
    "nesterov": entry_of("DiLoCo's outer rule: Nesterov momentum 0.9", baselines.SGDMomentum, lr=0.7, nesterov=True),
    "delayed-nesterov": entry_of("outer: Nesterov momentum, updated once in 4 arrivals", baselines.DelayedNesterov),
    "momentum-look-ahead": entry_of("outer: arrivals, extrapolated along the momentum", baselines.MomentumLookAhead),
    "fed-buff": entry_of("outer: FedBuff, a buffer of 10 arrivals", baselines.FedBuff),
    "fed-async": entry_of("outer: FedAsync, the workers' models mixed in by their delay", baselines.FedAsync),
}

_DOMAIN = {"domain": Option("domain", default="whole", convert=parse_set)}  # the option that every rule has


class RuleSpec(Spec[AnyRule[Any]]):
    """A rule's text that has been read."""

    def build(self, domain: ConvexSet | str | None = None, **more: Any) -> AnyRule[Any]:
        """The rule, on the set of its text or else on this one; each option with several values is an axis of runs."""
        return super().build(domain=None if domain is None else as_set(domain), **more)


def read_rule(text: str) -> RuleSpec:
    """What a text says, such as ``anytime-sgd:lr=0.1|1,power=2``, or ``package.module:Class:option=value``."""
    return RuleSpec(**vars(read_spec(text, "rule", RULES, _DOMAIN)))


def parse_rule(text: str, domain: ConvexSet | str | None = None) -> AnyRule[Any]:
    """The rule that a text describes.

    A name of ``lategrad list``, and options of the rule (and of the learner inside it) by their names in Python; with
    several values, ``lr=0.1|1|10``, it is a sweep. Instead of the name, ``package.module:Class`` or
    ``path/to/file.py:Class`` is your own rule.

    Args:
        text: such as ``steady``, ``steady:lr=1,c=20`` or ``anytime-sgd:lr=0.1|1,power=2,domain=ball:5``.
        domain: the set, where the text has none: a set or a text.

    >>> parse_rule("sgd:lr=0.1,average=linear", "ball:5")
    SGD(lr=0.1, domain=Ball(radius=5.0, center=None), average='linear', weight_decay=0.0)
    >>> parse_rule("sgd:lr=0.1|1").lr
    tensor([[0.1000],
            [1.0000]], dtype=torch.float64)
    >>> parse_rule("sgd:averages=linear")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    ValueError: rule 'sgd' has no option 'averages'; did you mean 'average'?; its options: lr, average=none, ...
    """
    return as_rule(read_rule(text).build(domain))


def as_rule(rule: AnyRule[Any] | str) -> AnyRule[Any]:
    """A rule from what users write: a rule, or a text such as ``steady:lr=1``."""
    if isinstance(rule, str):
        return parse_rule(rule)
    kind = rule if isinstance(rule, type) else type(rule)
    if issubclass(kind, Optimizer):
        same = next((name for name in RULES if name.replace("-", "") == kind.__name__.lower()), "steady-adam")
        raise ValueError(f"rule must be a server rule, such as {same!r}, got {kind.__name__}, an optimizer for a "
                         "loop of your own, where lategrad.optim.Delayed gives it late gradients")  # fmt: skip
    if isinstance(rule, type):
        raise ValueError(f"rule must be a rule, got the class {rule.__name__}: call it, {rule.__name__}(...)")
    missing = [member for member in ("domain", "init", "query", "update", "output") if not hasattr(rule, member)]
    if missing:
        remedy = ": give it a field domain = lategrad.WholeSpace(), or another set" if missing == ["domain"] else ""
        raise ValueError(f"rule must be a server rule, such as lategrad.Steady() or 'steady:lr=1', got "
                         f"{type(rule).__name__}, which has no {', '.join(missing)}{remedy}")  # fmt: skip
    return rule


def build_rule(name: str, value: Scalar, domain: ConvexSet) -> AnyRule[Any]:
    """The rule of that name, with its first option (one value, or one for each run) and its constraint set."""
    entry = read_rule(name).entry
    return entry.make(domain=domain, **{entry.parameter: value})
