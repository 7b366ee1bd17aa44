"""`python -m reproduction`: what it runs, what it refuses, and how it ends."""

import csv
import os
import re
import signal
import subprocess
import sys
import time

import pytest
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
    assert (tmp_path / "report.html").read_text().count("<svg") == 3 + 1
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fig5"], "PART must be one of .*, got 'fig5'; did you mean 'fig"),
        (["fig1", "theorem"], "got 'theorem'; did you mean 'theorems'"),
        (["fig1", "--scale", "papers"], "--scale must be one of .*, got 'papers'; did you mean 'paper'"),
        (["deep", "--models", "mpl"], "--models must be one of 'mlp', 'cnn', 'gpt', got 'mpl'; did you mean 'mlp'"),
        (["deep", "--rules", "muonn"], "--rules must be one of .*, got 'muonn'; did you mean 'muon'"),
        (["local", "--rules", "fed-bufff"], "--rules must be one of .* did you mean 'fed-buff'"),
        (["fig1", "--models", "mlp"], "--models and --rules must be left out: they limit deep, local and local-real"),
        (["fig1", "--device", "tpu"], "--device"),
    ],
)  # fmt: skip
def test_bad_names_are_refused_with_a_suggestion(arguments, message, tmp_path):
    result = call(*arguments, "--out", tmp_path)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert re.search(message, result.stderr)
    assert list(tmp_path.iterdir()) == []


def test_all_leaves_out_what_runs_only_by_name():
    assert NAMES == ("fig1", "fig2", "fig3", "fig4", "baselines", "deep", "theorems", "local", "local-real")
    assert [part.name for part in PARTS if part.only_by_name] == ["local", "local-real"]
    assert [part.name for part in PARTS if part.has_models] == ["deep", "local", "local-real"]


@pytest.mark.slow  # starts a reproduction twice
def test_an_interrupted_run_keeps_what_is_finished_and_continues(tmp_path):
    command = [sys.executable, "-m", "reproduction", "theorems", "--out", str(tmp_path)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
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
