"""The targets that deep models under delay are held against; all of them are our own claims."""

import math
from collections.abc import Sequence
from functools import partial
from itertools import groupby

from reproduction.deep.plan import TARGET_DELAYS, DeepSetting
from reproduction.deep.scores import DeepScores
from reproduction.report import Verdict, verdict

Panel = dict[str, DeepScores]  # scores on one model by the name of the rule
_claim = partial(verdict, source="ours")


def behind(scores: DeepScores, other: DeepScores, delay: str) -> float:
    """How much worse the first is than the second: accuracy lost, or loss added."""
    difference = other.mean(delay) - scores.mean(delay)
    return -difference if scores.by_loss else difference


def verdicts(setting: DeepSetting, panel: Panel, judged: bool) -> list[Verdict]:
    late = [delay for delay in TARGET_DELAYS if delay in setting.delays]
    found: list[Verdict | None] = [_ahead(setting, panel, [delay for delay in late if delay != "8"])]
    if judged:
        limits = (0.05, 0.15, 0.10) if setting.by_loss else (0.003,) * 3
        muon = {delay: limit for delay, limit in zip(TARGET_DELAYS, limits, strict=True) if delay in late}
        adamw = dict.fromkeys(late, 0.0 if setting.by_loss else 0.015)
        ours = "steady-muon" if setting.by_loss else "steady-adam"
        found += [
            _near_anchor(setting, panel, "steady-muon", "synchronous-muon", muon),
            _near_anchor(setting, panel, ours, "synchronous-adamw", adamw),
            None if setting.by_loss else _first_elementwise(setting, panel, late),
            _wide(setting, panel),
            *(_nothing_lost(setting, panel, name) for name in ("steady-muon", "steady-adam")),
        ]
    return [verdict for verdict in found if verdict is not None]


def _near_anchor(
    setting: DeepSetting, panel: Panel, ours: str, anchor: str, allowed: dict[str, float]
) -> Verdict | None:
    if ours not in panel or anchor not in panel:
        return None
    gaps = {delay: behind(panel[ours], panel[anchor], delay) for delay in allowed}
    holds = all(gap <= allowed[delay] for delay, gap in gaps.items())
    return _claim("near_anchor", holds, model=setting.model, ours=ours, anchor=anchor, allowed=allowed, gaps=gaps)


def _ahead(setting: DeepSetting, panel: Panel, delays: Sequence[str]) -> Verdict | None:
    others = [scores for scores in panel.values() if scores.candidate.is_baseline]
    if "steady-muon" not in panel or not others or not delays:
        return None
    leads = {}
    for delay in delays:
        by_rule = {other.candidate.rule: behind(other, panel["steady-muon"], delay) for other in others}
        leads[delay] = min(by_rule.items(), key=lambda item: item[1])
    required = 0.0 if setting.by_loss else 0.03
    holds = all(lead >= required for _, lead in leads.values())
    return _claim("ahead", holds, model=setting.model, required=required, leads=leads)


def _first_elementwise(setting: DeepSetting, panel: Panel, delays: Sequence[str]) -> Verdict | None:
    others = [s for s in panel.values() if s.candidate.is_baseline and s.candidate.elementwise]
    if "steady-adam" not in panel or not others:
        return None
    leads = {delay: min(behind(other, panel["steady-adam"], delay) for other in others) for delay in delays}
    return _claim("first_elementwise", all(lead > 0 for lead in leads.values()), model=setting.model, leads=leads)


def good_neighbours(scores: DeepScores, delay: str, within: float) -> int:
    """The most neighbouring learning rates whose score is that near to the best of all."""
    means = scores.grids[delay].mean(0)
    near = means <= means.min() + within if scores.by_loss else means >= means.max() - within
    return max((len(list(run)) for is_near, run in groupby(near.tolist()) if is_near), default=0)


def _wide(setting: DeepSetting, panel: Panel) -> Verdict | None:
    if "steady-muon" not in panel or "64" not in panel["steady-muon"].grids:
        return None
    within = 0.05 if setting.by_loss else 0.01
    count = good_neighbours(panel["steady-muon"], "64", within)
    return _claim("wide", count >= 4, model=setting.model, within=within, count=count)


def _nothing_lost(setting: DeepSetting, panel: Panel, ours: str) -> Verdict | None:
    others = [scores for scores in panel.values() if not scores.candidate.synchronous]
    if ours not in panel or len(others) < 2:
        return None
    gap = max(behind(panel[ours], other, "0") for other in others)
    allowed = 0.03 if setting.by_loss else 0.005
    holds = gap <= allowed and math.isfinite(gap)
    return _claim("nothing_lost", holds, model=setting.model, ours=ours, allowed=allowed, gap=gap)
