"""Tables, figures and the report's section."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from lategrad.trace import Trace, describe
from reproduction import style
from reproduction.baselines.judging import Result, mean_late, place, ranked, results, spread, worst_drop
from reproduction.baselines.measuring import measure
from reproduction.baselines.setup import CONFIGS, SCENARIOS, Config, Contender, Setting, config_for
from reproduction.part import Run
from reproduction.results import Section
from reproduction.style import three_digits

Panels = dict[tuple[Setting, tuple[str, str]], list[Result]]


def title(result: Result, constrained: bool) -> str:
    """The rule's name, with a dagger where the projection is outside its theory."""
    return style.TITLES[result.rule] + (" †" if constrained and not result.contender.projected else "")


def table(panel: Sequence[Result], constrained: bool, protocol: str) -> list[dict[str, str]]:
    """A row for each rule, best mean first: mean and worst drop, accuracy at every delay, spread, how it was tuned."""
    rows = []
    for result in sorted(panel, key=lambda r: -mean_late(getattr(r, protocol))):
        accuracy = getattr(result, protocol)
        row = {"place": str(place(result, panel, protocol)), "rule": title(result, constrained),
               "mean": three_digits(mean_late(accuracy)),
               "worst drop": three_digits(worst_drop(accuracy))}  # fmt: skip
        row |= dict(zip(SCENARIOS, map(three_digits, accuracy.mean(0).tolist()), strict=True))
        row["spread"] = three_digits(spread(accuracy))
        if protocol == "frozen":
            knob, step = result.choice
            settled = f", {result.contender.knob} {result.contender.values[knob]:g}" if result.contender.knob else ""
            differs = not torch.equal(result.accuracy, result.at_query)
            row["mean at query"] = three_digits(mean_late(result.frozen_at_query)) if differs else ""
            row["step"] = f"{result.steps[step]:.2g}{settled}"
        rows.append(row)
    return rows


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
            if late.max() > 0:
                ax.plot([late.min(), late.max()], [y, y], color=colour, linewidth=3, alpha=0.35, solid_capstyle="butt")
                ax.plot(mean_late(result.frozen), y, "o", color=colour, markersize=5)
            else:  # at 0 it would flatten all others
                ax.annotate("frozen, it diverges under every delay", (0.02, y), xycoords=("axes fraction", "data"),
                            verticalalignment="center", fontsize=7.5, color=colour)  # fmt: skip
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


HEADLINE = "baselines-over-delays"
OURS = ("steady", "steady-coordinate")


def headline(panels: Panels) -> Figure:
    """Accuracy against the constant delays with frozen steps, in the first panel: ours before the baselines in grey.

    A rule that loses more than half of its accuracy leaves the picture, or it would flatten all others.
    """
    (setting, (name, _)), panel = next(iter(panels.items()))
    figure, (ax,) = style.panels(
        [f"Ours against the baselines: {setting.data}, {name}"], "test accuracy", height=style.HEADLINE
    )
    constant = [position for position, label in enumerate(SCENARIOS) if label.isdecimal()]
    lowest = 1.0
    for result in sorted(panel, key=lambda result: result.rule in OURS):
        values = result.frozen.mean(0)[constant]
        if values.min() > values[0] / 2:
            lowest = min(lowest, values.min().item())
        if result.rule in OURS:
            dashes = "-" if result.rule == OURS[0] else "--"
            ax.plot(values, dashes, marker="o", markersize=4, linewidth=2.4, color=style.COLOURS[result.rule],
                    label=style.TITLES[result.rule])  # fmt: skip
        else:
            coloured = result.rule in ("sgd", "anytime-sgd")
            ax.plot(values, linewidth=1.4 if coloured else 0.8, alpha=1 if coloured else 0.7,
                    color=style.COLOURS[result.rule] if coloured else style.RIVAL,
                    label=style.TITLES[result.rule] if coloured else None)  # fmt: skip
    ax.set_ylim(bottom=lowest - 0.02)
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
            f"({mean_late(ours.frozen):.3f} on average over the delays; the best baseline, {style.TITLES[best.rule]}, "
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
        f"Left out, as it takes hours on a CPU: {', '.join(left_out)}; `python -m reproduction baselines "
        f"--scale {run.scale} --device cuda` has it."
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
    stems = {f"baselines-{setting.data}": setting for setting in config.settings}
    return Section(
        name="baselines",
        title="The rules and their baselines",
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
        | {
            HEADLINE: f"Every rule with its step frozen from delay 0, {runs}. Grey: the baselines; one that loses more "
            "than half of its accuracy leaves the picture."
        },
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
