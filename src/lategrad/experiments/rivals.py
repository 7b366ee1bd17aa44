"""The paper's rules, Steady and every rival under constant, random, changing and data-dependent delays.

Each rule is tuned twice: at delay 0 and then frozen (the headline), and anew for every kind of delay (the oracle).
Tuning looks at the training loss; the test accuracy is only reported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor

from lategrad.delays import ByClass
from lategrad.experiments import style
from lategrad.experiments.jobs import Job
from lategrad.experiments.part import Run
from lategrad.experiments.results import Section
from lategrad.experiments.sweep import LOGNORMAL, cached_trace, dataset, half_decades
from lategrad.problems import SoftmaxRegression
from lategrad.registry import build_rule, parse_set
from lategrad.rules import AnyRule
from lategrad.simulate import Delays, simulate
from lategrad.trace import Axis, Trace, describe

SCENARIOS: dict[str, Delays] = {
    "0": 0,
    "100": 100,
    "250": 250,
    "500": 500,
    "1000": 1000,
    "lognormal": LOGNORMAL,
    "10-1000-10": "regimes:0.33*10;0.34*1000;10",
    "slow worker": "cluster:workers=50,speed=lognormal,spread=0.4,slow=1x100",
    "by class": ByClass((0,) * 5 + (1000,) * 5, reduce="mean"),
}
"""Kinds of delays by their names in tables; the first is the one that steps are frozen from."""


RUN_STEP = 5e-6
"""Seconds of one core for one update of one run on digits, about; for forecasts."""
_three_digits = style.three_digits


def scenarios_for(classes: int) -> dict[str, Delays]:
    """The same kinds for a data set with another number of classes, the last half of which is late."""
    late = classes // 2
    return SCENARIOS | {"by class": ByClass((0,) * (classes - late) + (1000,) * late, reduce="mean")}


POINTS = ("output", "query")
"""Where a run is judged: at the rule's own output, and at its last query (most rules' last iterate)."""


@dataclass(frozen=True)
class Contender:
    """A rule, the steps it may choose from, and a second number that only delays can tell apart."""

    rule: str
    steps: tuple[float, ...]
    knob: str = ""
    """The name of the second number, if it has one that neither its paper nor its theory settles."""
    values: tuple[float, ...] = ()
    projected: bool = False
    """Whether its theory covers the projection onto a ball."""

    def build(self, domain: str, every_step: int) -> AnyRule[Any]:
        """All its combinations as one rule; runs have the shape (values of the knob, steps)."""
        steps = torch.tensor(self.steps[::every_step], dtype=torch.float64)
        rule = build_rule(self.rule, steps.view(1, -1, 1), parse_set(domain))
        if not self.knob:
            return rule
        values = torch.tensor(self.values, dtype=torch.float64).view(-1, 1, 1)
        return dataclasses.replace(rule, **{self.knob: values})  # type: ignore[type-var]


_LOW, _MIDDLE, _HIGH = half_decades(-3, 1), half_decades(-2, 2), half_decades(-1, 3)
CONTENDERS = (
    Contender("sgd-linear", _LOW),
    Contender("anytime-sgd", _HIGH, projected=True),
    Contender("optimistic-anytime", _HIGH, projected=True),
    Contender("steady", _MIDDLE, projected=True),
    Contender("steady-coordinate", _MIDDLE),
    Contender("adaptive-revision", _LOW),
    Contender("async-adagrad", _LOW),
    Contender("ada-delay", _LOW, "smoothness", (1.0, 10.0, 100.0)),
    Contender("dc-asgd", _LOW),
    Contender("dc-asgd-a", _LOW),
    Contender("staleness-aware", half_decades(-3, 1)),
    Contender("delay-adaptive", _LOW),
    Contender("picky-sgd", _LOW, "distance", (0.1, 1.0, 10.0)),
    Contender("ringmaster", _LOW, "threshold", (1.0, 10.0, 100.0)),
    Contender("rennala", half_decades(-3, 1), "batch", (1.0, 10.0, 100.0)),
    Contender("clipped-sgd", half_decades(-3, 1), "clip", (0.1, 0.5, 2.0)),
    Contender("schedule-free", _LOW),
    Contender("unixgrad", _HIGH, projected=True),
)


@dataclass(frozen=True)
class Setting:
    """A data set, how many updates are made on it, and how many rows each uses."""

    data: str
    updates: int
    batch: int
    preprocessing: str = "standardise-globally"
    first_seed: int = 0


@dataclass(frozen=True)
class Config:
    """Everything that was chosen."""

    settings: tuple[Setting, ...]
    seeds: int
    every_step: int = 1
    """Take every n-th step of the grids: 1 for half decades, 2 for decades."""
    domains: tuple[tuple[str, str], ...] = (("unconstrained", "whole"), ("constrained", "ball:10"))
    """Names and sets."""
    contenders: tuple[Contender, ...] = CONTENDERS

    def problem(self, setting: Setting) -> SoftmaxRegression:
        """Softmax regression."""
        return SoftmaxRegression(dataset(setting.data, setting.preprocessing), batch=setting.batch)


UNSEEN = tuple(Setting(name, 20_000, 16, "standardise", first_seed=100) for name in ("letters", "satellite"))
"""Data and seeds on which nothing was chosen, neither a rule nor a constant."""

CONFIGS = {
    "quick": Config((Setting("digits", 20_000, 16),), seeds=1, every_step=2),
    "paper": Config((Setting("fashion-mnist", 46_875, 64), Setting("digits", 20_000, 16)), seeds=3),
    "full": Config((Setting("fashion-mnist", 187_500, 16), Setting("digits", 50_000, 16), *UNSEEN), seeds=3),
}


TOO_LARGE = ("fashion-mnist",)
"""Data sets on which the comparison takes hours on a CPU."""


def config_for(run: Run) -> Config:
    """What is run: without a GPU, not on the data sets that would take hours."""
    config = CONFIGS[run.scale]
    if run.device != "cpu":
        return config
    return dataclasses.replace(config, settings=tuple(s for s in config.settings if s.data not in TOO_LARGE))


# ---- running


def jobs(run: Run) -> list[Job]:
    """A job for every rule on every data set and set."""
    config, made = config_for(run), []
    for setting in config.settings:
        for domain in config.domains:
            for contender in config.contenders:
                runs = (len(contender.steps[:: config.every_step]) * max(1, len(contender.values)) * len(SCENARIOS)
                        * config.seeds)  # fmt: skip
                made.append(Job(
                    f"rivals: {setting.data}, {domain[0]}, {style.TITLES[contender.rule]}",
                    6 + runs * setting.updates * RUN_STEP if run.device == "cpu" else 30,
                    partial(measure, config, setting, domain, contender, run.out, device=run.device),
                    (_path(run.out, setting, domain, contender),),
                    "processes" if run.device == "cpu" else "gpu",
                ))  # fmt: skip
    return made


def _path(out: Path, setting: Setting, domain: tuple[str, str], contender: Contender) -> Path:
    return out / "traces" / f"rivals-{setting.data}-{domain[0]}-{contender.rule}.safetensors"


def measure(config: Config, setting: Setting, domain: tuple[str, str], contender: Contender, out: Path, *,
            device: str) -> Trace:  # fmt: skip
    """All steps of a rule under all delays: axes seed, delay, knob, step and point; no vectors."""
    problem, (_, the_set) = config.problem(setting), domain
    kinds = scenarios_for(problem.outputs)
    scenarios = {label: describe(delays) for label, delays in kinds.items()}
    rule = contender.build(the_set, config.every_step)
    key = {"setting": dataclasses.asdict(setting), "seeds": config.seeds,
           "rule": describe(rule), "scenarios": scenarios}  # fmt: skip

    def run() -> Trace:
        trace = simulate(
            problem, rule, list(kinds.values()), setting.updates, device=device,
            seed=[setting.first_seed + k for k in range(config.seeds)],
            record_every=setting.updates,
            # On a GPU the step is replayed as a graph: for small problems compiling takes longer than it saves.
            compile=setting.updates > 10_000 and (device == "cpu" or setting.data in TOO_LARGE),
        )  # fmt: skip
        return _at_both_points(trace, contender, problem, device)

    return cached_trace(_path(out, setting, domain, contender), key, run)


def _at_both_points(trace: Trace, contender: Contender, problem: SoftmaxRegression, device: str) -> Trace:
    """The end of a run, judged at the rule's output and at its query; the vectors are left behind."""
    on_device, query = problem.to(device), trace.query.to(device)
    accuracy = on_device.accuracy(query)
    assert trace.accuracy is not None
    assert accuracy is not None
    at_query = {"loss": on_device.loss(query).squeeze(-1).cpu(), "accuracy": accuracy.squeeze(-1).cpu()}
    at_output = {"loss": trace.loss[-1], "accuracy": trace.accuracy[-1]}
    number = next(axis for axis in trace.axes if axis.name not in ("seed", "delay", contender.knob, "run0"))
    axes = (trace.axis("seed"), Axis("delay", tuple(SCENARIOS)), Axis("knob", contender.values or ("",)),
            Axis("lr", number.values), Axis("point", POINTS))  # fmt: skip
    both: dict[str, Any] = {
        name: torch.stack([at_output[name], at_query[name]], dim=-1).unsqueeze(0) for name in at_output
    }
    return dataclasses.replace(
        trace, steps=trace.steps[-1:], axes=axes, delays=trace.delays[-1:], time=None, worker=None,
        output=trace.output[..., :0], query=trace.query[..., :0], **both,
    )  # fmt: skip


# ---- judging


@dataclass(frozen=True, eq=False)
class Result:
    """A rule in one panel: its accuracies and how it was tuned."""

    rule: str
    contender: Contender
    steps: tuple[float, ...]
    """Those that were run."""
    accuracy: Tensor
    """``(seeds, delays, knobs, steps)`` at the point that the rule is judged by; what diverged counts as zero."""
    at_query: Tensor
    """The same at the last query."""
    loss: Tensor
    """The training loss at the point that the rule is judged by, which it is tuned by; infinite if it diverged."""
    test_rows: int
    """How many rows an accuracy is a mean of."""

    @cached_property
    def choice(self) -> tuple[int, int]:
        """The frozen knob and step: the step has the smallest training loss without delay; the knob, which often makes
        no difference there, is granted in hindsight, the best test accuracy on average over all delays."""
        mean = self.accuracy.mean(0)
        steps = self.loss.mean(0)[0].argmin(-1)  # for each value of the knob
        late = mean[1:].gather(-1, steps.view(1, -1, 1).expand(len(mean) - 1, -1, 1))
        knob = int(late.squeeze(-1).mean(0).argmax())
        return knob, int(steps[knob])

    @property
    def frozen(self) -> Tensor:
        """``(seeds, delays)`` with the frozen step."""
        knob, step = self.choice
        return self.accuracy[:, :, knob, step]

    @property
    def frozen_at_query(self) -> Tensor:
        """The same runs at their last query."""
        knob, step = self.choice
        return self.at_query[:, :, knob, step]

    @property
    def oracle(self) -> Tensor:
        """``(seeds, delays)`` with the step and the knob of the smallest training loss at each delay."""
        flat = self.accuracy.flatten(2)
        best = self.loss.flatten(2).mean(0).argmin(-1)
        return flat.gather(-1, best.view(1, -1, 1).expand(len(flat), -1, 1)).squeeze(-1)


def mean_late(accuracy: Tensor) -> float:
    """The mean over all delays but 0."""
    return accuracy[:, 1:].mean().item()


def worst_drop(accuracy: Tensor) -> float:
    """How much is lost, on the mean over seeds, from delay 0 to the worst delay."""
    by_delay = accuracy.mean(0)
    return (by_delay[0] - by_delay.min()).item()


def spread(accuracy: Tensor) -> float:
    """How far the means over the late delays of two seeds are apart."""
    by_seed = accuracy[:, 1:].mean(1)
    return (by_seed.max() - by_seed.min()).item()


def is_ahead(first: Result, second: Result, protocol: str) -> bool:
    """Whether a mean is better by more than both rules' seeds differ, and by more than two rows of the test part.

    All else is a tie.
    """
    mine, other = getattr(first, protocol), getattr(second, protocol)
    return mean_late(mine) - mean_late(other) > max(spread(mine), spread(other), 2 / first.test_rows)


def place(result: Result, panel: Sequence[Result], protocol: str) -> int:
    """One more than the number of rules that are ahead; tied rules share the best place."""
    return 1 + sum(is_ahead(other, result, protocol) for other in panel)


def results(trace: Trace, contender: Contender, test_rows: int) -> list[Result]:
    """The rule judged by its own output; SGD also by its last iterate, as a rule of its own."""
    assert trace.accuracy is not None
    finite = torch.isfinite(trace.loss[-1])
    output, query = torch.where(finite, trace.accuracy[-1], 0.0).unbind(-1)
    loss, loss_at_query = torch.where(finite, trace.loss[-1], torch.inf).unbind(-1)
    steps = trace.axis("lr").values
    own = Result(contender.rule, contender, steps, output, query, loss, test_rows)
    if contender.rule != "sgd-linear":
        return [own]
    return [Result("sgd", contender, steps, query, query, loss_at_query, test_rows), own]


def ranked(panel: Iterable[Result]) -> list[Result]:
    """The best mean over the delays first, steps frozen."""
    return sorted(panel, key=lambda result: -mean_late(result.frozen))


def title(result: Result, constrained: bool) -> str:
    """The rule's name, with a dagger where the projection is outside its theory."""
    return style.TITLES[result.rule] + (" †" if constrained and not result.contender.projected else "")


def table(panel: Sequence[Result], constrained: bool, protocol: str) -> list[dict[str, str]]:
    """A row for each rule, best mean first: mean and worst drop, accuracy at every delay, spread, how it was tuned."""
    rows = []
    for result in sorted(panel, key=lambda r: -mean_late(getattr(r, protocol))):
        accuracy = getattr(result, protocol)
        row = {"place": str(place(result, panel, protocol)), "rule": title(result, constrained),
               "mean": _three_digits(mean_late(accuracy)),
               "worst drop": _three_digits(worst_drop(accuracy))}  # fmt: skip
        row |= dict(zip(SCENARIOS, map(_three_digits, accuracy.mean(0).tolist()), strict=True))
        row["spread"] = _three_digits(spread(accuracy))
        if protocol == "frozen":
            knob, step = result.choice
            settled = f", {result.contender.knob} {result.contender.values[knob]:g}" if result.contender.knob else ""
            differs = not torch.equal(result.accuracy, result.at_query)
            row["mean at query"] = _three_digits(mean_late(result.frozen_at_query)) if differs else ""
            row["step"] = f"{result.steps[step]:.2g}{settled}"
        rows.append(row)
    return rows


# ---- showing

Panels = dict[tuple[Setting, tuple[str, str]], list[Result]]


def plot(panels: Panels, setting: Setting) -> Figure:
    """For each rule the range and the mean over the late delays with its frozen step, and the oracle's mean."""
    ours = {domain: ranked(panel) for (of, domain), panel in panels.items() if of == setting}
    rules = max(len(panel) for panel in ours.values())
    figure, axes = style.panels([f"{setting.data}, {name} ({the_set})" for name, the_set in ours], "",
                                height=0.6 + 0.21 * rules, sharey=False)  # fmt: skip
    for ax, ((_, the_set), panel) in zip(axes, ours.items(), strict=True):
        for y, result in enumerate(panel):
            colour = style.COLOURS.get(result.rule, style.RIVAL)
            late = result.frozen.mean(0)[1:]
            ax.plot([late.min(), late.max()], [y, y], color=colour, linewidth=3, alpha=0.35, solid_capstyle="butt")
            ax.plot(mean_late(result.frozen), y, "o", color=colour, markersize=5)
            ax.plot(mean_late(result.oracle), y, "o", color=colour, markersize=5, markerfacecolor="white")
            ax.plot(result.frozen.mean(0)[0], y, "|", color=colour, markersize=8)
        ax.set_yticks(range(len(panel)), [title(result, the_set != "whole") for result in panel], fontsize=7.5)
        ax.set_ylim(len(panel) - 0.4, -0.6)
        ax.tick_params(axis="x", labelsize=8)
    axes[-1].set_xlabel("test accuracy")
    handles = [
        Line2D([], [], color="black", marker="o", linestyle="", label="mean over the delays, frozen step"),
        Line2D([], [], color="black", linewidth=3, alpha=0.35, label="worst to best delay, frozen step"),
        Line2D([], [], color="black", marker="o", linestyle="", markerfacecolor="white",
               label="mean, tuned at each delay"),
        Line2D([], [], color="black", marker="|", linestyle="", markersize=8, label="without delay"),
    ]  # fmt: skip
    figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=7.5)
    return figure


HEADLINE = "rivals-over-delays"
OURS = ("steady", "steady-coordinate")


def headline(panels: Panels) -> Figure:
    """Accuracy against the constant delays with frozen steps, in the first panel: ours before the rivals in grey."""
    (setting, (name, _)), panel = next(iter(panels.items()))
    figure, (ax,) = style.panels(
        [f"Ours against the rivals: {setting.data}, {name}"], "test accuracy", height=style.HEADLINE
    )
    constant = [position for position, label in enumerate(SCENARIOS) if label.isdecimal()]
    for result in sorted(panel, key=lambda result: result.rule in OURS):
        values = result.frozen.mean(0)[constant]
        if result.rule in OURS:
            dashes = "-" if result.rule == OURS[0] else "--"
            ax.plot(values, dashes, marker="o", markersize=4, linewidth=2.4, color=style.COLOURS[result.rule],
                    label=style.TITLES[result.rule])  # fmt: skip
        else:
            coloured = result.rule in ("sgd", "anytime-sgd")
            ax.plot(values, linewidth=1.4 if coloured else 0.8, alpha=1 if coloured else 0.7,
                    color=style.COLOURS[result.rule] if coloured else style.RIVAL,
                    label=style.TITLES[result.rule] if coloured else None)  # fmt: skip
    ax.set_xticks(range(len(constant)), [list(SCENARIOS)[position] for position in constant])
    ax.set_xlabel("delay (updates)")
    style.legend(figure, [ax])
    return figure


def finding(panels: Panels) -> str:
    """Where Steady stands in each panel."""
    parts = []
    for (setting, (name, _)), panel in panels.items():
        order = ranked(panel)
        ours = next(result for result in order if result.rule in OURS)
        best = next(result for result in order if result.rule not in OURS)
        rank = place(ours, order, "frozen")
        tied = any(place(other, order, "frozen") == rank for other in order if other.rule not in OURS)
        parts.append(
            f"{'tied for ' if tied else ''}{_ordinal(rank)} of {len(order)} on {setting.data}, {name} "
            f"({mean_late(ours.frozen):.3f} on average over the delays; the best rival, {style.TITLES[best.rule]}, "
            f"{mean_late(best.frozen):.3f})"
        )
    return f"Our own rule, Steady, with its step frozen from delay 0, is {', and '.join(parts)}."


def _ordinal(number: int) -> str:
    return {1: "first", 2: "second", 3: "third"}.get(number, f"{number}th")


def rows(setting: Setting, domain: tuple[str, str], trace: Trace, contender: Contender) -> list[dict[str, Any]]:
    """Every final number of a rule, for the CSV."""
    place = {"data": setting.data, "regime": domain[0], "rule": contender.rule}
    return [
        {**place, "delay": row["delay"], "knob": contender.knob, "value": row["knob"], "lr": row["lr"],
         "seed": row["seed"], "point": row["point"], "accuracy": row["accuracy"], "loss": row["loss"]}
        for row in trace.rows()
    ]  # fmt: skip


def _winners(panels: Panels) -> str:
    """Who is best in each panel, under both protocols."""
    parts = []
    for (setting, (name, the_set)), panel in panels.items():
        first = ranked(panel)
        oracle = max(panel, key=lambda result: mean_late(result.oracle))
        constrained = the_set != "whole"
        parts.append(
            f"{setting.data}, {name}: frozen {title(first[0], constrained)} ({mean_late(first[0].frozen):.3f}) before "
            f"{title(first[1], constrained)} ({mean_late(first[1].frozen):.3f}), oracle {title(oracle, constrained)} "
            f"({mean_late(oracle.oracle):.3f})"
        )
    return "; ".join(parts)


def section(run: Run) -> Section:
    """Everything, by both protocols."""
    left_out = [s.data for s in CONFIGS[run.scale].settings if s not in config_for(run).settings]
    missing = (
        f"Left out, as it takes hours on a CPU: {', '.join(left_out)}; `lategrad reproduce rivals --scale {run.scale} "
        "--device cuda` has it."
    )
    return section_of(config_for(run), run.out, device=run.device, about=(missing,) if left_out else ())


def section_of(config: Config, out: Path, *, device: str, about: tuple[str, ...] = ()) -> Section:
    """The same for a configuration of one's own."""
    panels: Panels = {}
    every: list[dict[str, Any]] = []
    for setting in config.settings:
        for domain in config.domains:
            found, problem = panels.setdefault((setting, domain), []), config.problem(setting)
            for contender in config.contenders:
                trace = measure(config, setting, domain, contender, out, device=device)
                found += results(trace, contender, len(problem.test))
                every += rows(setting, domain, trace, contender)
    runs = "; ".join(f"{s.data}, batch {s.batch}, {s.updates:,} updates" for s in config.settings)
    stems = {f"rivals-{setting.data}": setting for setting in config.settings}
    return Section(
        name="rivals",
        title="The rules and their rivals",
        text=(
            f"Softmax regression: {runs}; {config.seeds} seed(s). Delays are constant (0 to 1000); log-normal "
            "(7, 0.4); 10, then 1000, then 10, a third of the run each; those of 50 workers of which one is 100 times "
            "slower; and 1000 times the share of the last half of the classes in the minibatch (no theorem covers that "
            "one). Every gradient that arrives counts as an update, also those that a rule throws away.",
            "Frozen: the step of the smallest training loss at delay 0. Oracle: the smallest at each delay, which "
            "nobody knows beforehand. A second number that means little without delays (Ringmaster's R, Rennala's B, "
            "Picky SGD's distance, the clipping norm, AdaDelay's L) is granted in hindsight, also to the frozen rules: "
            "the best of three in test accuracy on average over all delays. The number of workers that Delay-adaptive "
            "SGD needs is one more than the mean delay so far. Steady's own constants were chosen by test accuracy on "
            "Fashion-MNIST, on these seeds and delays; on letters and satellite nothing was.",
            "Every rule is judged by its own output; `mean at query` is the same runs at their last query, for most "
            "rules the last iterate. The mean is over all delays but 0, the worst drop from delay 0 to the worst one; "
            "the spread is the difference between the means of two seeds. Rules share a place if their means differ by "
            "less than the spread of either or than two rows of the test part: a tie. †: the projection onto the ball "
            "is outside the rule's theory.",
            f"Best means. {_winners(panels)}.",
            *about,
        ),
        figures={stem: plot(panels, setting) for stem, setting in stems.items()} | {HEADLINE: headline(panels)},
        captions={stem: f"Accuracy under late gradients on {s.data}, best mean first." for stem, s in stems.items()}
        | {HEADLINE: f"Every rule with its step frozen from delay 0, {runs}. Grey: the rivals."},
        tables={
            f"{setting.data}, {name} ({the_set}), {protocol}": table(panel, the_set != "whole", protocol)
            for (setting, (name, the_set)), panel in panels.items()
            for protocol in ("frozen", "oracle")
        },
        rows=every,
        finding=finding(panels),
        headline=HEADLINE,
        config=dataclasses.asdict(config) | {"delays": {label: describe(d) for label, d in SCENARIOS.items()}},
    )
