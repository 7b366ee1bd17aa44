"""What lies in a run's folder: links and pipes are refused by name, and what cannot be written ends no run."""

import contextlib
import os
import resource

import pytest
import torch

import lategrad as lg
from helpers.serving import read_only
from lategrad.cli.train import _print_summary
from lategrad.problems import Quadratic
from lategrad.serve.checkpoints.archive import _WRITTEN
from lategrad.serve.checkpoints.checkpoint import checkpoint_paths
from lategrad.support.files import open_plain, read_plain, replacing

PROBLEM, RULE = Quadratic(), lg.SGD(lr=0.1)
HOW = {"workers": 1, "engine": "threads", "progress": False, "compile": False}


def put(kind, path, target):
    """A pipe, or a link to a file that must not change."""
    target.write_text("precious")
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(target)


@pytest.mark.parametrize("kind", ["pipe", "link"])
@pytest.mark.parametrize("name", _WRITTEN)
def test_a_run_does_not_start_in_a_folder_with_links_and_pipes(kind, name, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    put(kind, folder / name, tmp_path / "target")
    with pytest.raises(OSError, match=f"{name}' is not a plain file: remove it, or choose another folder"):
        lg.train(PROBLEM, RULE, steps=5, out=folder, **HOW)
    assert (tmp_path / "target").read_text() == "precious"
    (folder / name).unlink()
    assert lg.train(PROBLEM, RULE, steps=5, out=folder, **HOW).complete


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_links_and_pipes_that_come_during_a_run_are_not_opened(kind, tmp_path):
    put(kind, tmp_path / "log.jsonl", tmp_path / "target")
    for how in (lambda path: open_plain(path, "a"), lambda path: open_plain(path, "r+b"), read_plain):
        with pytest.raises(OSError, match="is not a plain file"):
            how(tmp_path / "log.jsonl")

    folder = tmp_path / "run"

    def place(telemetry, output):
        if telemetry.record == 50:
            (folder / "log.jsonl").unlink()
            put(kind, folder / "log.jsonl", tmp_path / "target")

    with pytest.warns(UserWarning, match="LogFiles is switched off: .*log.jsonl' is not a plain file"):
        lg.train(PROBLEM, RULE, steps=100, out=folder, on_record=place, record_every=50, slow="constant:1", **HOW)
    assert (tmp_path / "target").read_text() == "precious"


def test_a_figure_takes_the_place_of_a_link_and_not_of_its_target(tmp_path):
    put("link", tmp_path / "training.png", tmp_path / "target")
    lg.simulate(PROBLEM, RULE, 0, 5).plot(tmp_path / "training.png")
    assert (tmp_path / "target").read_text() == "precious"
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")


@contextlib.contextmanager
def full_disk():
    """Real writes, which really fail."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.filterwarnings("ignore:checkpoint at update", "ignore:the trace could not", "ignore:LogFiles is")
@pytest.mark.filterwarnings("ignore:the log of updates")
def test_a_full_disk_does_not_end_a_run_that_keeps_its_best_output(tmp_path):
    with full_disk() as fill, pytest.warns(UserWarning, match="the best output could not be saved, training continues"):
        trace = lg.train(PROBLEM, RULE, steps=30, out=tmp_path, monitor="loss", on_record=lambda *_: fill(), **HOW)
    assert trace.complete
    with pytest.raises(OSError, match="the run is complete, and its trace could not be written"):
        _print_summary(trace, tmp_path)  # a script must not take it for a success


def test_a_figure_that_cannot_be_written_is_a_warning_after_the_run(tmp_path, capsys):
    trace = lg.train(PROBLEM, RULE, steps=5, out=tmp_path, **HOW)
    (tmp_path / "training.png" / "inside").mkdir(parents=True)
    with pytest.warns(UserWarning, match="training.png could not be written"):
        _print_summary(trace, tmp_path)
    out = capsys.readouterr().out
    assert "5 updates in" in out
    assert out.endswith(f"written to {tmp_path}: trace.safetensors, records.csv, checkpoints\n")


def test_ctrl_c_while_the_figure_is_drawn_leaves_the_line_that_resumes(tmp_path, capsys, monkeypatch):
    with pytest.warns(UserWarning, match="stopped by on_record"):
        trace = lg.train(PROBLEM, RULE, steps=10**6, record_every=5, on_record=lambda *_: "stop", **HOW)

    def plot(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(lg.Trace, "plot", plot)
    with pytest.raises(KeyboardInterrupt):
        _print_summary(trace, tmp_path)
    assert capsys.readouterr().err.endswith(f"to continue: lategrad resume {tmp_path}\n")


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_what_lies_at_the_name_of_a_temporary_file_is_not_opened(kind, tmp_path):
    with replacing(tmp_path / "trace") as part:
        part.touch()
    put(kind, part, tmp_path / "target")
    with replacing(tmp_path / "trace") as part:
        part.write_text("new")
    assert (tmp_path / "target").read_text() == "precious"
    assert (tmp_path / "trace").read_text() == "new"


def test_a_folder_of_tensorboard_that_takes_nothing_is_one_line(tmp_path):
    pytest.importorskip("tensorboard")
    (tmp_path / "tensorboard").mkdir()
    with read_only(tmp_path / "tensorboard"), pytest.raises(OSError, match="tensorboard"):
        lg.train(PROBLEM, RULE, steps=5, out=tmp_path, log="tensorboard", **HOW)
    assert not checkpoint_paths(tmp_path)


def test_a_typo_in_monitor_does_not_cost_the_folder(tmp_path):
    with pytest.raises(ValueError, match="monitor must be one of the recorded values, loss, got 'los'"):
        lg.train(PROBLEM, RULE, steps=5, out=tmp_path, monitor="los", **HOW)
    assert lg.train(PROBLEM, RULE, steps=5, out=tmp_path, monitor="loss", **HOW).complete
    with pytest.raises(ValueError, match="got 'los'"):
        lg.resume(tmp_path, PROBLEM, RULE, steps=9, monitor="los")
    assert torch.equal(lg.resume(tmp_path, PROBLEM, RULE, steps=9).steps[-1], torch.tensor(9))
