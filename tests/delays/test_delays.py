from __future__ import annotations

import math
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import lategrad as lg
from lategrad.delays import (
    ByClass,
    Constant,
    Cyclic,
    DelayModel,
    FromFunction,
    Geometric,
    LogNormal,
    Pareto,
    Recorded,
    Regimes,
    Uniform,
    UpdateQueue,
    cap,
    summarise,
)
from lategrad.delays.clocks import (
    Cluster,
    ConstantTime,
    ExponentialTime,
    LinearDrift,
    LogNormalTime,
    ParetoTime,
    SineDrift,
    Worker,
)
from lategrad.delays.specs import DELAYS, parse

SAMPLES = 200_000
WARM_UP = 100_000  # the cap cannot matter for light tails after this many updates

MODELS: dict[str, DelayModel] = {
    "constant": Constant(7),
    "uniform": Uniform(3, 40),
    "geometric": Geometric(20.0),
    "lognormal": LogNormal(3.0, 0.5),
    "pareto": Pareto(1.5, 10.0),
    "cyclic": Cyclic((0, 10, 3)),
    "function": FromFunction(lambda t: t // 3),
    "recorded": Recorded(torch.arange(2000) // 2),
    "regimes": Regimes(((40, Uniform(0, 5)), (300, Geometric(50.0)), (None, LogNormal(2.0, 1.0)))),
    "by class": ByClass((Uniform(0, 9), Geometric(30.0), 5)),
    "cluster": Cluster((Worker(distribution=ExponentialTime()),) * 6 + (Worker(mean=30.0, up=50.0, down=5.0),)),
}
RANDOM = ("uniform", "geometric", "lognormal", "pareto", "regimes", "by class", "cluster")
LABELS = torch.randint(3, (2000, 4), generator=torch.Generator().manual_seed(0))

every_model = pytest.mark.parametrize("name", MODELS)


def draw(name: str, steps: int, seed: int = 0) -> torch.Tensor:
    return MODELS[name].draw(steps, seed, LABELS[:steps]).delays


def uncapped(model: DelayModel, seed: int = 0) -> np.ndarray:
    return model.draw(WARM_UP + SAMPLES, seed).delays[WARM_UP:].double().numpy()


def assert_mean(values: np.ndarray, mean: float, sd: float) -> None:
    assert abs(values.mean() - mean) < 4 * sd / math.sqrt(len(values))


def assert_probability(events: np.ndarray, p: float) -> None:
    assert_mean(events.astype(float), p, math.sqrt(p * (1 - p)))


@every_model
def test_delays_are_integers_within_the_run(name: str) -> None:
    delays = draw(name, 1000)
    assert delays.dtype == torch.int64
    assert delays.shape == (1000,)
    assert (delays >= 0).all()
    assert (delays <= torch.arange(1000)).all()


@every_model
def test_a_draw_depends_on_its_arguments_only(name: str) -> None:
    first = draw(name, 1000)
    np.random.seed(0)
    torch.manual_seed(0)
    assert torch.equal(first, draw(name, 1000))


@every_model
@pytest.mark.parametrize("steps", [1, 2, 39, 41, 999])
def test_a_longer_draw_starts_with_the_shorter_one(name: str, steps: int) -> None:
    assert torch.equal(draw(name, steps), draw(name, 1000)[:steps])


@pytest.mark.parametrize("name", RANDOM)
def test_seeds_give_different_draws(name: str) -> None:
    assert not torch.equal(draw(name, 1000, seed=1), draw(name, 1000, seed=2))


@pytest.mark.parametrize("name", sorted(set(MODELS) - set(RANDOM)))
def test_the_other_models_are_not_random(name: str) -> None:
    assert torch.equal(draw(name, 1000, seed=1), draw(name, 1000, seed=2))


@every_model
@pytest.mark.parametrize(("steps", "seed", "argument"), [(0, 0, "steps"), (2.0, 0, "steps"), (5, -1, "seed")])
def test_steps_and_seed_are_checked(name: str, steps: int, seed: int, argument: str) -> None:
    with pytest.raises(ValueError, match=f"^{argument} must be an integer >= [01], got"):
        MODELS[name].draw(steps, seed, LABELS[:5])


def test_only_models_of_labels_need_them() -> None:
    assert [name for name, model in MODELS.items() if model.needs_labels] == ["by class"]
    assert all(isinstance(model, DelayModel) for model in MODELS.values())


def test_cap_rounds_down_and_keeps_the_query_in_the_run() -> None:
    assert cap(np.array([5.9, 0.9, 5.9, 1.999, np.inf])).tolist() == [0, 0, 2, 1, 4]
    assert cap(np.array([2**62, 0, 2**62])).tolist() == [0, 0, 2]


def test_constant() -> None:
    assert Constant(3).draw(6, 0).delays.tolist() == [0, 1, 2, 3, 3, 3]
    assert Constant(10**30).draw(3, 0).delays.tolist() == [0, 1, 2]


def test_uniform_has_both_ends_and_equal_frequencies() -> None:
    values = uncapped(Uniform(3, 7))
    assert sorted(set(values)) == [3, 4, 5, 6, 7]
    for k in range(3, 8):
        assert_probability(values == k, 1 / 5)


def test_geometric_starts_at_zero_and_has_its_mean() -> None:
    values = uncapped(Geometric(50.0))
    assert_mean(values, 50, math.sqrt(50 * 51))
    for k in (0, 10, 200):
        assert_probability(values >= k + 1, (50 / 51) ** (k + 1))
    assert Geometric(1.7e308).draw(4, 0).delays.tolist() == [0, 1, 2, 3]


def test_lognormal_of_the_paper() -> None:
    values = uncapped(LogNormal(7, 0.4))
    distribution = stats.lognorm(s=0.4, scale=math.exp(7))
    assert (round(distribution.mean()), round(distribution.std())) == (1188, 495)
    assert (round(distribution.median()), round(distribution.ppf(0.99))) == (1097, 2781)
    assert_mean(
        values, float(distribution.sf(np.arange(1, 40_000)).sum()), distribution.std()
    )  # E floor(X) = sum P(X >= k)
    assert values.std() == pytest.approx(495, rel=0.01)
    assert_probability(values < 1097, float(distribution.cdf(1097)))
    assert_probability(values >= 2781, float(distribution.sf(2781)))


@pytest.mark.parametrize("shape", [0.7, 1.0, 1.5])
def test_pareto_tail(shape: float) -> None:
    values = uncapped(Pareto(shape, 100.0))
    assert values.min() == 100
    for k in (101, 200, 1000, 10_000):
        assert_probability(values >= k, (k / 100) ** -shape)


def test_pareto_mean() -> None:
    mean = 100 + float(((np.arange(101, 10_000_000) / 100) ** -3.0).sum())
    assert_mean(uncapped(Pareto(3.0, 100.0)), mean, 100 * math.sqrt(3 / 4))


def test_infinite_delays_are_capped() -> None:
    with np.errstate(all="raise"):
        assert LogNormal(1e4, 1.0).draw(4, 0).delays.tolist() == [0, 1, 2, 3]
        assert Pareto(1e-4, 1.0).draw(4, 0).delays.tolist() == [0, 1, 2, 3]


def test_delays_of_different_updates_are_uncorrelated() -> None:
    values = uncapped(Uniform(0, 1000))
    correlation = np.corrcoef(values[1:], values[:-1])[0, 1]
    assert abs(correlation) < 4 / math.sqrt(SAMPLES)


def test_from_function_is_asked_for_every_update_in_order() -> None:
    asked: list[int] = []

    def adversary(t: int) -> int:
        asked.append(t)
        return 10**30 if t % 2 else 1

    assert FromFunction(adversary).draw(5, 0).delays.tolist() == [0, 1, 2, 1, 4]
    assert asked == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("answer", [-1, 1.0, True, None])
def test_from_function_must_answer_with_delays(answer: object) -> None:
    model = FromFunction(lambda t: 0 if t < 3 else answer)  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match=r"function\(3\) must be an integer >= 0"):
        model.draw(4, 0)


class TestRegimes:
    def test_fractions_end_at_the_rounded_sum(self) -> None:
        regimes = Regimes(((0.33, 1), (0.33, 2), (None, 3)))
        delays = regimes.draw(1000, 0).delays[4:]
        assert torch.equal(delays, torch.tensor([1] * 330 + [2] * 330 + [3] * 340)[4:])
        assert regimes.draw(10, 0).delays.tolist() == [0, 1, 1, 2, 2, 2, 2, 3, 3, 3]

    def test_integers_are_updates(self) -> None:
        regimes = Regimes(((1, 5), (2, 0), (3, 1)))
        assert regimes.draw(8, 0).delays.tolist() == [0, 0, 0, 1, 1, 1, 1, 1]
        assert regimes.draw(2, 0).delays.tolist() == [0, 0]

    def test_fractions_and_integers_add_up(self) -> None:
        regimes = Regimes(((0.25, 0), (3, 1), (0.25, 2), (0.5, 3)))
        assert regimes.draw(8, 0).delays.tolist() == [0, 0, 1, 1, 1, 2, 2, 3]

    def test_a_whole_run_is_1_point_0_and_one_update_is_1(self) -> None:
        assert Regimes(((1.0, 0), (None, 2))).draw(5, 0).delays.tolist() == [0, 0, 0, 0, 0]
        assert Regimes(((1, 0), (None, 2))).draw(5, 0).delays.tolist() == [0, 1, 2, 2, 2]

    def test_a_part_runs_on_the_clock_of_the_whole_run(self) -> None:
        regimes = Regimes(((50, 0), (None, FromFunction(lambda t: max(t - 10, 0)))))
        assert regimes.draw(60, 0).delays[50:].tolist() == list(range(41, 51))

    def test_the_parts_do_not_share_their_random_numbers(self) -> None:
        regimes = Regimes(((5000, Pareto(5.0, 1000.0)), (None, Uniform(0, 1000))))
        delays = regimes.draw(10_000, 0).delays.double().numpy()
        # One generator makes two such integers of the 64 bits that it makes one such power of.
        for half in (0, 1):
            correlation = np.corrcoef(delays[2500:5000], delays[5000 + half :: 2])[0, 1]
            assert abs(correlation) < 4 / math.sqrt(2500)

    def test_labels_reach_the_parts(self) -> None:
        regimes = Regimes(((2, 0), (None, ByClass((1, 3)))))
        assert regimes.needs_labels
        labels = torch.tensor([[0], [0], [1], [0], [1]])
        assert regimes.draw(5, 0, labels).delays.tolist() == [0, 0, 2, 1, 3]
        with pytest.raises(ValueError, match=r"labels must be .*, got None"):
            regimes.draw(5, 0)

    @pytest.mark.parametrize(
        ("parts", "message"),
        [
            ((), "at least one pair"),
            ((Constant(1),), "pairs"),
            (((0.0, 1), (None, 2)), "length of part 1"),
            (((1.5, 1), (None, 2)), "length of part 1"),
            (((0, 1), (None, 2)), "length of part 1"),
            (((True, 1), (None, 2)), "length of part 1"),
            (((5, 1), (None, 2), (None, 3)), "length of part 2"),
            (((0.6, 1), (0.6, 2)), "at most 1 together"),
            (((0.6, 1.5), (None, 2)), "model of part 1"),
            (((0.6, 1), (None, -2)), "delay must be"),
        ],
    )
    def test_errors(self, parts: tuple[tuple[float, int], ...], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            Regimes(parts)


class TestRecorded:
    def test_replays_any_draw(self) -> None:
        worker = Worker(up=20.0, down=1.0)
        recorded = Cluster([worker, worker, Worker(mean=3.0)], local_steps=5, adapt=True).draw(100, 0)
        replayed = Recorded(*recorded).draw(100, 7)
        for mine, theirs in zip(replayed, recorded, strict=True):
            assert mine is not None
            assert theirs is not None
            assert torch.equal(mine, theirs)

    def test_a_draw_has_the_right_types(self) -> None:
        trace = torch.tensor([0, 1, 1], dtype=torch.int32)
        model = Recorded(trace, time=torch.tensor([0, 0, 2]), worker=trace)
        delays, time, worker = model.draw(2, 0)[:3]
        assert time is not None
        assert worker is not None
        assert (delays.dtype, time.dtype, worker.dtype) == (torch.int64, torch.float64, torch.int64)

    def test_a_draw_can_be_overwritten(self) -> None:
        model = Recorded(torch.tensor([0, 1, 1]))
        model.draw(2, 0).delays.fill_(99)
        assert model.draw(2, 0).delays.tolist() == [0, 1]

    def test_the_trace_must_be_long_enough(self) -> None:
        with pytest.raises(ValueError, match="steps must be <= 3, the length of the trace, got 4"):
            Recorded(torch.tensor([0, 0, 0])).draw(4, 0)

    @pytest.mark.parametrize(
        ("delays", "time", "worker", "message"),
        [
            ([0, 1, 3, 9], None, None, r"delays\[2\] must be in 0..2: update t = 3 has t - 1 = 2, got 3"),
            ([0, -1], None, None, r"delays\[1\] must be in 0..1"),
            ([0.0, 1.0], None, None, "delays must be a tensor of integers, got torch.float32"),
            ([[0], [1]], None, None, r"delays must be of shape \(T,\)"),
            ([0, 1], [0.0], None, "time must be as long as delays"),
            ([0, 1, 2], [0.0, 2.0, 1.0], None, r"time\[2\] must be finite and no earlier"),
            ([0, 1], [0.0, math.inf], None, r"time\[1\] must be finite"),
            ([0, 1], None, [1, 2, 3], "worker must be as long as delays"),
            ([0, 1], None, [0.5, 1.0], "worker must be a tensor of integers"),
        ],
    )
    def test_errors(self, delays: list, time: list | None, worker: list | None, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            Recorded(
                torch.tensor(delays),
                None if time is None else torch.tensor(time),
                None if worker is None else torch.tensor(worker),
            )

    def test_lists_are_refused(self) -> None:
        with pytest.raises(ValueError, match="delays must be a tensor of integers, got"):
            Recorded([0, 1])  # type: ignore[arg-type]


class TestByClass:
    labels = torch.tensor([[0, 0], [1, 1], [0, 2], [2, 1], [1, 0], [0, 0], [2, 2]])

    def test_the_batch_waits_for_its_latest_sample(self) -> None:
        assert ByClass({0: 0, 1: 2, 2: 5}).draw(7, 0, self.labels).delays.tolist() == [0, 1, 2, 3, 2, 0, 5]

    def test_a_sequence_is_indexed_by_class(self) -> None:
        assert ByClass((0, 2, 5)).draw(7, 0, self.labels).delays.tolist() == [0, 1, 2, 3, 2, 0, 5]

    def test_mean_over_the_batch(self) -> None:
        delays = ByClass((0, 2, 5), reduce="mean").draw(7, 0, self.labels).delays
        assert delays.tolist() == [0, 1, 1, 2, 1, 0, 5]

    def test_the_samples_of_a_class_share_a_delay_and_the_classes_do_not(self) -> None:
        model = ByClass((Uniform(0, 1000), Uniform(0, 1000)))
        zeros, ones = torch.zeros(20_000, 1, dtype=torch.int64), torch.ones(20_000, 1, dtype=torch.int64)
        of_zeros, of_ones = model.draw(20_000, 0, zeros).delays, model.draw(20_000, 0, ones).delays
        assert torch.equal(model.draw(20_000, 0, zeros.expand(-1, 8)).delays, of_zeros)
        both = torch.cat([zeros, ones], dim=1)
        assert torch.equal(model.draw(20_000, 0, both).delays, torch.maximum(of_zeros, of_ones))
        correlation = np.corrcoef(of_zeros[1000:].numpy(), of_ones[1000:].numpy())[0, 1]
        assert abs(correlation) < 4 / math.sqrt(19_000)

    def test_labels_are_needed(self) -> None:
        with pytest.raises(ValueError, match=r"labels must be integers of shape \(steps = 7, batch\).*got None"):
            ByClass((0, 2, 5)).draw(7, 0)

    @pytest.mark.parametrize("shape", [(7,), (6, 2), (7, 0), (7, 2, 1)])
    def test_labels_have_a_row_for_every_update(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(ValueError, match=r"labels must be integers of shape \(steps = 7, batch\)"):
            ByClass((0, 2, 5)).draw(7, 0, torch.zeros(shape, dtype=torch.int64))

    def test_labels_are_integers(self) -> None:
        with pytest.raises(ValueError, match="labels must be a tensor of integers"):
            ByClass((0, 2, 5)).draw(7, 0, torch.zeros(7, 2))

    def test_unknown_classes(self) -> None:
        with pytest.raises(ValueError, match=r"labels must be among .* \[0, 2\], got \[1\]"):
            ByClass({0: 0, 2: 5}).draw(7, 0, self.labels)

    @pytest.mark.parametrize(
        ("by_class", "reduce", "message"),
        [
            ({}, "max", "by_class must be"),
            ({-1: 3}, "max", "each class of by_class"),
            ({0: 1.5}, "max", r"by_class\[0\] must be a delay model"),
            ((1, 2), "sum", "reduce must be one of 'max', 'mean'"),
        ],
    )
    def test_errors(self, by_class: dict[int, int], reduce: str, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            ByClass(by_class, reduce)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Constant(-1), "delay must be an integer >= 0, got -1"),
        (lambda: Constant(2.5), "delay must be an integer >= 0, got 2.5"),
        (lambda: Constant(True), "delay must be"),
        (lambda: Uniform(-1, 3), "low must be an integer >= 0"),
        (lambda: Uniform(3, 2), "low must be <= high = 2, got 3"),
        (lambda: Uniform(0, 2.5), "high must be an integer >= 0"),
        (lambda: Geometric(-0.5), "mean must be a finite number >= 0"),
        (lambda: LogNormal(math.inf, 1.0), "mu must be a finite number, got inf"),
        (lambda: LogNormal("7", 1.0), "mu must be a finite number"),
        (lambda: LogNormal(7.0, -0.4), "sigma must be"),
        (lambda: Pareto(0.0, 1.0), "shape must be a finite number > 0"),
        (lambda: Pareto(1.0, 0.0), "scale must be a finite number > 0"),
        (lambda: Cyclic(()), "sequence must be at least one delay"),
        (lambda: Cyclic((1, -2)), "each delay of sequence must be an integer >= 0, got -2"),
        (lambda: FromFunction(3), "function must be"),
    ],
)
def test_bad_arguments(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


class TestSummarise:
    def test_by_hand(self) -> None:
        summary = summarise(torch.tensor([4, 0, 1, 3]))
        assert (summary.mean, summary.median, summary.max) == (2.0, 2.0, 4)
        assert summary.std == pytest.approx(math.sqrt(10 / 4))
        assert summary.p95 == pytest.approx(3 + 0.85)  # position 0.95 * 3 among 0, 1, 3, 4
        assert summary.p99 == pytest.approx(3 + 0.97)
        assert summary.histogram.counts.tolist() == [1, 1, 0, 1, 1]
        assert summary.histogram.edges.tolist() == [0, 1, 2, 3, 4, 5]

    @pytest.mark.parametrize("model", [Constant(0), Uniform(0, 49), Uniform(0, 50), Pareto(1.0, 30.0)])
    def test_against_numpy(self, model: DelayModel) -> None:
        delays = model.draw(10_000, 0).delays
        summary, values = summarise(delays), delays.numpy()
        assert summary.mean == pytest.approx(values.mean())
        assert summary.std == pytest.approx(values.std(ddof=0))
        expected = [np.median(values), np.quantile(values, 0.95), np.quantile(values, 0.99), values.max()]
        assert [summary.median, summary.p95, summary.p99, summary.max] == pytest.approx(expected)
        counts, edges = summary.histogram
        assert len(counts) <= 50
        assert len(edges) == len(counts) + 1
        assert counts.sum() == len(values)
        assert edges[0] == 0
        assert edges[-2] <= values.max() < edges[-1]
        assert counts.tolist() == np.histogram(values, bins=edges.numpy())[0].tolist()

    @pytest.mark.parametrize(
        ("delays", "message"),
        [
            (torch.zeros(0, dtype=torch.int64), "delays must be at least one delay"),
            (torch.tensor([0.5]), "delays must be a tensor of integers"),
            (torch.tensor([3, -1]), "delays must be >= 0, got -1"),
        ],
    )
    def test_errors(self, delays: torch.Tensor, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            summarise(delays)


def same(model: DelayModel, other: DelayModel) -> bool:
    return repr(model) == repr(other)


class TestParse:
    @pytest.mark.parametrize(
        ("spec", "model"),
        [
            ("500", Constant(500)),
            (" constant:500 ", Constant(500)),
            ("uniform:0,100", Uniform(0, 100)),
            ("geometric:50", Geometric(50.0)),
            ("lognormal:7,0.4", LogNormal(7.0, 0.4)),
            ("lognormal:-1, 0", LogNormal(-1.0, 0.0)),
            ("pareto:1.5,100", Pareto(1.5, 100.0)),
            ("cyclic:0,10,100", Cyclic([0, 10, 100])),
            ("cyclic:3", Cyclic([3])),
            (
                "regimes:0.33*10;0.33*1000;10",
                Regimes([(0.33, Constant(10)), (0.33, Constant(1000)), (None, Constant(10))]),
            ),
            (
                "regimes: 20*lognormal:7,0.4; 1.0*uniform:0,9; 1*cluster:workers=1",
                Regimes([(20, LogNormal(7.0, 0.4)), (1.0, Uniform(0, 9)), (1, Cluster([Worker()]))]),
            ),
            ("regimes:5", Regimes([(None, Constant(5))])),
        ],
    )
    def test_each_form(self, spec: str, model: DelayModel) -> None:
        assert same(parse(spec), model)

    @pytest.mark.parametrize(
        ("spec", "workers"),
        [
            ("workers=2", [Worker(), Worker()]),
            ("workers=1,speed=constant", [Worker(distribution=ConstantTime())]),
            ("workers=1,speed=exponential", [Worker(distribution=ExponentialTime())]),
            ("speed=lognormal,spread=0.4,workers=1", [Worker(distribution=LogNormalTime(0.4))]),
            ("workers=1, speed=pareto, shape=1.5", [Worker(distribution=ParetoTime(1.5))]),
            ("workers=3,slow=1x100", [Worker(), Worker(), Worker(mean=100.0)]),
            ("workers=3,late=2x60", [Worker(start=60.0), Worker(start=60.0), Worker()]),
            ("workers=2,slow=2x3,late=1x5", [Worker(mean=3.0, start=5.0), Worker(mean=3.0)]),
            ("workers=1,up=100,down=10", [Worker(up=100.0, down=10.0)]),
            ("workers=1,up=100,down=inf", [Worker(up=100.0, down=math.inf)]),
            ("workers=1,drift=0.01", [Worker(drift=LinearDrift(0.01))]),
            ("workers=1,swing=0.5x100", [Worker(drift=SineDrift(0.5, 100.0))]),
        ],
    )
    def test_each_option_of_a_cluster(self, spec: str, workers: list[Worker]) -> None:
        assert same(parse(f"cluster:{spec}"), Cluster(workers))

    @pytest.mark.parametrize(
        ("spec", "why"),
        [
            ("", "unknown delay ''; valid: constant:500"),
            ("banana", "unknown delay 'banana'; valid: constant:500"),
            ("banana:3", "unknown delay 'banana'; valid: constant:500"),
            ("-5", "unknown delay '-5'; valid: constant:500"),
            ("constant:-5", "delay must be an integer >= 0, got -5"),
            ("constant:2.5", "delay of delay 'constant' must be an integer, got '2.5'"),
            ("constant", "delay 'constant' needs delay: write constant:500"),
            ("uniform:5", "delay 'uniform' needs high: write uniform:0,100"),
            ("uniform:5,2", "low must be <= high"),
            ("geometric:1,2", "delay 'geometric' takes at most 1 value, got '1,2'"),
            ("geometric:nan", "mean must be a finite number"),
            ("lognormal:7", "delay 'lognormal' needs sigma: write lognormal:7,0.4"),
            ("lognormal:7,x", "sigma of delay 'lognormal' must be a number, got 'x'"),
            ("pareto:0,100", "shape must be"),
            ("cyclic:", "delay 'cyclic' needs sequence: write cyclic:0,10,100"),
            ("cyclic:1,\n2;", "must be an integer, got '2;'"),
            ("regimes:10;20", "length of part 1"),
            ("regimes:2.5*10;20", "length of part 1"),
            ("regimes:0.5*10;banana:3", "unknown delay 'banana'"),
            ("regimes:half*10;3", "length of a delay must be an integer or a number, got 'half'"),
            ("regimes:0.5*regimes:3*1;2", "each part of regimes must be a delay of another kind"),
            ("regimes:0.5*1;regimes:2", "each part of regimes must be a delay of another kind"),
            ("cluster:", "delay 'cluster' needs workers: write cluster:workers=50"),
            ("cluster:workers=3,size=2", "delay 'cluster' has no option 'size'"),
            ("cluster:speed=constant", "delay 'cluster' needs workers"),
            ("cluster:workers=3,workers=4", "workers of delay 'cluster' is given twice"),
            ("cluster:workers=0", "at least one Worker"),
            ("cluster:workers=x", "workers of delay 'cluster' must be an integer, got 'x'"),
            ("cluster:workers=3,speed=fast", "speed of delay 'cluster' must be one of constant, exp"),
            ("cluster:workers=3,spread=0.4", "spread must be given with speed=lognormal, and only then"),
            ("cluster:workers=3,speed=lognormal", "spread must be given with speed=lognormal"),
            ("cluster:workers=3,speed=pareto", "shape must be given with speed=pareto"),
            ("cluster:workers=3,slow=4x100", "the workers of slow must be an integer in 0..3"),
            ("cluster:workers=3,late=-1x100", "the workers of late must be an integer in 0..3"),
            ("cluster:workers=3,slow=1", "slow (such as 1x100) of a delay must be a number"),
            ("cluster:workers=3,slow=1x0", "mean must be"),
            ("cluster:workers=3,down=5", "down must be given along with up"),
            ("cluster:workers=3,drift=1,swing=0.5x10", "one of the two"),
        ],
    )
    def test_each_error_is_one_line_with_the_reason(self, spec: str, why: str) -> None:
        with pytest.raises(ValueError, match=re.escape(why)) as caught:
            parse(spec)
        message = str(caught.value)
        assert len(message.splitlines()) == 1
        if message.startswith("unknown"):
            assert all(entry.form in message for entry in DELAYS.values())

    @pytest.mark.parametrize("name", DELAYS)
    def test_the_example_of_every_form_parses(self, name: str) -> None:
        entry = DELAYS[name]
        assert entry.form.startswith(f"{name}:")
        assert len((entry.form + entry.summary).splitlines()) == 1
        assert len(parse(entry.form).draw(20, 0).delays) == 20


@pytest.mark.parametrize("name", MODELS)
def test_no_delay_is_larger_than_the_largest(name):
    model = MODELS[name]
    if model.largest is not None:
        assert draw(name, steps=500).max() <= model.largest


def test_largest_delays():
    delays = lg.delays
    assert delays.Constant(5).largest == 5
    assert delays.Uniform(2, 9).largest == 9
    assert delays.Cyclic((1, 7, 2)).largest == 7
    assert delays.Recorded(torch.tensor([0, 1, 1])).largest == 1
    assert delays.Regimes(((5, 3), (0.5, "uniform:0,9"), (None, 1))).largest == 9
    assert delays.Regimes(((5, 3), (None, delays.Geometric(2.0)))).largest is None
    assert delays.ByClass({0: 3, 4: "cyclic:1,8"}).largest == 8
    assert delays.Pareto(1.5, 2.0).largest is None


def test_an_object_that_is_nearly_a_delay_model_is_told_what_it_lacks():
    class NoBound:
        needs_labels = False

        def draw(self, steps, seed, labels=None): ...

    with pytest.raises(ValueError, match=r"delays must be a delay model, .* \(it has no largest\)"):
        lg.delays.as_delay_model(NoBound())
    with pytest.raises(ValueError, match="delays must be a delay model"):
        lg.delays.as_delay_model(lg.delays.Constant)


# ---- delays that run forward


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(1, 60))
def test_an_update_queue_uses_every_query_once_and_in_the_order_of_arrival(delays, steps):
    """Against a plain queue: at every tick a query is handed out, then what is due is applied."""
    distribution = Cyclic(delays)
    version, waiting, wanted, tick = 0, [], [], 0
    while len(wanted) < steps:
        waiting.append((tick + delays[tick % len(delays)], tick, version))
        for _, _, fetched in sorted(entry for entry in waiting if entry[0] == tick):
            wanted.append(version - fetched)
            version += 1
        waiting = [entry for entry in waiting if entry[0] > tick]
        tick += 1
    assert UpdateQueue(distribution).draw(steps, seed=0).delays.tolist() == wanted[:steps]


def test_an_update_queue_with_a_constant_delay_is_that_delay():
    assert torch.equal(UpdateQueue(Constant(7)).draw(50, 0).delays, Constant(7).draw(50, 0).delays)


def test_an_update_queue_of_anything_but_a_distribution_is_refused():
    with pytest.raises(ValueError, match="distribution must be a distribution of delays"):
        UpdateQueue(Regimes(((None, 3),)))
    with pytest.raises(ValueError, match="delay 'queue': distribution must be a distribution of delays"):
        parse("queue:regimes:1")
