"""Every set, learner and rule by its name, with its options: ``parse_rule("steady:lr=1,c=20", domain="ball:5")``.

A rule joins with one line in :data:`RULES`; its options are read off the fields of its class.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import torch

from lategrad.domains import SETS as SETS
from lategrad.domains import as_set
from lategrad.domains import parse_set as parse_set
from lategrad.learners import (
    FTRL,
    KT,
    OGD,
    AdaGrad,
    AdaGradNorm,
    DoG,
    DoWG,
    Learner,
    OptimisticFTRL,
    OptimisticOGD,
)
from lategrad.rules import (
    SGD,
    AnyRule,
    Anytime,
    CenteredClipping,
    Steady,
    SteadyAdam,
    SteadyMuon,
    SteadyShort,
    StronglyConvexOGD,
    baselines,
)
from lategrad.sets import ConvexSet, WholeSpace
from lategrad.support.options import Option, load_object, options_of, own_target, parse_options, split_options
from lategrad.support.validation import Scalar, did_you_mean, require

Built = TypeVar("Built", covariant=True)


@dataclass(frozen=True)
class Entry(Generic[Built]):
    """A learner or a rule that is built from its options and a set."""

    summary: str
    make: Callable[..., Built]
    """Takes its options, and the set as ``domain``, by name."""
    options: Mapping[str, Option]

    @property
    def parameter(self) -> str:
        """What its first option, its one number, is called."""
        return next(iter(self.options))

    def build(self, value: Scalar, domain: ConvexSet) -> Built:
        """With its one number (or one number for each run), and a default for the rest."""
        return self.make(domain=domain, **{self.parameter: value})


def _entry(summary: str, make: Callable[..., Built], **preset: Any) -> Entry[Built]:
    """An entry whose options are those of a class, some with another default."""
    options = {name: replace(option, default=preset.get(name, option.default))
               for name, option in options_of(make).items()}  # fmt: skip
    return Entry(summary, lambda **given: make(**{**preset, **given}), options)


LEARNERS: dict[str, Entry[Learner[Any]]] = {
    "ogd": _entry("online gradient descent, step lr/sqrt(t)", OGD),
    "ftrl": _entry("follow the regularised leader (dual averaging)", FTRL),
    "adagrad-norm": _entry("OGD with one step from all past gradients", AdaGradNorm),
    "adagrad": _entry("OGD with a step for every coordinate", AdaGrad),
    "optimistic-ogd": _entry("adaptive optimistic OGD", OptimisticOGD),
    "optimistic-ftrl": _entry("adaptive optimistic FTRL", OptimisticFTRL),
    "dog": _entry("distance over gradients (experimental)", DoG),
    "dowg": _entry("distance over weighted gradients (experimental)", DoWG),
    "kt": _entry("coin betting (experimental)", KT),
}


def _anytime(learner: str, summary: str) -> Entry[AnyRule[Any]]:
    """Anytime averaging around a learner; the options of both."""
    inner, own = LEARNERS[learner], options_of(Anytime)

    def make(domain: ConvexSet, **given: Any) -> AnyRule[Any]:
        outer = {name: given.pop(name) for name in own if name in given}
        return Anytime(inner.make(domain=domain, **given), **outer)

    return Entry(summary, make, {**inner.options, **own})


RULES: dict[str, Entry[AnyRule[Any]]] = {
    "anytime-sgd": _anytime("ogd", "Algorithm 1 with OGD, the paper's anytime SGD"),
    "anytime-ftrl": _anytime("ftrl", "Algorithm 1 with FTRL"),
    "anytime-adagrad-norm": _anytime("adagrad-norm", "Algorithm 1 with AdaGrad-norm"),
    "anytime-adagrad": _anytime("adagrad", "Algorithm 1 with AdaGrad"),
    "optimistic-anytime": _anytime("optimistic-ogd", "Algorithm 2 with optimistic OGD"),
    "optimistic-anytime-ftrl": _anytime("optimistic-ftrl", "Algorithm 2 with optimistic FTRL"),
    "strongly-convex": _entry("Algorithms 3 and 4, for strongly convex objectives", StronglyConvexOGD),
    "sgd": _entry("SGD with a constant step, last iterate", SGD),
    "sgd-uniform": _entry("SGD with a constant step, uniform average", SGD, average="uniform"),
    "sgd-linear": _entry("SGD with a constant step, linearly weighted average", SGD, average="linear"),
    "centered-clipping": _entry(
        "SGD along a momentum that no single worker can move far", CenteredClipping, radius=1.0
    ),
    "steady": _entry("our own: anytime averaging for long delays", Steady),
    "steady-coordinate": _entry("our own, with a step for every coordinate", Steady, per_coordinate=True),
    "steady-short": _entry("our own, for runs that are short against the delay", SteadyShort),
    "steady-adam": _entry("our own, for deep models: Adam's steps, averaged and braked", SteadyAdam),
    "steady-muon": _entry("our own, for deep models: orthogonalised steps that look ahead", SteadyMuon),
    "anytime-dog": _anytime("dog", "Algorithm 1 with DoG (experimental)"),
    "anytime-dowg": _anytime("dowg", "Algorithm 1 with DoWG (experimental)"),
    "anytime-kt": _anytime("kt", "Algorithm 1 with coin betting (experimental)"),
    "adaptive-revision": _entry("AdaptiveRevision, uniform average", baselines.AdaptiveRevision),
    "async-adagrad": _entry("asynchronous AdaGrad, uniform average", baselines.AsyncAdaGrad),
    "ada-delay": _entry("AdaDelay per coordinate, L = 1", baselines.AdaDelay),
    "dc-asgd": _entry("SGD with delay compensation, lambda = 0.04", baselines.DCASGD),
    "dc-asgd-a": _entry("SGD with adaptive delay compensation, lambda_0 = 2", baselines.AdaptiveDCASGD),
    "staleness-aware": _entry("SGD, learning rate lr/max(1, delay)", baselines.StalenessAware),
    "delay-adaptive": _entry("delay-adaptive SGD, the number of workers estimated", baselines.DelayAdaptive),
    "picky-sgd": _entry("SGD on gradients taken within a distance of 1", baselines.PickySGD),
    "ringmaster": _entry("Ringmaster ASGD, SGD on delays below 10", baselines.Ringmaster),
    "rennala": _entry("Rennala SGD, minibatches of 10 gradients at the current point", baselines.Rennala),
    "clipped-sgd": _entry("SGD on gradients clipped to norm 1", baselines.ClippedSGD),
    "schedule-free": _entry("Schedule-Free SGD, interpolation 0.9", baselines.ScheduleFree),
    "unixgrad": _entry("UniXGrad, two gradients a round", baselines.UniXGrad),
    "sgd-momentum": _entry("SGD with momentum 0.9", baselines.SGDMomentum),
    "adamw": _entry("AdamW, torch's constants", baselines.AdamW),
    "nadam": _entry("NAdam with beta1 = 0.99, for asynchronous pipelines", baselines.NAdam),
    "schedule-free-adamw": _entry("Schedule-Free AdamW, the package's constants", baselines.ScheduleFreeAdamW),
    "muon": _entry("Muon on matrices, AdamW on the rest", baselines.Muon),
    "gap-aware": _entry("Gap-Aware SGD, momentum 0.9", baselines.GapAware),
    "dana-slim": _entry("DANA-Slim, a momentum of 0.9 for every worker", baselines.DANASlim),
    "pipemare": _entry("AdamW with PipeMare's learning rates", baselines.PipeMare),
    "weight-prediction": _entry("AdamW with predicted weights, as in XPipe", baselines.WeightPrediction),
    "ringmaster-muon": _entry("Ringmaster Muon, delays below 2", baselines.RingmasterMuon),
    "nesterov": _entry("DiLoCo's outer rule: Nesterov momentum 0.9", baselines.SGDMomentum, lr=0.7, nesterov=True),
    "delayed-nesterov": _entry("outer: Nesterov momentum, updated once in 4 arrivals", baselines.DelayedNesterov),
    "momentum-look-ahead": _entry("outer: each arrival, extrapolated along the momentum", baselines.MomentumLookAhead),
    "fed-buff": _entry("outer: FedBuff, a buffer of 10 arrivals", baselines.FedBuff),
    "fed-async": _entry("outer: FedAsync, the workers' models mixed in by their staleness", baselines.FedAsync),
}


@dataclass(frozen=True)
class RuleSpec:
    """A rule as text, understood: whose it is, and the values of its options, several for a sweep."""

    name: str
    entry: Entry[AnyRule[Any]]
    given: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    domain: ConvexSet | None = None

    @property
    def own(self) -> bool:
        """Whether it is a class of the user's own."""
        return self.name not in RULES

    @property
    def swept(self) -> list[str]:
        """The options with several values, in the order of the axes that they make."""
        return [name for name, values in self.given.items() if len(values) > 1]

    def with_option(self, name: str, *values: Any) -> RuleSpec:
        """The same with one more option given."""
        return replace(self, given={**self.given, name: values})

    def build(self, domain: ConvexSet | str | None = None) -> AnyRule[Any]:
        """The rule, on its own set or else on this one; every option with several values is an axis of runs."""
        require("domain", domain, self.domain is None or domain is None, f"None: rule {self.name!r} has its own")
        missing = [name for name, option in self.entry.options.items() if option.required and name not in self.given]
        if missing:
            example = ",".join(f"{name}=VALUE" for name in missing)
            raise ValueError(f"rule {self.name!r} needs {' and '.join(missing)}: write {self.name}:{example}")
        try:
            values = {name: self._value(name) for name in self.given}
            return self.entry.make(domain=as_set(self.domain or domain), **values)
        except ValueError as error:
            raise ValueError(f"rule {self.name!r}: {error}") from None

    def _value(self, name: str) -> Any:
        values = self.given[name]
        if len(values) == 1:
            return values[0]
        later = len(self.swept) - 1 - self.swept.index(name)
        return torch.tensor(values, dtype=torch.float64).view(-1, *[1] * later, 1)


def read_rule(text: str) -> RuleSpec:
    """What a text says, such as ``anytime-sgd:lr=0.1|1,power=2``, or ``package.module:Class:option=value``."""
    name, _, options = text.partition(":")
    name = name.strip()
    if name in RULES:
        entry = RULES[name]
    else:
        own = own_target(text)
        if own is None:
            raise ValueError(f"unknown rule {name!r}{did_you_mean(name, RULES)}; valid: {', '.join(RULES)}")
        name, options = f"{own[0]}:{own[1]}", own[2]
        entry = _own_entry(own[0], own[1])
    owner = f"rule {name!r}"
    pairs = split_options(options, owner)
    domain = [parse_set(value) for key, value in pairs if key == "domain"]
    others = ",".join(f"{key}={value}" for key, value in pairs if key != "domain")
    return RuleSpec(name, entry, parse_options(others, entry.options, owner), domain[0] if domain else None)


def _own_entry(module: str, name: str) -> Entry[AnyRule[Any]]:
    make = load_object(module, name)
    require("rule", f"{module}:{name}", callable(make), "a class, or a function that makes a rule")
    options = options_of(make)
    takes_domain = "domain" in inspect.signature(make).parameters

    def build(domain: ConvexSet, **given: Any) -> AnyRule[Any]:
        require("domain", domain, takes_domain or isinstance(domain, WholeSpace), f"none: {name} takes no domain")
        return as_rule(make(**given, **({"domain": domain} if takes_domain else {})))

    return Entry((make.__doc__ or "").strip().partition("\n")[0], build, options)


def parse_rule(text: str, domain: ConvexSet | str | None = None) -> AnyRule[Any]:
    """The rule that a text describes.

    A name of ``lategrad list``, and options of the rule (and of the learner inside it) by their names in Python; with
    several values, ``lr=0.1|1|10``, it is a sweep. Instead of the name, ``package.module:Class`` or
    ``path/to/file.py:Class`` is a rule of one's own.

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
    return read_rule(text).build(domain)


_MEMBERS = ("domain", "init", "query", "update", "output")


def as_rule(rule: AnyRule[Any] | str) -> AnyRule[Any]:
    """A rule from what users write: a rule, or a text such as ``steady:lr=1``."""
    if isinstance(rule, str):
        return parse_rule(rule)
    if isinstance(rule, type):
        raise ValueError(f"rule must be a rule, got the class {rule.__name__}: call it, {rule.__name__}(...)")
    missing = [member for member in _MEMBERS if not hasattr(rule, member)]
    if missing:
        remedy = ": give it a field domain = lategrad.WholeSpace(), or another set" if missing == ["domain"] else ""
        raise ValueError(f"rule must be a server rule, such as lategrad.Steady() or 'steady:lr=1', got "
                         f"{type(rule).__name__}, which has no {', '.join(missing)}{remedy}")  # fmt: skip
    return rule


def build_rule(name: str, value: Scalar, domain: ConvexSet) -> AnyRule[Any]:
    """The rule of that name, with its one number (or one number for each run) and its set."""
    if name not in RULES:
        raise ValueError(f"unknown rule {name!r}{did_you_mean(name, RULES)}; valid: {', '.join(RULES)}")
    return RULES[name].build(value, domain)
