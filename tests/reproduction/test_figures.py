"""The paper's experiments in small, and verdicts that can come out both ways."""

import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from lategrad.problems import Optimum
from lategrad.registry import build_rule, parse_set
from lategrad.simulator import simulate
from lategrad.trace import Axis, Trace
from reproduction.figures import fig1, fig3, horizon, lr_range
from reproduction.figures.sweep import (
    HEAVY,
    LONG,
    PLANS,
    SHORT,
    STRONGLY_CONVEX,
    Sweep,
    best_position,
    both_places,
    own_experiment,
    sweep,
)
from reproduction.jobs import Job, Progress, run_jobs
from reproduction.study import Plan, Workspace, lr_grid

pytestmark = pytest.mark.filterwarnings("ignore:delay .* is too long for:UserWarning")  # these runs are short
DIGITS = {"data": "digits", "optimum_tolerance": 1e-2}
CONSTRAINED, UNCONSTRAINED = both_places(128, 32, SHORT, **DIGITS)
LONGER = both_places(1024, 4, LONG, records=8, **DIGITS)
HEAVY_TAILS, _ = both_places(600, 4, LONG[:2], delays=(HEAVY,), grid_at=(HEAVY,), tuned_at=(), **DIGITS)
PENALISED = replace(STRONGLY_CONVEX, updates=128, data="digits")
TINY = Plan((CONSTRAINED, UNCONSTRAINED, *LONGER, HEAVY_TAILS, PENALISED), (), seeds=1, lr_stride=4)
COVERED = replace(CONSTRAINED, updates=1_000_000)  # long enough for the theorem to be about a delay of 1,000


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return Workspace(tmp_path_factory.mktemp("out"))


@pytest.fixture(scope="module")
def results(out):
    return sweep(TINY, out)


def files(space):
    return {path: path.stat().st_mtime_ns for path in (space.out / "traces").iterdir()}


def test_finished_sweeps_are_not_run_again_but_other_choices_are(results, out, tmp_path):
    before = files(out)
    again = sweep(TINY, out)
    assert files(out) == before
    first = results.regimes[CONSTRAINED]["sgd"].accuracy
    torch.testing.assert_close(again.regimes[CONSTRAINED]["sgd"].accuracy, first, equal_nan=True)
    one = replace(TINY, settings=(replace(CONSTRAINED, candidates=SHORT[:1]),))
    two_seeds = sweep(replace(one, seeds=2), Workspace(tmp_path)).regimes[one.settings[0]]["sgd"].accuracy
    again = sweep(one, Workspace(tmp_path)).regimes[one.settings[0]]["sgd"].accuracy
    torch.testing.assert_close(again, first, equal_nan=True)
    delays = (0, CONSTRAINED.delays.index(500))
    torch.testing.assert_close(two_seeds[:, :1, delays], first[:, :, delays])
    assert not torch.equal(two_seeds[:, 0, delays], two_seeds[:, 1, delays])


def test_a_damaged_trace_is_made_again(results, out):
    path = out.path(f"{UNCONSTRAINED.name}-anytime-sgd-grid-0")
    path.write_bytes(b"damaged")
    again = sweep(TINY, out).regimes[UNCONSTRAINED]["anytime-sgd"].accuracy
    torch.testing.assert_close(again, results.regimes[UNCONSTRAINED]["anytime-sgd"].accuracy, equal_nan=True)
    assert Trace.load(path).complete


def test_a_sweep_equals_plain_simulations(results):
    """Whole grid at the delays where it is shown, the winners elsewhere, nothing in between."""
    problem, trace = CONSTRAINED.problem(), results.regimes[CONSTRAINED]["anytime-sgd"]
    lrs, delays, updates = trace.axes[-1].values, trace.axis("delay").values, CONSTRAINED.updates
    assert delays == CONSTRAINED.delays
    won = {best_position(trace, 0), best_position(trace, 500)}
    for i, delay in enumerate(delays):
        for k, lr in enumerate(lrs):
            if delay in CONSTRAINED.grid_at or k in won:
                rule = build_rule("anytime-sgd", lr, parse_set(CONSTRAINED.domain))
                alone = simulate(problem, rule, delay, updates, seed=0, record_every=updates)
                assert trace.accuracy[-1, 0, i, k].item() == pytest.approx(alone.accuracy[-1].item(), abs=6e-3)
            else:
                assert trace.accuracy[-1, 0, i, k].isnan()


def test_sgd_is_judged_by_its_last_iterate_and_by_its_average_along_one_run(results):
    regime = LONGER[0]
    for name in ("sgd", "sgd-linear"):
        trace, at = results.regimes[regime][name], regime.delays.index(500)
        rule = build_rule(name, trace.axes[-1].values[1], parse_set(regime.domain))
        alone = simulate(regime.problem(), rule, 500, regime.updates, seed=0, record_every=regime.updates // 8)
        assert trace.steps.tolist() == alone.steps.tolist()
        torch.testing.assert_close(trace.accuracy[:, 0, at, 1], alone.accuracy, atol=6e-3, rtol=0)
        torch.testing.assert_close(trace.loss[:, 0, at, 1], alone.loss, atol=1e-3, rtol=1e-3)
    assert not torch.equal(trace.accuracy, results.regimes[regime]["sgd"].accuracy)


def test_a_shorter_horizon_is_the_beginning_of_the_run(results):
    """The learning rate is chosen anew at each: by the training loss without delay."""
    regime = LONGER[1]
    trace = results.regimes[regime]["anytime-sgd"]
    drops = horizon.lost(trace)
    assert list(drops) == [128, 256, 512, 1024]
    lrs = trace.axes[-1].values
    shorter = simulate(regime.problem(), LONG[1].build(torch.tensor(lrs).unsqueeze(-1)), [0, 500], 256, seed=[0])
    best = shorter.loss[-1, :, 0].mean(0).argmin()
    assert drops[256][1] == lrs[best]
    alone = shorter.accuracy[-1, :, 0, best] - shorter.accuracy[-1, :, 1, best]
    torch.testing.assert_close(drops[256][0], alone, atol=6e-3, rtol=0)


def test_figures_take_the_regimes_that_they_are_given(tmp_path):
    regime = replace(UNCONSTRAINED, delays=(0, 50), grid_at=(0,), tuned_at=(0,), candidates=(SHORT[1],))
    found = sweep(Plan((regime,), (), seeds=1, lr_stride=4), Workspace(tmp_path))
    trace = found.regimes[regime]["anytime-sgd"]
    best = best_position(trace, 0)
    rule = build_rule("anytime-sgd", trace.axes[-1].values[best], parse_set(regime.domain))
    alone = simulate(regime.problem(), rule, 50, regime.updates, seed=0, record_every=regime.updates)
    assert trace.accuracy[-1, 0, 1, best].item() == pytest.approx(alone.accuracy[-1].item(), abs=6e-3)
    section = fig1.section(found)
    assert set(section.figures) == {"fig1", "fig1-headline"}
    assert section.verdicts == ()  # there is no SGD to compare with
    for other in (lr_range.FIG2, lr_range.FIG4, fig3, horizon):
        with pytest.raises(ValueError, match=r"regimes must be with one .*, got \['unconstrained-128-digits'\]"):
            other.section(found)
    with pytest.raises(ValueError, match=r"tuned_at must be among grid_at, \(0,\), got \(0, 50\)"):
        replace(regime, tuned_at=(0, 50))


def test_an_experiment_of_ones_own(tmp_path):
    numbers = torch.linspace(0, 1, 60).view(20, 3)
    rows = "\n".join(",".join(map(str, [*row, "late" if row[0] > 0.5 else "early"])) for row in numbers.tolist())
    (tmp_path / "own.csv").write_text(rows)
    ball, free = own_experiment(str(tmp_path / "own.csv"), ["9", "3"], 200)
    assert (ball.delays, ball.updates, free.domain) == ((0, 3, 9), 200, "whole")
    assert ball.problem().outputs == 2
    assert own_experiment("", [], 0)[0].delays == (0, 10, 100, 1000)


@pytest.mark.slow
def test_jobs_do_what_the_sections_read(tmp_path):
    """In other processes; a second time there is nothing left to do."""
    plan, space = replace(TINY, settings=(PENALISED,)), Workspace(tmp_path)
    jobs = Sweep().jobs_of(plan, space)
    lines = []
    run_jobs(jobs, lines.append, processes=2)
    assert "6 pieces of work on 2 core(s), 0 of them done before" in lines[0]
    assert [line[:4] for line in lines[1:]][-1] == "100%"
    before = files(space)
    assert "sgd" in sweep(plan, space).regimes[PENALISED]
    run_jobs(jobs, lines.append, processes=1)
    assert "6 of them done before" in lines[-1]
    assert files(space) == before


@pytest.mark.parametrize(("lane", "processes"), [("processes", 1), ("processes", 2), ("streams", 1)])
def test_a_job_that_fails_is_not_swallowed(lane, processes):
    jobs = [Job("a", 1, partial(divmod, 1, 0), lane=lane), Job("b", 1, int, lane=lane)]
    with pytest.raises(ZeroDivisionError):
        run_jobs(jobs, lambda line: None, processes=processes)


@pytest.mark.parametrize("lane", ["processes", "streams"])
def test_a_job_waits_for_those_that_it_comes_after(tmp_path, lane):
    first, second = Path(tmp_path / "a"), Path(tmp_path / "b")
    jobs = [Job("b", 9, partial(first.rename, second), lane=lane, after=("a",)), Job("a", 1, first.touch, lane=lane)]
    run_jobs(jobs, lambda line: None, processes=1)
    assert second.exists()
    with pytest.raises(ValueError, match="after must be labels of these jobs"):
        run_jobs(jobs[:1], lambda line: None, processes=1)


def test_jobs_that_share_a_gpu_run_beside_each_other():
    """Jobs that wait for each other come to their end."""
    there = threading.Barrier(2, timeout=600)
    said = []
    run_jobs([Job(name, 600, there.wait, lane="streams") for name in "ab"], said.append, processes=1)
    assert "2 pieces of work on 1 core(s) and a GPU" in said[0]
    assert "about 10 minutes" in said[0]
    assert said[-1].startswith("100%")


def test_a_forecast_follows_the_pace():
    jobs = [Job(str(k), 100.0, int) for k in range(6)]
    said = []
    progress = Progress(jobs, {"processes": 2}, said.append)
    assert said == ["6 pieces of work on 2 core(s), 0 of them done before: about 5 minutes"]
    progress.done(jobs[0], 100.0)
    assert said[1] == " 17% done, about 5 minutes left: 0, 100 s"  # the clock of this test stands still
    for job in jobs[1:5]:
        progress.done(job, 300.0)
    assert said[-1] == " 83% done, about 12 minutes left: 4, 300 s"
    assert len(said) == 1 + 5


def test_sections_have_figures_verdicts_and_the_promised_columns(results):
    sections = [
        fig1.section(results),
        horizon.section(results),
        lr_range.FIG2.section(results),
        fig3.section(results),
        lr_range.FIG4.section(results),
    ]
    for section in sections:
        assert section.verdicts
        assert set(section.figures) == set(section.captions)
        assert {verdict.figure for verdict in section.verdicts} <= set(section.figures)
        assert all(verdict.quote or verdict.source == "ours" for verdict in section.verdicts)
        assert all(verdict.holds is None for verdict in section.verdicts)  # these runs are too short for any delay
    columns = ["rule", "regime", "updates", "batch", "delay", "lr", "seed", "accuracy", "loss"]
    for section in (sections[0], sections[2], sections[4]):
        assert all(list(row) == columns for row in section.rows)
    rules = {"sgd", "sgd-linear", "anytime-sgd", "steady"}
    assert {row["rule"] for row in sections[1].rows} == rules
    assert {(row["regime"], row["updates"]) for row in sections[0].rows} == {
        ("constrained", 128), ("constrained", 1024), ("unconstrained", 128), ("unconstrained", 1024),
        ("strongly-convex", 128),
    }  # fmt: skip
    excess = {row["regime"]: row["excess_loss"] for row in sections[3].rows}
    assert excess["unconstrained"] == ""
    assert excess["constrained"] > -1e-2
    assert {row["delay"] for row in sections[4].rows} == {HEAVY}
    assert any("update queue" in paragraph for paragraph in sections[4].text)
    assert not any("update queue" in paragraph for paragraph in sections[2].text)


def test_the_plans_have_a_horizon_that_the_theorem_is_about_and_one_that_it_is_not():
    for plan in PLANS.values():
        for place in ("constrained", "unconstrained"):
            own = [regime for regime in plan.settings if regime.place == place]
            short, long, *longest = sorted(own, key=lambda regime: regime.updates)
            assert not short.covers(500)
            assert long.covers(500, 1000)
            assert {"sgd-linear", "anytime-sgd", "steady"} <= set(long.rules)
            assert all(regime.covers(HEAVY) for regime in longest)
            assert longest or place == "unconstrained"


def made_up(accuracy, name="lr"):
    """A trace with given final accuracies, (delays, lrs), the same for two seeds."""
    delays = CONSTRAINED.delays
    values = torch.tensor(accuracy, dtype=torch.float64).expand(len(delays), -1).expand(1, 2, -1, -1)
    axes = (Axis("seed", (0, 1)), Axis("delay", delays), Axis(name, lr_grid(-2, 2)))
    empty = torch.zeros(2, len(delays), 9, 1)
    return Trace(torch.tensor([100]), -values, values, torch.zeros(1), empty, empty, axes, {"steps": 100})


FLAT, PEAK = [0.8] * 9, [0.3] * 4 + [0.8] + [0.3] * 4


def test_the_verdict_on_the_range_of_learning_rates_comes_out_both_ways():
    def judge(ours, sgd, average, regime=COVERED):
        traces = {"anytime-sgd": made_up(ours), "sgd": made_up(sgd), "sgd-linear": made_up(average)}
        return lr_range.FIG2.verdict(regime, traces).holds

    assert judge(FLAT, PEAK, PEAK)
    assert judge(FLAT, PEAK, FLAT) is False  # SGD's average would do
    assert judge(FLAT, FLAT, PEAK) is False
    assert judge(PEAK, FLAT, FLAT) is False
    assert judge(FLAT, PEAK, PEAK, CONSTRAINED) is None  # too short for the theorem


def test_good_learning_rates_are_within_a_share_of_the_best():
    values = torch.tensor([[0.8, 0.2, 0.8, 0.73, 0.71, 0.2]])
    assert lr_range.count_good(values, 0.1) == 3
    assert lr_range.count_good(values, 0.0) == 2


def with_delays(by_delay):
    """A trace whose accuracy depends on the delay only."""
    trace = made_up(FLAT)
    accuracy = torch.tensor(by_delay, dtype=torch.float64).view(1, 1, -1, 1).expand(1, 2, -1, 9)
    return Trace(trace.steps, -accuracy, accuracy, trace.delays, trace.output, trace.query, trace.axes, trace.config)


KEEPS, FALLS = [0.84, 0.83, 0.83, 0.82], [0.84, 0.8, 0.7, 0.6]


def test_the_verdicts_of_figure_1_come_out_both_ways():
    def judge(ours, sgd, average):
        traces = {"anytime-sgd": with_delays(ours), "sgd": with_delays(sgd), "sgd-linear": with_delays(average)}
        return [verdict.holds for verdict in fig1.verdicts(COVERED, traces)]

    assert judge(KEEPS, FALLS, FALLS) == [True, True, True]
    assert judge(KEEPS, FALLS, KEEPS) == [False, True, False]  # SGD's average would do
    assert judge(FALLS, FALLS, FALLS) == [False, False, False]
    assert judge(FALLS, KEEPS, KEEPS) == [False, False, False]


def test_a_claim_is_counted_only_at_delays_that_the_theorem_is_about():
    traces = dict.fromkeys(("anytime-sgd", "sgd", "sgd-linear"), with_delays(FALLS))
    outcomes = {}
    for updates in (37_500, 250_000, 1_000_000):
        gap, maintains, _ = fig1.verdicts(replace(CONSTRAINED, updates=updates), traces)
        outcomes[updates] = gap.outcome, maintains.outcome  # at delays 1000 and 500
    assert outcomes[37_500] == ("not counted", "not counted")
    assert outcomes[250_000] == ("not counted", "no")
    assert outcomes[1_000_000] == ("no", "no")
    short = fig1.maintains_verdict(replace(CONSTRAINED, updates=37_500), traces)
    assert "kept up to delay 100 (not counted: these delays are above √T = 193)" in short.measured


def over_time(accuracy, steps, losses=None):
    """A trace with records at these steps, delays 0 and 500, one learning rate and one seed."""
    values = torch.tensor(accuracy, dtype=torch.float64).view(len(steps), 1, 2, 1)
    axes = (Axis("seed", (0,)), Axis("delay", (0, 500)), Axis("lr", (1.0,)))
    nothing = torch.zeros(1, 0)
    loss = -values if losses is None else torch.tensor(losses, dtype=torch.float64).view(-1, 1, 1, 1).expand_as(values)
    return Trace(torch.tensor(steps), loss, values, torch.zeros(1), nothing, nothing, axes)


@pytest.mark.parametrize(
    ("late", "holds"), [((0.5, 0.8, 0.81), True), ((0.5, 0.8, 0.75), False), ((0.82, 0.8, 0.8), False)]
)
def test_anytime_sgd_recovers_where_the_root_of_t_reaches_the_delay(late, holds):
    """Does not hold: much is lost at the longest run; less at the shortest."""
    accuracy = [value for one in late for value in (0.84, one)]
    traces = {"anytime-sgd": over_time(accuracy, [125_000, 250_000, 500_000])}
    assert horizon.recovers_verdict(CONSTRAINED, traces).holds is holds
    if holds:
        longer = {"anytime-sgd": over_time(accuracy, [250_000, 500_000, 1_000_000])}
        assert horizon.recovers_verdict(CONSTRAINED, longer).holds is False  # now the first counts, too
    shorter = {"anytime-sgd": over_time(accuracy, [50_000, 100_000, 200_000])}
    assert horizon.recovers_verdict(CONSTRAINED, shorter).holds is None  # too short for the theorem


@pytest.mark.parametrize(
    ("ours", "sgd", "holds"),
    [([1, 0.5, 0.3], [1, 1, 1], True), ([1, 0.5, 0.4], [1, 1, 1], False), ([1, 0.5, 0.3], [8, 4, 2], False),
     ([1, 0.5, 0.3], [0.5, 0.5, 0.5], False)],
)  # fmt: skip
def test_figure_3_looks_at_the_falls_of_both(ours, sgd, holds):
    """Does not hold: anytime SGD stalls, SGD falls as fast, SGD ends nearly as low."""
    traces = {name: over_time([0.5] * 6, [0, 1, 2], losses) for name, losses in (("anytime-sgd", ours), ("sgd", sgd))}
    best = Optimum(torch.zeros(1), 0.0, 0.0)
    assert fig3.approach_verdict(COVERED, traces, best, "sgd").holds is holds


def test_tuning_picks_the_smallest_training_loss_over_seeds_at_that_delay():
    trace = made_up([0.1, 0.2, 0.3, 0.9, 0.3, 0.2, 0.1, 0.1, 0.1])  # the loss is minus the accuracy
    assert best_position(trace, 0) == 3
    trace.loss[:, :, 0, 5] = -2.0
    trace.loss[:, 1, 0, 6] = torch.nan
    assert best_position(trace, 0) == 5
    assert best_position(trace, 500) == 3
