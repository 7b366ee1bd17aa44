"""Tolerance studies: values and curves, verdicts, and a study that continues after an interruption."""

import csv
import importlib
import json
import math
import os
import sys
import warnings
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import tolerance_script
import torch
from torch import nn

import lategrad as lg
from lategrad.cli import main as cli
from lategrad.optim import Delayed
from lategrad.support import progress
from lategrad.support.options import load_object
from lategrad.tolerance_study import Run
from lategrad.tolerance_study.code_identity import identify_code
from lategrad.tolerance_study.run import Task
from lategrad.tolerance_study.study import parallel_runs

SCRIPT = Path(tolerance_script.__file__)


def values_of(result):
    """All numbers, those that are not finite by one name: a file says no more of them."""
    return [[value if math.isfinite(value) else "diverged" for value in run.values] for run in result.runs]


def quadratic(wrap, steps=40, lr=0.3):
    """Without noise: x <- x - lr x_{t - tau}."""
    x = nn.Parameter(1 + torch.rand(1, dtype=torch.float64))
    optimizer = wrap(torch.optim.SGD([x], lr=lr))
    for _ in range(steps):
        optimizer.zero_grad()
        (x**2 / 2).backward()
        optimizer.step()
        yield 1 + x.item() ** 2


def test_every_run_is_the_training_with_a_delayed_optimizer():
    result = lg.tolerance(quadratic, delays=(0, 2, 5), seeds=2)
    assert (result.delays, result.optimizers) == ((0, 2, 5), ("own",))
    for delay in (0, 2, 5):
        for seed, value in enumerate(result.values("own", delay)):
            torch.manual_seed(seed)
            *_, last = quadratic(lambda optimizer, delay=delay: Delayed(optimizer, delay))
            assert value == last
    point = result.point("own", 5)
    assert (point.updates, point.rounds) == (35, 35 / 6)
    assert point.value == pytest.approx(result.values("own", 5).mean())
    gaps = result.values("own", 5) - result.values("own", 0)
    assert (point.gap, point.gap_spread) == (pytest.approx(gaps.mean()), pytest.approx(gaps.std(ddof=1)))


def test_the_largest_delay_is_the_last_before_the_first_that_costs_more():
    result = lg.tolerance(quadratic, delays=(0, 1, 2, 4, 8), seeds=1)
    gaps = [result.point("own", delay).gap for delay in result.delays]
    assert gaps[-1] > 1  # beyond the edge of stability, which is at lr * tau of about 3/2
    for cost in (1e-6, 0.01, 0.3):
        fits = [gap <= cost * result.values("own", 0)[0] for gap in gaps]
        assert fits[0]
        assert not all(fits)
        assert result.largest(cost) == result.delays[fits.index(False) - 1]


def result_of(curves, better="lower", cost=0.05, seeds=1):
    """A result from curves over 100 updates, by delay."""
    runs = [
        Run(Task("own", delay, seed), tuple(range(1, 101)), tuple(float(v) for v in curve + 1e-9 * seed), 1.0, 0)
        for delay, curve in curves.items()
        for seed in range(seeds)
    ]
    return lg.Tolerance(tuple(runs), better=better, cost=cost)


T = np.arange(1, 101)


def test_a_slower_curve_is_recoverable_and_one_that_stops_is_permanent():
    base = 1 + 3 * np.exp(-T / 20)
    result = result_of({
        0: base,
        1: 1 + 3 * np.exp(-T / 21),
        2: 1 + 3 * np.exp(-T / 60),
        4: 1.5 + 3 * np.exp(-T / 10),
        8: np.where(T < 50, 2.0, np.inf),
    })  # fmt: skip
    assert [result.point("own", delay).verdict for delay in result.delays] == [
        "free",
        "free",
        "recoverable",
        "permanent",
        "diverged",
    ]
    assert result.largest() == 1
    assert result.point("own", 2).slowdown == pytest.approx(3.0, rel=0.1)  # three times slower by construction
    assert result.point("own", 8).slowdown is None


def test_higher_is_better_where_it_is_said_so():
    lower, higher = (result_of({0: sign * (1 + 3 * np.exp(-T / 20)), 4: sign * (1.5 + np.exp(-T / 10))}, better)
                     for sign, better in ((1, "lower"), (-1, "higher")))  # fmt: skip
    assert lower.point("own", 4).gap == pytest.approx(higher.point("own", 4).gap)
    assert lower.point("own", 4).verdict == higher.point("own", 4).verdict == "permanent"
    assert lower.largest() == higher.largest() == 0


def test_a_delay_that_helps_needs_fewer_updates():
    result = result_of({0: 1 + 3 * np.exp(-T / 20), 2: 1 + 3 * np.exp(-T / 10)})
    assert result.point("own", 2).slowdown == pytest.approx(0.5, rel=0.15)  # twice as fast by construction


def test_a_gap_within_the_spread_of_seeds_is_unclear():
    def finals(gaps):
        runs = [Run(Task("own", 0, seed), (9,), (1.0,), 1.0, 0) for seed in range(len(gaps))]
        return lg.Tolerance((*runs, *(Run(Task("own", 3, i), (9,), (1 + gap,), 1.0, 0) for i, gap in enumerate(gaps))))

    assert finals([-0.5, 0.9]).point("own", 3).verdict == "unclear"  # more seeds would tell
    assert finals([0.19, 0.21]).point("own", 3).verdict == "costs"  # no curve, so that no more can be said
    assert finals([0.04, 0.04]).point("own", 3).verdict == "free"
    assert finals([0.2]).point("own", 3).verdict == "costs"
    assert math.isnan(finals([0.2]).point("own", 3).gap_spread)


def test_optimizers_take_the_place_of_the_own_one():
    result = lg.tolerance(tolerance_script.train, (0, 8), {"small steps": tolerance_script.small_steps}, seeds=1)
    assert result.optimizers == ("own", "small steps")
    assert result.values("small steps", 0)[0] > result.values("own", 0)[0]  # slower without a delay,
    assert math.isnan(result.values("own", 8)[0])
    assert result.values("small steps", 8)[0] < 3  # and stable with one


def test_delays_by_stage_need_the_model_and_are_those_of_a_pipeline():
    result = lg.tolerance(tolerance_script.train, (0, 1, 8), seeds=1, profile="stages:2")
    torch.manual_seed(0)

    def wrap(optimizer, model):
        return Delayed(optimizer, lg.delays.by_stage(model, 2, delay=8))

    wrap.name, wrap.delay, wrap.seed = "own", 8, 0
    *_, last = tolerance_script.train(wrap)
    assert result.values("own", 8)[0] == last
    assert result.point("own", 8).updates == 60
    uniform = lg.tolerance(tolerance_script.train, (0, 8), seeds=1)
    assert not result.values("own", 8)[0] > uniform.values("own", 8)[0]  # only the first of two stages is late
    with pytest.raises(ValueError, match=r"profile 'stages:2' needs the model: wrap\(optimizer, model\)"):
        lg.tolerance(quadratic, (0,), seeds=1, profile="stages:2")


def test_an_interrupted_study_continues(tmp_path, monkeypatch):
    counted = tmp_path / "counted"
    monkeypatch.setenv("COUNT_RUNS_IN", str(counted))
    lg.tolerance(tolerance_script.train, (0, 2), seeds=1, out=tmp_path / "tol")
    more = lg.tolerance(tolerance_script.train, (0, 2, 4), seeds=2, out=tmp_path / "tol")
    lines = counted.read_text().splitlines()
    assert len(lines) == len(set(lines)) == 6
    monkeypatch.delenv("COUNT_RUNS_IN")
    again = lg.tolerance(tolerance_script.train, (0, 2, 4), seeds=2)
    assert values_of(more) == values_of(again)
    with pytest.raises(ValueError, match="out must be another folder: .* better lower, not higher"):
        lg.tolerance(tolerance_script.train, (0,), seeds=1, out=tmp_path / "tol", better="higher")
    with pytest.raises(ValueError, match="out must be another folder: the code of train is not"):
        lg.tolerance(quadratic, (0,), seeds=1, out=tmp_path / "tol")


@pytest.mark.slow
def test_parallel_runs_equal_runs_in_order():
    alone = lg.tolerance(tolerance_script.train, (0, 4), seeds=1)
    together = lg.tolerance(tolerance_script.train, (0, 4), seeds=1, workers="auto")
    assert values_of(together) == values_of(alone)
    with pytest.raises(ValueError, match="workers must be 1 for this training: it cannot be sent to another process"):
        lg.tolerance(lambda wrap: 1.0, (0,), workers=2)
    assert parallel_runs(2**60) == 1
    assert parallel_runs(1) >= 1


def test_tables_pages_pictures_and_files(tmp_path):
    result = lg.tolerance(tolerance_script.train, (0, 2, 8), {"small <steps>": tolerance_script.small_steps}, seeds=2)
    table = result.table()
    assert str(result) == table
    assert "slower" not in table
    base = result.values("own", 0)
    for point in result.points():  # also of another optimizer
        gap = result.values(point.optimizer, point.delay).mean() - base.mean()
        assert point.gap_to_own == pytest.approx(gap, nan_ok=True)
        assert f" {gap:+.3g} " in table
    loaded = lg.Tolerance.load(result.to_json(tmp_path / "tol.json"))
    assert table.count("\n| ") == 6
    assert "own: tolerates a delay of " in table
    json.loads((tmp_path / "tol.json").read_text(), parse_constant=pytest.fail)  # NaN is no JSON
    page = result.to_html(tmp_path / "deep" / "tol.html").read_text()
    assert page.count("<tr>") == 7
    assert "<svg" in page
    assert "small &lt;steps&gt;" in page
    result.plot(tmp_path / "tol.png")
    assert (tmp_path / "tol.png").read_bytes().startswith(b"\x89PNG")
    rows = list(csv.DictReader(result.to_csv(tmp_path / "tol.csv").read_text().splitlines()))
    assert [float(row["gap"]) for row in rows] == pytest.approx([point.gap for point in result.points()], nan_ok=True)
    assert values_of(loaded) == values_of(result)
    assert loaded.table() == table
    (tmp_path / "other.json").write_text(json.dumps({"format": "other"}))
    with pytest.raises(ValueError, match="a file of the format 'lategrad-tolerance-1'"):
        lg.Tolerance.load(tmp_path / "other.json")


def test_seeds_that_change_nothing_are_noticed():
    def with_own_seed(wrap):
        torch.manual_seed(5)
        yield from quadratic(wrap)

    with pytest.warns(UserWarning, match="all seeds gave the same values"):
        lg.tolerance(with_own_seed, (0, 1), seeds=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lg.tolerance(quadratic, (0, 1), seeds=2)


def no_wrap(wrap):
    return 1.0


def wraps_twice(wrap):
    x = nn.Parameter(torch.ones(1))
    wrap(wrap(torch.optim.SGD([x], lr=0.1)))


def gives_text(wrap):
    wrap(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))
    return "text"


def gives_nothing(wrap):
    wrap(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))


def forgets_what_wrap_returned(wrap):
    x = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([x], lr=0.1)
    wrap(optimizer)
    x.sum().backward()
    optimizer.step()
    return x.item()


@pytest.mark.parametrize(
    ("train", "options", "error", "message"),
    [
        (forgets_what_wrap_returned, {}, ValueError, r"no update: write optimizer = wrap\(optimizer\)"),
        (no_wrap, {}, ValueError, r"gave a value before it called wrap\(optimizer\)"),
        (wraps_twice, {}, ValueError, "wrap was called twice"),
        (gives_text, {}, ValueError, "must give numbers, got 'text'"),
        (gives_nothing, {}, ValueError, "must give numbers, got None"),
        (quadratic, {"optimizers": {"new": lambda params: None}}, ValueError,
         "optimizer 'new' must be a torch.optim.Optimizer, got None"),
        (quadratic, {"delays": (0, -1)}, ValueError, "each of delays must be an integer >= 0, got -1"),
        (quadratic, {"seeds": 0}, ValueError, "seeds must be an integer >= 1"),
        (quadratic, {"better": "bigger"}, ValueError, "better must be one of 'lower', 'higher'"),
        (quadratic, {"workers": "many"}, ValueError, "workers must be an integer >= 1, or 'auto'"),
        (quadratic, {"profile": "stages"}, ValueError, "profile must be None, or 'stages:P'"),
        (quadratic, {"optimizers": {"own": None}}, ValueError, "optimizers must be without the name 'own'"),
    ],
)  # fmt: skip
def test_bad_studies(train, options, error, message):
    with pytest.raises(error, match=message):
        lg.tolerance(train, **{"delays": (0,), "seeds": 1, **options})


def run_command(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main(["tolerance", *arguments])
    output = capsys.readouterr()
    return ended.value.code or 0, output.out, output.err


def test_the_command_runs_a_function_of_a_script(capsys, tmp_path):
    code, out, _ = run_command(
        capsys, f"{SCRIPT}:train", "--delay", "0", "2", "--seeds", "1", "--out", str(tmp_path / "tol"),
        "--optimizer", f"small={SCRIPT}:small_steps",
    )  # fmt: skip
    assert code == 0
    assert out.count("| small ") == 2
    assert {path.name for path in (tmp_path / "tol").iterdir()} == {
        "tolerance.html", "tolerance.png", "tolerance.csv", "tolerance.json", "runs", "study.json",
    }  # fmt: skip
    assert len(list((tmp_path / "tol" / "runs").iterdir())) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such_module_anywhere:train"], "No module named 'no_such_module_anywhere'"),
        (["missing.py:train"], "no file 'missing.py'"),
        ([f"{SCRIPT}:missing"], "tolerance_script.py' has no 'missing'"),
        (["train"], "must be MODULE:FUNCTION or FILE.py:FUNCTION, got 'train'"),
        ([f"{SCRIPT}:train", "--delay", "0", "x"], "Invalid value for '--delay'"),
        (
            [f"{SCRIPT}:train", "--optimizer", "x"],
            "--optimizer must be NAME=MODULE:FUNCTION, each with a name of its own, got ['x']",
        ),
        ([f"{SCRIPT}:train", "--optimizer", *[f"x={SCRIPT}:small_steps"] * 2], "each with a name of its own, got ['x="),
    ],
)
def test_bad_commands_are_one_line(capsys, arguments, message):
    code, _, err = run_command(capsys, *arguments)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1


def write_script(folder, *, lr=0.1, other=0.01, helper=0.0, late=0.0):
    (folder / "their_helper.py").write_text(f"OFFSET = {helper}\n")
    (folder / "their_late_helper.py").write_text(f"OFFSET = {late}\n")
    (folder / "their_script.py").write_text(
        f"import torch\nimport their_helper\nLR = {lr}\n"
        "def train(wrap):\n"
        "    x = torch.nn.Parameter(torch.rand(1))\n"
        "    optimizer = wrap(torch.optim.SGD([x], lr=LR))\n"
        "    for _ in range(3):\n"
        "        optimizer.zero_grad()\n"
        "        (x**2).sum().backward()\n"
        "        optimizer.step()\n"
        "    import their_late_helper\n"
        "    return 1 + x.item() + their_helper.OFFSET + their_late_helper.OFFSET\n"
    )
    (folder / "their_optimizers.py").write_text(
        f"import torch\nLR = {other}\ndef small(params):\n    return torch.optim.SGD(params, lr=LR)\n"
    )


@pytest.mark.parametrize(
    ("change", "changed"),
    [({"lr": 0.4}, "train"), ({"helper": 1.0}, "train"), ({"late": 1.0}, "train"), ({"other": 0.02}, "small")],
)
def test_runs_of_other_code_are_not_reused(change, changed, capsys, tmp_path, monkeypatch):
    """A constant of the script, of a module that it imports, also in a function, or of an optimizer's file changed."""
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run():
        for name in ("their_script", "their_helper", "their_late_helper", "their_optimizers"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        importlib.invalidate_caches()
        small = load_object(str(tmp_path / "their_optimizers.py"), "small")
        train = load_object(str(tmp_path / "their_script.py"), "train")
        return lg.tolerance(train, (0, 1), {"small": small}, seeds=1, out=tmp_path / "tol")

    write_script(tmp_path)
    first = run()
    assert capsys.readouterr().err == ""
    assert values_of(run()) == values_of(first)
    assert capsys.readouterr().err == f"4 of 4 runs are kept from before, in {tmp_path / 'tol'}\n"
    write_script(tmp_path, **change)
    with pytest.raises(
        ValueError, match=f"out must be another folder: the code of {changed} is not that of the runs in"
    ):
        run()
    (tmp_path / "tol" / "study.json").unlink()  # the remedy, where the change does not matter
    assert values_of(run()) == values_of(first)


@pytest.mark.parametrize("nonsense", ["", "[]", "{}", '{"optimizers": 3}', "[" * 100_000, "a pipe"])
@pytest.mark.parametrize("name", ["study.json", "runs/*delay1*"])
def test_damaged_files_of_a_study_are_one_line_that_names_them(nonsense, name, tmp_path):
    def study():
        return lg.tolerance(quadratic, (0, 1), seeds=1, out=tmp_path, progress=False)

    first = study()
    (path,) = tmp_path.glob(name)
    path.unlink()
    if nonsense == "a pipe":
        os.mkfifo(path)
    else:
        path.write_text(nonsense)
    with pytest.raises((ValueError, OSError), match=f"{path.name}' is (damaged|not a plain file)") as raised:
        study()
    assert "\n" not in str(raised.value)
    path.unlink()
    assert values_of(study()) == values_of(first)


def test_a_figure_takes_the_place_of_a_link(tmp_path):
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "tolerance.png").symlink_to(tmp_path / "precious")
    lg.tolerance(quadratic, (0, 1), seeds=1, progress=False).plot(tmp_path / "tolerance.png")
    assert (tmp_path / "precious").read_text() == "precious"


def test_values_that_a_training_closes_over_are_part_of_its_code():
    def made(lr):
        return lambda wrap: lr

    assert identify_code(made(1)) == identify_code(made(1))
    assert identify_code(made(1)) != identify_code(made(2))
    assert identify_code(partial(quadratic, steps=3)) != identify_code(partial(quadratic, steps=4))
    assert identify_code(partial(quadratic, steps=3))["name"] == "quadratic"
    assert identify_code(cache(made(1))) != identify_code(cache(made(2)))
    assert identify_code(torch.optim.SGD) != identify_code(torch.optim.Adam)


def test_off_a_terminal_a_study_prints_a_line_now_and_then_and_ctrl_c_says_what_is_kept(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(progress, "LINE_EVERY", 0.0)

    def train(wrap):
        if wrap.delay == 2:
            raise KeyboardInterrupt
        yield from quadratic(wrap)

    with pytest.raises(KeyboardInterrupt):
        lg.tolerance(train, (0, 1, 2), seeds=1, out=tmp_path)
    said = capsys.readouterr().err.splitlines()
    assert said[:2] == ["tolerance: run 1 of 3", "tolerance: run 2 of 3"]
    assert said[2] == f"2 of 3 runs are kept in {tmp_path}: do the same again to continue"
