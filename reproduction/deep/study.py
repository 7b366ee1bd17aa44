"""Tables, figures, verdicts (all of them on claims of our own) and the report's section."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure

from reproduction import report, style
from reproduction.deep.models import MODELS
from reproduction.deep.plan import PLANS, TARGET_DELAYS, DeepSetting, LargeSetting, PipelineSetting
from reproduction.deep.scores import DeepScores, describe_delays, score_rule
from reproduction.jobs import Lane
from reproduction.report import Section, Verdict, prose, verdict
from reproduction.study import Plan, Study, Task, rows_of
from reproduction.style import TITLES

SECONDS = {"mlp": 11.0, "cnn": 9.0, "gpt": 70.0}
"""For one elementwise rule on one model, about: on one core at the quick scale, on a GPU of its own at the others; for
forecasts. Rules that orthogonalise take twice as long. A large model takes a quarter of a second for each update of a
run, of all runs together: twice what an H200 needs, as forecasts take it to be shared."""

Panel = dict[str, DeepScores]  # scores on one model by the name of the rule
_claim = partial(verdict, source="ours")


class Deep(Study[DeepSetting, DeepScores]):
    """Three models, every rule that its users would reach for, by both protocols."""

    name = "deep"
    plans = PLANS
    hours_on_cpu = True
    has_models = True

    def seconds(self, task: Task[DeepSetting]) -> float:
        seconds = SECONDS.get(task.setting.model, 0.25 * task.setting.updates)
        return seconds * (1 if task.candidate.elementwise else 2)

    def lane(self, task: Task[DeepSetting]) -> Lane:
        """On a GPU large models run in processes: a loop in Python takes longer to launch work than it takes."""
        lane = super().lane(task)
        return "gpu" if isinstance(task.setting, LargeSetting) and lane == "streams" else lane

    def measure(self, task: Task[DeepSetting]) -> DeepScores:
        return score_rule(task)

    def show(self, plan: Plan[DeepSetting], panels: dict[DeepSetting, Panel]) -> Section:
        first, panel = next(iter(panels.items()))
        text, _ = prose("deep", titles=[setting.title for setting in panels], seeds=plan.seeds,
                        **{name: any(isinstance(setting, kind) for setting in panels)
                           for name, kind in (("large", LargeSetting), ("pipelines", PipelineSetting))})  # fmt: skip
        return Section(
            name=self.name,
            title="Deep models. Three architectures under delay",
            text=text,
            figures={f"deep-{s.model}": plot_curves(s, p) if isinstance(s, PipelineSetting) else plot(s, p)
                     for s, p in panels.items()} | {"deep-drift": plot_drift(panels)},
            captions={f"deep-{s.model}": f"{s.title}: every learning rate frozen from delay 0." for s in panels}
            | {"deep-drift": "All delayed runs; SteadyMuon is green, SteadyAdam pink, others grey."},
            finding=finding(first, panel),
            tables={f"{setting.title}, {protocol}": table(setting, panel, protocol)
                    for setting, panel in panels.items() for protocol in setting.protocols},
            rows=[row for s, panel in panels.items() for scores in panel.values() for row in _rows(s, scores)],
            verdicts=tuple(v for setting, panel in panels.items() for v in verdicts(setting, panel, plan.judged)),
            config=dataclasses.asdict(plan) | {
                "delays": {s.model: {name: describe_delays(s.delay_model(name)) for name in s.delays} for s in panels}
            },
        )  # fmt: skip


def ranked(panel: Panel, protocol: str = "frozen") -> list[DeepScores]:
    """Anchors first, then the best mean over the delays; rules that diverged somewhere are last."""

    def order(scores: DeepScores) -> tuple[bool, float]:
        late = [score.mean().item() for delay, score in getattr(scores, protocol).items() if delay != "0"]
        mean = sum(late) / max(1, len(late))
        return not scores.candidate.synchronous, mean if scores.by_loss else -mean

    return sorted(panel.values(), key=order)


def table(setting: DeepSetting, panel: Panel, protocol: str) -> list[dict[str, str]]:
    """The rounds, then a row for each rule: its mean score at each delay, the largest spread over seeds, its lr.

    A learning rate at the end of its grid is marked: the best may lie beyond. "drift" has V of the frozen ones.
    """
    delays, number = setting.delays, style.loss_in_table if setting.by_loss else style.three_digits
    number = {"drift": "{:.2g}".format, "slowdown": "{:.2f}".format}.get(protocol, number)
    rows = [{"rule": "rounds"} | {delay: f"{setting.rounds(delay):,}" for delay in delays} | {"spread": "", "lr": ""}]
    for scores in ranked(panel, "tuned" if protocol == "tuned" else "frozen"):
        values = getattr(scores, protocol)
        row = {"rule": TITLES[scores.candidate.rule]}
        row |= {delay: number(values[delay].mean().item()) if delay in values else "" for delay in delays}
        spreads = [(score.max() - score.min()).item() for score in values.values()]
        row["spread"] = number(max(spreads)) if len(next(iter(values.values()))) > 1 else ""
        tuned = protocol == "tuned" or scores.candidate.synchronous
        chosen = [scores.choice[delay] for delay in (delays if tuned else ["0"]) if delay in scores.choice]
        row["lr"] = " / ".join(map(scores.candidate.lr_in_table, chosen))
        rows.append(row)
    return rows


def plot(setting: DeepSetting, panel: Panel) -> Figure:
    delays, ylabel = setting.delays, "loss on held-out text" if setting.by_loss else "test accuracy"
    figure, (ax,) = style.panels([setting.title], ylabel, height=4)
    constant = sum(delay.isdecimal() for delay in delays)  # they come first
    drawn = 0
    for scores in ranked(panel):
        candidate = scores.candidate
        values = [scores.mean(delay) for delay in delays]
        colour = style.COLOURS.get(candidate.rule) or colormaps["tab20"](drawn)
        drawn += candidate.rule not in style.COLOURS
        dashes = {"synchronous-adamw": ":", "synchronous-muon": "--"}.get(candidate.rule, "-")
        look: dict[str, Any] = {"color": colour, "marker": "o", "markersize": 5 if candidate.ours else 3}
        ax.plot(range(constant), values[:constant], dashes, linewidth=2.6 if candidate.ours else 1.2,
                label=TITLES[candidate.rule], **look)  # fmt: skip
        ax.plot(range(constant, len(delays)), values[constant:], linestyle="none", **look)  # other kinds, not longer
    ax.set_xticks(range(len(delays)), [f"{delay}\n{setting.rounds(delay):,}" for delay in delays], fontsize=8)
    ax.set_xlabel("delay, and the rounds that it leaves time for")
    if setting.by_loss:
        start = math.log(setting.vocabulary)  # of a model that scores all characters alike
        best = min(scores.mean(delay) for scores in panel.values() for delay in delays)
        if best < start:
            ax.set_ylim(best - 0.05 * (start - best), min(ax.get_ylim()[1], start))
    style.legend(figure, [ax])
    return figure


def plot_curves(setting: PipelineSetting, panel: Panel) -> Figure:
    """The loss in the course of training, in one stage and in the most."""
    titles = ["1 stage", f"{1 + setting.mean_delay(setting.delays[-1])} stages"]
    figure, axes = style.panels(titles, "loss on held-out text", columns=2)
    for i, (rule, scores) in enumerate(panel.items()):
        for ax, delay in zip(axes, setting.delays[:: len(setting.delays) - 1], strict=True):
            trace = next(trace for trace in scores.traces if trace.axis("delay").values == (delay,))
            losses = trace.recorded()["test_loss"][:, 0, 0, trace.axis("lr").values.index(scores.lr())]
            ax.plot(trace.steps, losses, color=style.COLOURS.get(rule) or colormaps["tab10"](i + 2),
                    linewidth=2.6 if scores.candidate.ours else 1.2, label=TITLES[rule])  # fmt: skip
            ax.set_xlabel("updates")
    axes[0].set_ylim(top=math.log(setting.vocabulary))  # of a model that scores all characters alike
    style.legend(figure, axes[:1])
    return figure


def plot_drift(panels: dict[DeepSetting, Panel]) -> Figure:
    """The training loss against V: every delayed run of every rule, at every learning rate."""
    figure, axes = style.panels([setting.title for setting in panels], "training loss at the end", height=4)
    for ax, panel in zip(axes, panels.values(), strict=True):
        for rule, scores in panel.items():
            for trace in (trace for trace in scores.traces if trace.metrics["drift"].any()):
                ax.scatter(trace.metrics["drift"], trace.loss, s=12, color=style.COLOURS.get(rule, style.BASELINE))
        ax.set(xscale="log", yscale="log", xlabel="drift V")
    return figure


def behind(scores: DeepScores, other: DeepScores, delay: str) -> float:
    """How much worse the first is than the second: accuracy lost, or loss added."""
    difference = other.mean(delay) - scores.mean(delay)
    return -difference if scores.by_loss else difference


def verdicts(setting: DeepSetting, panel: Panel, judged: bool) -> Iterator[Verdict]:
    """On the rules that the panel has."""
    late = [delay for delay in TARGET_DELAYS if delay in setting.delays]
    yield from _ahead(setting, panel, [delay for delay in late if delay != "8"])
    if judged:
        limits = (0.05, 0.15, 0.10) if setting.by_loss else (0.003,) * 3
        muon = {delay: limit for delay, limit in zip(TARGET_DELAYS, limits, strict=True) if delay in late}
        yield from _near_anchor(setting, panel, "steady-muon", "synchronous-muon", muon)
        adamw = dict.fromkeys(late, 0.0 if setting.by_loss else 0.015)
        ours = "steady-muon" if setting.by_loss else "steady-adam"
        yield from _near_anchor(setting, panel, ours, "synchronous-adamw", adamw)
        if not setting.by_loss:
            yield from _first_elementwise(setting, panel, late)
        yield from _wide(setting, panel)
        for name in ("steady-muon", "steady-adam"):
            yield from _nothing_lost(setting, panel, name)


def _near_anchor(
    setting: DeepSetting, panel: Panel, ours: str, anchor: str, allowed: dict[str, float]
) -> Iterator[Verdict]:
    if ours in panel and anchor in panel:
        gaps = {delay: behind(panel[ours], panel[anchor], delay) for delay in allowed}
        holds = all(gap <= allowed[delay] for delay, gap in gaps.items())
        yield _claim("near_anchor", holds, model=setting.model, ours=ours, anchor=anchor, allowed=allowed, gaps=gaps)


def _ahead(setting: DeepSetting, panel: Panel, delays: Sequence[str]) -> Iterator[Verdict]:
    others = [scores for scores in panel.values() if scores.candidate.is_baseline]
    if "steady-muon" in panel and others and delays:
        leads = {}
        for delay in delays:
            by_rule = {other.candidate.rule: behind(other, panel["steady-muon"], delay) for other in others}
            leads[delay] = min(by_rule.items(), key=lambda item: item[1])
        required = 0.0 if setting.by_loss else 0.03
        holds = all(lead >= required for _, lead in leads.values())
        yield _claim("ahead", holds, model=setting.model, required=required, leads=leads)


def _first_elementwise(setting: DeepSetting, panel: Panel, delays: Sequence[str]) -> Iterator[Verdict]:
    others = [s for s in panel.values() if s.candidate.is_baseline and s.candidate.elementwise]
    if "steady-adam" in panel and others:
        leads = {delay: min(behind(other, panel["steady-adam"], delay) for other in others) for delay in delays}
        yield _claim("first_elementwise", all(lead > 0 for lead in leads.values()), model=setting.model, leads=leads)


def _wide(setting: DeepSetting, panel: Panel) -> Iterator[Verdict]:
    """On the most neighbouring learning rates whose score is near to the best of all."""
    if "steady-muon" in panel and "64" in panel["steady-muon"].grids:
        within = 0.05 if setting.by_loss else 0.01
        means = panel["steady-muon"].grids["64"].mean(0)
        near = means <= means.min() + within if setting.by_loss else means >= means.max() - within
        count = max((len(list(run)) for is_near, run in groupby(near.tolist()) if is_near), default=0)
        yield _claim("wide", count >= 4, model=setting.model, within=within, count=count)


def _nothing_lost(setting: DeepSetting, panel: Panel, ours: str) -> Iterator[Verdict]:
    others = [scores for scores in panel.values() if not scores.candidate.synchronous]
    if ours in panel and len(others) > 1:
        gap = max(behind(panel[ours], other, "0") for other in others)
        allowed = 0.03 if setting.by_loss else 0.005
        holds = gap <= allowed and math.isfinite(gap)
        yield _claim("nothing_lost", holds, model=setting.model, ours=ours, allowed=allowed, gap=gap)


def finding(setting: DeepSetting, panel: Panel) -> str:
    late = [delay for delay in setting.delays if delay.isdecimal()][-1]
    own = [scores for scores in panel.values() if scores.candidate.ours]
    baselines = [scores for scores in panel.values() if scores.candidate.is_baseline]
    if setting.by_loss or not own or not baselines:
        return ""
    best, baseline = (max(group, key=lambda scores: scores.mean(late)) for group in (own, baselines))
    return report.finding("deep", model=MODELS[setting.model], updates=setting.updates, late=late, best=best,
                          baseline=baseline)  # fmt: skip


def _rows(setting: DeepSetting, scores: DeepScores) -> list[dict[str, Any]]:
    place, columns = {"model": setting.model, "rule": scores.candidate.rule}, ("delay", "lr", "seed", "step", "loss")
    return [
        row | {"rounds": setting.rounds(row["delay"]), "frozen": math.isclose(row["lr"], scores.lr())}
        for trace in scores.traces for row in rows_of(trace, (*columns, "test_loss", "accuracy", "drift"), **place)
    ]  # fmt: skip
