"""Drift: the distance between the query of a gradient and the query at its arrival, against a plain transcription."""

import pytest
import torch

import lategrad as lg
from lategrad import delays as d
from lategrad.cli import main as cli
from lategrad.cli.results import Contender, table
from lategrad.problems import LocalSteps, ModuleProblem, Quadratic, SoftmaxRegression, load
from lategrad.registry import RULES, build_rule
from lategrad.trace import Trace

PROBLEM = Quadratic(dim=5, noise=0.3)
STEPS, EVERY = 30, 7
TAUS = torch.tensor([min(t, tau) for t, tau in enumerate([3, 0, 5, 2, 9] * 6)])


def distances(rule, taus, problem=PROBLEM, seed=0):
    """All queries are stored, and update t is made with the gradient of x_{t - tau}."""
    state = lg.rules.rule.first_state(rule, problem.start())
    queries, tickets, found = [], [], []
    for t, tau in enumerate(taus.tolist()):
        queries.append(rule.query(state).clone())
        tickets.append(lg.rules.rule.issue_ticket(rule, state).clone())
        found.append((queries[t - tau] - queries[t]).norm().item())
        grad = problem.gradient(queries[t - tau], problem.samples(seed, t, 1)[0])
        state = lg.rules.rule.apply_update(rule, state, grad, torch.tensor([tau]), tickets[t - tau])
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.filterwarnings("ignore:SteadyMuon without blocks")
@pytest.mark.parametrize("name", RULES)
def test_it_is_that_of_a_loop_which_stores_all_queries(name):
    rule = build_rule(name, 0.2, lg.Ball(1.0))
    trace = lg.simulate(PROBLEM, rule, d.Recorded(TAUS), STEPS, record_every=EVERY, compile=False, drift=True)
    expected = distances(rule, TAUS)
    torch.testing.assert_close(trace.certificate().drift, expected.mean(), rtol=1e-9, atol=1e-12)
    since = [0.0, *(part.mean().item() for part in expected.split(EVERY))]
    assert trace.metrics["drift"].tolist() == pytest.approx(since, rel=1e-9, abs=1e-12)
    assert trace.certificate().drift > 0
    undelayed = lg.simulate(PROBLEM, rule, 0, STEPS, compile=False, drift=True)
    assert not undelayed.metrics["drift"].any()


def softmax(batch=4):
    return SoftmaxRegression(load("digits"), batch=batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_backend_measures_the_same(dtype):
    rule = lg.Anytime(lg.OGD(lr=torch.tensor([[0.1], [1.0]])), interpolation=0.7)
    data = load("digits")
    problem = SoftmaxRegression(data._replace(x_train=data.x_train.to(dtype), x_test=data.x_test.to(dtype)), batch=4)
    options = {"seed": [0, 3], "record_every": 150, "drift": True}
    models, backends = [0, d.Uniform(0, 9), 40], {}
    for compile in (False, True):
        trace = lg.simulate(problem, rule, models, 300, compile=compile, **options)
        backends[trace.config["backend"]] = trace.metrics["drift"]
    assert backends.keys() == {"eager", "loops"}
    assert backends["eager"].shape == (3, 2, 3, 2)
    torch.testing.assert_close(backends["loops"], backends["eager"], rtol=1e-3, atol=1e-9)
    for j, model in enumerate(models):
        taus = d.as_delay_model(model).draw(300, 3).delays
        expected = distances(lg.Anytime(lg.OGD(lr=1.0), interpolation=0.7), taus, problem, seed=3).mean()
        torch.testing.assert_close(backends["loops"][1:, 1, j, 1].mean(), expected, rtol=1e-3, atol=1e-9)


def test_compiled_updates_measure_the_same():
    options = {"record_every": 20, "drift": True}
    eager, compiled = (
        lg.simulate(PROBLEM, lg.SGD(lr=0.1), [0, 3], 40, compile=compile, **options) for compile in (False, True)
    )
    assert compiled.config["backend"] == "compile"
    torch.testing.assert_close(compiled.metrics["drift"], eager.metrics["drift"], rtol=1e-6, atol=1e-9)


def test_nothing_is_measured_by_default_and_nothing_changes_by_measuring():
    plain = lg.simulate(softmax(), lg.SGD(lr=0.1), 5, 50, compile=True)
    measured = lg.simulate(softmax(), lg.SGD(lr=0.1), 5, 50, compile=True, drift=True)
    assert "drift" not in plain.metrics
    assert plain.certificate().drift is None
    assert torch.equal(plain.output, measured.output)


@pytest.mark.filterwarnings("ignore:delay .* is too long")
def test_workers_with_local_steps_drift_from_the_query_that_they_started_at():
    problem = LocalSteps(PROBLEM, 3, "sgd:lr=0.05")
    trace = lg.simulate(problem, lg.SGD(lr=1.0), 4, 12, record_every=1, drift=True)
    queries = [lg.simulate(problem, lg.SGD(lr=1.0), d.Recorded(trace.delays[:n]), n).query for n in range(1, 12)]
    queries.insert(0, PROBLEM.start())
    expected = [(queries[t] - queries[max(0, t - 4)]).norm().item() for t in range(12)]
    assert trace.metrics["drift"].tolist() == pytest.approx([0.0, *expected])


@pytest.mark.filterwarnings("ignore:delay .* is too long")
def test_by_stage_the_query_of_a_gradient_is_of_several_versions():
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    rows = torch.utils.data.TensorDataset(torch.randn(20, 3), torch.randint(2, (20,)))
    problem = ModuleProblem(module, rows, batch=5)
    stages = d.by_stage(module, 2, delay=2)
    trace = lg.simulate(problem, lg.SGD(lr=0.5), stages, 8, record_every=1, compile=False, drift=True)
    queries = [problem.start()]
    for n in range(1, 8):
        queries.append(lg.simulate(problem, lg.SGD(lr=0.5), stages, n, compile=False).query)
    first = problem.blocks.parts[0].size + problem.blocks.parts[1].size  # the first stage's entries, which are late
    expected = [(queries[t] - queries[max(0, t - 2)])[:first].norm().item() for t in range(8)]
    assert trace.metrics["drift"].tolist() == pytest.approx([0.0, *expected], rel=1e-5)


def test_the_certificate_counts_the_gradients_in_flight(tmp_path):
    trace = lg.simulate(PROBLEM, lg.SGD(lr=0.1), [0, 3, d.Recorded(TAUS)], STEPS, seed=[0, 1], drift=True)
    drift, mean_delay, outstanding, most = Trace.load(trace.save(tmp_path / "trace")).certificate()
    assert drift.shape == mean_delay.shape == outstanding.shape == most.shape == (2, 3)
    in_flight = [sum(s - TAUS[s] <= t <= s for s in range(STEPS)) for t in range(STEPS)]
    assert outstanding[0, 2] == pytest.approx(sum(in_flight).item() / STEPS)
    torch.testing.assert_close(outstanding, 1 + mean_delay)  # Little's law
    assert most[0].tolist() == [1, 4, max(in_flight)]


def test_a_run_that_diverges_has_no_finite_drift():
    trace = lg.simulate(Quadratic(dim=3), lg.SGD(lr=50.0), 2, 1000, drift=True)
    assert not trace.certificate().drift.isfinite()


@pytest.mark.parametrize("value", [None, "no", 1])
def test_it_is_on_or_off(value):
    with pytest.raises(ValueError, match="drift must be True or False"):
        lg.simulate(PROBLEM, lg.SGD(lr=0.1), 0, 5, drift=value)
    with pytest.raises(ValueError, match="drift must be True or False"):
        lg.optim.Delayed(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1), 2, drift=value)
    with pytest.raises(ValueError, match="drift must be True or False"):
        lg.tolerance(print, drift=value)


@pytest.mark.filterwarnings("ignore:interrupted")
def test_a_simulation_that_is_interrupted_at_once_has_a_table():
    class Interrupted(Quadratic):
        def samples(self, seed, first, count):
            raise KeyboardInterrupt

    trace = lg.simulate(Interrupted(), lg.SGD(lr=0.1), [3], 100, seed=[0], drift=True)
    assert trace.delays.numel() == 0
    table([Contender("sgd", trace, {})])


def test_a_metric_of_that_name_is_refused():
    with pytest.raises(ValueError, match="a text other than .*drift"):
        lg.problems.problem.require_free_names(["drift"])


def test_on_the_command_line(capsys):
    words = "simulate --problem quadratic --rule sgd --lr 0.1 --delay 0 4 --steps 50"
    with pytest.raises(SystemExit):
        cli.main([*words.split(), "--drift"])
    *_, undelayed, delayed, _ = capsys.readouterr().out.splitlines()
    trace = lg.simulate(Quadratic(), lg.SGD(lr=0.1), 4, 50, drift=True)
    assert float(undelayed.split()[-2]) == 0.0
    assert float(delayed.split()[-2]) == pytest.approx(trace.certificate().drift.item(), rel=1e-3)
