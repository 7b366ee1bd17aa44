"""The paper's experiments in small, and verdicts that can come out both ways."""

import csv

import pytest
import torch

from lategrad.experiments import fig1, fig2, fig3, step_range
from lategrad.experiments.sweep import CONSTRAINED, REGIMES, WHOLE_GRID, Scale, SweepConfig, half_decades, sweep, tuned
from lategrad.registry import build_rule, parse_set
from lategrad.simulate import simulate
from lategrad.trace import Axis, Trace

TINY = SweepConfig(Scale(epochs=3, seeds=2, batch=32, every_step=4, optimum_tolerance=1e-2), data="digits")


@pytest.fixture(scope="module")
def sweeps(tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    return out, {regime: sweep(TINY, regime, out, say=lambda line: None) for regime in REGIMES}


def test_finished_sweeps_are_not_run_again(sweeps):
    out, first = sweeps
    said = []
    again = sweep(TINY, CONSTRAINED, out, say=said.append)
    assert said == []
    torch.testing.assert_close(again["sgd"].accuracy, first[CONSTRAINED]["sgd"].accuracy, equal_nan=True)
    other = SweepConfig(Scale(epochs=3, seeds=1, batch=32, every_step=4), data="digits")
    sweep(other, CONSTRAINED, out / "other", say=said.append)
    assert len(said) == 3 * 2


def test_a_damaged_trace_is_made_again(tmp_path):
    said = []
    sweep(TINY, CONSTRAINED, tmp_path, say=said.append)
    path = tmp_path / "traces" / "constrained-anytime-sgd-grid.safetensors"
    path.write_bytes(b"damaged")
    sweep(TINY, CONSTRAINED, tmp_path, say=said.append)
    assert len(said) == 3 * 2 + 1
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


def test_sections_have_figures_verdicts_and_the_promised_columns(sweeps):
    out, found = sweeps
    sections = [
        fig1.section(fig1.Config(), TINY, found),
        step_range.section(fig2.CONFIG, TINY, found),
        fig3.section(fig3.Config(records=4), TINY, found, out, device="cpu", say=lambda line: None),
    ]
    for section in sections:
        columns = ["rule", "regime", "delay", "lr", "seed", "step", "accuracy", "loss", "excess_loss"]
        assert all(list(row) == columns for row in section.rows)
        assert section.verdicts
        assert set(section.figures) == set(section.captions)
    regimes = {row["regime"] for row in sections[2].rows if row["excess_loss"] != ""}
    assert regimes == {"constrained", "strongly-convex"}
    assert all(row["excess_loss"] >= -1e-2 for row in sections[2].rows if row["excess_loss"] != "")


def made_up(accuracy, name="lr"):
    """A trace with given final accuracies, (delays, steps), the same for two seeds."""
    delays = (0, 10, 50, 100, 250, 500, 1000, "lognormal:7,0.4")
    values = torch.tensor(accuracy, dtype=torch.float64).expand(len(delays), -1).expand(1, 2, -1, -1)
    axes = (Axis("seed", (0, 1)), Axis("delay", delays), Axis(name, half_decades(-2, 2)))
    empty = torch.zeros(2, 8, 9, 1)
    return Trace(torch.tensor([100]), -values, values, torch.zeros(1), empty, empty, axes, {"steps": 100})


FLAT, PEAK = [0.8] * 9, [0.3] * 4 + [0.8] + [0.3] * 4


def test_the_step_range_verdict_comes_out_both_ways():
    def judge(ours, sgd):
        traces = dict.fromkeys(CONSTRAINED.rules, made_up(FLAT)) | {"anytime-sgd": made_up(ours), "sgd": made_up(sgd)}
        (verdict,) = step_range.verdicts(fig2.CONFIG, CONSTRAINED, traces)
        return verdict.reproduced

    assert judge(FLAT, PEAK)
    assert not judge(PEAK, FLAT)
    assert not judge(FLAT, FLAT)


def test_good_decades_counts_the_longest_run_of_neighbours():
    steps = half_decades(-2, 2)
    values = torch.tensor([[0.8, 0.2, 0.8, 0.8, 0.8, 0.2, 0.8, 0.8, 0.2]])
    assert step_range.good_decades(steps, values, 0.75) == pytest.approx(1.0, abs=1e-3)
    assert step_range.good_decades(steps, values, 0.9) == 0.0


def with_delays(by_delay):
    """A trace whose accuracy depends on the delay only."""
    trace = made_up(FLAT)
    accuracy = torch.tensor([*by_delay, 0.0], dtype=torch.float64).view(1, 1, 8, 1).expand(1, 2, 8, 9)
    return Trace(trace.steps, -accuracy, accuracy, trace.delays, trace.output, trace.query, trace.axes, trace.config)


def test_the_gap_verdict_comes_out_both_ways():
    steady, falling = [0.84] * 7, [0.84, 0.83, 0.8, 0.7, 0.6, 0.5, 0.4]

    def judge(ours, sgd):
        traces = {"anytime-sgd": with_delays(ours), "sgd": with_delays(sgd)}
        return [verdict.reproduced for verdict in fig1.verdicts(fig1.Config(), CONSTRAINED, traces)]

    assert judge(steady, falling) == [True, True]
    assert judge(falling, falling) == [False, False]
    assert judge(falling, steady) == [False, False]


def test_tuning_picks_the_best_mean_over_seeds_at_that_delay():
    trace = made_up([0.1, 0.2, 0.3, 0.9, 0.3, 0.2, 0.1, 0.1, 0.1])
    assert tuned(trace, 0) == 3


@pytest.mark.slow
def test_reproduce_from_the_command_line(tmp_path):
    """The main job at its quick scale on the real data, in one go, and again from its finished parts."""
    from lategrad import cli

    for _ in range(2):
        with pytest.raises(SystemExit) as ended:
            cli.main(["reproduce", "fig1", "--scale", "quick", "--out", str(tmp_path)])
        assert not ended.value.code
    assert (tmp_path / "report.html").read_text().count("<svg") == 2
    rows = list(csv.DictReader((tmp_path / "fig1.csv").open()))
    at_zero = [float(r["accuracy"]) for r in rows if r["delay"] == "0" and r["rule"] == "anytime-sgd"]
    assert max(at_zero) > 0.8


def test_unknown_parts_and_scales_are_refused(capsys):
    from lategrad import cli

    for arguments in (["fig5"], ["fig1", "--scale", "huge"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(["reproduce", *arguments])
        assert ended.value.code == 2
        assert "must be one of" in capsys.readouterr().err
