"""Tables, figures, verdicts and the report's section."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure

from reproduction import style
from reproduction.deep.setup import MODELS, model_title
from reproduction.jobs import Job, Say, to_stderr
from reproduction.local.measuring import PROTOCOLS, Result, measure
from reproduction.local.setup import ANCHOR, CONFIGS, Config, Setting
from reproduction.part import Run
from reproduction.results import Section, Verdict

SECONDS = {"quick": 15.0, "paper": 15.0, "full": 45.0}
"""For one rule in one setting, about: on one core at the quick scale, on a GPU at the others; for forecasts."""
OURS = "steady-muon"
"""The one of ours that targets are stated for."""
SHARE = 0.5
"""Of synchronous training's virtual time, in which ours is to be where that is at its end."""

TITLES = {**style.TITLES, "sgd": "SGD"}  # whose average is not shown here

Panel = dict[str, Result]
"""Results in one setting by the name of the rule."""


def title(setting: Setting) -> str:
    """What is trained, and how."""
    model = model_title(setting.model, setting.layers, setting.width)
    return f"{model}; {setting.local_steps} local steps, {setting.workers} workers"


def final(result: Result, protocol: str) -> float:
    """The mean loss over seeds at the end."""
    return result.curves[protocol].mean[-1].item()


def ranked(panel: Panel, protocol: str) -> list[Result]:
    """The anchor first, then the smallest loss at the end."""
    return sorted(panel.values(), key=lambda result: (not result.contender.synchronous, final(result, protocol)))


def share_of_time(setting: Setting, panel: Panel, result: Result, protocol: str) -> float | None:
    """The share of the virtual time after which a rule stays below synchronous training's last loss; None if none."""
    reached = result.curves[protocol].reaches(final(panel[ANCHOR], protocol))
    return None if reached is None else reached / setting.seconds


def table(setting: Setting, panel: Panel, protocol: str) -> list[dict[str, str]]:
    """A row for each rule: its loss when as many gradients had arrived as synchronous training uses, that at the end of
    the time, and after what share of the time it stayed below synchronous training's last."""
    rows = []
    used = setting.rounds * setting.local_steps * setting.workers
    if ANCHOR in panel:
        used = int(panel[ANCHOR].curves[protocol].gradients[-1])
    for result in ranked(panel, protocol):
        curve = result.curves[protocol]
        row = {
            "rule": TITLES[result.contender.rule],
            "equal gradients": style.loss_in_table(curve.at_gradients(used)),
            "equal time": style.loss_in_table(final(result, protocol)),
        }
        if curve.losses.shape[1] > 1:
            row["spread"] = style.loss_in_table((curve.losses[-1].max() - curve.losses[-1].min()).item())
        if ANCHOR in panel:
            share = share_of_time(setting, panel, result, protocol)
            row["time to synchronous loss"] = "never" if share is None else f"{share:.2f}"
        rows.append(row | {"step": f"{result.step[protocol]:.2g}" + (" (end)" if result.at_end[protocol] else "")})
    return rows


def plot(setting: Setting, panel: Panel, protocol: str = "frozen", *, real: bool = False) -> Figure:
    """Loss against virtual time, or real seconds; synchronous training in black, ours thick."""
    unit, clock = (1.0, "seconds") if real else (setting.seconds, "virtual time (1: synchronous training's)")
    short = f"{MODELS[setting.model]}; {setting.local_steps} local steps"
    figure, (ax,) = style.panels([short], "loss on held-out data", height=4)
    others = colormaps["tab10"]
    drawn = 0
    for result in ranked(panel, protocol):
        curve, rule = result.curves[protocol], result.contender.rule
        colour = style.COLOURS.get(rule) or others(drawn)
        drawn += rule not in style.COLOURS
        ax.plot(curve.seconds / unit, curve.mean, "--" if result.contender.synchronous else "-",
                color=colour, linewidth=2.6 if result.contender.ours else 1.2, label=TITLES[rule])  # fmt: skip
    if ANCHOR in panel:
        ax.axhline(final(panel[ANCHOR], protocol), color="black", linewidth=0.6, linestyle=":")
    start = next(iter(panel.values())).curves[protocol].mean[0].item()
    best = min(result.curves[protocol].mean.min().item() for result in panel.values())
    ax.set_ylim(best - 0.05 * (start - best), start + 0.02 * (start - best))  # what is above has diverged
    ax.set_xlabel(clock)
    style.legend(figure, [ax])
    return figure


def verdicts(setting: Setting, panel: Panel, protocol: str = "frozen") -> list[Verdict]:
    """The two targets, with the step that is frozen from one worker."""
    if OURS not in panel:
        return []
    ours, found = panel[OURS], []
    if ANCHOR in panel:
        share = share_of_time(setting, panel, ours, protocol)
        found.append(Verdict(
            f"{setting.name}: {TITLES[OURS]} is soon where synchronous DiLoCo ends",
            f"below its last loss for good after at most {SHARE} of its virtual time, the outer step frozen",
            "never in that time" if share is None else f"in {share:.2f} of it",
            share is not None and share <= SHARE,
            figure=f"local-{setting.name}",
        ))  # fmt: skip
    baselines = [r for r in panel.values() if not (r.contender.ours or r.contender.synchronous)]
    if baselines:
        best = min(baselines, key=lambda baseline: final(baseline, protocol))
        lead = final(best, protocol) - final(ours, protocol)
        found.append(Verdict(
            f"{setting.name}: {TITLES[OURS]} is ahead of every other asynchronous outer rule",
            "the smallest held-out loss at the end, all outer steps frozen from one worker",
            f"{final(ours, protocol):.3f}; {TITLES[best.contender.rule]} {final(best, protocol):.3f}",
            lead > 0,
            figure=f"local-{setting.name}",
        ))  # fmt: skip
    return found


def rows(setting: Setting, result: Result) -> list[dict[str, Any]]:
    """Every recorded number of a rule, for the CSV."""
    return [
        {"model": setting.model, "local_steps": setting.local_steps, "rule": result.contender.rule,
         "protocol": protocol, "lr": result.step[protocol], "seed": seed, "seconds": second, "gradients": int(count),
         "test_loss": loss}
        for protocol in result.curves
        for second, count, losses in zip(result.curves[protocol].seconds.tolist(),
                                         result.curves[protocol].gradients.tolist(),
                                         result.curves[protocol].losses.tolist(), strict=True)
        for seed, loss in enumerate(losses)
    ]  # fmt: skip


def jobs(run: Run) -> list[Job]:
    """A job for every rule in every setting."""
    config = CONFIGS[run.scale].limited(run.models, run.rules)
    return [
        Job(f"local: {setting.name}, {TITLES[contender.rule]}", SECONDS[run.scale],
            partial(measure, config, setting, contender, run.out, device=run.device, say=to_stderr),
            lane="processes" if run.device == "cpu" else "streams")
        for setting in config.settings for contender in config.contenders
    ]  # fmt: skip


def section(run: Run) -> Section:
    """Everything at a scale, by both protocols."""
    return section_of(CONFIGS[run.scale].limited(run.models, run.rules), run.out, device=run.device)


def section_of(config: Config, out: Path, *, device: str, say: Say = to_stderr) -> Section:
    """Run everything, and show it by both protocols."""
    panels = {
        setting: {
            contender.rule: measure(config, setting, contender, out, device=device, say=say)
            for contender in config.contenders
        }
        for setting in config.settings
    }
    return Section(
        name="local",
        title="Local steps on workers of different speed",
        text=(
            "; ".join(f"{title(s)}, {s.rounds} synchronous rounds, batch {s.batch}, inner {s.inner}" for s in panels)
            + f"; {config.seeds} seed(s), which change samples, not the first parameters. A worker takes its local "
            "steps from the server's point and sends where they led; the state of its inner optimizer stays with it. "
            "For a gradient the fastest worker takes 1 virtual second and the slowest 6, the others lie between.",
            "Synchronous DiLoCo waits for the slowest worker in every round; its outer rule is Nesterov momentum on "
            "the mean of what all workers send. The others get each worker's pseudo-gradient as it arrives, in the "
            "same virtual time. Sending takes no time.",
            "Frozen: the outer step is the one of eight half decades (four decades at the scale quick) with the "
            "smallest training loss for the fastest worker alone, in the same virtual time. Tuned: the same choice "
            "made with all workers. Both use a seed that is not shown. Synchronous DiLoCo is always tuned. All other "
            "constants are the authors'. A step marked (end) is the first or last of its grid.",
            "Equal gradients: the loss on held-out data when as many gradients had arrived as synchronous training "
            "uses in all; equal time: at the end. The last but one column is the share of the virtual time after which "
            "a rule's loss stays below the one that synchronous training ends with.",
        ),
        figures={f"local-{s.name}": plot(s, panel) for s, panel in panels.items()},
        captions={f"local-{s.name}": f"{title(s)}: outer steps frozen from one worker." for s in panels},
        tables={f"{title(s)}, {protocol}": table(s, panel, protocol)
                for s, panel in panels.items() for protocol in PROTOCOLS},
        rows=[row for s, panel in panels.items() for result in panel.values() for row in rows(s, result)],
        verdicts=tuple(v for s, panel in panels.items() for v in verdicts(s, panel)) if config.targets else (),
        config=dataclasses.asdict(config),
    )  # fmt: skip
