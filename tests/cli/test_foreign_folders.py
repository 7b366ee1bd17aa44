"""Run folders that others made: code and clusters that they name are not used unasked, and nonsense is one line."""

import hashlib
import inspect
import json
import shutil
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save, save_file

import lategrad as lg
from lategrad.cli import main as cli
from lategrad.cli.train import saved_command
from lategrad.problems import Quadratic
from lategrad.serve.checkpoints.archive import Archive
from lategrad.serve.checkpoints.checkpoint import checkpoint_paths

CODE = "from pathlib import Path\nPath('executed').touch()\nfrom lategrad.problems import Quadratic as P\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder of a run of 20 updates, with a checkpoint at 10 as well."""
    folder = tmp_path_factory.mktemp("made") / "run"
    options = "--problem quadratic --rule sgd --lr 0.01 --steps 20 --workers 1 --engine threads --max-delay 5"
    arguments = [*options.split(), "--checkpoint-every", "10", "--out", str(folder)]
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", *arguments])
    assert not ended.value.code
    return folder


@pytest.fixture
def run(made, tmp_path, monkeypatch, capsys):
    """A function that resumes or replays a copy of that run in a folder with code of others."""
    shutil.copytree(made, tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    for name in ("digits", "FILE", "quadratic", "mine"):
        Path(f"{name}.py").write_text(CODE)

    def call(command, *arguments):
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main([command, "run", *arguments])
        return ended.value.code or 0, capsys.readouterr().err.strip()

    return call


def change(where, value, *, all_of_them=False):
    """Write a value, under a valid checksum, into the newest checkpoint (or all), at a place such as config.rule."""
    for path in checkpoint_paths(Path("run")) if all_of_them else checkpoint_paths(Path("run"))[:1]:
        description = json.loads(json.loads(path.read_text())["checkpoint"])
        *parents, last = where.split(".")
        at = description
        for parent in parents:
            at = at[parent]
        at[last] = "HERE"
        text = json.dumps(description).replace('"HERE"', value)
        path.write_text(json.dumps({"checksum": hashlib.sha256(text.encode()).hexdigest(), "checkpoint": text}))


def change_trace(change_config):
    path = Path("run/trace.safetensors")
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    config = json.loads(metadata["config"])
    change_config(*[config, tensors][: len(inspect.signature(change_config).parameters)])
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, path, metadata={**metadata, "config": json.dumps(config)})


# ---- Code and clusters


@pytest.mark.parametrize("problem", ["digits:P", "FILE:P", "quadratic:P", "MODULE:CLASS"])
@pytest.mark.parametrize("command", ["resume", "replay"])
def test_a_known_name_with_a_suffix_is_no_module(run, problem, command):
    change("config.settings.notes.command.problem", json.dumps(problem), all_of_them=True)
    change_trace(lambda config: config["settings"]["notes"]["command"].update(problem=problem))
    code, err = run(command, *(["--steps", "25"] if command == "resume" else []))
    assert (code, err.count("\n")) == (2, 0)
    assert not Path("executed").exists()


@pytest.mark.parametrize("option", ["problem", "rule"])
@pytest.mark.parametrize("command", ["resume", "replay"])
def test_code_that_the_folder_names_runs_after_the_user_names_it_too(run, option, command):
    Path("mine:P").touch()  # also where a file of that name makes it look like data
    named = "mine:P" if option == "rule" else "mine:Q"
    change(f"config.settings.notes.command.{option}", json.dumps(named), all_of_them=True)
    change_trace(lambda config: config["settings"]["notes"]["command"].update({option: named}))
    code, err = run(command)
    assert code == 2
    assert f"error: the run used code of your own: name it again, --{option} {named}" in err
    assert not Path("executed").exists()


def test_what_a_folder_names_can_be_pasted_and_printed(run):
    named = "$(touch executed)\n\x1b[2J:P"
    change("config.settings.notes.command.rule", json.dumps(named), all_of_them=True)
    code, err = run("resume")
    assert code == 2
    assert err.endswith(r"name it again, --rule '$(touch executed)\n\x1b[2J:P'")


def test_a_cluster_that_the_folder_names_is_not_dialled(run):
    change("config.settings.engine", '"ray"', all_of_them=True)
    change("config.settings.address", '"ray://203.0.113.9:10001"', all_of_them=True)
    code, err = run("resume", "--steps", "25")
    assert code == 2
    assert "--address must be given again: only the run's folder names the Ray cluster at 'ray://203" in err
    code, err = run("resume", "--steps", "25", "--engine", "threads")
    assert code == 0, err


# ---- Nonsense under a valid checksum

_NESTED = "[" * 900 + "]" * 900


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        ("config.settings.invented", "1", "from a newer version of lategrad: it has the setting 'invented'"),
        ("config.settings.steps", "[]", "steps must be an integer"),
        ("config.settings.log", "3", "log must be of type str"),
        ("config.settings.slow", '{"0": 3}', "slow must be a distribution"),
        ("config.settings.notes.command", "7", "the command must be of type dict"),
        ("config.settings.notes.command.rule", "null", "command.rule must be of type str, got None"),
        ("config.settings.notes.command.local", _NESTED, "command.local must be of type dict"),
        ("config.rule", "null", "config.rule must be of type dict"),
        ("config.replaced", '{"0": "x"}', "config.replaced.0 must be of type int"),
        ("version", str(2**60), "version must be of type int"),
        ("version", str(10**14), "its version is 100000000000000"),
        ("records.loss", "null", "records.loss must be of type list"),
        ("records.loss", "[1.0]", "differ in length"),
        ("refusals", '{"a": {}}', "refusals.a must be of type int"),
        ("gate", '{"0": 3}', "gate.0 must be of type dict"),
        ("next_sequence", '{"a": 1}', "no numbers"),
        ("seconds", "null", "seconds must be of type float"),
        ("log", _NESTED, "log must be of type dict"),
    ],
)
def test_nonsense_in_the_newest_checkpoint_is_one_line_and_the_one_before_is_used(run, where, value, message):
    change(where, value)

    with pytest.warns(UserWarning, match=f"{message}.*trying the one before it") as warned:
        assert Archive(Path("run")).load(lambda settings: saved_command(settings, Path("run"))).version == 10
    (said,) = (str(one.message) for one in warned if one.category is UserWarning)
    assert len(said) < 600


@pytest.mark.parametrize(
    ("nonsense", "name"),
    [
        (lambda tensors: tensors.clear(), "output"),
        (lambda tensors: tensors.pop("output"), "output"),
        (lambda tensors: tensors.pop("state.0"), r"state\.\d"),
        (lambda tensors: tensors.update(other=tensors["output"].clone()), "other"),
        (lambda tensors: tensors.update({"state.77": tensors["output"].clone()}), r"state\.\d"),
        (lambda tensors: tensors.update({"record.15": tensors["output"][:2].clone()}), r"record\.15"),
    ],
)
def test_tensors_that_are_not_of_a_checkpoint_are_one_line_and_the_one_before_is_used(run, nonsense, name):
    path = checkpoint_paths(Path("run"))[0].with_suffix(".safetensors")
    tensors = load_file(path)
    nonsense(tensors)
    path.write_bytes(save(tensors))
    change("tensors", json.dumps(hashlib.sha256(path.read_bytes()).hexdigest()))
    with pytest.warns(UserWarning, match=f"tensor '{name}' is missing, unknown or of another shape; trying the one"):
        assert Archive(Path("run")).load().version == 10


def test_a_run_resumes_from_the_checkpoint_before_one_of_a_newer_version(run):
    change("config.settings.invented", "1")
    code, err = run("resume", "--steps", "25")
    assert code == 0
    assert "from a newer version of lategrad: it has the setting 'invented'; trying the one before it" in err
    assert lg.Trace.load("run/trace.safetensors").complete


@pytest.mark.parametrize(
    "nonsense",
    [
        lambda config: config.update(settings=None),
        lambda config: config["settings"].update(notes=[]),
        lambda config: config["settings"].update(seed="x"),
        lambda config: config["settings"].update(compression=[]),
        lambda config: config["settings"].update(schedule=3),
        lambda config: config["settings"]["notes"].update(command=None),
        lambda config: config["settings"]["notes"]["command"].update(lr="x"),
        lambda config: config.pop("compiled"),
        lambda config: config.update(contents=None),
        lambda config: config.update(pipeline=3),
        lambda config: config.update(pipeline={"microbatches": 1, "stashing": True, "delays": [1]}, seeds=[0]),
        lambda config: config["settings"].update(compression="int9"),
        lambda config, tensors: tensors.update(loss=tensors["loss"][:0]),
        lambda config, tensors: tensors.update(loss=tensors["loss"].view(1, -1)),
        lambda config, tensors: tensors.update(steps=tensors["steps"][0]),
        lambda config, tensors: tensors.update(sequence=tensors["sequence"][:2]),
        lambda config, tensors: tensors.update(sequence=tensors["sequence"].double()),
    ],
)
def test_nonsense_in_a_trace_is_one_line(run, nonsense):
    change_trace(nonsense)
    code, err = run("replay")
    assert (code, err.count("\n"), err.startswith("error: ")) == (2, 0, True), err


# ---- Another rule


def test_another_rule_is_told_by_what_differs(tmp_path):
    problem = Quadratic()
    how = {"workers": 1, "engine": "threads", "progress": False}
    lg.train(problem, lg.Anytime(lg.OGD(lr=0.03)), steps=5, out=tmp_path, **how)
    for rule, message in [
        (lg.Anytime(lg.OGD(lr=0.01)), "lr is 0.01, was 0.03"),
        (lg.Anytime(lg.OGD(lr=0.03, domain=lg.Ball(1)), power=2), "domain is Ball, was WholeSpace, power is 2, was 1"),
        (lg.SGD(lr=0.03), "it is SGD, was Anytime"),
    ]:
        with pytest.raises(ValueError, match=f"^rule must be that of the checkpoint: {message}$"):
            lg.resume(tmp_path, problem, rule, steps=9)
