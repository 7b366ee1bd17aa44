"""Tables, figures, verdicts and the report's section."""

import dataclasses
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure

from reproduction import report, style
from reproduction.deep.models import MODELS
from reproduction.local.curves import PROTOCOLS, LocalCurves, VirtualRuns
from reproduction.local.plan import ANCHOR, PLANS, LocalSetting
from reproduction.report import Section, Verdict, prose, verdict
from reproduction.study import Plan, Study, Task

OURS = "steady-muon"  # the one of ours that targets are stated for
TARGET_SHARE = 0.5  # of synchronous training's virtual time, in which ours must reach the loss that that one ends with
TITLES = {**style.TITLES, "sgd": "SGD"}  # whose average is not shown here

Panel = Mapping[str, LocalCurves]  # curves in one setting by the name of the rule


class Local(Study[LocalSetting, LocalCurves]):
    """Outer rules in virtual time."""

    name = "local"
    plans = PLANS
    only_by_name = True
    has_models = True

    def seconds(self, task: Task[LocalSetting]) -> float:
        return 15.0 if task.setting.rounds * task.setting.local_steps <= 600 else 45.0

    def measure(self, task: Task[LocalSetting]) -> LocalCurves:
        return VirtualRuns(task).curves(range(task.seeds))

    def show(self, plan: Plan[LocalSetting], panels: dict[LocalSetting, dict[str, LocalCurves]]) -> Section:
        return Section(
            name=self.name,
            title="Local steps. Workers of different speed, in virtual time",
            text=prose("local", settings=list(panels), seeds=plan.seeds)[0],
            figures={f"local-{s.name}": plot(s, panel) for s, panel in panels.items()},
            captions={f"local-{s.name}": f"{s.title}: outer learning rates frozen from one worker." for s in panels},
            tables={f"{s.title}, {protocol}": table(s, panel, protocol)
                    for s, panel in panels.items() for protocol in PROTOCOLS},
            rows=[row for s, panel in panels.items() for curves in panel.values() for row in csv_rows(s, curves)],
            verdicts=tuple(v for s, panel in panels.items() for v in verdicts(s, panel)) if plan.judged else (),
            finding=finding(*next(iter(panels.items()))),
            config=dataclasses.asdict(plan),
        )  # fmt: skip


def ranked(panel: Panel, protocol: str) -> list[LocalCurves]:
    return sorted(panel.values(), key=lambda curves: (not curves.candidate.synchronous, curves.final(protocol)))


def share_of_time(setting: LocalSetting, panel: Panel, rule: str, protocol: str) -> float | None:
    """The share of the time after which a rule's loss stays below synchronous training's last; None if it does not."""
    reached = panel[rule].curves[protocol].reaches(panel[ANCHOR].final(protocol))
    return None if reached is None else reached / setting.seconds


def table(setting: LocalSetting, panel: Panel, protocol: str) -> list[dict[str, str]]:
    """A row for each rule: its loss when as many gradients had arrived as synchronous training uses, that at the end of
    the time, and after what share of the time it stayed below synchronous training's last."""
    rows = []
    used = setting.rounds * setting.local_steps * setting.workers
    if ANCHOR in panel:
        used = int(panel[ANCHOR].curves[protocol].gradients[-1])
    for curves in ranked(panel, protocol):
        curve, candidate = curves.curves[protocol], curves.candidate
        row = {
            "rule": TITLES[candidate.rule],
            "equal gradients": style.loss_in_table(curve.at_gradients(used)),
            "equal time": style.loss_in_table(curves.final(protocol)),
        }
        if curve.losses.shape[1] > 1:
            row["spread"] = style.loss_in_table((curve.losses[-1].max() - curve.losses[-1].min()).item())
        if ANCHOR in panel:
            share = share_of_time(setting, panel, candidate.rule, protocol)
            row["time to synchronous loss"] = "never" if share is None else f"{share:.2f}"
        rows.append(row | {"lr": candidate.lr_in_table(curves.choice[protocol])})
    return rows


def plot(setting: LocalSetting, panel: Panel, protocol: str = "frozen", *, real: bool = False) -> Figure:
    """Loss against virtual time, or real seconds; synchronous training in black, ours thick."""
    unit, clock = (1.0, "seconds") if real else (setting.seconds, "virtual time (1: synchronous training's)")
    title = f"{MODELS[setting.model]}; {setting.local_steps} local steps"
    figure, (ax,) = style.panels([title], "loss on held-out data", height=4)
    others = colormaps["tab10"]
    drawn = 0
    for curves in ranked(panel, protocol):
        curve, candidate = curves.curves[protocol], curves.candidate
        colour = style.COLOURS.get(candidate.rule) or others(drawn)
        drawn += candidate.rule not in style.COLOURS
        ax.plot(curve.seconds / unit, curve.mean, "--" if candidate.synchronous else "-", color=colour,
                linewidth=2.6 if candidate.ours else 1.2, label=TITLES[candidate.rule])  # fmt: skip
    if ANCHOR in panel:
        ax.axhline(panel[ANCHOR].final(protocol), color="black", linewidth=0.6, linestyle=":")
    start = next(iter(panel.values())).curves[protocol].mean[0].item()
    best = min(curves.curves[protocol].mean.min().item() for curves in panel.values())
    ax.set_ylim(best - 0.05 * (start - best), start + 0.02 * (start - best))  # curves above have diverged
    ax.set_xlabel(clock)
    style.legend(figure, [ax])
    return figure


def verdicts(setting: LocalSetting, panel: Panel, protocol: str = "frozen") -> Iterator[Verdict]:
    if OURS not in panel:
        return
    claim = partial(verdict, source="ours", figure=f"local-{setting.name}", name=setting.name, ours=TITLES[OURS])
    if ANCHOR in panel:
        share = share_of_time(setting, panel, OURS, protocol)
        yield claim("soon", share is not None and share <= TARGET_SHARE, share=share, target=TARGET_SHARE)
    losses = {rule: curves.final(protocol) for rule, curves in panel.items() if curves.candidate.is_baseline}
    if losses:
        loss, best = panel[OURS].final(protocol), min(losses, key=lambda rule: losses[rule])
        ahead = losses[best] > loss
        yield claim("ahead_locally", ahead, loss=loss, best=TITLES[best], best_loss=losses[best])


def finding(setting: LocalSetting, panel: Panel, protocol: str = "frozen") -> str:
    if OURS not in panel or ANCHOR not in panel:
        return ""
    share = share_of_time(setting, panel, OURS, protocol)
    return report.finding("local", setting=setting, model=MODELS[setting.model], ours=OURS, share=share,
                          loss=panel[ANCHOR].final(protocol))  # fmt: skip


def csv_rows(setting: LocalSetting, curves: LocalCurves) -> list[dict[str, Any]]:
    return [
        {"model": setting.model, "local_steps": setting.local_steps, "rule": curves.candidate.rule,
         "protocol": protocol, "lr": curves.lr(protocol), "seed": seed, "seconds": second, "gradients": int(count),
         "test_loss": loss}
        for protocol, curve in curves.curves.items()
        for second, count, losses in zip(curve.seconds.tolist(), curve.gradients.tolist(), curve.losses.tolist(),
                                         strict=True)
        for seed, loss in enumerate(losses)
    ]  # fmt: skip
