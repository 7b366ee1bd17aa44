"""Local steps in the simulator: every simulated worker has its own optimizer, and the clocks know of its steps."""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lategrad as lg
from lategrad.delays import Constant, Recorded
from lategrad.delays.clocks import Barrier, Cluster, ExponentialTime, Worker
from lategrad.problems import LocalSteps, Quadratic, Synchronous
from lategrad.simulator import Simulation
from lategrad.simulator.workers import Workers, fewest_workers, wave_ends

UNEVEN = Cluster([Worker(mean=1.0), Worker(mean=2.7)])


def adamw_job(problem, x, memory, minibatches, lr=0.05, decay=0.01):
    """H steps of AdamW with plain floats from x; memory is (m, v, t) and is changed."""
    m, v, t = memory
    y = list(x)
    for z in minibatches:
        g = [
            a * (yj - o) + problem.noise * zj / math.sqrt(problem.dim)
            for a, yj, o, zj in zip(problem.curvatures.tolist(), y, problem.optimum.tolist(), z.tolist(), strict=True)
        ]
        t += 1
        for j, gj in enumerate(g):
            m[j] = 0.9 * m[j] + 0.1 * gj
            v[j] = 0.999 * v[j] + 0.001 * gj * gj
            direction = m[j] / (1 - 0.9**t) / (math.sqrt(v[j] / (1 - 0.999**t)) + 1e-8)
            y[j] -= lr * (direction + decay * y[j])
    return y, (m, v, t)


def by_hand(problem, steps, arrivals, outer):
    """The server adds outer * (where the worker came to - where it began); every worker keeps its own moments."""
    server, queries, memories = [0.0] * problem.dim, [], {}
    for t, delay in enumerate(arrivals.delays.tolist()):
        queries.append(list(server))
        x, worker = queries[t - delay], int(arrivals.worker[t])
        count = steps if arrivals.local_steps is None else int(arrivals.local_steps[t])
        lost = worker not in memories or (arrivals.fresh is not None and bool(arrivals.fresh[t]))
        memory = ([0.0] * problem.dim, [0.0] * problem.dim, 0) if lost else memories[worker]
        y, memories[worker] = adamw_job(problem, x, memory, problem.samples(0, steps * t, count))
        server = [s + outer * (yj - xj) for s, yj, xj in zip(server, y, x, strict=True)]
    return server


CLUSTERS = {
    "uneven": UNEVEN,
    "adapting": Cluster([Worker(mean=1.0), Worker(mean=2.7)], adapt=True),
    "preempted": Cluster([Worker(mean=1.0, up=25.0, down=2.0), Worker(mean=2.7)]),
}


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_cluster_with_local_steps_equals_its_plain_transcription(name):
    plain = Quadratic(dim=3, noise=0.4)
    cluster = CLUSTERS[name].with_local_steps(5)
    arrivals = cluster.draw(steps=40, seed=0)
    assert (arrivals.fresh is not None) == (name == "preempted")
    problem = LocalSteps(plain, local_steps=5, inner="adamw:lr=0.05")
    trace = lg.simulate(problem, lg.SGD(lr=0.6), CLUSTERS[name], steps=40)
    expected = torch.tensor(by_hand(plain, 5, arrivals, outer=0.6), dtype=torch.float64)
    torch.testing.assert_close(trace.output, expected, rtol=1e-10, atol=1e-12)


def test_whose_moments_are_whose_matters():
    problem = LocalSteps(Quadratic(dim=3, noise=0.4), local_steps=5, inner="adamw:lr=0.05")
    drawn = UNEVEN.with_local_steps(5).draw(40, 0)
    own = lg.simulate(problem, lg.SGD(lr=0.6), Recorded(drawn.delays, worker=drawn.worker), steps=40)
    shared = lg.simulate(problem, lg.SGD(lr=0.6), Recorded(drawn.delays, worker=drawn.worker * 0), steps=40)
    assert (own.output - shared.output).abs().max() > 1e-3


def test_a_constant_delay_is_workers_in_turn():
    problem = LocalSteps(Quadratic(noise=0.4), local_steps=3, inner="sgd-momentum:lr=0.05")
    plain = lg.simulate(problem, lg.SGD(lr=0.2), delays=3, steps=50)
    delays = lg.delays.Constant(3).draw(50, 0).delays
    in_turn = lg.simulate(problem, lg.SGD(lr=0.2), Recorded(delays, worker=torch.arange(50) % 4), steps=50)
    assert torch.equal(plain.output, in_turn.output)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=60))
def test_the_fewest_workers_send_one_after_another_and_could_not_be_fewer(raw):
    delays = torch.tensor([min(delay, t) for t, delay in enumerate(raw)])
    fetched = (torch.arange(len(raw)) - delays).tolist()  # updates before the fetch
    last = {}
    for t, worker in enumerate(fewest_workers(delays).tolist(), start=1):
        assert last.get(worker, 0) <= fetched[t - 1], "it has fetched before it sent its last one"
        last[worker] = t
    under_way = [sum(fetched[t] < moment <= t + 1 for t in range(len(raw))) for moment in range(1, len(raw) + 1)]
    assert len(last) == max(under_way)


def test_a_job_takes_as_long_as_its_gradients():
    workers = [Worker(mean=1.0, distribution=ExponentialTime()), Worker(mean=3.0)]
    alone = Cluster(workers[:1]).draw(60, 4).time
    assert torch.allclose(Cluster(workers[:1], local_steps=6).draw(10, 4).time, alone[5::6])
    trace = lg.simulate(LocalSteps(Quadratic(), local_steps=6), "sgd:lr=0.1", Cluster(workers[1:]), steps=5)
    assert trace.time.tolist() == [18.0, 36.0, 54.0, 72.0, 90.0]
    assert trace.local_steps.tolist() == [6] * 5


def test_slow_workers_that_take_fewer_steps_come_back_as_often():
    cluster = Cluster([Worker(mean=mean) for mean in (1.0, 2.0, 4.0)], adapt=True)
    trace = lg.simulate(LocalSteps(Quadratic(), local_steps=8), "sgd:lr=0.1", cluster, steps=30)
    assert trace.worker.bincount().tolist() == [10, 10, 10]
    assert [int(trace.local_steps[trace.worker == w][0]) for w in range(3)] == [8, 4, 2]


def test_a_number_of_steps_of_the_clusters_own_must_be_the_problems():
    with pytest.raises(ValueError, match="local_steps must be the problem's 8, or None, got 7"):
        lg.simulate(LocalSteps(Quadratic(), local_steps=8), "sgd:lr=0.1", Cluster([Worker()], local_steps=7), steps=3)


@dataclass(frozen=True, eq=False)
class SumOfWeights:
    """A rule that moves by the weights of its gradients, whatever those are."""

    domain: lg.WholeSpace = lg.WholeSpace()

    def init(self, x0):
        return (lg.rules.first_query(self, x0),)

    def query(self, state):
        return state[0]

    output = query

    def ticket(self, state):
        return torch.ones_like(state[0][..., :1])

    def weigh(self, ticket, weight):
        return ticket * weight

    def update(self, state, grad, delay, ticket):
        return (state[0] + ticket,)


def test_a_rule_that_weighs_is_told_the_share_of_the_steps():
    problem = LocalSteps(Quadratic(dim=2), local_steps=8)
    cluster = Cluster([Worker(mean=mean) for mean in (1.0, 2.0, 4.0)], adapt=True)
    adapting = lg.simulate(problem, SumOfWeights(), cluster, steps=30)
    assert adapting.output.tolist() == [10 + 5 + 2.5] * 2
    assert lg.simulate(problem, SumOfWeights(), 3, steps=30).output.tolist() == [30.0] * 2


def test_runs_at_once_are_the_same_as_each_by_itself():
    problem = LocalSteps(Quadratic(noise=0.3), local_steps=4, inner="adamw:lr=0.03")
    models = [0, 3, Cluster([Worker(mean=1.0), Worker(mean=2.7, up=30.0, down=1.0)], adapt=True)]
    together = lg.simulate(problem, "sgd:lr=0.1|0.5", models, steps=30, seed=[0, 1])
    for i, seed in enumerate((0, 1)):
        for j, model in enumerate(models):
            for k, lr in enumerate((0.1, 0.5)):
                alone = lg.simulate(problem, lg.SGD(lr=lr), model, steps=30, seed=seed)
                torch.testing.assert_close(together.output[i, j, k], alone.output, rtol=1e-10, atol=1e-12)
    assert together.local_steps.shape == (30, 2, 3)


def test_padded_waves_are_the_same():
    """As a GPU runs them, which replays what it has recorded."""
    problem = LocalSteps(Quadratic(noise=0.3), local_steps=2, inner="adamw:lr=0.03")
    uneven = Cluster([Worker(mean=mean) for mean in (1.0, 1.7, 2.1, 5.0)]).with_local_steps(2)
    arrivals, outputs = [[uneven.draw(60, 0), Constant(5).draw(60, 0)]], []
    for padded in (False, True):
        simulation = Simulation(problem, lg.SGD(lr=0.1), arrivals, seeds=(0,), share_samples=True, compile=False)
        simulation.workers.pads_waves = padded
        for first in range(0, 60, 7):
            simulation.run(first, min(first + 7, 60), lambda done: None)
        outputs.append(simulation.rule.output(simulation.state))
    assert torch.equal(*outputs)


def test_a_cluster_takes_little_more_steps_one_after_another_than_its_fastest_worker():
    speeds = [Worker(mean=mean) for mean in torch.linspace(1, 6, 16).tolist()]
    updates = int((Cluster(speeds).draw(2000, 0).time <= 180).sum())
    delays = Cluster(speeds).draw(updates, 0).delays
    problem = LocalSteps(Quadratic(), local_steps=2)
    workers = Workers(
        problem, [[Cluster(speeds).draw(updates, 0)]], delays.view(-1, 1, 1), problem.start().view(1, 1, -1)
    )
    waves = list(workers.waves(0, updates))
    assert sum(waves) == updates
    assert 180 <= len(waves) <= 1.15 * 180


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40))
def test_a_wave_needs_no_query_that_it_makes_itself(raw):
    delays = torch.tensor([min(delay, t) for t, delay in enumerate(raw)])
    needed, workers = (torch.arange(len(raw)) - delays).tolist(), fewest_workers(delays)
    for start, end in enumerate(wave_ends(delays.unsqueeze(1), workers.unsqueeze(1))):
        assert end > start
        assert all(needed[t] <= start for t in range(start, end))
        assert len(set(workers[start:end].tolist())) == end - start
        assert end == len(raw) or needed[end] > start or workers[end] in workers[start:end]


def test_one_worker_has_one_job_after_another_whatever_the_record_says():
    plain, delays = Quadratic(dim=3, noise=0.4), torch.tensor([0, 1, 2, 2, 2, 2, 2, 2])
    recorded = Recorded(delays, worker=torch.zeros(8, dtype=torch.int64))
    trace = lg.simulate(LocalSteps(plain, local_steps=5, inner="adamw:lr=0.05"), lg.SGD(lr=0.6), recorded, steps=8)
    expected = torch.tensor(by_hand(plain, 5, recorded.draw(8, 0), outer=0.6), dtype=torch.float64)
    torch.testing.assert_close(trace.output, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_compiled_it_is_the_same():
    problem = LocalSteps(Quadratic(noise=0.3), local_steps=2, inner="adamw:lr=0.03")
    eager = lg.simulate(problem, "sgd:lr=0.1|0.5", [0, UNEVEN], steps=20, compile=False)
    compiled = lg.simulate(problem, "sgd:lr=0.1|0.5", [0, UNEVEN], steps=20, compile=True)
    torch.testing.assert_close(compiled.output, eager.output, rtol=1e-9, atol=1e-12)


def test_a_trace_with_local_steps_is_kept_in_its_file(tmp_path):
    trace = lg.simulate(LocalSteps(Quadratic(), local_steps=3), "sgd:lr=0.1", CLUSTERS["adapting"], steps=9)
    assert torch.equal(lg.Trace.load(trace.save(tmp_path / "a.safetensors")).local_steps, trace.local_steps)


def test_a_synchronous_round_is_the_mean_of_its_workers_who_keep_their_own_moments():
    local = LocalSteps(Quadratic(dim=3, noise=0.4), local_steps=4, inner="adamw:lr=0.05")
    trace = lg.simulate(Synchronous(local, workers=3), "sgd:lr=0.5|0.9", 0, steps=6, seed=[0, 1])
    for i, seed in enumerate((0, 1)):
        for j, lr in enumerate((0.5, 0.9)):
            x = local.start()
            memories = [local.init_worker_state(x) for _ in range(3)]
            for k in range(6):
                sent = []
                for w in range(3):
                    grad, memories[w] = local.run_job(x, local.samples(seed, 3 * k + w, 1)[0], memories[w])
                    sent.append(grad)
                x = x - lr * torch.stack(sent).mean(0)
            torch.testing.assert_close(trace.output[i, j], x, rtol=1e-10, atol=1e-12)


def test_a_barrier_waits_for_the_slowest_job_of_every_round():
    workers = [Worker(mean=mean, distribution=ExponentialTime()) for mean in (1.0, 2.0, 6.0)]
    others = Worker(mean=1e9)  # which do not arrive in time, but have the random numbers of the first ones
    alone = [Cluster([others] * i + [one], local_steps=4).draw(5, 7).time for i, one in enumerate(workers)]
    lengths = [torch.diff(time, prepend=time.new_zeros(1)) for time in alone]
    rounds = Barrier(workers, local_steps=4).draw(5, 7).time
    torch.testing.assert_close(rounds, torch.stack(lengths).amax(0).cumsum(0))
    with pytest.raises(ValueError, match="never preempted"):
        Barrier([Worker(up=3.0)])
