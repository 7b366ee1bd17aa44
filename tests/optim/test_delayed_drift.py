"""Drift of a delayed optimizer: between the parameters of a gradient and those at its update."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn

import lategrad as lg
from lategrad.cli import main as cli
from lategrad.optim import Delayed, SteadyAdam
from lategrad.problems import Quadratic
from lategrad.tolerance_study import Tolerance


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def vector(net):
    return torch.cat([p.detach().flatten() for p in net.parameters()]).double()


def passes(net, optimizer, count, first=0):
    """Train; returns the parameters after each number of updates."""
    points = {optimizer.updates: vector(net)}
    for step in range(first, first + count):
        optimizer.zero_grad()
        net(torch.randn(8, 3, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
        points.setdefault(optimizer.updates, vector(net))
    return points


BUILDERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "steady-adam": lambda params: SteadyAdam(params, lr=0.01),
}


@pytest.mark.parametrize("name", BUILDERS)
def test_at_a_constant_delay_it_is_that_of_a_loop_which_stores_all_parameters(name):
    net = model()
    optimizer = Delayed(BUILDERS[name](net.parameters()), 3, drift=True)
    points = passes(net, optimizer, 20)
    expected = [(points[t] - points[max(0, t - 3)]).norm().item() for t in range(17)]
    assert optimizer.drift == pytest.approx(sum(expected) / 17, rel=1e-5)


@pytest.mark.parametrize("delays", [2, "uniform:0,5", "cyclic:0,4,1"])
def test_it_is_what_the_simulator_measures(delays):
    problem = Quadratic(dim=4, noise=0.0)
    x = nn.Parameter(problem.start().clone())
    optimizer = Delayed(torch.optim.SGD([x], lr=0.1), delays, drift=True)
    while optimizer.updates < 50:
        x.grad = problem.gradient(x.detach(), torch.zeros(4, dtype=torch.float64))
        optimizer.step()
    trace = lg.simulate(problem, lg.SGD(lr=0.1), delays, optimizer.updates, drift=True)
    assert optimizer.drift == pytest.approx(trace.certificate().drift.item(), rel=1e-9)


def test_without_delay_it_is_zero_and_by_default_it_is_not_measured():
    net = model()
    optimizer = Delayed(BUILDERS["sgd"](net.parameters()), 0, drift=True)
    passes(net, optimizer, 5)
    assert optimizer.drift == 0.0
    assert Delayed(BUILDERS["sgd"](net.parameters()), 4).drift is None


def test_measuring_changes_nothing():
    nets = model(), model()
    for net, drift in zip(nets, (False, True), strict=True):
        passes(net, Delayed(BUILDERS["sgd"](net.parameters()), "uniform:0,6", drift=drift), 30)
    assert torch.equal(vector(nets[0]), vector(nets[1]))


@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize("stashing", [True, False])
def test_by_stage_only_what_is_late_moves(stashing):
    net = model()
    stages = lg.delays.by_stage(net, 2, delay=2, stashing=stashing)
    optimizer = Delayed(BUILDERS["sgd"](net.parameters()), stages, drift=True)
    points = passes(net, optimizer, 12)
    first = 3 * 4 + 4
    expected = [(points[t] - points[max(0, t - 2)])[:first].norm().item() for t in range(12)]
    assert optimizer.drift == pytest.approx(sum(expected) / 12, rel=1e-5)


@pytest.mark.parametrize("way", ["state_dict", "pickle"])
def test_a_saved_state_continues_the_measurement(way, tmp_path):
    whole, net = model(), model()
    expected = Delayed(BUILDERS["sgd"](whole.parameters()), 3, drift=True)
    passes(whole, expected, 20)
    optimizer = Delayed(BUILDERS["sgd"](net.parameters()), 3, drift=True)
    passes(net, optimizer, 9)
    if way == "pickle":
        net, optimizer = pickle.loads(pickle.dumps((net, optimizer)))
    else:
        torch.save(optimizer.state_dict(), tmp_path / "state")
        net = copy.deepcopy(net)
        optimizer = Delayed(BUILDERS["sgd"](net.parameters()), 3, drift=True)
        optimizer.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    passes(net, optimizer, 11, first=9)
    assert optimizer.drift == expected.drift


def test_a_state_without_measurements_gives_no_mean_of_the_whole():
    net = model()
    before = Delayed(BUILDERS["sgd"](net.parameters()), 3)
    passes(net, before, 9)
    after = Delayed(BUILDERS["sgd"](net.parameters()), 3, drift=True)
    after.load_state_dict(before.state_dict())
    passes(net, after, 9)
    assert math.isnan(after.drift)


def test_an_update_that_fails_and_is_repeated_counts_once():
    net = model()
    inner = BUILDERS["sgd"](net.parameters())
    optimizer = Delayed(inner, 2, drift=True)
    points = passes(net, optimizer, 6)
    step, inner.step = inner.step, lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        passes(net, optimizer, 1, first=6)
    inner.step = step
    points |= passes(net, optimizer, 8, first=6)
    expected = sum((points[t] - points[max(0, t - 2)]).norm().item() for t in range(optimizer.updates))
    assert optimizer.drift == pytest.approx(expected / optimizer.updates, rel=1e-5)


def quadratic(wrap):
    x = nn.Parameter(1 + torch.rand(1, dtype=torch.float64))
    optimizer = wrap(torch.optim.SGD([x], lr=0.3))
    for _ in range(40):
        optimizer.zero_grad()
        (x**2 / 2).backward()
        optimizer.step()
    return 1 + x.item() ** 2


def test_a_tolerance_study_reports_it(tmp_path):
    result = lg.tolerance(quadratic, delays=(0, 2), seeds=2, drift=True, out=tmp_path, progress=False)
    path = [x := 1.0, 1.0, 1.0]  # x_{t+1} = x_t - 0.3 x_{t-2}, from 1; a start of c moves c times as far
    for _ in range(38):
        path.append(x := x - 0.3 * path[-3])
    mean = sum(abs(path[t + 2] - path[t]) for t in range(38)) / 38
    torch.manual_seed(0)
    start = 1 + torch.rand(1, dtype=torch.float64).item()
    assert result.runs[2].drift == pytest.approx(start * mean)
    assert result.point("own", 0).drift == 0.0
    assert result.point("own", 2).drift == pytest.approx(sum(run.drift for run in result.runs[2:]) / 2)
    assert f"{result.point('own', 2).drift:.3g} " in result.table().splitlines()[3]
    result.to_json(tmp_path / "result.json")
    result.to_html(tmp_path / "result.html")
    assert "<th>drift</th>" in (tmp_path / "result.html").read_text()
    assert Tolerance.load(tmp_path / "result.json").points() == result.points()
    again = lg.tolerance(quadratic, delays=(0, 2), seeds=2, drift=True, out=tmp_path, progress=False)
    assert again.runs == result.runs
    with pytest.raises(ValueError, match="had drift True, not False"):
        lg.tolerance(quadratic, delays=(0, 2), seeds=2, out=tmp_path)


def test_a_study_without_it_has_no_such_column():
    assert "drift" not in lg.tolerance(quadratic, delays=(0, 2), seeds=1).table()


def test_on_the_command_line(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["tolerance", f"{__file__}:quadratic", "--delay", "0", "2", "--seeds", "1", "--drift"])
    assert not ended.value.code
    assert "| drift" in capsys.readouterr().out.splitlines()[0]
