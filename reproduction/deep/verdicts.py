"""The targets that deep models under delay are held against."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from reproduction.deep.measuring import Result
from reproduction.deep.setup import LATE, Setting
from reproduction.results import Verdict
from reproduction.style import TITLES

Panel = dict[str, Result]
"""Results on one model by the name of the rule."""


def mean(result: Result, delay: str) -> float:
    """Over seeds, with the frozen step (anchors: tuned)."""
    return result.frozen[delay].mean().item()


def behind(result: Result, other: Result, delay: str) -> float:
    """How much worse the first is than the second: accuracy lost, or loss added."""
    difference = mean(other, delay) - mean(result, delay)
    return -difference if result.by_loss else difference


def baselines(panel: Panel) -> list[Result]:
    """Rules of other authors that are told nothing that we are not."""
    return [result for result in panel.values() if not (result.contender.ours or result.contender.synchronous)]


def verdicts(setting: Setting, panel: Panel, delays: Sequence[str], targets: bool) -> list[Verdict]:
    """Those that can be read from what was run."""
    late = [delay for delay in LATE if delay in delays]
    found: list[Verdict | None] = [_ahead(setting, panel, [delay for delay in late if delay != "8"])]
    if targets:
        muon = dict(zip(LATE, (0.05, 0.15, 0.10) if setting.by_loss else (0.003,) * 3, strict=True))
        adamw = dict.fromkeys(LATE, 0.0) if setting.by_loss else dict.fromkeys(LATE, 0.015)
        ours = "steady-muon" if setting.by_loss else "steady-adam"
        found += [
            _near_anchor(setting, panel, "steady-muon", "synchronous-muon", {d: muon[d] for d in late}),
            _near_anchor(setting, panel, ours, "synchronous-adamw", {d: adamw[d] for d in late}),
            None if setting.by_loss else _first_elementwise(setting, panel, late),
            _wide(setting, panel),
            *(_nothing_lost(setting, panel, name) for name in ("steady-muon", "steady-adam")),
        ]
    return [verdict for verdict in found if verdict is not None]


def _numbers(pairs: Iterable[tuple[str, float]]) -> str:
    return ", ".join(f"{value:+.3f} at {delay}" for delay, value in pairs)


def _near_anchor(setting: Setting, panel: Panel, ours: str, anchor: str, allowed: dict[str, float]) -> Verdict | None:
    if ours not in panel or anchor not in panel:
        return None
    gaps = {delay: behind(panel[ours], panel[anchor], delay) for delay in allowed}
    limits = ", ".join(f"{limit:g} at {delay}" for delay, limit in allowed.items())
    return Verdict(
        f"{setting.model}: {TITLES[ours]} with its frozen step is as good as {TITLES[anchor]} in the same rounds",
        f"behind by at most {limits}",
        f"behind by {_numbers(gaps.items())}",
        all(gap <= allowed[delay] for delay, gap in gaps.items()),
    )


def _ahead(setting: Setting, panel: Panel, delays: Sequence[str]) -> Verdict | None:
    others = baselines(panel)
    if "steady-muon" not in panel or not others or not delays:
        return None
    best = {delay: min(others, key=lambda other, d=delay: behind(other, panel["steady-muon"], d)) for delay in delays}  # type: ignore[misc]
    leads = {delay: behind(other, panel["steady-muon"], delay) for delay, other in best.items()}
    least = 0.0 if setting.by_loss else 0.03
    names = ", ".join(
        f"{TITLES[other.contender.rule]} by {leads[delay]:.3f} at {delay}" for delay, other in best.items()
    )
    return Verdict(
        f"{setting.model}: under long delays SteadyMuon is ahead of every baseline, all steps frozen",
        f"ahead by at least {least:g} at {' and '.join(delays)}",
        f"ahead of {names}",
        all(lead >= least for lead in leads.values()),
    )


def _first_elementwise(setting: Setting, panel: Panel, delays: Sequence[str]) -> Verdict | None:
    others = [other for other in baselines(panel) if other.contender.elementwise]
    if "steady-adam" not in panel or not others:
        return None
    leads = {delay: min(behind(other, panel["steady-adam"], delay) for other in others) for delay in delays}
    return Verdict(
        f"{setting.model}: SteadyAdam is ahead of every baseline that looks at single entries, all steps frozen",
        f"ahead at {', '.join(delays)}",
        f"ahead of the best by {_numbers(leads.items())}",
        all(lead > 0 for lead in leads.values()),
    )


def steps_in_a_row(result: Result, delay: str, within: float) -> int:
    """The most neighbouring steps whose score is that near to the best of all."""
    scores = result.grids[delay].mean(0)
    near = scores <= scores.min() + within if result.by_loss else scores >= scores.max() - within
    longest = current = 0
    for one in near.tolist():
        current = current + 1 if one else 0
        longest = max(longest, current)
    return longest


def _wide(setting: Setting, panel: Panel) -> Verdict | None:
    if "steady-muon" not in panel or "64" not in panel["steady-muon"].grids:
        return None
    within = 0.05 if setting.by_loss else 0.01
    count = steps_in_a_row(panel["steady-muon"], "64", within)
    return Verdict(
        f"{setting.model}: at delay 64 SteadyMuon does not need a tuned step",
        f"four neighbouring half-decade steps within {within:g} of the best",
        f"{count} in a row",
        count >= 4,
    )


def _nothing_lost(setting: Setting, panel: Panel, ours: str) -> Verdict | None:
    others = [result for result in panel.values() if not result.contender.synchronous]
    if ours not in panel or len(others) < 2:
        return None
    gap = max(behind(panel[ours], other, "0") for other in others)
    allowed = 0.03 if setting.by_loss else 0.005
    return Verdict(
        f"{setting.model}: without delay nothing is lost by {TITLES[ours]}",
        f"behind the best rule of all by at most {allowed:g}",
        f"behind by {gap:.3f}",
        gap <= allowed and bool(torch.isfinite(torch.tensor(gap))),
    )
