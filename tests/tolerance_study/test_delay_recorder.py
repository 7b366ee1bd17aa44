"""The record of delays, and the gate for gradients that are too late."""

import csv
import time
import warnings
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lategrad as lg
from lategrad.gates import Admission


@given(st.lists(st.tuples(st.integers(0, 90), st.floats(0.1, 3.0)), min_size=1, max_size=80))
def test_the_summary_is_what_numpy_says_of_the_delays(observed):
    recorder = lg.DelayRecorder()
    for version, (delay, weight) in enumerate(observed, start=100):
        recorder.observe(issued=version - delay, applied=version, weight=weight)
    delays, weights = (np.array(column) for column in zip(*observed, strict=True))
    summary = recorder.summary()
    assert summary[:3] == (len(delays), 0, delays.min())
    assert summary.mean == pytest.approx(delays.mean())
    assert summary.median == np.percentile(delays, 50, method="inverted_cdf")
    assert summary.p95 == np.percentile(delays, 95, method="inverted_cdf")
    assert summary.max == delays.max()
    assert summary.weighted_mean == pytest.approx((delays * weights).sum() / weights.sum())
    assert summary.distinct == len(set(delays.tolist()))
    assert summary.drift is summary.relative_drift is summary.cosine is None
    counts = [int(line.split()[1]) for line in recorder.histogram().splitlines()[1:]]
    assert sum(counts) == len(delays)
    assert len(counts) <= 13


def test_recent_is_about_the_last_ones():
    recorder = lg.DelayRecorder(window=3)
    for version, delay in enumerate([0, 1, 2, 3, 4, 5]):
        recorder.observe(version - delay, version)
    assert (recorder.recent().applied, recorder.recent().min, recorder.recent().mean) == (3, 3, 4.0)
    assert recorder.summary().mean == 2.5


def test_a_straight_path_moves_by_the_delay_and_a_back_and_forth_one_does_not():
    direction = torch.tensor([3.0, 4.0])
    straight, shaking = lg.DelayRecorder(), lg.DelayRecorder()
    for t in range(4, 30):
        straight.observe(t - 4, t, at=(t - 4) * direction, now=t * direction)
        shaking.observe(t - 4, t, [direction * (-1) ** t], at=[direction * ((t - 4) % 2)], now=[direction * (t % 2)])
    assert straight.summary().relative_drift == pytest.approx(4.0)
    assert straight.summary().drift == pytest.approx(20.0)
    assert shaking.summary().relative_drift == pytest.approx(0.0)
    assert shaking.summary().cosine == pytest.approx(-1.0)
    assert straight.summary().cosine is None


def test_what_was_dropped_is_counted_apart(tmp_path):
    recorder = lg.DelayRecorder()
    recorder.observe(0, 2, worker="a")
    recorder.observe(0, 9, worker="b", dropped=True)
    assert recorder.summary()[:2] == (1, 1)
    assert recorder.summary().max == 2
    assert (recorder.by_worker, recorder.dropped_by_worker) == (Counter("a"), Counter("b"))
    rows = list(csv.DictReader(recorder.to_csv(tmp_path / "new" / "delays.csv").read_text().splitlines()))
    assert [(row["delay"], row["applied"], row["dropped"]) for row in rows] == [("2", "1", "0"), ("9", "0", "1")]


def test_tensorboard_shows_the_recent_delays(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    recorder = lg.DelayRecorder()
    with SummaryWriter(str(tmp_path)) as writer:
        recorder.log_to(writer, 0)  # nothing was observed yet: the mean is left out
        recorder.observe(1, 4)
        recorder.log_to(writer, 1)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("delay/mean")] == [(1, 3.0)]
    assert "delay/cosine" not in events.Tags()["scalars"]


def test_a_gradient_from_the_future_is_refused():
    with pytest.raises(ValueError, match=r"issued must be in 0\.\.3, .* got 4"):
        lg.DelayRecorder().observe(issued=4, applied=3)
    with pytest.raises(ValueError, match="at and now must be given together"):
        lg.DelayRecorder().observe(0, 0, at=torch.ones(1))
    assert lg.DelayRecorder().histogram() == "no gradient was applied yet"


@pytest.mark.slow
def test_a_call_without_vectors_takes_microseconds():
    recorder = lg.DelayRecorder()
    fastest = float("inf")
    for _ in range(5):  # the machine may be busy with something else: the best of a few
        begin = time.perf_counter()
        for version in range(2000):
            recorder.observe(version // 2, version, weight=0.5, worker=version % 4)
        fastest = min(fastest, (time.perf_counter() - begin) / 2000)
    assert fastest < 20e-6


# ---- The gate


def test_dropping_and_weighing():
    drop, weigh = lg.DelayGate(3), lg.DelayGate(3, "weigh")
    assert [drop.admit(delay).action for delay in (0, 3, 4)] == ["apply", "apply", "drop"]
    assert [weigh.admit(delay).weight for delay in (0, 3, 4, 7)] == [1.0, 1.0, 0.8, 0.5]
    assert drop.summary() == {"None": {"applied": 2, "dropped": 1, "share": 1.0}}


@given(st.integers(1, 6), st.integers(0, 8), st.randoms(use_true_random=False))
def test_with_waiting_no_gradient_exceeds_the_maximum_delay_and_none_waits_forever(workers, slack, random):
    """Any order of arrivals: those that wait are asked again after each update."""
    max_delay = workers - 1 + slack
    gate, version, out, waiting = lg.DelayGate(max_delay, "wait"), 0, dict.fromkeys(range(workers), 0), []
    applied = Counter()
    for _ in range(120):
        arriving = [worker for worker in out if worker not in waiting]
        if arriving:
            waiting.append(random.choice(arriving))
        for worker in sorted(waiting, key=lambda w: out[w]):
            delay = version - out[worker]
            others = [version - issued for other, issued in out.items() if other != worker]
            if gate.admit(delay, worker, out=others).action == "apply":
                assert delay <= max_delay
                waiting.remove(worker)
                version += 1
                out[worker] = version
                applied[worker] += 1
        assert len(waiting) < workers  # one is computing
    assert sum(applied.values()) == version > 0


def test_waiting_needs_room_for_all_that_are_out():
    gate = lg.DelayGate(1, "wait")
    with pytest.raises(ValueError, match="max_delay must be >= 3 with policy='wait' and 3 other gradients out"):
        gate.admit(0, out=[0, 0, 0])


def test_a_warning_names_a_starved_worker():
    gate = lg.DelayGate(2, workers=range(4))
    for arrival in range(79):
        gate.admit(9 if arrival % 4 == 3 else 1, arrival % 4)
    message = r"worker 3 is starved: it computed 0 of 60 updates.*20 dropped with a delay over 2"
    with pytest.warns(UserWarning, match=message):
        gate.admit(9, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        for _ in range(80):
            gate.admit(1, 0)
    assert gate.summary()["3"] == {"applied": 0, "dropped": 20, "share": 0.0}


def test_workers_that_take_turns_are_not_starved():
    gate = lg.DelayGate(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(1000):
            assert gate.admit(i % 3, worker=i % 5) == Admission("apply", 1.0)
    assert gate.share(0) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_delay": -1}, "max_delay must be an integer >= 0"),
        ({"max_delay": 2.5}, "max_delay must be an integer >= 0"),
        ({"max_delay": 2, "policy": "ignore"}, "policy must be one of 'drop', 'wait', 'weigh', got 'ignore'"),
    ],
)
def test_bad_gates(arguments, message):
    with pytest.raises(ValueError, match=message):
        lg.DelayGate(**arguments)
