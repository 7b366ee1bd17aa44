"""The command line as a user meets it."""

import csv
import os
import re
import subprocess
import sys

import pytest
import torch
from sklearn.datasets import load_wine

import lategrad as lg
from lategrad.cli import main as cli
from lategrad.delays.specs import DELAYS
from lategrad.problems import Quadratic
from lategrad.registry import RULES
from lategrad.replays import replay
from lategrad.support import progress
from lategrad.trace import Trace, plot_traces


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    output = capsys.readouterr()
    return ended.value.code or 0, output.out, output.err


def test_list_names_everything(capsys):
    code, out, _ = run(capsys, "list")
    assert code == 0
    for name in [*RULES, *DELAYS, "ball:RADIUS", "digits", "fashion-mnist", "softmax"]:
        assert name in out


def test_simulate_prints_a_table_and_writes_everything(capsys, tmp_path):
    code, out, _ = run(
        capsys, "simulate", "--rule", "sgd", "anytime-sgd", "--lr", "0.1", "1", "--delay", "constant:0", "uniform:0,9",
        "--domain", "ball:5", "--steps", "50", "--seeds", "2", "--out", str(tmp_path / "demo"),
    )  # fmt: skip
    assert code == 0
    assert out.count("anytime-sgd") >= 4
    rows = list(csv.DictReader((tmp_path / "demo" / "results.csv").read_text().splitlines()))
    assert len(rows) == 2 * 2 * 2 * 2 * 11
    assert {row["delay"] for row in rows} == {"constant:0", "uniform:0,9"}
    trace = Trace.load(tmp_path / "demo" / "sgd.safetensors")
    last = [row for row in rows if row["rule"] == "sgd" and row["step"] == "50"]
    assert float(last[0]["accuracy"]) == pytest.approx(trace.accuracy[-1, 0, 0, 0].item())
    assert (tmp_path / "demo" / "results.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in (tmp_path / "demo").iterdir()) == [
        "anytime-sgd.safetensors", "results.csv", "results.png", "sgd.safetensors"]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rule", "xyz"], "unknown rule 'xyz'; valid: anytime-sgd"),
        (["--domain", "cube:1"], "unknown constraint set 'cube'; valid: whole, ball:RADIUS"),
        (["--delay", "banana"], "unknown delay 'banana'; valid: constant:500, uniform:0,100"),
        (["--delay", "lognormal:7"], "delay 'lognormal' needs sigma: write lognormal:7,0.4"),
        (["--lr", "fast"], "'--lr'"),
        (["--lr", "-1"], "lr must be a finite number >= 0"),
        (["--steps", "0"], "--steps must be an integer >= 1, got 0"),
        (["--rule", "stedy"], "did you mean 'steady'?"),
        (["--rule", "steady:lr=x"], "lr of rule 'steady' must be a number, got 'x'"),
        (["--rule", "strongly-convex", "--lr", "0.1"], "write --rule strongly-convex:strong_convexity=0.1"),
        (["--rule", "sgd", "sgd"], "--rule sgd is given twice"),
        (["--rule", "sgd:lr=1", "--lr", "2"], "--lr 2 is of no use"),
        (["--steps", "5", "--steps", "6"], "--steps is given twice"),
        (["--record-every", "0"], "--record-every must be an integer >= 1"),
        (["--seeds", "0"], "--seeds must be an integer >= 1 and <= 100000, got 0"),
        (["--problem", "no-such.csv"], "no-such.csv"),
        (["--problem", "imagenet"], "'digits', 'fashion-mnist'"),
        (["--model", "forest"], "--model must be one of 'softmax', 'least-squares', 'svm', got 'forest'"),
        (["--preprocess", "whiten"], "--preprocess must be one of 'standardise', 'standardise-globally'"),
        (["--batch", "0"], "--batch must be an integer >= 1, got 0"),
        (["--clip", "0"], "--clip must be a finite number > 0, got 0"),
        (["--max-norm-ratio", "1"], "--max-norm-ratio must be a finite number > 1, got 1"),
        (["--speed", "9"], "No such option: --speed"),
        (["--out", ""], "--out must not be empty"),
        (["--out="], "--out must not be empty"),
        (["--seeds", "1000000000"], "--seeds must be an integer >= 1 and <= 100000, got 1000000000"),
        (["--steps", "99999999999999999999"], "--steps must have numbers below 2^63, got 99999999999999999999"),
        (["--device", "meta"], "--device must be 'cpu' or 'cuda', got 'meta'"),
        (["--rule", "fed-buff:size=99999999999999999999"], "--rule must have numbers below 2^63, got fed-buff:size=99"),
        (["--rule", "fed-buff:1,99999999999999999999"], "--rule must have numbers below 2^63, got fed-buff:1,99"),
        (["--problem", "quadratic:dim=99999999999999"], "problem 'quadratic': RuntimeError: [enforce fail"),
        (["--problem", "digits:P"], "'digits', 'fashion-mnist'"),
        (["--batch", "100000000000"], "can't allocate memory: you tried to allocate 204800000000000 bytes"),
    ],
)
def test_errors_are_one_line_with_exit_code_2(capsys, arguments, message):
    code, out, err = run(capsys, "simulate", *arguments)
    assert code == 2
    assert err.startswith("error: ")
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert out == ""


OWN_CODE = """
import torch
import lategrad as lg

class Divides(lg.SGD):
    def update(self, state, grad, delay):
        return state._replace(x=state.x / (0 * len(state.x) // 0))

class Raises(lg.problems.Quadratic):
    def gradient(self, x, sample):
        raise RuntimeError("broken\\nin two lines")

class Short(lg.problems.Quadratic):
    def gradient(self, x, sample):
        return x[..., :3]

def train(wrap):
    raise KeyError("loss")

def twice(wrap):
    for _ in range(2):
        wrap(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1))

def nothing():
    pass
"""


@pytest.fixture(scope="module")  # a module is imported once
def own_code(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    (folder / "late_code.py").write_text(OWN_CODE)
    (folder / "exits.py").write_text("raise SystemExit(4)")
    return {"OWN": f"{folder}/late_code.py", "EXITS": f"{folder}/exits.py"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["simulate", "--rule", "OWN:Divides:lr=1"], "late_code.py, line 7, in update: ZeroDivisionError: "),
        (
            ["train", "--rule", "OWN:Divides:lr=1", "--engine", "threads"],
            "late_code.py, line 7, in update: ZeroDivision",
        ),
        (["simulate", "--problem", "OWN:Raises"], "late_code.py, line 11, in gradient: RuntimeError: broken"),
        (["simulate", "--problem", "OWN:Short"], "shape of a gradient must be x's (1, 1, 10), got (1, 1, 3)"),
        (["tolerance", "OWN:train"], "late_code.py, line 18, in train: KeyError: 'loss'"),
        (["tolerance", "OWN:train", "--workers", "2"], "late_code.py, line 18, in train: KeyError: 'loss'"),
        (["tolerance", "OWN:twice"], "wrap was called twice"),
        (["tolerance", "OWN:nothing"], "must be a function of one argument"),
        (
            ["tolerance", "OWN:train", "--seeds", "1000000000"],
            "--seeds must be an integer >= 1 and <= 100000, got ",
        ),
        (["tolerance", "OWN:train", "--optimizer", "=OWN:train"], "--optimizer must be NAME=MODULE:FUNCTION, each"),
        (["tolerance", "OWN:train", "--optimizer", "a=OWN:train", "a=OWN:twice"], "each with a name of its own, got"),
        (["simulate", "--problem", "EXITS:Problem"], "exits.py': SystemExit: 4"),
    ],
)
def test_what_ones_own_code_raises_is_one_line_that_names_its_place(capsys, own_code, arguments, message):
    code, out, err = run(capsys, *(re.sub("OWN|EXITS", lambda found: own_code[found[0]], text) for text in arguments))
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_an_error_that_no_code_of_the_user_made_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr("lategrad.cli.simulate.set_from", lambda text: {}["missing"])
    monkeypatch.setattr("lategrad.tolerance_study.code_identity.is_own_file", lambda file: False)  # this file, too
    with pytest.raises(KeyError, match="missing"):
        cli.main(["simulate"])


def test_a_command_after_two_dashes_is_the_command(capsys):
    assert run(capsys, "--", "list") == run(capsys, "list")


def test_replay_refuses_its_folder_before_it_runs_and_resume_another_rule(capsys, tmp_path):
    folder = str(tmp_path / "run")
    assert run(capsys, "train", "--problem", "quadratic", "--rule", "sgd:0.1", "--steps", "20", "--workers", "1",
               "--engine", "threads", "--out", folder)[0] == 0  # fmt: skip
    (tmp_path / "file").write_text("")
    code, out, err = run(capsys, "replay", folder, "--out", str(tmp_path / "file"))
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    for command, option, value, saved in (("resume", "rule", "adamw:lr=1", "sgd:0.1"),
                                          ("resume", "problem", "digits", "quadratic"),
                                          ("replay", "problem", "digits", "quadratic")):  # fmt: skip
        code, _, err = run(capsys, command, folder, f"--{option}", value)
        assert (code, err) == (2, f"error: --{option} must be the run's, {saved}, or be left out, got {value}\n")


def test_simulate_shortens_and_refuses_long_gradients_as_train_does(capsys, tmp_path):
    code, _, err = run(capsys, "simulate", "--problem", "quadratic", "--rule", "sgd", "--steps", "60", "--delay", "3",
                       "--clip", "0.01", "--max-norm-ratio", "50", "--out", str(tmp_path / "clipped"))  # fmt: skip
    assert code == 0, err
    trace = Trace.load(tmp_path / "clipped" / "sgd.safetensors")
    assert (trace.config["clip"], trace.config["max_norm_ratio"]) == (0.01, 50.0)
    same = lg.simulate(Quadratic(), "sgd:lr=0.1", 3, 60, clip=0.01, max_norm_ratio=50.0)
    torch.testing.assert_close(trace.output.reshape(-1), same.output)
    commands = {name: cli.program(name).commands[name] for name in cli.COMMANDS}
    for name in ("clip", "max_norm_ratio"):
        one, other = (next(p for p in commands[c].params if p.name == name) for c in ("simulate", "train"))
        assert (one.opts, one.help, one.default) == (other.opts, other.help, other.default)


def test_an_unknown_command_and_no_command(capsys):
    assert run(capsys, "simulat")[0] == 2
    code, out, _ = run(capsys)
    assert code in (0, 2)
    assert "simulate" in out


def test_help_and_version_need_no_torch():
    """Torch alone takes more than a second of processor time."""
    script = ("import sys, lategrad.cli.main as cli\ntry: cli.main(sys.argv[1:])\n"
              "except SystemExit as end: assert not end.code and 'torch' not in sys.modules, end.code")  # fmt: skip
    for argument in ("--help", "--version"):
        subprocess.run([sys.executable, "-c", script, argument], check=True, stdout=subprocess.DEVNULL, timeout=600)
    for name in cli.COMMANDS:
        assert cli.program(name).commands[name].help.partition("\n")[0] == cli.COMMANDS[name][1]


def test_public_names_are_there_although_they_are_imported_late():
    assert lg.replay is replay
    assert set(lg.__all__) <= set(dir(lg))
    assert [name for name in lg.__all__ if name not in ("optim", "pipeline") and not hasattr(lg, name)] == []
    with pytest.raises(AttributeError, match="module 'lategrad' has no attribute 'trian'"):
        _ = lg.trian


def test_help_teaches(capsys):
    code, out, _ = run(capsys, "simulate", "--help")
    assert code == 0
    for word in ("--rule", "lognormal:7,0.4", "ball:5", "Example"):
        assert word in out


def test_the_installed_program_runs():
    done = subprocess.run([sys.executable, "-m", "lategrad", "list"], capture_output=True, text=True, check=True)
    assert "anytime-sgd" in done.stdout


def test_rules_with_differently_named_numbers_share_a_table(capsys, tmp_path):
    rules = ["anytime-sgd", "optimistic-anytime:diameter=2", "steady:lr=0.5|1,c=20"]
    command = ["simulate", "--problem", "quadratic", "--rule", *rules, "--steps", "20", "--out", str(tmp_path)]
    code, out, err = run(capsys, *command)
    assert code == 0, err
    rows = list(csv.DictReader((tmp_path / "results.csv").read_text().splitlines()))
    settings = {(row["rule"], row["lr"], row["diameter"], row["c"]) for row in rows}
    assert settings == {("anytime-sgd", "0.1", "", ""), ("optimistic-anytime:diameter=2", "", "2.0", ""),
                        ("steady:c=20", "0.5", "", "20.0"), ("steady:c=20", "1.0", "", "20.0")}  # fmt: skip
    assert "spread" not in out  # of one seed there is none
    assert "lr 0.5" in out
    code, _, err = run(capsys, *command)
    assert code == 2
    assert "holds results already: choose another folder, or add --overwrite" in err
    assert run(capsys, *command, "--overwrite")[0] == 0


def test_legends_have_round_numbers_and_single_seeds_no_band(tmp_path):
    rule = lg.SGD(torch.tensor([[0.1], [0.3]]))  # float32: 0.10000000149
    figure = plot_traces({name: lg.simulate(Quadratic(), rule, 0, 10) for name in ("first", "second")})
    (axes,) = figure.axes
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["first, lr 0.1", "first, lr 0.3", "second, lr 0.1", "second, lr 0.3"]
    assert not axes.collections
    assert lg.simulate(Quadratic(), rule, 0, 10, seed=[0, 1]).plot().axes[0].collections


def test_many_curves_are_drawn_in_panels():
    delays, lrs = ["constant:0", "uniform:0,3", "constant:5"], torch.tensor([[0.01], [0.1], [0.3], [1.0]])
    rules = {"first": lg.SGD(lrs), "second": lg.SGD(0.7 * lrs), "third": lg.SGD(0.5 * lrs)}
    traces = {name: lg.simulate(Quadratic(), rule, delays, 30, compile=False) for name, rule in rules.items()}
    figure = plot_traces(traces)  # 36 runs: three panels with three lines
    for axes, (name, trace) in zip(figure.axes, traces.items(), strict=True):
        legend = [text.get_text() for text in axes.get_legend().get_texts()]
        for delay, label, line, curves in zip(delays, legend, axes.get_lines(), trace.loss.unbind(1), strict=True):
            best = int(curves[-1].argmin())
            parts = {*axes.get_title().split(", "), *label.replace("0,3", "0;3").split(", ")}
            assert parts == {name, f"delay {delay}".replace(",", ";"), trace.axis("lr").at(best)}
            assert line.get_ydata()[-1] == curves[-1, best]
    trace = lg.simulate(Quadratic(), rules["first"], [*delays, 1], 30, compile=False)
    panels = trace.plot().axes  # 16 runs of one rule: all of them, a panel for each delay
    assert [axes.get_title() for axes in panels] == [f"delay {delay}" for delay in (*delays, 1)]
    assert [len(axes.get_lines()) for axes in panels] == [4] * 4
    labels = [text.get_text() for text in panels[0].get_legend().get_texts()]
    assert labels == ["lr 0.01", "lr 0.1", "lr 0.3", "lr 1"]


def test_off_a_terminal_a_simulation_prints_a_line_now_and_then(capsys, monkeypatch):
    lg.simulate(Quadratic(), lg.SGD(0.1), 0, 5, compile=False)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "LINE_EVERY", 0.0)
    lg.simulate(Quadratic(), lg.SGD(0.1), 0, 5, compile=False)
    assert "simulating: update 5 of 5\n" in capsys.readouterr().err
    lg.simulate(Quadratic(), lg.SGD(0.1), 0, 5, compile=False, progress=False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rule", "sgd", "steady"], "unexpected extra argument"),
        (["--lr", "0.1", "7"], "unexpected extra argument"),
        (["--rule", "sgd", "--rule", "steady"], "--rule is given twice: it takes one value"),
        (["--rule", "sgd:lr=0.1|1"], "a training has one value of lr"),
        (["--slow", "0=constant:1", "0=constant:9"], "--slow names a worker twice: 0=constant:1 0=constant:9"),
        (["--rule", "strongly-convex", "--lr", "2"], "write --rule strongly-convex:strong_convexity=2"),
    ],
)
def test_train_takes_one_value_of_everything(capsys, arguments, message):
    code, _, err = run(capsys, "train", "--problem", "quadratic", *arguments)
    assert code == 2
    assert message in err


def test_a_pause_for_a_worker_that_is_not_there_is_said(capsys):
    code, _, err = run(capsys, "train", "--problem", "quadratic", "--steps", "20", "--workers", "2", "--engine",
                       "threads", "--slow", "9=constant:1")  # fmt: skip
    assert code == 0
    assert "warning: slow names worker 9" in err


def test_a_rule_may_have_a_set_of_its_own(capsys):
    command = ["simulate", "--problem", "quadratic", "--steps", "20", "--rule", "sgd:lr=0.1,domain=box:0,1"]
    code, out, err = run(capsys, *command)
    assert code == 0, err
    assert "domain=box:0,1" in out
    code, _, err = run(capsys, *command, "--domain", "ball:2")
    assert code == 2
    assert "rule 'sgd' has its own" in err


def test_version_and_short_help(capsys):
    assert run(capsys, "--version")[:2] == (0, f"lategrad {lg.__version__}\n")
    for arguments in (["-h"], ["simulate", "-h"]):
        code, out, _ = run(capsys, *arguments)
        assert code == 0
        assert "Usage" in out


def test_list_shows_options_with_defaults_and_no_raw_mathematics(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    _, out, _ = run(capsys, "list")
    assert "lr=1, c=30, per_coordinate=false" in out
    assert "lr, schedule=sqrt, weight_decay=0, power=1, interpolation=1" in out
    assert ":math:" not in out
    assert "\\" not in out


OWN_PROBLEM = """
from lategrad.problems import Quadratic

class Bowl(Quadratic):
    def __init__(self, dim: int = 3, noise: float = 0.0):
        super().__init__(dim=dim, noise=noise)
"""


def test_a_problem_of_ones_own_is_simulated_trained_and_resumed(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_bowl.py").write_text(OWN_PROBLEM)
    problem = f"{tmp_path / 'my_bowl.py'}:Bowl:dim=4"
    code, out, err = run(capsys, "simulate", "--problem", problem, "--rule", "sgd", "--steps", "30")
    assert code == 0, err
    assert "sgd" in out
    code, _, err = run(capsys, "simulate", "--problem", problem, "--l2", "1")
    assert (code, "do not apply to --problem" in err) == (2, True)
    folder = str(tmp_path / "night")
    code, _, err = run(capsys, "train", "--problem", problem, "--rule", "sgd", "--steps", "30", "--engine", "threads",
                       "--out", folder)  # fmt: skip
    assert code == 0, err
    code, _, err = run(capsys, "resume", folder, "--steps", "60")
    assert code == 2
    assert "the run used code of your own: name it again, --problem" in err
    code, out, err = run(capsys, "resume", folder, "--steps", "60", "--problem", problem)
    assert code == 0, err
    assert "60 updates" in out
    code, out, err = run(capsys, "replay", folder, "--problem", problem, "--rule", "sgd:lr=0.1|0.2")
    assert code == 0, err
    assert "lr 0.2" in out
    sys.modules.pop("my_bowl")


def test_simulate_takes_problems_with_options_and_local_steps(capsys, tmp_path):
    command = ["simulate", "--problem", "quadratic:dim=4,noise=0", "--rule", "sgd:1", "--steps", "20"]
    local = ["--local-steps", "5", "--inner", "sgd:0.1", "--delay", "3", "--out", str(tmp_path)]
    code, _, err = run(capsys, *command, *local)
    assert code == 0, err
    problem = lg.problems.LocalSteps(Quadratic(dim=4, noise=0.0), 5, "sgd:lr=0.1")
    expected = lg.simulate(problem, lg.SGD(1.0), 3, 20)
    torch.testing.assert_close(Trace.load(tmp_path / "sgd-lr=1.safetensors").output.reshape(-1), expected.output)
    code, _, err = run(capsys, *command, "--inner", "sgd:0.1")
    assert (code, "--inner and --scaled need --local-steps, such as 50" in err) == (2, True)


OWN_MODULE = """
import torch
from lategrad.problems import ModuleProblem

def tiny(width: int = 2):
    torch.manual_seed(0)
    rows = [(torch.randn(4), torch.tensor(i % 2)) for i in range(20)]
    return ModuleProblem(torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Linear(width, 2)), rows, batch=5)
"""


def test_a_function_that_makes_a_problem_of_a_module_is_simulated(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_module.py").write_text(OWN_MODULE)
    code, out, err = run(capsys, "simulate", "--problem", f"{tmp_path / 'my_module.py'}:tiny:width=3", "--rule",
                         "steady-adam", "adamw:lr=0.01|0.1", "--steps", "10", "--delay", "0", "2")  # fmt: skip
    assert code == 0, err
    assert out.count("adamw") >= 4
    sys.modules.pop("my_module")


def test_wine_needs_each_feature_standardised(capsys, tmp_path):
    wine = load_wine()
    lines = [",".join([*map(str, x), wine.target_names[y]]) for x, y in zip(wine.data, wine.target, strict=True)]
    (tmp_path / "wine.csv").write_text("\n".join(lines))
    command = ["simulate", "--problem", str(tmp_path / "wine.csv"), "--rule", "steady", "--steps", "300", "--out"]
    accuracy = {}
    for how in ("standardise", "standardise-globally"):
        code, _, err = run(capsys, *command, str(tmp_path / how), "--preprocess", how)
        assert code == 0, err
        accuracy[how] = Trace.load(tmp_path / how / "steady.safetensors").accuracy[-1].item()
    assert accuracy["standardise"] > 0.97
    assert accuracy["standardise-globally"] < 0.9


OWN_RULES = """
import lategrad as lg

class Mine(lg.SGD):
    def __init__(self):
        super().__init__(lr=0.1)

class Plain:
    pass

def raises(lr=0.1):
    raise KeyError("x")
"""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "banana"], "device must be 'cpu' or 'cuda', got 'banana'"),
        (["--problem", "own_code.py:missing"], "'own_code.py': ZeroDivisionError: oops"),
        (["--rule", "own_syntax.py:Mine"], "'own_syntax.py': SyntaxError: "),
        (["--problem", "quadratic", "--rule", "own_rules.py:raises"], "'own_rules.py:raises': KeyError: 'x'"),
        (["--problem", "quadratic", "--rule", "own_rules.py:Plain"], "got Plain, which has no domain, init"),
        (["--rule", "own_rules.py:Mine", "--lr", "1"], "--lr is not an option of rule 'own_rules.py:Mine'"),
        (["--problem", "quadratic", "--l2", "0.5"], "do not apply to --problem quadratic"),
        (["--problem", "quadratic", "--steps", "5", "--out", __file__], "exists"),
    ],
)
def test_more_errors_in_one_line(capsys, arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_code.py").write_text("raise ZeroDivisionError('oops')")
    (tmp_path / "own_syntax.py").write_text("def f(:")
    (tmp_path / "own_rules.py").write_text(OWN_RULES)
    for name in ("own_code", "own_syntax", "own_rules"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    code, _, err = run(capsys, "simulate", *arguments)
    assert code == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1


INTERRUPTED = """
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever this process has inherited
os.kill(os.getpid(), signal.SIGINT)
print("imported")
"""


def test_ctrl_c_while_torch_is_imported_is_no_traceback(tmp_path):
    """Importing it once more, after a half of it, would be one, or a crash."""
    torch_that_is_interrupted = tmp_path / "torch.py"
    torch_that_is_interrupted.write_text(INTERRUPTED)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run([sys.executable, "-m", "lategrad", "list"], env={**os.environ, "PYTHONPATH": path},
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
