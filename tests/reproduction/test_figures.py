"""The paper's experiments in small, and verdicts that can come out both ways."""

import threading
from dataclasses import replace
from functools import partial

import pytest
import torch

from lategrad.problems import Optimum
from lategrad.registry import build_rule, parse_set
from lategrad.simulator import simulate
from lategrad.trace import Axis, Trace
from reproduction.figures import fig1, fig3, lr_range
from reproduction.figures.sweep import (
    CANDIDATES,
    FORWARD,
    LOGNORMAL,
    WHOLE_GRID,
    Sweep,
    best_position,
    regimes,
    sweep,
)
from reproduction.jobs import Job, run_jobs
from reproduction.study import Candidate, Plan, Workspace, lr_grid

pytestmark = pytest.mark.filterwarnings("ignore:delay .* is too long for:UserWarning")  # these runs are short
SMALL = regimes(epochs=3, batch=32, optimum_tolerance=1e-2, data="digits")
CONSTRAINED, UNCONSTRAINED, STRONGLY_CONVEX = SMALL
TINY = Plan(SMALL, CANDIDATES, seeds=2, lr_stride=4)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return sweep(TINY, Workspace(tmp_path_factory.mktemp("out")))


def files(space):
    return {path: path.stat().st_mtime_ns for path in (space.out / "traces").iterdir()}


def test_finished_sweeps_are_not_run_again_but_other_choices_are(results, tmp_path):
    before = files(results.space)
    again = sweep(TINY, results.space)
    assert files(results.space) == before
    first = results.regimes[CONSTRAINED]["sgd"].accuracy
    torch.testing.assert_close(again.regimes[CONSTRAINED]["sgd"].accuracy, first, equal_nan=True)
    one = replace(TINY, settings=(CONSTRAINED,), candidates=CANDIDATES[:1])
    sweep(replace(one, seeds=1), Workspace(tmp_path))
    more = sweep(one, Workspace(tmp_path)).regimes[CONSTRAINED]["sgd"].accuracy
    torch.testing.assert_close(more, first, equal_nan=True)


def test_a_damaged_trace_is_made_again(results):
    path = results.space.path("unconstrained-anytime-sgd-grid")
    path.write_bytes(b"damaged")
    again = sweep(TINY, results.space).regimes[UNCONSTRAINED]["anytime-sgd"].accuracy
    torch.testing.assert_close(again, results.regimes[UNCONSTRAINED]["anytime-sgd"].accuracy, equal_nan=True)
    assert Trace.load(path).complete


def test_a_sweep_equals_plain_simulations(results):
    """Whole grid at the delays where it is shown, the winners elsewhere, nothing in between."""
    problem, trace = CONSTRAINED.problem(), results.regimes[CONSTRAINED]["anytime-sgd"]
    lrs, delays, updates = trace.axes[-1].values, trace.axis("delay").values, CONSTRAINED.updates
    assert delays == CONSTRAINED.delays
    won = {best_position(trace, 0), best_position(trace, 250)}
    for i, delay in enumerate(delays):
        for k, lr in enumerate(lrs):
            if delay in WHOLE_GRID or k in won:
                rule = build_rule("anytime-sgd", lr, parse_set(CONSTRAINED.domain))
                alone = simulate(problem, rule, delay, updates, seed=1, record_every=updates)
                assert trace.accuracy[-1, 1, i, k].item() == pytest.approx(alone.accuracy[-1].item(), abs=6e-3)
            else:
                assert trace.accuracy[-1, 1, i, k].isnan()


def test_sgd_is_judged_by_its_last_iterate_and_by_its_average(results):
    found, updates = results.regimes[CONSTRAINED], CONSTRAINED.updates
    last, average = found["sgd"], found["sgd-linear"]
    rule = build_rule("sgd", last.axes[-1].values[1], parse_set(CONSTRAINED.domain))
    alone = simulate(CONSTRAINED.problem(), rule, 500, updates, seed=0, record_every=updates)
    at = CONSTRAINED.delays.index(500)
    assert last.accuracy[-1, 0, at, 1].item() == pytest.approx(alone.accuracy[-1].item(), abs=6e-3)
    assert not torch.equal(last.accuracy[-1, :, at], average.accuracy[-1, :, at])


def test_figure_3_shows_the_runs_of_the_sweep_over_time(results):
    """And SGD's last iterate, which the sweep judges at its end only, in a run of its own."""
    for rule in CONSTRAINED.curves:
        trace, whole = results.over_time(CONSTRAINED, rule), results.regimes[CONSTRAINED][rule]
        assert len(trace.steps) > 20
        at = CONSTRAINED.delays.index(500), best_position(whole, 0)
        torch.testing.assert_close(trace.accuracy[-1], whole.accuracy[-1][:, at[0], at[1]], atol=6e-3, rtol=0)


def test_a_regime_of_ones_own_needs_only_the_delays_at_which_learning_rates_are_tuned(tmp_path):
    """Figure 3's delay is run beside it, and not among the regime's own."""
    regime = replace(UNCONSTRAINED, name="mine", delays=(0, 50, 250), rules=("anytime-sgd",), epochs=1, batch=2)
    plan = Plan((regime,), (Candidate("anytime-sgd", (0.1, 1.0)),), seeds=1)
    found = sweep(plan, Workspace(tmp_path))
    trace = found.regimes[regime]["anytime-sgd"]
    assert trace.axis("delay").values == (0, 50, 250)
    assert not trace.accuracy[-1, :, (0, 2)].isnan().any()
    best = best_position(trace, 0)
    rule = build_rule("anytime-sgd", trace.axes[-1].values[best], parse_set(regime.domain))
    alone = simulate(regime.problem(), rule, 50, regime.updates, seed=0, record_every=regime.updates)
    assert trace.accuracy[-1, 0, 1, best].item() == pytest.approx(alone.accuracy[-1].item(), abs=6e-3)
    assert found.over_time(regime, "anytime-sgd").delays.max() == 500
    with pytest.raises(ValueError, match=r"delays must be delays with \(0, 250\), .*, got \(0, 50\)"):
        replace(regime, delays=(0, 50))


@pytest.mark.slow
def test_jobs_do_what_the_sections_read(tmp_path):
    """In other processes; a second time there is nothing left to do."""
    plan, space = replace(TINY, settings=(STRONGLY_CONVEX,)), Workspace(tmp_path)
    jobs = [Job(task.candidate.rule, 1, partial(Sweep().measure, task), Sweep().files(task))
            for task in plan.tasks(space)]  # fmt: skip
    lines = []
    run_jobs(jobs, lines.append, processes=2)
    assert "3 pieces of work on 2 core(s), 0 of them done before" in lines[0]
    assert [line[:4] for line in lines[1:]][-1] == "100%"
    before = files(space)
    assert "sgd" in sweep(plan, space).regimes[STRONGLY_CONVEX]
    run_jobs(jobs, lines.append, processes=1)
    assert "3 of them done before" in lines[-1]
    assert files(space) == before


@pytest.mark.parametrize(("lane", "processes"), [("processes", 1), ("processes", 2), ("streams", 1)])
def test_a_job_that_fails_is_not_swallowed(lane, processes):
    jobs = [Job("a", 1, partial(divmod, 1, 0), lane=lane), Job("b", 1, int, lane=lane)]
    with pytest.raises(ZeroDivisionError):
        run_jobs(jobs, lambda line: None, processes=processes)


def test_jobs_that_share_a_gpu_run_beside_each_other():
    """Jobs that wait for each other come to their end."""
    there = threading.Barrier(2, timeout=600)
    said = []
    run_jobs([Job(name, 600, there.wait, lane="streams") for name in "ab"], said.append, processes=1)
    assert "2 pieces of work on 1 core(s) and a GPU" in said[0]
    assert said[0].endswith("about 10 minutes")
    assert said[-1].startswith("100%")


def test_sections_have_figures_verdicts_and_the_promised_columns(results):
    sections = [
        fig1.section(results),
        lr_range.FIG2.section(results),
        fig3.section(results),
        lr_range.FIG4.section(results),
    ]
    for section in sections:
        columns = ["rule", "regime", "delay", "lr", "seed", "step", "accuracy", "loss", "excess_loss"]
        assert all(list(row) == columns for row in section.rows)
        assert section.verdicts
        assert set(section.figures) == set(section.captions)
        assert {verdict.figure for verdict in section.verdicts} <= set(section.figures)
        assert all(verdict.quote for verdict in section.verdicts)
    regimes = {row["regime"] for row in sections[2].rows if row["excess_loss"] != ""}
    assert regimes == {"constrained", "strongly-convex"}
    assert all(row["excess_loss"] >= -1e-2 for row in sections[2].rows if row["excess_loss"] != "")
    assert {row["delay"] for row in sections[3].rows} == {LOGNORMAL, FORWARD}
    assert any("in an update queue instead of" in paragraph for paragraph in sections[3].text)
    assert any("are drawn at the update" in paragraph for paragraph in sections[3].text)
    assert not any("are drawn at the update" in paragraph for paragraph in sections[1].text)
    assert any("strong convexity H" in paragraph for paragraph in sections[0].text)


def made_up(accuracy, name="lr"):
    """A trace with given final accuracies, (delays, lrs), the same for two seeds."""
    delays = CONSTRAINED.delays
    values = torch.tensor(accuracy, dtype=torch.float64).expand(len(delays), -1).expand(1, 2, -1, -1)
    axes = (Axis("seed", (0, 1)), Axis("delay", delays), Axis(name, lr_grid(-2, 2)))
    empty = torch.zeros(2, len(delays), 9, 1)
    return Trace(torch.tensor([100]), -values, values, torch.zeros(1), empty, empty, axes, {"steps": 100})


FLAT, PEAK = [0.8] * 9, [0.3] * 4 + [0.8] + [0.3] * 4


@pytest.mark.parametrize("stem", ["fig4", "fig4-forward"])
def test_the_verdict_on_the_range_of_learning_rates_comes_out_both_ways(stem):
    def judge(ours, sgd, average):
        traces = {"anytime-sgd": made_up(ours), "sgd": made_up(sgd), "sgd-linear": made_up(average)}
        return lr_range.FIG4.verdict(stem, CONSTRAINED, traces).holds

    assert judge(FLAT, PEAK, PEAK)
    assert not judge(FLAT, PEAK, FLAT)  # SGD's average would do
    assert not judge(FLAT, FLAT, PEAK)
    assert not judge(PEAK, FLAT, FLAT)


def test_good_learning_rates_are_within_a_share_of_the_best():
    values = torch.tensor([[0.8, 0.2, 0.8, 0.73, 0.71, 0.2]])
    assert lr_range.count_good(values, 0.1) == 3
    assert lr_range.count_good(values, 0.0) == 2


def with_delays(by_delay):
    """A trace whose accuracy depends on the delay only."""
    trace = made_up(FLAT)
    accuracy = torch.tensor([*by_delay, 0.0, 0.0], dtype=torch.float64).view(1, 1, -1, 1).expand(1, 2, -1, 9)
    return Trace(trace.steps, -accuracy, accuracy, trace.delays, trace.output, trace.query, trace.axes, trace.config)


def test_the_verdicts_of_figure_1_come_out_both_ways():
    steady, falling = [0.84] * 7, [0.84, 0.83, 0.8, 0.7, 0.6, 0.5, 0.4]

    def judge(ours, sgd, average):
        traces = {"anytime-sgd": with_delays(ours), "sgd": with_delays(sgd), "sgd-linear": with_delays(average)}
        return [verdict.holds for verdict in fig1.verdicts(CONSTRAINED, traces, 37_500)]

    assert judge(steady, falling, falling) == [True, True, True]
    assert judge(steady, falling, steady) == [False, True, False]  # SGD's average would do
    assert judge(falling, falling, falling) == [False, False, False]
    assert judge(falling, steady, steady) == [False, False, False]


def test_verdicts_that_depend_on_the_horizon_say_so():
    traces = dict.fromkeys(("anytime-sgd", "sgd", "sgd-linear"), with_delays([0.84, 0.83, 0.8, 0.7, 0.6, 0.5, 0.4]))
    verdict = fig1.maintains_verdict(CONSTRAINED, traces, 37_500)
    assert (
        "kept up to delay 50. At 37,500 updates; the theorem asks for delays up to about √T = 193" in verdict.measured
    )


@pytest.mark.parametrize(
    ("ours", "sgd", "holds"),
    [([1, 0.5, 0.3], [1, 1, 1], True), ([1, 0.5, 0.4], [1, 1, 1], False), ([1, 0.5, 0.3], [8, 4, 2], False),
     ([1, 0.5, 0.3], [0.5, 0.5, 0.5], False)],
)  # fmt: skip
def test_figure_3_looks_at_the_falls_of_both(ours, sgd, holds):
    """Does not hold: anytime SGD stalls, SGD falls as fast, SGD ends nearly as low."""

    def over(losses):
        values = torch.tensor(losses, dtype=torch.float64).unsqueeze(-1)
        nothing = torch.zeros(1, 0)
        return Trace(torch.arange(3), values, values, torch.zeros(1), nothing, nothing, (Axis("seed", (0,)),))

    best = Optimum(torch.zeros(1), 0.0, 0.0)
    traces = {"anytime-sgd": over(ours), "sgd": over(sgd)}
    assert fig3.approach_verdict(CONSTRAINED, traces, best, "sgd").holds is holds


def test_tuning_picks_the_best_mean_over_seeds_at_that_delay():
    trace = made_up([0.1, 0.2, 0.3, 0.9, 0.3, 0.2, 0.1, 0.1, 0.1])
    assert best_position(trace, 0) == 3
