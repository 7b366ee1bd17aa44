"""Figure 3: excess loss against epochs at a delay of 500, steps tuned without delay."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from lategrad.experiments import style
from lategrad.experiments.results import Section, Verdict
from lategrad.experiments.sweep import Regime, Say, SweepConfig, cached_trace, tuned
from lategrad.problems import Optimum, minimum
from lategrad.registry import build_rule, parse_set
from lategrad.sets import WholeSpace
from lategrad.simulate import simulate
from lategrad.trace import Trace


@dataclass(frozen=True)
class Config:
    """What is recorded, and when a claim counts as reproduced."""

    delay: int = 500
    records: int = 25
    tuned_at: int = 0
    fall_wanted: float = 0.71
    """Over the second half of the run anytime SGD's excess loss must fall to this share or less: the rate
    1/sqrt(T) of Theorem 1 falls to 71% when T doubles."""
    factor_wanted: float = 2.0
    """At the end, SGD's excess loss must be this many times anytime SGD's."""


def curves(config: Config, sweep_config: SweepConfig, regime: Regime, traces: dict[str, Trace], out: Path, *,
           device: str, say: Say) -> dict[str, Trace]:  # fmt: skip
    """A run of every rule with its frozen step, recorded along the way."""
    found = {}
    problem = sweep_config.problem(regime)
    for rule in regime.rules:
        step = traces[rule].axes[-1].values[tuned(traces[rule], config.tuned_at)]
        key = {"config": sweep_config.describe(), "fig3": dataclasses.asdict(config), "rule": rule,
               "regime": dataclasses.asdict(regime), "step": step}  # fmt: skip

        def run(rule: str = rule, step: float = step) -> Trace:
            say(f"{regime.name}: {rule} over time, step {step:g}")
            return simulate(problem, build_rule(rule, step, parse_set(regime.domain)), config.delay, sweep_config.steps,
                            seed=sweep_config.seeds(), device=device, compile=False,
                            record_every=max(1, sweep_config.steps // config.records))  # fmt: skip

        found[rule] = cached_trace(out / "traces" / f"fig3-{regime.name}-{rule}.safetensors", key, run)
    return found


def optimum(sweep_config: SweepConfig, regime: Regime) -> Optimum | None:
    """The smallest loss in the set, up to a proven gap; None where no gap can be proven."""
    domain, problem = parse_set(regime.domain), sweep_config.problem(regime)
    if isinstance(domain, WholeSpace) and regime.l2 == 0:
        return None
    return minimum(problem, domain, tolerance=sweep_config.scale.optimum_tolerance)


def verdict(config: Config, regime: Regime, traces: dict[str, Trace], best: Optimum) -> Verdict:
    """Does anytime SGD approach the optimum while SGD does not?"""
    excess = {rule: (traces[rule].loss - best.value).mean(-1) for rule in ("anytime-sgd", "sgd")}
    half = len(excess["anytime-sgd"]) // 2
    fall = (excess["anytime-sgd"][-1] / excess["anytime-sgd"][half]).item()
    factor = (excess["sgd"][-1] / excess["anytime-sgd"][-1]).item()
    return Verdict(
        claim=f"At delay {config.delay} the loss of anytime SGD approaches the optimum, that of SGD does not "
        f"({regime.name})",
        criterion=f"over the second half of the run its excess loss falls to {config.fall_wanted:.0%} or less, and "
        f"ends at least {config.factor_wanted:g} times below SGD's",
        measured=f"falls to {fall:.0%}; ends at {excess['anytime-sgd'][-1]:.3g} against {excess['sgd'][-1]:.3g}, "
        f"{factor:.1f} times below",
        reproduced=fall <= config.fall_wanted and factor >= config.factor_wanted,
    )


def plot(sweep_config: SweepConfig, regime: Regime, traces: dict[str, Trace], best: Optimum | None) -> Figure:
    """Excess loss against epochs, or the loss itself where the optimum is not known."""
    ylabel = "training loss" if best is None else "excess training loss"
    figure, axes = style.panels([regime.title], ylabel)
    for rule in regime.rules:
        epochs = traces[rule].steps * sweep_config.scale.epochs / sweep_config.steps
        value = traces[rule].loss if best is None else (traces[rule].loss - best.value).clamp_min(1e-6)
        style.line(axes[0], rule, epochs.tolist(), torch.nan_to_num(value.T, nan=1e6, posinf=1e6), marker="")
    axes[0].set(yscale="log", xlabel="epochs")
    style.legend(figure, axes)
    return figure


def section(config: Config, sweep_config: SweepConfig, sweeps: dict[Regime, dict[str, Trace]], out: Path, *,
            device: str, say: Say) -> Section:  # fmt: skip
    """The figures and their verdicts."""
    figures: dict[str, Figure] = {}
    captions: dict[str, str] = {}
    rows: list[dict[str, Any]] = []
    verdicts: list[Verdict] = []
    minima: list[str] = []
    for regime, traces in sweeps.items():
        over_time = curves(config, sweep_config, regime, traces, out, device=device, say=say)
        say(f"{regime.name}: the exact optimum (kept in the cache once found)")
        best = optimum(sweep_config, regime)
        stem = f"fig3-{regime.name}"
        figures[stem] = plot(sweep_config, regime, over_time, best)
        shown = "Training loss" if best is None else "Excess training loss"
        captions[stem] = f"{shown} against epochs, constant delay {config.delay}; {regime.title}."
        if best is not None:
            minima.append(f"{regime.name} {best.value:.5f} (gap at most {best.gap:.1g})")
            if regime.l2 == 0:
                verdicts.append(verdict(config, regime, over_time, best))
        for rule, trace in over_time.items():
            step = traces[rule].axes[-1].values[tuned(traces[rule], config.tuned_at)]
            for row in trace.rows(None if best is None else best.value):
                place = {"rule": rule, "regime": regime.name, "delay": config.delay, "lr": step, "seed": row["seed"]}
                rows.append(place | {name: row[name] for name in ("step", "accuracy", "loss", "excess_loss")})
    return Section(
        name="fig3",
        title=f"Figure 3. Excess loss against epochs at delay {config.delay}",
        text=(
            "The training loss of each rule's output minus the smallest loss in the set, with the steps that "
            f"were tuned without delay. The smallest loss is found to a proven gap: {'; '.join(minima)}.",
            "Without a constraint and without a penalty the problem is so badly conditioned that no gap can be proven; "
            "there the loss itself is shown.",
        ),
        figures=figures,
        captions=captions,
        rows=rows,
        verdicts=tuple(verdicts),
        config={"sweep": sweep_config.describe(), "fig3": dataclasses.asdict(config)},
    )
