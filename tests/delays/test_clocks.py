from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lategrad.delays import clocks
from lategrad.delays.clocks import (
    Cluster,
    ComputeTime,
    ConstantTime,
    ExponentialTime,
    LinearDrift,
    LogNormalTime,
    ParetoTime,
    SineDrift,
    Worker,
)
from lategrad.support.seeds import Stream

DISTRIBUTIONS: list[ComputeTime] = [ConstantTime(), ExponentialTime(), LogNormalTime(0.4), ParetoTime(1.5)]


@dataclass(frozen=True, eq=False)
class Repeating:
    """Four given times over and over; small integers make many ties."""

    times: tuple[int, int, int, int]

    def sample(self, rng: np.random.Generator, size: int) -> np.ndarray:
        assert size % 4 == 0
        return np.resize(np.array(self.times, dtype=np.float64), size)


def simulate(cluster: Cluster, steps: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    delays, time, worker = cluster.draw(steps, seed)[:3]
    assert time is not None
    assert worker is not None
    return delays, time, worker


def naive(workers: list[Worker], steps: int, seed: int) -> tuple[list[int], list[float], list[int]]:
    """Every worker's (fetch, return) intervals on their own, then sort the returns and count."""
    intervals = []
    for i, worker in enumerate(workers):
        units = clocks.random_times(worker.distribution, seed, Stream.COMPUTING, i)
        spells = clocks.random_times(ExponentialTime(), seed, Stream.PREEMPTION, i)
        fetch, done, end_of_spell = worker.start, 0, math.inf
        if worker.up < math.inf:
            end_of_spell = fetch + worker.up * next(spells)
        while done < steps:
            back = fetch + worker.mean * next(units) * (worker.drift(fetch) if worker.drift else 1.0)
            if back >= end_of_spell:
                fetch = end_of_spell + worker.down * next(spells)
                end_of_spell = fetch + worker.up * next(spells)
            else:
                intervals.append((back, i, fetch))
                fetch, done = back, done + 1
    intervals.sort()
    returns = [(back, i) for back, i, _ in intervals]
    versions = [sum(other <= (fetch, i) for other in returns) for _, i, fetch in intervals[:steps]]
    delays = [t - version for t, version in enumerate(versions)]
    return delays, [back for back, _ in returns[:steps]], [i for _, i in returns[:steps]]


times = st.integers(1, 4)
distributions = st.sampled_from(DISTRIBUTIONS) | st.builds(Repeating, st.tuples(times, times, times, times))
means, starts = st.sampled_from([1.0, 2.0, 0.3]), st.sampled_from([0.0, 1.0, 2.5])
drifts = st.sampled_from([None, LinearDrift(0.1), SineDrift(0.5, 7.0)])
steady = st.builds(Worker, mean=means, distribution=distributions, start=starts, drift=drifts)
preemptible = st.builds(  # without linear drift, under which no spell would be long enough in the end
    Worker,
    mean=means,
    distribution=distributions,
    start=starts,
    up=st.sampled_from([4.0, 20.0]),
    down=st.sampled_from([0.0, 3.0]),
    drift=st.sampled_from([None, SineDrift(0.5, 7.0)]),
)
clusters = st.lists(steady | preemptible, min_size=1, max_size=5)


@settings(max_examples=150)
@given(clusters, st.integers(1, 30), st.integers(0, 1000))
def test_against_the_naive_simulation(some: list[Worker], steps: int, seed: int) -> None:
    delays, time, worker = simulate(Cluster(some), steps, seed)
    expected_delays, expected_time, expected_worker = naive(some, steps, seed)
    assert worker.tolist() == expected_worker
    assert time.tolist() == expected_time
    assert delays.tolist() == expected_delays


@settings(max_examples=50)
@given(clusters, st.integers(0, 1000))
def test_invariants(some: list[Worker], seed: int) -> None:
    steps, count = 60, len(some)
    delays, time, worker = simulate(Cluster(some), steps, seed)
    assert ((delays >= 0) & (delays <= torch.arange(steps))).all()
    assert (time.diff() >= 0).all()
    starts = torch.tensor([w.start for w in some])
    assert (time > starts[worker]).all()  # all computing times here are positive
    assert delays.sum() <= (count - 1) * steps
    for i, one in enumerate(some):
        updates = 1 + (worker == i).nonzero().flatten()
        fetched = updates - 1 - delays[updates - 1]
        just_after_previous = torch.cat([torch.zeros(1, dtype=torch.int64), updates[:-1]])[: len(updates)]
        if one.up < math.inf or one.start > 0:
            assert (fetched >= just_after_previous).all()
        else:
            assert torch.equal(fetched, just_after_previous)
    for shorter in (1, 7, 59):
        for short, long in zip(simulate(Cluster(some), shorter, seed), (delays, time, worker), strict=True):
            assert torch.equal(short, long[:shorter])


def test_a_seed_determines_everything() -> None:
    cluster = Cluster([Worker(distribution=distribution, up=10.0, down=1.0) for distribution in DISTRIBUTIONS[1:]])
    first, again, other = (simulate(cluster, 200, seed) for seed in (1, 1, 2))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(first, again, strict=True))
    assert not torch.equal(first[1], other[1])


def test_workers_that_are_equal_do_not_share_their_random_numbers() -> None:
    _, time, worker = simulate(Cluster([Worker(distribution=ExponentialTime())] * 2), 20, 0)
    assert not torch.equal(time[worker == 0][:5], time[worker == 1][:5])


def test_another_worker_at_the_end_leaves_the_times_of_the_others() -> None:
    few = [Worker(distribution=ExponentialTime(), up=5.0, down=1.0)] * 3
    _, time, _ = simulate(Cluster(few), 100, 0)
    _, more_time, more_worker = simulate(Cluster([*few, Worker(distribution=ParetoTime(1.5))]), 150, 0)
    others = more_time[more_worker < 3]
    shared = min(len(time), len(others))
    assert shared >= 90
    assert torch.equal(time[:shared], others[:shared])


@pytest.mark.parametrize("count", [1, 2, 7])
def test_equal_constant_workers_are_the_constant_delay(count: int) -> None:
    delays, time, worker = simulate(Cluster([Worker(mean=0.1)] * count), 100, 0)
    assert torch.equal(delays, torch.arange(100).clamp_max(count - 1))
    assert torch.equal(worker, torch.arange(100) % count)
    assert torch.allclose(time, 0.1 * (1 + torch.arange(100) // count).double())


def in_flight_at_the_end(worker: Tensor, count: int) -> int:
    """How many updates the gradients in flight have missed so far, all together."""
    updates = torch.arange(1, len(worker) + 1)
    last = [int(updates[worker == i].max()) if (worker == i).any() else 0 for i in range(count)]
    return sum(len(worker) - t for t in last)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("steps", [1, 50, 3000])
def test_the_mean_delay_is_one_less_than_the_workers_whatever_the_speeds(distribution: ComputeTime, steps: int) -> None:
    some = [Worker(mean=1.0 + i, distribution=distribution, drift=SineDrift(0.9, 30.0)) for i in range(9)]
    delays, _, worker = simulate(Cluster([*some, Worker(mean=1e9, distribution=distribution)]), steps, 0)
    assert int(delays.sum()) == 9 * steps - in_flight_at_the_end(worker, 10)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_mean_delay_converges(distribution: ComputeTime) -> None:
    delays, _, _ = simulate(Cluster([Worker(mean=1.0 + i, distribution=distribution) for i in range(10)]), 20_000, 0)
    assert delays.double().mean() == pytest.approx(9, abs=0.05)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS[:3])
def test_a_worker_a_hundred_times_slower_is_rare_and_very_late(distribution: ComputeTime) -> None:
    some = [Worker(distribution=distribution)] * 9 + [Worker(mean=100.0, distribution=distribution)]
    delays, _, worker = simulate(Cluster(some), 100_000, 0)
    late = delays[worker == 9].double()
    gap = 9 * 100.0  # updates that the nine others make in 100 seconds
    error = 5 / math.sqrt(len(late))  # the standard deviation is at most the mean
    assert len(late) == pytest.approx(100_000 / gap, rel=0.5)
    assert late.mean() == pytest.approx(gap, rel=error)
    assert delays[worker < 9].double().mean() < 9


def test_a_worker_a_hundred_times_slower_exactly() -> None:
    some = [Worker(mean=1.0)] * 9 + [Worker(mean=100.0)]
    delays, time, worker = simulate(Cluster(some), 5000, 0)
    assert time[worker == 9].tolist() == [100.0, 200.0, 300.0, 400.0, 500.0]
    assert delays[worker == 9].tolist() == [900] * 5  # last in the order of ties
    assert delays[worker < 9].unique().tolist()[-2:] == [8, 9]


@pytest.mark.parametrize(
    ("distribution", "variance"),
    [(ConstantTime(), 0.0), (ExponentialTime(), 1.0), (LogNormalTime(0.5), math.exp(0.25) - 1)],
)
def test_computing_times_have_mean_one(distribution: ComputeTime, variance: float) -> None:
    sample = distribution.sample(np.random.default_rng(0), 100_000)
    assert abs(sample.mean() - 1) <= 4 * math.sqrt(variance / 100_000)
    assert sample.var() == pytest.approx(variance, rel=0.05)


def test_pareto_times() -> None:
    sample = ParetoTime(3.0).sample(np.random.default_rng(0), 100_000)
    assert sample.min() >= 2 / 3
    assert abs(sample.mean() - 1) < 4 * math.sqrt(1 / 3 / 100_000)
    assert abs((sample > 2).mean() - 1 / 27) < 4 * math.sqrt(1 / 27 / 100_000)  # (2 / (2/3))^-3


def test_one_worker_computes_for_the_times_of_its_distribution() -> None:
    _, time, _ = simulate(Cluster([Worker(mean=5.0, distribution=ExponentialTime())]), 20_000, 0)
    gaps = time.diff()
    assert gaps.mean() == pytest.approx(5, rel=4 / math.sqrt(20_000))
    assert (gaps > 5).double().mean() == pytest.approx(math.exp(-1), abs=0.015)


def test_linear_drift_by_hand() -> None:
    _, time, _ = simulate(Cluster([Worker(mean=2.0, drift=LinearDrift(0.5))]), 4, 0)
    assert time.tolist() == [2.0, 6.0, 14.0, 30.0]  # 2, then 2 (1 + 1), 2 (1 + 3), 2 (1 + 7)


def test_sine_drift_changes_the_rate_of_arrivals() -> None:
    _, time, _ = simulate(Cluster([Worker(mean=0.01, drift=SineDrift(0.8, 100.0))]), 20_000, 0)
    assert (time < 100).sum() / 10_000 == pytest.approx(1 / 0.6, rel=0.01)  # the mean of 1 / (1 + 0.8 sin)
    slow, fast = ((time > 20) & (time < 30)).sum(), ((time > 70) & (time < 80)).sum()
    assert fast / slow == pytest.approx(1.8 / 0.2, rel=0.2)


def test_drift_that_is_not_positive() -> None:
    with pytest.raises(ValueError, match=r"drift must be > 0, got -0.5 at virtual second 1.5"):
        Cluster([Worker(mean=1.5, drift=lambda now: 1.0 - now)]).draw(5, 0)


def test_late_joiners() -> None:
    delays, time, worker = simulate(Cluster([Worker(start=10.0, mean=2.0), Worker()]), 40, 0)
    assert time[worker == 0][0] == 12.0
    # At second 10 the joiner comes first, with 9 updates made; before it returns come those of 10 and 11.
    assert delays[worker == 0].tolist() == [2] * len(delays[worker == 0])
    assert delays[: 9 + 2].tolist() == [0] * 11
    assert worker[11] == 0


def test_a_cluster_that_starts_late_has_no_delay_for_it() -> None:
    now, later = (simulate(Cluster([Worker(start=start)] * 3), 20, 0) for start in (0.0, 64.0))
    assert torch.equal(now[0], later[0])
    assert torch.equal(now[1] + 64, later[1])


def test_preempted_gradients_never_arrive() -> None:
    up, down, steps = 2.0, 3.0, 20_000
    _, time, _ = simulate(Cluster([Worker(mean=1.0, up=up, down=down)]), steps, 0)
    assert (time.diff() > 1 - 1e-9).all()
    # A spell of length U returns floor(U) gradients: 1 / (exp(1 / up) - 1) on average, every up + down.
    rate = 1 / (math.expm1(1 / up) * (up + down))
    assert steps / time[-1] == pytest.approx(rate, rel=0.03)
    # Every spell is too short for a gradient that takes 50 times as long, except for one in e^50.
    _, _, worker = simulate(Cluster([Worker(), Worker(mean=100.0, up=2.0, down=0.0)]), 2000, 0)
    assert worker.unique().tolist() == [0]


def test_a_preempted_worker_fetches_anew() -> None:
    some = [Worker(mean=0.01), Worker(mean=1.0, up=0.5, down=5.0)]
    delays, _, worker = simulate(Cluster(some), 50_000, 0)
    restarted = delays[worker == 1]
    assert len(restarted) > 5
    assert ((restarted >= 98) & (restarted <= 101)).all()  # its last second only, not the lost ones before


def test_a_cluster_that_is_gone_is_an_error() -> None:
    some = [Worker(mean=0.1, up=5.0, down=math.inf)] * 3
    with pytest.raises(ValueError, match=r"at most (\d+) for .*every worker has left for good.*got 100000") as caught:
        Cluster(some).draw(100_000, 0)
    most = int(str(caught.value).split("at most ")[1].split()[0])
    assert 0 < most < 1000
    assert len(Cluster(some).draw(most, 0).delays) == most
    with pytest.raises(ValueError, match=f"steps must be at most {most} "):
        Cluster(some).draw(most + 1, 0)


def test_a_cluster_that_never_finishes_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"steps must be at most 0 .*fetches in a row were preempted.*got 5"):
        Cluster([Worker(mean=1000.0, up=1.0)] * 2).draw(5, 0)


def test_a_drift_that_overflows_is_an_error() -> None:
    with pytest.raises(ValueError, match="every worker has left for good"):
        Cluster([Worker(drift=LinearDrift(1.0))]).draw(5000, 0)


def test_a_worker_that_is_gone_leaves_the_others() -> None:
    some = [Worker(), Worker(up=10.0, down=math.inf)]
    delays, _, worker = simulate(Cluster(some), 500, 0)
    assert 0 < (worker == 1).sum() < 200
    assert (delays[-200:] == 0).all()


def test_a_distribution_must_give_times() -> None:
    with pytest.raises(ValueError, match="times of the distribution must be finite and >= 0"):
        Cluster([Worker(distribution=Repeating((1, -1, 1, 1)))]).draw(1, 0)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_a_thousand_workers(distribution: ComputeTime) -> None:
    delays, _, worker = simulate(Cluster([Worker(distribution=distribution)] * 1000), 10_000, 0)
    assert int(delays.sum()) == 999 * 10_000 - in_flight_at_the_end(worker, 1000)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Worker(mean=0.0), "mean must be a finite number > 0"),
        (lambda: Worker(distribution="fast"), "distribution must be a distribution of times"),
        (lambda: Worker(start=-1.0), "start must be"),
        (lambda: Worker(start=math.inf), "start must be"),
        (lambda: Worker(up=0.0), "up must be"),
        (lambda: Worker(up=math.nan), "up must be"),
        (lambda: Worker(down=-1.0), "down must be"),
        (lambda: Worker(drift=2.0), "drift must be a function"),
        (lambda: LogNormalTime(-0.1), "spread must be"),
        (lambda: ParetoTime(1.0), "shape must be a finite number > 1"),
        (lambda: LinearDrift(-0.1), "rate must be"),
        (lambda: SineDrift(1.0, 5.0), r"amplitude must be a number in \[0, 1\)"),
        (lambda: SineDrift(0.5, 0.0), "period must be"),
        (lambda: Cluster(()), "workers must be at least one Worker"),
        (lambda: Cluster([3]), "each of workers must be a Worker, got 3"),
    ],
)
def test_bad_arguments(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()
