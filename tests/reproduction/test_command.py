"""`python -m reproduction`: what it runs, what it refuses, and how it ends."""

import csv
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from reproduction.__main__ import app
from reproduction.reproduce import NAMES, PARTS


def call(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.slow
def test_reproduce_from_the_command_line(tmp_path):
    """The main job at its quick scale on the real data, in one go, and again from its finished parts."""
    for _ in range(2):
        assert call("fig1", "fig2", "--scale", "quick", "--out", tmp_path).exit_code == 0
    assert (tmp_path / "report.html").read_text().count("<img") == 3 + 1
    rows = list(csv.DictReader((tmp_path / "fig1.csv").read_text().splitlines()))

    def frozen(rule, delay, updates):
        own = ("constrained", updates, rule)
        of_rule = [row for row in rows if (row["regime"], row["updates"], row["rule"]) == own]
        best = min((row for row in of_rule if row["delay"] == "0"), key=lambda row: float(row["loss"]))["lr"]
        return next(float(row["accuracy"]) for row in of_rule if (row["delay"], row["lr"]) == (delay, best))

    for sgd in ("sgd", "sgd-linear"):
        for updates in ("37500", "1000000"):
            assert abs(frozen("anytime-sgd", "0", updates) - frozen(sgd, "0", updates)) < 0.02
        assert frozen("anytime-sgd", "500", "37500") - frozen(sgd, "500", "37500") > 0.15
    assert frozen("anytime-sgd", "0", "37500") - frozen("anytime-sgd", "500", "37500") > 0.1
    assert frozen("anytime-sgd", "0", "1000000") - frozen("anytime-sgd", "500", "1000000") < 0.05


@pytest.mark.slow  # worker processes
def test_figure_1_on_ones_own_data_and_delays(tmp_path):
    x = torch.randn(300, 5, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] + x[:, 1] > 0).long()
    np.savez(tmp_path / "own.npz", x=x, y=y)
    result = call("fig1", "--data", tmp_path / "own.npz", "--delays", "7", "--delays", "40", "--updates", 500,
                  "--out", tmp_path / "out")  # fmt: skip
    assert result.exit_code == 0, result.output
    rows = list(csv.DictReader((tmp_path / "out" / "fig1.csv").read_text().splitlines()))
    assert {row["delay"] for row in rows} == {"0", "7", "40"}
    assert {row["regime"] for row in rows} == {"constrained", "unconstrained"}
    assert max(float(row["accuracy"]) for row in rows if row["delay"] == "40") > 0.9
    assert (tmp_path / "out" / "fig1.png").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fig5"], "PART must be one of .*, got 'fig5'; did you mean 'fig"),
        (["fig1", "theorem"], "got 'theorem'; did you mean 'theorems'"),
        (["fig1", "--scale", "papers"], "--scale must be one of .*, got 'papers'; did you mean 'paper'"),
        (["deep", "--models", "mpl"], "--models must be one of 'mlp', 'cnn', 'gpt', .*, got 'mpl'; did you mean 'mlp'"),
        (["deep", "--rules", "muonn"], "--rules must be one of .*, got 'muonn'; did you mean 'muon'"),
        (["local", "--rules", "fed-bufff"], "--rules must be one of .* did you mean 'fed-buff'"),
        (["fig1", "--models", "mlp"], "--models and --rules must be left out: they limit deep, local and local-real"),
        (["fig1", "--device", "tpu"], "--device"),
        (["fig1", "--data", "missing.csv"], "there is no file 'missing.csv': check the path"),
        (["fig1", "--data", "data.txt"], "a path ending in .npz, .csv, .*, got 'data.txt'"),
        (["fig1", "--delays", "long"], r"--delays must be whole numbers, at least one above 0, .*, got \['long'\]"),
        (["fig1", "--delays", "0"], r"--delays must be whole numbers, at least one above 0, .*, got \['0'\]"),
        (["fig1", "--updates", "-1"], "--updates must be >= 1, or left out, got -1"),
        (["fig1", "fig2", "--delays", "3"], "--data, --delays and --updates must be left out: they are for fig1 alone"),
    ],
)  # fmt: skip
def test_bad_names_are_refused_with_a_suggestion(arguments, message, tmp_path):
    result = call(*arguments, "--out", tmp_path)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert re.search(message, result.stderr)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nothing"], "No such option: --nothing"),
        (["fig1", "--updates", "x"], "Invalid value for '--updates'"),
        (["--scale", "quick", "--scale", "paper"], "--scale is given twice"),
        (["fig1", "--out", __file__], "File exists"),
    ],
)
def test_what_the_parser_refuses_is_one_line_with_exit_code_2(arguments, message):
    command = [sys.executable, "-m", "reproduction", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_all_leaves_out_what_runs_only_by_name():
    assert NAMES[:5] == ("fig1", "horizon", "fig2", "fig3", "fig4")
    assert NAMES[5:] == ("baselines", "deep", "theorems", "local", "local-real")
    assert [part.name for part in PARTS if part.only_by_name] == ["local", "local-real"]
    assert [part.name for part in PARTS if part.has_models] == ["deep", "local", "local-real"]


@pytest.mark.slow  # starts a reproduction twice
def test_an_interrupted_run_keeps_what_is_finished_and_continues(tmp_path):
    command = [sys.executable, "-m", "reproduction", "theorems", "--out", str(tmp_path)]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a shell's background ignores it
    )  # fmt: skip
    deadline = time.monotonic() + 300
    while len(list(tmp_path.glob("traces/*.json"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "interrupted: what is finished is kept" in errors
    done = {path: path.stat().st_mtime_ns for path in tmp_path.glob("traces/*.json")}
    again = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=True)
    assert f"{len(done)} of them done before" in again.stderr
    assert all(path.stat().st_mtime_ns == when for path, when in done.items())
    assert (tmp_path / "report.html").is_file()
