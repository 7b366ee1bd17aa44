"""The command line as a user meets it."""

import csv
import subprocess
import sys

import pytest

from lategrad import cli
from lategrad.delays.specs import FORMS
from lategrad.registry import RULES
from lategrad.trace import Trace


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    output = capsys.readouterr()
    return ended.value.code or 0, output.out, output.err


def test_list_names_everything(capsys):
    code, out, _ = run(capsys, "list")
    assert code == 0
    for name in [*RULES, *FORMS, "ball:RADIUS", "digits", "fashion-mnist", "softmax"]:
        assert name in out


def test_simulate_prints_a_table_and_writes_everything(capsys, tmp_path):
    code, out, _ = run(
        capsys, "simulate", "--rule", "sgd", "anytime-sgd", "--lr", "0.1", "1", "--delay", "constant:0", "uniform:0,9",
        "--domain", "ball:5", "--steps", "50", "--seeds", "2", "--out", str(tmp_path / "demo"),
    )  # fmt: skip
    assert code == 0
    assert out.count("anytime-sgd") >= 4
    rows = list(csv.DictReader((tmp_path / "demo" / "results.csv").open()))
    assert len(rows) == 2 * 2 * 2 * 2 * 11
    assert {row["delay"] for row in rows} == {"constant:0", "uniform:0,9"}
    trace = Trace.load(tmp_path / "demo" / "sgd.safetensors")
    last = [row for row in rows if row["rule"] == "sgd" and row["step"] == "50"]
    assert float(last[0]["accuracy"]) == pytest.approx(trace.accuracy[-1, 0, 0, 0].item())
    assert (tmp_path / "demo" / "anytime-sgd.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rule", "adam"], "unknown rule 'adam'; valid: anytime-sgd"),
        (["--domain", "cube:1"], "unknown set 'cube:1'; valid: whole, ball:RADIUS"),
        (["--delay", "sometimes"], "valid forms: 500, constant:500"),
        (["--delay", "lognormal:7"], "lognormal:7,0.4"),
        (["--lr", "fast"], "'--lr'"),
        (["--lr", "-1"], "lr must be a finite number >= 0"),
        (["--steps", "0"], "steps must be an integer >= 1, got 0"),
        (["--seeds", "0"], "--seeds must be an integer >= 1, got 0"),
        (["--problem", "no-such.csv"], "no-such.csv"),
        (["--problem", "imagenet"], "'digits', 'fashion-mnist'"),
        (["--model", "forest"], "--model must be one of 'softmax', 'least-squares', 'svm', got 'forest'"),
        (["--preprocess", "whiten"], "preprocessing must be one of"),
        (["--batch", "0"], "batch must be an integer >= 1, got 0"),
        (["--speed", "9"], "No such option: --speed"),
    ],
)
def test_errors_are_one_line_with_exit_code_2(capsys, arguments, message):
    code, out, err = run(capsys, "simulate", *arguments)
    assert code == 2
    assert err.startswith("error: ")
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert out == ""


def test_an_unknown_command_and_no_command(capsys):
    assert run(capsys, "simulat")[0] == 2
    code, out, _ = run(capsys)
    assert code in (0, 2)
    assert "simulate" in out


def test_help_teaches(capsys):
    code, out, _ = run(capsys, "simulate", "--help")
    assert code == 0
    for word in ("--rule", "lognormal:7,0.4", "ball:5", "Example"):
        assert word in out


def test_the_installed_program_runs():
    done = subprocess.run([sys.executable, "-m", "lategrad", "list"], capture_output=True, text=True, check=True)
    assert "anytime-sgd" in done.stdout


def test_rules_with_differently_named_numbers_share_a_table(capsys, tmp_path):
    code, _, err = run(
        capsys, "simulate", "--problem", "quadratic", "--rule", "anytime-sgd", "optimistic-anytime",
        "--steps", "20", "--out", str(tmp_path),
    )  # fmt: skip
    assert code == 0, err
    rows = list(csv.DictReader((tmp_path / "results.csv").open()))
    assert {row["rule"] for row in rows} == {"anytime-sgd", "optimistic-anytime"}
    assert {row["lr"] for row in rows} == {"0.1"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "banana"], "device must be 'cpu' or 'cuda', got 'banana'"),
        (["--problem", "quadratic", "--l2", "0.5"], "do not apply to --problem quadratic"),
        (["--problem", "quadratic", "--steps", "5", "--out", __file__], "exists"),
    ],
)
def test_more_errors_in_one_line(capsys, arguments, message):
    code, _, err = run(capsys, "simulate", *arguments)
    assert code == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1
