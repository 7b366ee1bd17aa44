"""The paper's experiments in small, and verdicts that can come out both ways."""

import csv
import threading
from dataclasses import replace
from functools import partial

import pytest
import torch

from lategrad.problems import Optimum
from lategrad.registry import build_rule, parse_set
from lategrad.simulator import simulate
from lategrad.trace import Axis, Trace
from reproduction import fig1, fig2, fig3, fig4, step_range
from reproduction.jobs import Job, run_jobs
from reproduction.sweep import (
    CONSTRAINED,
    FORWARD,
    LOGNORMAL,
    REGIMES,
    STRONGLY_CONVEX,
    UNCONSTRAINED,
    WHOLE_GRID,
    Scale,
    SweepConfig,
    half_decades,
    over_time,
    sweep,
    sweep_jobs,
    tuned,
)

TINY = SweepConfig(Scale(epochs=3, seeds=2, batch=32, every_step=4, optimum_tolerance=1e-2), data="digits")


@pytest.fixture(scope="module")
def sweeps(tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    return out, {regime: sweep(TINY, regime, out) for regime in REGIMES}


def test_finished_sweeps_are_not_run_again(sweeps, monkeypatch):
    out, first = sweeps
    with monkeypatch.context() as patch:
        patch.setattr("reproduction.sweep.simulate", None)
        again = sweep(TINY, CONSTRAINED, out)
        torch.testing.assert_close(again["sgd"].accuracy, first[CONSTRAINED]["sgd"].accuracy, equal_nan=True)
        with pytest.raises(TypeError):
            sweep(replace(TINY, scale=replace(TINY.scale, seeds=1)), CONSTRAINED, out)


def test_a_damaged_trace_is_made_again(sweeps):
    out, first = sweeps
    path = out / "traces" / "unconstrained-anytime-sgd-grid.safetensors"
    path.write_bytes(b"damaged")
    again = sweep(TINY, UNCONSTRAINED, out)["anytime-sgd"].accuracy
    torch.testing.assert_close(again, first[UNCONSTRAINED]["anytime-sgd"].accuracy, equal_nan=True)
    assert Trace.load(path).complete


def test_a_sweep_equals_plain_simulations(sweeps):
    """Whole grid at the delays where it is shown, the winners elsewhere, nothing in between."""
    _, found = sweeps
    problem, trace = TINY.problem(CONSTRAINED), found[CONSTRAINED]["anytime-sgd"]
    steps, delays = trace.axes[-1].values, trace.axis("delay").values
    assert delays == CONSTRAINED.delays
    won = {tuned(trace, 0), tuned(trace, 250)}
    for i, delay in enumerate(delays):
        for k, step in enumerate(steps):
            if delay in WHOLE_GRID or k in won:
                rule = build_rule("anytime-sgd", step, parse_set(CONSTRAINED.domain))
                alone = simulate(problem, rule, delay, TINY.steps, seed=1, record_every=TINY.steps)
                assert trace.accuracy[-1, 1, i, k].item() == pytest.approx(alone.accuracy[-1].item(), abs=6e-3)
            else:
                assert trace.accuracy[-1, 1, i, k].isnan()


def test_sgd_is_judged_by_its_last_iterate_and_by_its_average(sweeps):
    _, found = sweeps
    last, average = found[CONSTRAINED]["sgd"], found[CONSTRAINED]["sgd-linear"]
    rule = build_rule("sgd", last.axes[-1].values[1], parse_set(CONSTRAINED.domain))
    alone = simulate(TINY.problem(CONSTRAINED), rule, 500, TINY.steps, seed=0, record_every=TINY.steps)
    at = CONSTRAINED.delays.index(500)
    assert last.accuracy[-1, 0, at, 1].item() == pytest.approx(alone.accuracy[-1].item(), abs=6e-3)
    assert not torch.equal(last.accuracy[-1, :, at], average.accuracy[-1, :, at])


def test_figure_3_shows_the_runs_of_the_sweep_along_the_way(sweeps):
    """And SGD's last iterate, which the sweep judges at its end only, in a run of its own."""
    out, found = sweeps
    for rule in CONSTRAINED.rules:
        trace, whole = over_time(TINY, CONSTRAINED, rule, out), found[CONSTRAINED][rule]
        assert len(trace.steps) > 20
        at = CONSTRAINED.delays.index(500), tuned(whole, 0)
        torch.testing.assert_close(trace.accuracy[-1], whole.accuracy[-1][:, at[0], at[1]], atol=6e-3, rtol=0)


def test_a_regime_of_ones_own_needs_only_the_delays_at_which_steps_are_tuned(tmp_path):
    """Figure 3's delay is run beside it, and not among the regime's own."""
    regime = replace(UNCONSTRAINED, name="mine", delays=(0, 50, 250), grids=(("anytime-sgd", (0.1, 1.0)),))
    config = SweepConfig(Scale(epochs=1, seeds=1, batch=2), data="digits")
    trace = sweep(config, regime, tmp_path)["anytime-sgd"]
    assert trace.axis("delay").values == (0, 50, 250)
    assert not trace.accuracy[-1, :, (0, 2)].isnan().any()
    best = tuned(trace, 0)
    rule = build_rule("anytime-sgd", trace.axes[-1].values[best], parse_set(regime.domain))
    alone = simulate(config.problem(regime), rule, 50, config.steps, seed=0, record_every=config.steps)
    assert trace.accuracy[-1, 0, 1, best].item() == pytest.approx(alone.accuracy[-1].item(), abs=6e-3)
    assert over_time(config, regime, "anytime-sgd", tmp_path).delays.max() == 500
    with pytest.raises(ValueError, match=r"delays must be delays with \(0, 250\), .*, got \(0, 50\)"):
        replace(regime, delays=(0, 50))


@pytest.mark.slow
def test_jobs_do_what_the_sections_read(tmp_path, monkeypatch):
    """In other processes; a second time there is nothing left to do."""
    jobs = [job for job in sweep_jobs(TINY, tmp_path, "cpu") if job.label.startswith("strongly")]
    said = []
    run_jobs(jobs, said.append, processes=2)
    assert "3 pieces of work on 2 core(s), 0 of them done before" in said[0]
    assert [line[:4] for line in said[1:]][-1] == "100%"
    monkeypatch.setattr("reproduction.sweep.simulate", None)
    assert "sgd" in sweep(TINY, STRONGLY_CONVEX, tmp_path)
    run_jobs(jobs, said.append, processes=1)
    assert "3 of them done before" in said[-1]


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


def test_sections_have_figures_verdicts_and_the_promised_columns(sweeps):
    out, found = sweeps
    sections = [
        fig1.section(fig1.Config(), TINY, found),
        step_range.section(fig2.CONFIG, TINY, found),
        fig3.section(fig3.Config(), TINY, found, out, device="cpu"),
        step_range.section(fig4.CONFIG, TINY, found, fig4.ABOUT),
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
    assert any("strong convexity H" in paragraph for paragraph in sections[0].text)


def made_up(accuracy, name="lr"):
    """A trace with given final accuracies, (delays, steps), the same for two seeds."""
    delays = CONSTRAINED.delays
    values = torch.tensor(accuracy, dtype=torch.float64).expand(len(delays), -1).expand(1, 2, -1, -1)
    axes = (Axis("seed", (0, 1)), Axis("delay", delays), Axis(name, half_decades(-2, 2)))
    empty = torch.zeros(2, len(delays), 9, 1)
    return Trace(torch.tensor([100]), -values, values, torch.zeros(1), empty, empty, axes, {"steps": 100})


FLAT, PEAK = [0.8] * 9, [0.3] * 4 + [0.8] + [0.3] * 4


@pytest.mark.parametrize("stem", ["fig4", "fig4-forward"])
def test_the_step_range_verdict_comes_out_both_ways(stem):
    def judge(ours, sgd, average):
        traces = {"anytime-sgd": made_up(ours), "sgd": made_up(sgd), "sgd-linear": made_up(average)}
        return step_range.verdict(fig4.CONFIG, stem, CONSTRAINED, traces).reproduced

    assert judge(FLAT, PEAK, PEAK)
    assert not judge(FLAT, PEAK, FLAT)  # SGD's average would do
    assert not judge(FLAT, FLAT, PEAK)
    assert not judge(PEAK, FLAT, FLAT)


def test_good_steps_are_within_a_share_of_the_best():
    values = torch.tensor([[0.8, 0.2, 0.8, 0.73, 0.71, 0.2]])
    assert step_range.good_steps(values, 0.1) == 3
    assert step_range.good_steps(values, 0.0) == 2


def with_delays(by_delay):
    """A trace whose accuracy depends on the delay only."""
    trace = made_up(FLAT)
    accuracy = torch.tensor([*by_delay, 0.0, 0.0], dtype=torch.float64).view(1, 1, -1, 1).expand(1, 2, -1, 9)
    return Trace(trace.steps, -accuracy, accuracy, trace.delays, trace.output, trace.query, trace.axes, trace.config)


def test_the_verdicts_of_figure_1_come_out_both_ways():
    steady, falling = [0.84] * 7, [0.84, 0.83, 0.8, 0.7, 0.6, 0.5, 0.4]

    def judge(ours, sgd, average):
        traces = {"anytime-sgd": with_delays(ours), "sgd": with_delays(sgd), "sgd-linear": with_delays(average)}
        return [verdict.reproduced for verdict in fig1.verdicts(fig1.Config(), CONSTRAINED, traces, 37_500)]

    assert judge(steady, falling, falling) == [True, True, True]
    assert judge(steady, falling, steady) == [False, True, False]  # SGD's average would do
    assert judge(falling, falling, falling) == [False, False, False]
    assert judge(falling, steady, steady) == [False, False, False]


def test_verdicts_that_depend_on_the_horizon_say_so():
    traces = dict.fromkeys(("anytime-sgd", "sgd", "sgd-linear"), with_delays([0.84, 0.83, 0.8, 0.7, 0.6, 0.5, 0.4]))
    verdict = fig1.maintains_verdict(fig1.Config(), CONSTRAINED, traces, 37_500)
    assert (
        "kept up to delay 50. At 37,500 updates; the theorem asks for delays up to about √T = 193" in verdict.measured
    )


@pytest.mark.parametrize(
    ("ours", "sgd", "reproduced"),
    [([1, 0.5, 0.3], [1, 1, 1], True), ([1, 0.5, 0.4], [1, 1, 1], False), ([1, 0.5, 0.3], [8, 4, 2], False),
     ([1, 0.5, 0.3], [0.5, 0.5, 0.5], False)],
)  # fmt: skip
def test_figure_3_looks_at_the_falls_of_both(ours, sgd, reproduced):
    """Not reproduced: anytime SGD stalls, SGD falls as fast, SGD ends nearly as low."""

    def over(losses):
        values = torch.tensor(losses, dtype=torch.float64).unsqueeze(-1)
        nothing = torch.zeros(1, 0)
        return Trace(torch.arange(3), values, values, torch.zeros(1), nothing, nothing, (Axis("seed", (0,)),))

    best = Optimum(torch.zeros(1), 0.0, 0.0)
    traces = {"anytime-sgd": over(ours), "sgd": over(sgd)}
    assert fig3.verdict(fig3.Config(), CONSTRAINED, traces, best, "sgd").reproduced is reproduced


def test_tuning_picks_the_best_mean_over_seeds_at_that_delay():
    trace = made_up([0.1, 0.2, 0.3, 0.9, 0.3, 0.2, 0.1, 0.1, 0.1])
    assert tuned(trace, 0) == 3


@pytest.mark.slow
def test_reproduce_from_the_command_line(tmp_path):
    """The main job at its quick scale on the real data, in one go, and again from its finished parts."""
    from lategrad.cli import main as cli

    for _ in range(2):
        with pytest.raises(SystemExit) as ended:
            cli.main(["reproduce", "fig1", "--scale", "quick", "--out", str(tmp_path)])
        assert not ended.value.code
    assert (tmp_path / "report.html").read_text().count("<svg") == 3
    rows = list(csv.DictReader((tmp_path / "fig1.csv").open()))
    ball = [row for row in rows if row["regime"] == "constrained"]
    assert {row["step"] for row in ball} == {"37500"}

    def frozen(rule, delay):
        of_rule = [row for row in ball if row["rule"] == rule]
        best = max((row for row in of_rule if row["delay"] == "0"), key=lambda row: float(row["accuracy"]))["lr"]
        return next(float(row["accuracy"]) for row in of_rule if (row["delay"], row["lr"]) == (delay, best))

    for sgd in ("sgd", "sgd-linear"):
        assert abs(frozen("anytime-sgd", "0") - frozen(sgd, "0")) < 0.02
        assert frozen("anytime-sgd", "500") - frozen(sgd, "500") > 0.15


def test_unknown_parts_and_scales_are_refused(capsys):
    from lategrad.cli import main as cli

    for arguments in (["fig5"], ["fig1", "--scale", "huge"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(["reproduce", *arguments])
        assert ended.value.code == 2
        assert "must be one of" in capsys.readouterr().err
