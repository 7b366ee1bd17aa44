"""``lategrad export`` and ``load_best``: the weights of a run in a module of one's own."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import lategrad as lg
from lategrad.cli import main as cli
from lategrad.problems import LocalSteps, ModuleProblem, SoftmaxRegression, load


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main(["export", *map(str, arguments)])
    output = capsys.readouterr()
    return ended.value.code or 0, output.out, output.err


def network():
    return nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))


def test_the_last_and_the_best_output_as_named_tensors(capsys, tmp_path):
    torch.manual_seed(0)
    problem = ModuleProblem(network(), load("digits"), validation=0.2)
    training = {"steps": 6, "workers": 1, "record_every": 1, "engine": "threads", "out": tmp_path}
    schedule = lambda t: torch.where(t <= 3, 1.0, 1000.0)  # noqa: E731  # so that the last record is not the best
    trace = lg.train(problem, lg.SGD(lr=0.1), **training, monitor="val_loss", schedule=schedule)
    best = int(trace.val_loss.argmin())
    assert best < 6
    code, out, _ = run(capsys, tmp_path, tmp_path / "last.safetensors")
    assert (code, out) == (0, f"{problem.dim} parameters in 6 tensors, written to {tmp_path / 'last.safetensors'}\n")
    assert run(capsys, tmp_path, tmp_path / "top.safetensors", "--best")[::2] == (0, "")
    loaded = network().eval()
    loaded.load_state_dict(load_file(tmp_path / "last.safetensors"), strict=False)
    for name, p in problem.module_at(trace.output).named_parameters():
        assert torch.equal(loaded.get_parameter(name), p)
    loaded.load_state_dict(load_file(tmp_path / "top.safetensors"), strict=False)
    found, into = LocalSteps(problem, 2, lg.SGD(0.1)).load_best(tmp_path), network()
    assert problem.load_best(tmp_path, into) is into
    rows = load("digits").x_test
    assert not into.training
    assert torch.equal(into(rows), found(rows))  # with batch norm's statistics at that point
    assert torch.equal(loaded[3].weight, found[3].weight)
    at = torch.cat([p.detach().flatten() for p in found.parameters()])
    assert problem.measure(at).val_loss.item() == trace.val_loss[best]


def test_a_linear_model_is_one_matrix_whose_last_column_is_the_bias(capsys, tmp_path):
    digits = load("digits")
    problem = SoftmaxRegression(digits)
    trace = lg.train(problem, lg.SGD(lr=0.1), steps=20, workers=1, engine="threads", out=tmp_path / "run")
    run(capsys, tmp_path / "run", tmp_path / "linear.safetensors")
    weight = load_file(tmp_path / "linear.safetensors")["weight"]
    scores = digits.x_test @ weight[:, :-1].T + weight[:, -1]
    assert (scores.argmax(-1) == digits.y_test).double().mean() == trace.accuracy[-1]


def test_what_cannot_be_exported_is_one_line(capsys, tmp_path):
    problem = SoftmaxRegression(load("digits"))
    lg.train(problem, lg.SGD(lr=0.1), steps=2, workers=1, engine="threads", out=tmp_path / "run")
    lg.simulate(problem, lg.SGD(lr=0.1), 0, 2).save(tmp_path / "simulated" / "trace.safetensors")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "best.safetensors").write_bytes(b"nonsense")
    cases = {
        ("run", "--best"): "best.safetensors': it needs --monitor, and a record",
        ("nowhere",): "trace.safetensors': a run writes it at its end",
        ("simulated",): "is damaged, or of another version: 'tensors'",
        ("damaged", "--best"): "is damaged, or of another version",
    }
    for (folder, *options), message in cases.items():
        code, _, err = run(capsys, tmp_path / folder, tmp_path / "file.safetensors", *options)
        assert (code, err.count("\n")) == (2, 1)
        assert message in err
    refused = "the file must be one that ends in .safetensors, its format, and none of the run's own, got"
    own = tmp_path / "run" / "trace.safetensors"
    for file, message in (("net.pt", refused), (own, refused), ("/proc/x.safetensors", "I/O error: ")):
        code, _, err = run(capsys, tmp_path / "run", file)
        assert (code, err.count("\n")) == (2, 1)
        assert message in err
