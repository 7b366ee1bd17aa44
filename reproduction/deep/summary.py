"""Tables, figures and the report's section."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure

from reproduction import style
from reproduction.deep.measuring import Result, describe_delays, measure
from reproduction.deep.setup import CONFIGS, MODELS, Config, Setting, model_title
from reproduction.deep.verdicts import Panel, verdicts
from reproduction.jobs import Job, Say, to_stderr
from reproduction.part import Run
from reproduction.results import Section

SECONDS = {"mlp": 17.0, "cnn": 13.0, "gpt": 70.0}
"""For one elementwise rule on one model, about: on one core at the quick scale, on a GPU of its own at the others; for
forecasts. Rules that orthogonalise take twice as long."""


def title(setting: Setting) -> str:
    """What is trained, on what."""
    model = model_title(setting.model, setting.layers, setting.width)
    return f"{model}; batch {setting.batch}, {setting.updates:,} updates"


def ranked(panel: Panel, protocol: str = "frozen") -> list[Result]:
    """Anchors first, then the best mean over the delays; what diverged somewhere is last."""

    def order(result: Result) -> tuple[bool, float]:
        late = [score.mean().item() for delay, score in result.scores(protocol).items() if delay != "0"]
        mean = sum(late) / max(1, len(late))
        return not result.contender.synchronous, mean if result.by_loss else -mean

    return sorted(panel.values(), key=order)


def table(setting: Setting, panel: Panel, delays: Sequence[str], protocol: str) -> list[dict[str, str]]:
    """The rounds, then a row for each rule: its mean score at each delay, the largest spread over seeds, its step.

    A step at the end of its grid is marked: the best may lie beyond.
    """
    rows = [{"rule": "rounds"} | {delay: f"{setting.rounds(delay):,}" for delay in delays} | {"spread": "", "step": ""}]
    for result in ranked(panel, protocol):
        scores = result.scores(protocol)
        row = {"rule": style.TITLES[result.contender.rule]}
        row |= {
            delay: _number(scores[delay].mean().item(), result.by_loss) if delay in scores else "" for delay in delays
        }
        spreads = [(score.max() - score.min()).item() for score in scores.values()]
        row["spread"] = _number(max(spreads), result.by_loss) if len(next(iter(scores.values()))) > 1 else ""
        tuned = protocol == "tuned" or result.contender.synchronous
        shown = [delay for delay in delays if delay in result.choice] if tuned else ["0"]
        ends = (0, len(result.contender.steps) - 1)
        row["step"] = " / ".join(
            f"{result.step(delay):.2g}" + (" (end)" if result.choice[delay] in ends else "") for delay in shown
        )
        rows.append(row)
    return rows


def _number(value: float, by_loss: bool) -> str:
    return style.loss_in_table(value) if by_loss else style.three_digits(value)


def plot(setting: Setting, panel: Panel, delays: Sequence[str]) -> Figure:
    """Every rule with its frozen step at every delay; anchors in black, ours thick."""
    figure, (ax,) = style.panels(
        [title(setting)], "loss on held-out text" if setting.by_loss else "test accuracy", height=4
    )
    others = colormaps["tab20"]
    constant = sum(delay.isdecimal() for delay in delays)  # they come first
    drawn = 0
    for result in ranked(panel):
        contender = result.contender
        values = [result.frozen[delay].mean().item() for delay in delays]
        colour = style.COLOURS.get(contender.rule) or others(drawn)
        drawn += contender.rule not in style.COLOURS
        dashes = {"synchronous-adamw": ":", "synchronous-muon": "--"}.get(contender.rule, "-")
        look: dict[str, Any] = {"color": colour, "marker": "o", "markersize": 5 if contender.ours else 3}
        ax.plot(range(constant), values[:constant], dashes, linewidth=2.6 if contender.ours else 1.2,
                label=style.TITLES[contender.rule], **look)  # fmt: skip
        ax.plot(range(constant, len(delays)), values[constant:], linestyle="none", **look)  # no longer delay, another
    ax.set_xticks(range(len(delays)), [f"{delay}\n{setting.rounds(delay):,}" for delay in delays], fontsize=8)
    ax.set_xlabel("delay, and the rounds that it leaves time for")
    if setting.by_loss:
        start = math.log(84)  # of a model that knows nothing
        best = min(score.mean().item() for result in panel.values() for score in result.frozen.values())
        if best < start:
            ax.set_ylim(best - 0.05 * (start - best), min(ax.get_ylim()[1], start))
    style.legend(figure, [ax])
    return figure


def rows(setting: Setting, result: Result) -> list[dict[str, Any]]:
    """Every final number of a rule, for the CSV."""
    contender = result.contender
    return [
        {"model": setting.model, "rule": contender.rule, "delay": row["delay"], "rounds": setting.rounds(row["delay"]),
         "lr": row["lr"], "seed": row["seed"], "loss": row["loss"], "test_loss": row["test_loss"],
         "accuracy": row["accuracy"], "frozen": math.isclose(row["lr"], result.step())}
        for trace in result.traces for row in trace.rows()
    ]  # fmt: skip


def jobs(run: Run) -> list[Job]:
    """A job for every rule on every model."""
    config = CONFIGS[run.scale].limited(run.models, run.rules)
    return [
        Job(f"deep: {setting.model}, {style.TITLES[contender.rule]}",
            SECONDS[setting.model] * (1 if contender.elementwise else 2),
            partial(measure, config, setting, contender, run.out, device=run.device, say=to_stderr),
            lane="processes" if run.device == "cpu" else "streams")
        for setting in config.settings for contender in config.contenders(setting)
    ]  # fmt: skip


def section(run: Run) -> Section:
    """Everything at a scale, by both protocols."""
    return section_of(CONFIGS[run.scale].limited(run.models, run.rules), run.out, device=run.device)


def headline(setting: Setting, panel: Panel, delays: Sequence[str]) -> Figure:
    """The first model, small: ours, synchronous training in as many rounds, and the baselines in grey."""
    figure, (ax,) = style.panels([f"Deep models: {MODELS[setting.model]}"], "test accuracy", height=style.HEADLINE)
    for result in reversed(ranked(panel)):
        contender = result.contender
        ours_or_anchor = contender.ours or bool(contender.synchronous)
        ax.plot([result.frozen[delay].mean().item() for delay in delays], "--" if contender.synchronous else "-",
                color=style.COLOURS.get(contender.rule, style.RIVAL) if ours_or_anchor else style.RIVAL,
                linewidth=2.4 if contender.ours else 1.2, marker="o", markersize=4 if contender.ours else 0,
                label=style.TITLES[contender.rule] if ours_or_anchor else None)  # fmt: skip
    ax.set_xticks(range(len(delays)), delays)
    ax.set_xlabel("delay (updates)")
    style.legend(figure, [ax])
    return figure


def finding(setting: Setting, panel: Panel, delays: Sequence[str]) -> str:
    """What the longest constant delay leaves of ours and of the best baseline, on the first model."""
    late = [delay for delay in delays if delay.isdecimal()][-1]
    by_kind = {ours: [r for r in panel.values() if r.contender.ours == ours and not r.contender.synchronous]
               for ours in (True, False)}  # fmt: skip
    if setting.by_loss or not all(by_kind.values()):
        return ""
    ours, baseline = (max(results, key=lambda r: r.frozen[late].mean().item()) for results in by_kind.values())
    return (
        f"On a deep model ({MODELS[setting.model]}, {setting.updates:,} updates), with steps frozen from delay 0, "
        f"{style.TITLES[ours.contender.rule]} goes from {ours.frozen['0'].mean():.3f} to "
        f"{ours.frozen[late].mean():.3f} at a "
        f"delay of {late}; the best baseline there, {style.TITLES[baseline.contender.rule]}, from "
        f"{baseline.frozen['0'].mean():.3f} to "
        f"{baseline.frozen[late].mean():.3f}."
    )


def section_of(config: Config, out: Path, *, device: str, say: Say = to_stderr) -> Section:
    """Run everything, and show it by both protocols."""
    panels = {
        setting: {
            contender.rule: measure(config, setting, contender, out, device=device, say=say)
            for contender in config.contenders(setting)
        }
        for setting in config.settings
    }
    panels = {setting: panel for setting, panel in panels.items() if panel}
    delays = config.delays
    setting, panel = next(iter(panels.items()))
    shown = {} if setting.by_loss else {"deep-over-delays": headline(setting, panel, delays)}
    return Section(
        name="deep",
        title="Deep models under delay",
        text=(
            "; ".join(title(setting) for setting in panels) + f"; {config.seeds} seed(s), which change samples and "
            "delays, not the first parameters. Images are standardised by two numbers. Accuracy is that on the 10,000 "
            "test images, the GPT's loss that on held-out text (nats a character, over fixed windows of the last tenth "
            "of every work). The delay `lognormal` is exp of a normal (3.847, 0.8): mean 64, median 46. In a "
            "`pipeline` the stages of the model (2 of the MLP, 3 of the CNN, 8 of the GPT) are late by their own "
            "number of updates, from 64 for the first evenly down to 0 for the last; rules are told 64.",
            "Frozen: the step is the one of nine half decades (five decades at the scale quick) with the smallest "
            "training loss at delay 0, by the first seed, and then left alone. Tuned: the same choice at each delay, "
            "which nobody can make beforehand. All other constants are those of papers and packages.",
            "With T updates that are tau late there is time for T/(1 + tau) rounds, one after another. The two "
            "synchronous rows are what can be had in as many rounds from as many gradients: minibatches 1 + tau times "
            "as large, no delay, the step tuned for each tau, linearly averaged output. For random delays tau is their "
            "mean, for the pipeline its first stage's. A step marked (end) is the first or last of its grid. What "
            "diverged has accuracy 0.",
            "On a GPU, products of float32 matrices are made in TF32.",
        ),
        figures={f"deep-{s.model}": plot(s, p, delays) for s, p in panels.items()} | shown,
        captions={f"deep-{s.model}": f"{title(s)}: every step frozen from delay 0." for s in panels}
        | {
            stem: f"{title(setting)}; steps frozen from delay 0. Grey: the baselines. Dashed: what synchronous "
            "training makes of as many gradients in as many rounds."
            for stem in shown
        },
        finding=finding(setting, panel, delays),
        headline=next(iter(shown), ""),
        tables={
            f"{title(setting)}, {protocol}": table(setting, panel, delays, protocol)
            for setting, panel in panels.items()
            for protocol in ("frozen", "tuned")
        },
        rows=[row for setting, panel in panels.items() for result in panel.values() for row in rows(setting, result)],
        verdicts=tuple(
            v for setting, panel in panels.items() for v in verdicts(setting, panel, delays, config.targets)
        ),
        config=dataclasses.asdict(config)
        | {"delay_laws": {s.model: {name: describe_delays(s.delays(name)) for name in delays} for s in panels}},
    )
