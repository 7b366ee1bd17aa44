"""Every set, learner and rule by its name on the command line, with one line that says what it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

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
from lategrad.rules import SGD, AnyRule, Anytime, Steady, SteadyAdam, SteadyMuon, StronglyConvexOGD, rivals
from lategrad.sets import Ball, Box, ConvexSet, L1Ball, Simplex, WholeSpace
from lategrad.support.validation import Scalar

Built = TypeVar("Built", covariant=True)


@dataclass(frozen=True)
class Entry(Generic[Built]):
    """A learner or a rule that is built from its one number and a set."""

    summary: str
    parameter: str
    """What the one number (``--lr`` on the command line) is called in the constructor."""
    build: Callable[[Scalar, ConvexSet], Built]


LEARNERS: dict[str, Entry[Learner[Any]]] = {
    "ogd": Entry("online gradient descent, step lr/sqrt(t)", "lr", OGD),
    "ftrl": Entry("follow the regularised leader (dual averaging)", "lr", FTRL),
    "adagrad-norm": Entry("OGD with one step from all past gradients", "diameter", AdaGradNorm),
    "adagrad": Entry("OGD with a step for every coordinate", "diameter", AdaGrad),
    "optimistic-ogd": Entry("adaptive optimistic OGD", "diameter", OptimisticOGD),
    "optimistic-ftrl": Entry("adaptive optimistic FTRL", "diameter", OptimisticFTRL),
    "dog": Entry("distance over gradients (experimental)", "initial_distance", DoG),
    "dowg": Entry("distance over weighted gradients (experimental)", "initial_distance", DoWG),
    "kt": Entry("coin betting (experimental)", "wealth", KT),
}


def _anytime(learner: str, summary: str) -> Entry[AnyRule[Any]]:
    entry = LEARNERS[learner]
    return Entry(summary, entry.parameter, lambda value, domain: Anytime(entry.build(value, domain)))


RULES: dict[str, Entry[AnyRule[Any]]] = {
    "anytime-sgd": _anytime("ogd", "Algorithm 1 with OGD, the paper's anytime SGD"),
    "anytime-ftrl": _anytime("ftrl", "Algorithm 1 with FTRL"),
    "anytime-adagrad-norm": _anytime("adagrad-norm", "Algorithm 1 with AdaGrad-norm"),
    "anytime-adagrad": _anytime("adagrad", "Algorithm 1 with AdaGrad"),
    "optimistic-anytime": _anytime("optimistic-ogd", "Algorithm 2 with optimistic OGD"),
    "optimistic-anytime-ftrl": _anytime("optimistic-ftrl", "Algorithm 2 with optimistic FTRL"),
    "strongly-convex": Entry(
        "Algorithms 3 and 4, for strongly convex objectives", "strong_convexity", StronglyConvexOGD
    ),
    "sgd": Entry("SGD with a constant step, last iterate", "lr", SGD),
    "sgd-uniform": Entry(
        "SGD with a constant step, uniform average", "lr", lambda lr, domain: SGD(lr, domain, "uniform")
    ),
    "sgd-linear": Entry(
        "SGD with a constant step, linearly weighted average",
        "lr",
        lambda lr, domain: SGD(lr, domain, "linear"),
    ),
    "steady": Entry("our own: anytime averaging for long delays", "lr", Steady),
    "steady-coordinate": Entry(
        "our own, with a step for every coordinate",
        "lr",
        lambda lr, domain: Steady(lr, domain, per_coordinate=True),
    ),
    "steady-adam": Entry("our own, for deep models: Adam's steps, averaged and braked", "lr", SteadyAdam),
    "steady-muon": Entry("our own, for deep models: orthogonalised steps that look ahead", "lr", SteadyMuon),
    "anytime-dog": _anytime("dog", "Algorithm 1 with DoG (experimental)"),
    "anytime-dowg": _anytime("dowg", "Algorithm 1 with DoWG (experimental)"),
    "anytime-kt": _anytime("kt", "Algorithm 1 with coin betting (experimental)"),
    "adaptive-revision": Entry("AdaptiveRevision, uniform average", "lr", rivals.AdaptiveRevision),
    "async-adagrad": Entry("asynchronous AdaGrad, uniform average", "lr", rivals.AsyncAdaGrad),
    "ada-delay": Entry("AdaDelay per coordinate, L = 1", "diameter", rivals.AdaDelay),
    "dc-asgd": Entry("SGD with delay compensation, lambda = 0.04", "lr", rivals.DCASGD),
    "dc-asgd-a": Entry("SGD with adaptive delay compensation, lambda_0 = 2", "lr", rivals.AdaptiveDCASGD),
    "staleness-aware": Entry("SGD, step lr/max(1, delay)", "lr", rivals.StalenessAware),
    "delay-adaptive": Entry(
        "delay-adaptive SGD, the number of workers estimated from the delays", "lr", rivals.DelayAdaptive
    ),
    "picky-sgd": Entry("SGD on gradients taken within a distance of 1", "lr", rivals.PickySGD),
    "ringmaster": Entry("Ringmaster ASGD, SGD on gradients fewer than 10 steps late", "lr", rivals.Ringmaster),
    "rennala": Entry("Rennala SGD, minibatches of 10 gradients at the current point", "lr", rivals.Rennala),
    "clipped-sgd": Entry("SGD on gradients clipped to norm 1", "lr", rivals.ClippedSGD),
    "schedule-free": Entry("Schedule-Free SGD, interpolation 0.9", "lr", rivals.ScheduleFree),
    "unixgrad": Entry("UniXGrad, two gradients a round", "diameter", rivals.UniXGrad),
    "sgd-momentum": Entry("SGD with momentum 0.9", "lr", rivals.SGDMomentum),
    "adamw": Entry("AdamW, torch's constants", "lr", rivals.AdamW),
    "nadam": Entry("NAdam with beta1 = 0.99, for asynchronous pipelines", "lr", rivals.NAdam),
    "schedule-free-adamw": Entry("Schedule-Free AdamW, the package's constants", "lr", rivals.ScheduleFreeAdamW),
    "muon": Entry("Muon on matrices, AdamW on the rest", "lr", rivals.Muon),
    "gap-aware": Entry("Gap-Aware SGD with momentum 0.9", "lr", rivals.GapAware),
    "dana-slim": Entry("DANA-Slim, a momentum of 0.9 for every worker", "lr", rivals.DANASlim),
    "pipemare": Entry("AdamW with PipeMare's step schedule", "lr", rivals.PipeMare),
    "weight-prediction": Entry("AdamW with predicted weights, as in XPipe", "lr", rivals.WeightPrediction),
    "ringmaster-muon": Entry("Muon on gradients fewer than 10 steps late", "lr", rivals.RingmasterMuon),
}


@dataclass(frozen=True)
class SetEntry:
    """A convex set written as ``name:numbers``."""

    summary: str
    form: str
    counts: tuple[int, ...]
    """How many numbers the form takes."""
    build: Callable[..., ConvexSet]


SETS: dict[str, SetEntry] = {
    "whole": SetEntry("no constraint", "whole", (0,), WholeSpace),
    "ball": SetEntry("Euclidean ball around the origin", "ball:RADIUS", (1,), Ball),
    "box": SetEntry("the same bounds for every coordinate", "box:LOW,HIGH", (2,), Box),
    "simplex": SetEntry("non-negative, with a given sum", "simplex or simplex:TOTAL", (0, 1), Simplex),
    "l1": SetEntry("l1 ball around the origin", "l1:RADIUS", (1,), L1Ball),
}


def parse_set(spec: str) -> ConvexSet:
    """The set that a specification such as ``ball:5`` names.

    >>> parse_set("ball:5")
    Ball(radius=5.0, center=None)
    >>> parse_set("cube:1")
    Traceback (most recent call last):
    ...
    ValueError: unknown set 'cube:1'; valid: whole, ball:RADIUS, box:LOW,HIGH, simplex or simplex:TOTAL, l1:RADIUS
    """
    name, _, rest = spec.partition(":")
    forms = ", ".join(entry.form for entry in SETS.values())
    try:
        numbers = [float(number) for number in rest.split(",")] if rest else []
    except ValueError:
        raise ValueError(f"set {spec!r} has a part that is not a number; valid: {forms}") from None
    if name not in SETS or len(numbers) not in SETS[name].counts:
        raise ValueError(f"unknown set {spec!r}; valid: {forms}")
    return SETS[name].build(*numbers)


def build_rule(name: str, value: Scalar, domain: ConvexSet) -> AnyRule[Any]:
    """The rule of that name, with its one number (or one number for each run) and its set."""
    if name not in RULES:
        raise ValueError(f"unknown rule {name!r}; valid: {', '.join(RULES)}")
    return RULES[name].build(value, domain)
