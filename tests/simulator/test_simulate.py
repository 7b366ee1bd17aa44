"""The simulator equals the loop that anyone would write, for every rule and every kind of delay."""

import gc
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import lategrad as lg
from helpers.parameters import expected_warnings
from lategrad import delays as d
from lategrad.delays.clocks import Cluster, Worker
from lategrad.problems import ModuleProblem, Quadratic, SoftmaxRegression, load
from lategrad.registry import RULES, build_rule
from lategrad.rules.rule import apply_update, issue_ticket
from lategrad.simulator import Simulation
from lategrad.simulator.history import plan_slots
from lategrad.trace import Axis, Trace

STEPS = 60


def digits(batch=4, **arguments):
    return SoftmaxRegression(load("digits"), batch=batch, dtype=torch.float64, **arguments)


def plain_loop(problem, rule, arrivals, steps, seed):
    """The delayed oracle as anyone would write it: one run, every past query kept."""
    samples = problem.samples(seed, 0, steps)
    state = rule.init(problem.start())
    queries, tickets = [], []
    for t in range(1, steps + 1):
        queries.append(rule.query(state).clone())
        tickets.append(issue_ticket(rule, state).clone())
        tau = arrivals.delays[t - 1]
        grad = problem.gradient(queries[t - 1 - tau], samples[t - 1])
        state = apply_update(rule, state, grad, tau, tickets[t - 1 - tau])
    return rule.output(state), rule.query(state)


DELAYS = {
    "none": d.Constant(0),
    "constant": d.Constant(7),
    "longer than the run": d.Constant(1000),
    "uniform": d.Uniform(0, 20),
    "geometric": d.Geometric(5.0),
    "lognormal": d.LogNormal(2.0, 1.0),
    "pareto": d.Pareto(1.1, 3.0),
    "regimes": d.Regimes(((20, d.Constant(2)), (20, d.Constant(30)), (20, d.Constant(0)))),
    "cyclic": d.Cyclic((0, 5, 11)),
    "adversary": d.FromFunction(lambda t: t // 2),
    "recorded": d.Recorded(torch.arange(100) // 3),
    "cluster": Cluster([Worker()] * 4 + [Worker(mean=20.0)]),
    "class-dependent": d.ByClass({k: 3 * k for k in range(10)}),
}


def drawn(model, problem, steps, seed):
    return model.draw(steps, seed, problem.labels(problem.samples(seed, 0, steps)))


@pytest.mark.parametrize("name", DELAYS)
def test_equals_the_plain_loop_for_every_delay_model(name):
    problem, model = digits(), DELAYS[name]
    rule = lg.Anytime(lg.OptimisticOGD(2.0, lg.Ball(1.0)))
    warns = pytest.warns(UserWarning, match="too long") if name == "longer than the run" else nullcontext()
    with warns:
        trace = lg.simulate(problem, rule, model, STEPS, seed=3)
    output, query = plain_loop(problem, rule, drawn(model, problem, STEPS, 3), STEPS, 3)
    torch.testing.assert_close(trace.output, output, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(trace.query, query, rtol=1e-10, atol=1e-12)
    assert torch.equal(trace.delays, drawn(model, problem, STEPS, 3).delays.int())


@pytest.mark.parametrize("name", RULES)
def test_equals_the_plain_loop_for_every_rule(name):
    problem, model = digits(), d.LogNormal(1.5, 1.0)
    rule = build_rule(name, 0.3, lg.Ball(2.0))
    with expected_warnings(rule):
        trace = lg.simulate(problem, rule, model, STEPS)
        output, query = plain_loop(problem, rule, model.draw(STEPS, 0), STEPS, 0)
    torch.testing.assert_close(trace.output, output, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(trace.query, query, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("backend", "batch"), [("eager", 4), ("loops", 4), ("compile", 32)])
def test_a_batch_equals_its_runs_one_by_one(backend, batch):
    problem, lrs, models, seeds = digits(batch), [0.1, 0.5, 2.0], [0, d.Uniform(0, 9), 5], [0, 4]
    sweep = lg.SGD(torch.tensor(lrs, dtype=torch.float64).unsqueeze(-1), lg.Ball(3.0), average="linear")
    trace = lg.simulate(problem, sweep, models, 300, seed=seeds, record_every=100, compile=backend != "eager")
    assert trace.loss.shape == (4, 2, 3, 3)
    assert trace.config["backend"] == backend
    for i, seed in enumerate(seeds):
        for j, model in enumerate(models):
            for k, lr in enumerate(lrs):
                one = lg.simulate(problem, lg.SGD(lr, lg.Ball(3.0), average="linear"), model, 300, seed=seed,
                                  record_every=100, compile=False)  # fmt: skip
                torch.testing.assert_close(trace.output[i, j, k], one.output, rtol=1e-9, atol=1e-11)
                torch.testing.assert_close(trace.loss[:, i, j, k], one.loss, rtol=1e-9, atol=1e-11)
                torch.testing.assert_close(trace.accuracy[:, i, j, k], one.accuracy)


def test_runs_that_do_not_share_samples():
    problem, rule = digits(), lg.SGD(torch.full((2, 1), 0.1, dtype=torch.float64))
    shared = lg.simulate(problem, rule, [0, 0], STEPS)
    torch.testing.assert_close(shared.output[0, 0], shared.output[1, 1], rtol=1e-12, atol=1e-12)
    apart = lg.simulate(problem, rule, [0, 0], STEPS, share_samples=False)
    outputs = apart.output.flatten(0, 1)
    assert all(not torch.equal(outputs[i], outputs[j]) for i in range(4) for j in range(i))
    again = lg.simulate(problem, rule, [0, 0], STEPS, share_samples=False)
    assert torch.equal(again.output, apart.output)


def test_the_same_seed_gives_the_same_trace_and_another_seed_another():
    problem, rule = digits(), lg.Anytime(lg.OGD(0.5, lg.Ball(2.0)))
    first, second = (lg.simulate(problem, rule, "lognormal:2,1", STEPS, seed=5) for _ in range(2))
    other = lg.simulate(problem, rule, "lognormal:2,1", STEPS, seed=6)
    assert torch.equal(first.output, second.output)
    assert torch.equal(first.loss, second.loss)
    assert not torch.equal(first.output, other.output)
    assert not torch.equal(first.delays, other.delays)


def test_records_do_not_change_the_run():
    problem, rule = digits(), lg.Anytime(lg.OGD(0.5))
    often = lg.simulate(problem, rule, 5, STEPS, record_every=7)
    once = lg.simulate(problem, rule, 5, STEPS, record_every=STEPS)
    assert often.steps.tolist() == [0, 7, 14, 21, 28, 35, 42, 49, 56, 60]
    assert once.steps.tolist() == [0, 60]
    assert torch.equal(often.output, once.output)
    assert often.loss[0].item() == pytest.approx(2.302585, rel=1e-6)
    assert often.complete


def test_runs_across_chunks_of_samples():
    """More updates than are loaded at once, with delays that reach across."""
    problem, rule, model = Quadratic(dim=3), lg.SGD(0.05), d.Uniform(0, 300)
    trace = lg.simulate(problem, rule, model, 700)
    output, _ = plain_loop(problem, rule, model.draw(700, 0), 700, 0)
    torch.testing.assert_close(trace.output, output, rtol=1e-10, atol=1e-12)


def test_a_module_is_trained():
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    problem = ModuleProblem(mlp, load("digits"), batch=32)
    trace = lg.simulate(problem, lg.SGD(torch.tensor([[0.05], [0.1]])), 4, 600)
    assert trace.accuracy[-1].min() > 0.85
    trained = problem.module_at(trace.output[1])
    hits = trained(load("digits").x_test).argmax(-1) == load("digits").y_test
    assert hits.double().mean().item() == pytest.approx(trace.accuracy[-1, 1].item())


def test_noise_with_a_value_for_each_run():
    problem = Quadratic(dim=4, noise=torch.tensor([[0.0], [2.0]], dtype=torch.float64))
    trace = lg.simulate(problem, lg.SGD(0.1), 0, 50)
    single = lg.simulate(Quadratic(dim=4, noise=2.0), lg.SGD(0.1), 0, 50)
    assert trace.output.shape == (2, 4)
    torch.testing.assert_close(trace.output[1], single.output)


def test_cluster_clocks_give_a_time_axis():
    trace = lg.simulate(Quadratic(), lg.SGD(0.1), Cluster([Worker()] * 3), STEPS)
    assert trace.time.shape == (STEPS,)
    assert (trace.time.diff() >= 0).all()
    assert set(trace.worker.tolist()) == {0, 1, 2}


def test_only_queries_that_will_be_read_are_kept():
    constant = plan_slots(d.Constant(500).draw(5000, 0).delays)
    assert constant.slots <= 502
    lognormal = d.LogNormal(7.0, 0.4).draw(50_000, 0).delays
    assert lognormal.max() > 5000
    assert plan_slots(lognormal).slots < 1200
    assert plan_slots(d.Constant(0).draw(100, 0).delays).slots == 2


def test_slots_hold_what_was_written():
    delays = d.Pareto(1.1, 5.0).draw(3000, 1).delays
    plan = plan_slots(delays)
    last_read = {}
    for t, delay in enumerate(delays.tolist()):
        last_read[t - delay] = t
    waiting = [sum(start <= t <= end for start, end in last_read.items()) for t in range(0, 3000, 10)]
    assert max(waiting) <= plan.slots - 1 <= max(waiting) + 10  # no more than wait at once; one is never read
    memory = [None] * plan.slots
    for t, (write, read) in enumerate(zip(plan.write.tolist(), plan.read.tolist(), strict=True)):
        memory[write] = t
        assert memory[read] == t - delays[t].item()


def test_a_finished_simulation_frees_its_memory_at_once():
    """Histories are large: they must not wait for the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        before = {id(o) for o in gc.get_objects() if type(o) is Simulation}  # of other tests
        lg.simulate(Quadratic(dim=1000), lg.SGD(0.1), 5, 20)
        left = [o for o in gc.get_objects() if type(o) is Simulation and id(o) not in before]
    finally:
        gc.enable()
    assert left == []


def test_too_little_memory_is_said_before_anything_runs():
    problem = Quadratic(dim=10**5)
    with pytest.raises(MemoryError, match="would take .* GiB and .* GiB are free: simulate fewer runs"):
        lg.simulate(problem, lg.SGD(torch.full((100, 1), 0.1).double()), 20_000, 40_000)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 0}, "steps must be an integer >= 1, got 0"),
        ({"steps": 10.0}, "steps must be an integer >= 1, got 10.0"),
        ({"record_every": 0}, "record_every must be an integer >= 1, or None, got 0"),
        ({"seed": -1}, "seed must be integers >= 0, got -1"),
        ({"seed": []}, "seed must be"),
        ({"delays": []}, "delays must be at least one delay model"),
        ({"delays": -5}, "delay must be an integer >= 0, got -5"),
        ({"delays": "lognormal:x"}, "mu of delay 'lognormal' must be a number, got 'x'"),
        ({"delays": 1.5}, "delays must be a delay model, an integer, or a text such as .*, got 1.5"),
        ({"delays": d.ByClass({0: 1})}, "problem must be one with classes"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    call = {"delays": 0, "steps": 10} | arguments
    with pytest.raises(ValueError, match=message):
        lg.simulate(Quadratic(), lg.SGD(0.1), **call)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_said():
    with pytest.raises(ValueError, match="device must be 'cpu': torch can use 0 GPU"):
        lg.simulate(Quadratic(), lg.SGD(0.1), 0, 5, device="cuda")


def test_delays_from_samples_need_shared_samples():
    with pytest.raises(ValueError, match="share_samples must be True when delays depend on the samples"):
        lg.simulate(digits(), lg.SGD(0.1), d.ByClass(dict.fromkeys(range(10), 1)), 5, share_samples=False)


PROGRAM = """
import lategrad as lg, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have told its background jobs to ignore it
from lategrad.problems import SoftmaxRegression, load
problem = SoftmaxRegression(load("digits"))
trace = lg.simulate(problem, lg.SGD(0.1), 3, 500_000, record_every=200, compile=False, save_to=sys.argv[1])
print("complete" if trace.complete else "ended early", trace.steps[-1].item(), flush=True)
"""


def interrupt(path, with_signal):
    """Run a long simulation and end it after its file has appeared and been renewed."""
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(path)], stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline and process.poll() is None:
        if path.exists() and len(Trace.load(path).steps) > 3:
            break
        time.sleep(0.05)
    os.kill(process.pid, with_signal)
    output, _ = process.communicate(timeout=600)
    return process.returncode, output


def test_a_killed_run_leaves_a_readable_trace(tmp_path):
    path = tmp_path / "trace.safetensors"
    code, _ = interrupt(path, signal.SIGKILL)
    assert code == -signal.SIGKILL
    trace = Trace.load(path)
    assert not trace.complete
    assert len(trace.steps) > 3
    assert len(trace.delays) == trace.steps[-1]
    assert trace.loss[-1] < trace.loss[0]


def test_ctrl_c_returns_what_was_recorded(tmp_path):
    code, output = interrupt(tmp_path / "trace.safetensors", signal.SIGINT)
    assert code == 0
    assert output.startswith("ended early")


def test_a_trace_survives_the_round_trip(tmp_path):
    rule = lg.SGD(torch.tensor([[0.1], [0.2]], dtype=torch.float64), lg.Ball(1.0))
    trace = lg.simulate(digits(), rule, [0, "uniform:0,5"], STEPS, seed=[1, 2])
    loaded = Trace.load(trace.save(tmp_path / "deep" / "trace.safetensors"))
    for name in ("steps", "loss", "accuracy", "delays", "output", "query"):
        assert torch.equal(getattr(loaded, name), getattr(trace, name))
    assert loaded.axes == trace.axes
    assert loaded.config == trace.config
    assert loaded.config["rule"]["domain"] == {"type": "Ball", "radius": 1.0, "center": None}
    assert list(tmp_path.rglob("*.part")) == []


def test_csv_has_a_row_for_every_record_of_every_run(tmp_path):
    rule = lg.SGD(torch.tensor([[0.1], [0.25]], dtype=torch.float64))
    trace = lg.simulate(digits(), rule, [0, 5], STEPS, seed=[1, 2], record_every=30)
    lines = trace.to_csv(tmp_path / "trace.csv", optimum=0.5).read_text().splitlines()
    assert lines[0] == "seed,delay,lr,step,accuracy,loss,excess_loss"
    assert len(lines) == 1 + 3 * 8
    seed, delay, lr, step, accuracy, loss, excess = lines[-1].split(",")
    assert (seed, delay, lr, step) == ("2", "5", "0.25", "60")
    assert float(accuracy) == trace.accuracy[-1, 1, 1, 1].item()
    assert float(excess) == pytest.approx(float(loss) - 0.5)


def test_plot_draws_a_line_for_every_run_but_seeds(tmp_path):
    rule = lg.SGD(torch.tensor([[0.1], [0.25]], dtype=torch.float64))
    trace = lg.simulate(digits(), rule, [0, 5], STEPS, seed=[1, 2])
    figure = trace.plot(tmp_path / "figure.png")
    loss, accuracy = figure.axes
    assert len(loss.lines) == len(accuracy.lines) == 4
    torch.testing.assert_close(torch.tensor(accuracy.lines[0].get_ydata()), trace.accuracy[:, :, 0, 0].mean(-1))
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    single = lg.simulate(Quadratic(), lg.SGD(0.1), 0, STEPS).plot()
    assert len(single.axes) == 1


@pytest.mark.parametrize("damage", ["truncated", "empty", "other"])
def test_a_damaged_trace_is_refused(tmp_path, damage):
    path = lg.simulate(Quadratic(), lg.SGD(0.1), 0, 5).save(tmp_path / "trace.safetensors")
    if damage == "other":
        from safetensors.torch import save_file

        save_file({"a": torch.zeros(1)}, path)
    else:
        path.write_bytes(path.read_bytes()[: 0 if damage == "empty" else -20])
    with pytest.raises(ValueError, match="not a readable trace|format of"):
        Trace.load(path)
    with pytest.raises(FileNotFoundError, match="no trace at"):
        Trace.load(tmp_path / "nothing")


def test_delay_summary_and_axes():
    trace = lg.simulate(Quadratic(), lg.SGD(0.1), 4, 100)
    assert trace.delay_summary().max == 4
    assert trace.delay_summary().mean == pytest.approx((0 + 1 + 2 + 3 + 4 * 96) / 100)
    with pytest.raises(ValueError, match="none: this is a single run"):
        trace.axis("lr")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_gives_the_same_results():
    problem, rule = digits(), lg.Anytime(lg.OGD(torch.tensor([[0.1], [0.5]]).double(), lg.Ball(2.0)))
    models = [0, 7, "lognormal:2,1"]
    cpu, gpu = (lg.simulate(problem, rule, models, 700, seed=[0, 1], device=device) for device in ("cpu", "cuda"))
    torch.testing.assert_close(gpu.output, cpu.output, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(gpu.loss, cpu.loss, rtol=1e-8, atol=1e-10)


@dataclass(frozen=True, eq=False)
class HeavyBall:
    """A correct rule whose first state has one tensor in two places."""

    domain: lg.WholeSpace = lg.WholeSpace()

    def init(self, x0):
        return (x0, x0)

    def query(self, state):
        return state[0]

    output = query

    def update(self, state, grad, delay):
        return (state[0] - 0.1 * grad + 0.5 * (state[0] - state[1]), state[0])


def test_a_state_that_shares_memory_at_the_start_is_separated():
    problem = Quadratic(dim=4, noise=0.0)
    output, _ = plain_loop(problem, HeavyBall(), d.Constant(2).draw(20, 0), 20, 0)
    torch.testing.assert_close(lg.simulate(problem, HeavyBall(), 2, 20).output, output)


def test_a_module_that_cannot_be_compiled_runs_eagerly():
    class Untraceable(nn.Linear):
        def forward(self, x):
            torch.compiler.disable(torch.relu)(x)  # breaks the graph
            return super().forward(x)

    problem = ModuleProblem(Untraceable(64, 10), load("digits"))
    with pytest.warns(UserWarning, match="running eagerly"):
        trace = lg.simulate(problem, lg.SGD(0.1), 0, 10, compile=True)
    assert trace.loss[-1] < trace.loss[0]


def test_an_axis_is_named_only_by_the_one_thing_that_varies():
    two = lg.SGD(torch.tensor([[0.1], [0.1]]).double(), lg.Ball(torch.tensor([[1.0], [2.0]]).double()))
    assert lg.simulate(Quadratic(), two, 0, 5).axes == (Axis("run0", (0, 1)),)


def test_a_step_for_each_run_needs_its_own_dimension():
    with pytest.raises(ValueError, match=r"lr must be of shape \(\*runs, 1\).*unsqueeze\(-1\), got \(3,\)"):
        lg.SGD(torch.tensor([0.1, 0.3, 1.0]))


def test_a_rule_from_its_name_is_that_rule():
    problem = Quadratic()
    named = lg.simulate(problem, "anytime-sgd:lr=0.5,power=2,domain=ball:1", "uniform:0,9", 40)
    made = lg.simulate(problem, lg.Anytime(lg.OGD(0.5, lg.Ball(1.0)), power=2), d.Uniform(0, 9), 40)
    assert torch.equal(named.output, made.output)
    sweep = lg.simulate(problem, "steady:lr=0.5|2,c=10|20|30", 3, 40)
    assert [(axis.name, axis.values) for axis in sweep.axes] == [("lr", (0.5, 2.0)), ("c", (10.0, 20.0, 30.0))]
    alone = lg.simulate(problem, lg.Steady(2.0, c=20.0), 3, 40)
    torch.testing.assert_close(sweep.output[1, 1], alone.output, rtol=1e-12, atol=1e-12)


def test_axes_have_the_names_that_the_caller_gives():
    steps, radii = torch.tensor([[0.1], [1.0]]), torch.tensor([[1.0], [2.0]])
    rule = lg.SGD(steps, lg.Ball(radii))  # both vary together: no one name is right
    assert lg.simulate(Quadratic(), rule, 0, 10).axes[0].name == "run0"
    named = lg.simulate(Quadratic(), rule, 0, 10, axes=["lr and radius"])
    assert (named.axes[0].name, named.axes[0].values) == ("lr and radius", (0, 1))
    assert lg.simulate(Quadratic(), rule, 0, 10, axes=["radius"]).axes[0].values == (1.0, 2.0)
    with pytest.raises(ValueError, match="axes must be 1 different names"):
        lg.simulate(Quadratic(), rule, 0, 10, axes=["lr", "radius"])


def test_delays_longer_than_the_run_are_said():
    with pytest.warns(UserWarning, match="delay 5000 is too long for 100 steps: every gradient is taken at the start"):
        lg.simulate(Quadratic(), "sgd:lr=0.01", [0, 5000], 100)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (lg.Steady, r"got the class Steady: call it, Steady\(\.\.\.\)"),
        (torch.optim.SGD([torch.zeros(1)], lr=0.1), "got SGD, an optimizer for a loop of your own"),
        ("stedy:lr=1", "unknown rule 'stedy'; did you mean 'steady'?"),
    ],
)
def test_what_is_no_rule_is_told_so(rule, message):
    with pytest.raises(ValueError, match=message):
        lg.simulate(Quadratic(), rule, 0, 10)
