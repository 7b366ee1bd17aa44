"""Running the comparison, its tables, its figures, and its section of the report."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from lategrad.problems.problem import measure
from lategrad.simulator import simulate
from lategrad.trace import Axis, Trace, describe
from reproduction import report, style
from reproduction.baselines.plan import LARGE, PLANS, SCENARIOS, SoftmaxSetting, scenarios_for
from reproduction.baselines.scores import SoftmaxScores, mean_late, place, ranked, split_points, spread, worst_drop
from reproduction.jobs import Lane
from reproduction.report import Section, prose
from reproduction.study import Plan, Request, Study, Task, column, rows_of, without_vectors
from reproduction.style import TITLES, three_digits

RUN_UPDATE = 5e-6  # seconds of one core for one update of one run on digits, about; for forecasts
POINTS = ("output", "query")  # where a run is judged; the last query is most rules' last iterate

SoftmaxPlan = Plan[SoftmaxSetting]
Panels = dict[SoftmaxSetting, list[SoftmaxScores]]


class Scored(NamedTuple):
    """A rule in one setting: its scores, SGD's by two outputs, and every number for the CSV."""

    scores: list[SoftmaxScores]
    rows: list[dict[str, Any]]


class Baselines(Study[SoftmaxSetting, Scored]):
    """All learning rates of a rule under all delays are one simulation, judged at its output and at its query.

    Small data sets run on the CPU even where there is a GPU, which runs the others.
    """

    name = "baselines"
    plans = PLANS

    def plan(self, request: Request) -> SoftmaxPlan:
        """Without a GPU, not on the data sets that would take hours."""
        plan = self.plans[request.scale]
        settings = [s for s in plan.settings if s.data not in LARGE or request.space.device != "cpu"]
        return dataclasses.replace(plan, settings=tuple(settings))

    def lane(self, task: Task[SoftmaxSetting]) -> Lane:
        return "gpu" if task.setting.data in LARGE else "processes"

    def seconds(self, task: Task[SoftmaxSetting]) -> float:
        runs = len(task.candidate.lrs) * max(1, len(task.candidate.values)) * len(SCENARIOS) * task.seeds
        return 30 if task.setting.data in LARGE else 1 + runs * task.setting.updates * RUN_UPDATE

    def files(self, task: Task[SoftmaxSetting]) -> tuple[Path, ...]:
        setting = task.setting
        return (task.space.path(f"baselines-{setting.data}-{setting.regime}-{task.candidate.rule}"),)

    def measure(self, task: Task[SoftmaxSetting]) -> Scored:
        """The trace has the axes seed, delay, value (of the knob), lr and point, and no vectors."""
        setting, candidate, space = task.setting, task.candidate, task.space
        device = space.device if setting.data in LARGE else "cpu"
        problem = setting.problem()
        scenarios = scenarios_for(problem.outputs)
        rule = candidate.build(column(candidate.lrs).unsqueeze(0), setting.domain)
        key = {"setting": setting.describe(), "seeds": task.seeds, "rule": describe(rule),
               "scenarios": {label: describe(delays) for label, delays in scenarios.items()}}  # fmt: skip

        def run() -> Trace:
            trace = simulate(
                problem, rule, list(scenarios.values()), setting.updates, device=device,
                seed=list(range(task.seeds)), record_every=setting.updates,
            )  # fmt: skip
            at_query = measure(problem.to(device), trace.query.to(device)).by_name()
            ends: dict[str, Any] = {name: torch.stack([values[-1], at_query[name].squeeze(-1).cpu()], -1).unsqueeze(0)
                                    for name, values in trace.recorded().items()}  # fmt: skip
            axes = (trace.axis("seed"), Axis("delay", tuple(SCENARIOS)), Axis("value", candidate.values or ("",)),
                    Axis("lr", candidate.lrs), Axis("point", POINTS))  # fmt: skip
            return dataclasses.replace(without_vectors(trace), steps=trace.steps[-1:], axes=axes, **ends)

        trace = space.trace(self.files(task)[0].stem, key, run)
        scores = split_points(candidate, trace.loss[-1], trace.recorded()["accuracy"][-1], len(problem.test))
        own = {"data": setting.data, "regime": setting.regime, "rule": candidate.rule, "knob": candidate.knob}
        return Scored(scores, rows_of(trace, ("delay", "value", "lr", "seed", "point", "accuracy", "loss"), **own))

    def section(self, request: Request) -> Section:
        section = super().section(request)
        left_out = {s.data for s in self.plans[request.scale].settings} - {s.data for s in self.plan(request).settings}
        if not left_out:
            return section
        missing = (f"Left out, as it takes hours on a CPU: {', '.join(left_out)}; `python -m reproduction baselines "
                   f"--scale {request.scale} --device cuda` includes it.")  # fmt: skip
        return dataclasses.replace(section, text=(*section.text, missing))

    def show(self, plan: SoftmaxPlan, panels: dict[SoftmaxSetting, dict[str, Scored]]) -> Section:
        scores = {s: [score for one in panel.values() for score in one.scores] for s, panel in panels.items()}
        runs = "; ".join(dict.fromkeys(f"{s.data}, batch {s.batch}, {s.updates:,} updates" for s in scores))
        stems = {f"baselines-{data}": data for data in dict.fromkeys(s.data for s in scores)}
        text, _ = prose("baselines", runs=runs, seeds=plan.seeds)
        return Section(
            name=self.name,
            title="Baselines. All rules under nine kinds of delays",
            text=text,
            figures={stem: plot(scores, data) for stem, data in stems.items()},
            captions={stem: f"Accuracy under late gradients on {stems[stem]}, best mean first." for stem in stems},
            tables={f"{s.name} ({s.domain}), {protocol}": table(panel, s.constrained, protocol)
                    for s, panel in scores.items() for protocol in ("frozen", "oracle")},
            rows=[row for panel in panels.values() for one in panel.values() for row in one.rows],
            finding=finding(scores),
            config=dataclasses.asdict(plan) | {"delays": {label: describe(d) for label, d in SCENARIOS.items()}},
        )  # fmt: skip


def _title(scores: SoftmaxScores, constrained: bool) -> str:
    """The rule's name, with a dagger where the projection is outside its theory."""
    return TITLES[scores.rule] + (" †" if constrained and not scores.candidate.projected else "")


def table(panel: Sequence[SoftmaxScores], constrained: bool, protocol: str) -> list[dict[str, str]]:
    rows = []
    for scores in ranked(panel, protocol):
        accuracy = getattr(scores, protocol)
        row = {"place": str(place(scores, panel, protocol)), "rule": _title(scores, constrained),
               "mean": three_digits(mean_late(accuracy)),
               "worst drop": three_digits(worst_drop(accuracy))}  # fmt: skip
        row |= dict(zip(SCENARIOS, map(three_digits, accuracy.mean(0).tolist()), strict=True))
        row["spread"] = three_digits(spread(accuracy))
        if protocol == "frozen":
            knob, lr = scores.choice
            second = f", {scores.candidate.knob} {scores.candidate.values[knob]:g}" if scores.candidate.knob else ""
            differs = not torch.equal(scores.accuracy, scores.at_query)
            row["mean at query"] = three_digits(mean_late(scores.at_query[..., knob, lr])) if differs else ""
            row["lr"] = f"{scores.candidate.lrs[lr]:.2g}{second}"
        rows.append(row)
    return rows


def plot(panels: Panels, data: str) -> Figure:
    own = {setting: ranked(panel) for setting, panel in panels.items() if setting.data == data}
    rules = max(len(panel) for panel in own.values())
    figure, axes = style.panels([f"{setting.name} ({setting.domain})" for setting in own], "",
                                height=0.6 + 0.21 * rules, sharey=False)  # fmt: skip
    for ax, (setting, panel) in zip(axes, own.items(), strict=True):
        for y, scores in enumerate(panel):
            colour = style.COLOURS.get(scores.rule, style.BASELINE)
            late = scores.frozen.mean(0)[1:]
            if late.max() > 0:
                ax.plot([late.min(), late.max()], [y, y], color=colour, linewidth=3, alpha=0.35, solid_capstyle="butt")
                ax.plot(mean_late(scores.frozen), y, "o", color=colour, markersize=5)
            else:  # at 0 it would flatten all others
                ax.annotate("frozen, it diverges under every delay", (0.02, y), xycoords=("axes fraction", "data"),
                            verticalalignment="center", fontsize=7.5, color=colour)  # fmt: skip
            ax.plot(mean_late(scores.oracle), y, "o", color=colour, markersize=5, markerfacecolor="white")
            ax.plot(scores.frozen.mean(0)[0], y, "|", color=colour, markersize=8)
        ax.set_yticks(range(len(panel)), [_title(scores, setting.constrained) for scores in panel], fontsize=7.5)
        ax.set_ylim(len(panel) - 0.4, -0.6)
        ax.tick_params(axis="x", labelsize=8)
    axes[-1].set_xlabel("test accuracy")
    handles = [
        Line2D([], [], color="black", marker="o", linestyle="", label="mean over the delays, frozen lr"),
        Line2D([], [], color="black", linewidth=3, alpha=0.35, label="worst to best delay, frozen lr"),
        Line2D([], [], color="black", marker="o", linestyle="", markerfacecolor="white",
               label="mean, tuned at each delay"),
        Line2D([], [], color="black", marker="|", linestyle="", markersize=8, label="without delay"),
    ]  # fmt: skip
    figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=7.5)
    return figure


def finding(panels: Panels) -> str:
    first, settings = next(iter(panels)), []
    for setting, panel in panels.items():
        if setting.data != first.data:
            continue
        order = ranked(panel)
        ours = next(scores for scores in order if scores.candidate.ours)
        others = [scores for scores in order if not scores.candidate.ours]
        rank = place(ours, order, "frozen")
        tied = any(place(other, order, "frozen") == rank for other in others)
        settings.append({"name": setting.name, "rank": style.ordinal(rank), "tied": tied, "rules": len(order),
                         "mean": mean_late(ours.frozen), "best": others[0].rule,
                         "best_mean": mean_late(others[0].frozen)})  # fmt: skip
    return report.finding("baselines", settings=settings)
