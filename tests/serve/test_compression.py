"""Compressed gradients: what rounding leaves out is sent later, what is logged was applied, and "none" is exact."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lategrad as lg
from helpers.serving import audit, train_until
from lategrad.problems import Quadratic, SoftmaxRegression, load
from lategrad.serve.compression import COMPRESSIONS, Compression
from lategrad.serve.messages import Job, JobInfo
from lategrad.serve.server import Server
from lategrad.serve.settings import Settings
from lategrad.serve.worker import Oracle, Streams

NARROW = [name for name in COMPRESSIONS if name != "none"]
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", NARROW)
@given(
    dim=st.integers(1, 700),
    jobs=st.integers(1, 12),
    seed=st.integers(0, 10_000),
    scale=st.sampled_from([1e-30, 1.0, 1e20]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_all_that_was_computed_arrives_but_for_the_last_remainder(name, dim, jobs, seed, scale, dtype):
    """sum of received + remainder = sum of gradients, up to the rounding of the sums; the remainder stays small."""
    compression, largest = Compression(name, dim, dtype), 0.0
    generator = torch.Generator().manual_seed(seed)
    grads = scale * torch.randn(jobs, dim, generator=generator, dtype=torch.float64).to(dtype)
    remainder, received = torch.zeros(dim, dtype=dtype), torch.zeros(dim, dtype=torch.float64)
    for grad in grads:
        wanted = grad + remainder
        message, got, remainder = compression.send(grad, remainder)
        assert (message.dtype, message.shape) == (compression.message_dtype, (compression.message_length,))
        assert torch.equal(compression.decode(message), got)
        largest = max(largest, wanted.abs().max().item())
        received += got.double()
        step = 2**-8 if name == "bfloat16" else 0.5 / 127
        assert (remainder.abs() <= 1.01 * step * wanted.abs().max()).all()
    gap = (received + remainder.double() - grads.double().sum(0)).abs().max().item()
    assert gap <= 4 * jobs * torch.finfo(dtype).eps * largest


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_many_runs_at_once_are_the_runs_one_by_one(name):
    grads = torch.randn(3, 2, 300, generator=torch.Generator().manual_seed(0))
    compression = Compression(name, 300, torch.float32)
    together = compression.send(grads, torch.full_like(grads, 0.01))
    for i in range(3):
        for j in range(2):
            alone = compression.send(grads[i, j], torch.full((300,), 0.01))
            for one, many in zip(alone, together, strict=True):
                assert torch.equal(one, many[i, j])


def test_an_int8_message_is_a_quarter_of_a_float32_one_and_rounds_each_block_by_its_own_largest():
    compression = Compression("int8", 100_000, torch.float32)
    assert compression.message_length < 0.26 * 4 * 100_000
    small = torch.ones(512)
    small[:256] *= 1e-6
    got = Compression("int8", 512, torch.float32).send(small, torch.zeros(512)).received
    torch.testing.assert_close(got, small, rtol=1e-6, atol=0)


def test_zeros_and_entries_too_small_for_a_scale_are_left_for_later():
    for vector in (torch.zeros(4), torch.full((4,), 1e-44)):
        sent = Compression("int8", 4, torch.float32).send(vector, torch.zeros(4))
        assert torch.equal(sent.received + sent.remainder, vector)
        assert not sent.message.any()


@pytest.mark.parametrize("name", NARROW)
def test_what_cannot_travel_is_refused_at_the_worker_and_leaves_no_remainder(name):
    class Huge(Quadratic):
        huge = True

        def gradient(self, x, sample):
            return super().gradient(x, sample) + (1e300 if self.huge else 0.0)

    problem = Huge()
    oracle = Oracle(problem, Streams(0), {}, CPU, name)
    with pytest.raises(ValueError, match=f"its largest entry, 1e.300, cannot be sent as {name}"):
        oracle.answer(Job(0, 0, 0, problem.start()))
    Huge.huge = False
    answer = oracle.answer(Job(0, 1, 0, problem.start()))
    assert answer.info.parent_job == -1, "nothing was kept of the job that failed"
    assert torch.isfinite(Compression(name, problem.dim, torch.float64).decode(answer.message)).all()


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda message: message[:-1], "shape"),
        (lambda message: message.double(), "dtype"),
        (lambda message: torch.full_like(message, 255 if message.dtype == torch.uint8 else math.nan), "not finite"),
    ],
    ids=["short", "wrong dtype", "nan"],
)
def test_a_server_refuses_messages_that_stand_for_no_gradient(name, spoil, reason):
    problem = Quadratic()
    server = Server(problem, lg.SGD(0.1), Settings(steps=5, compression=name))
    job = server.join(0)
    message = server.compression.encode(problem.start() + 1)
    with pytest.warns(UserWarning, match=f"refused a gradient of worker 0 at update 1: .*{reason}"):
        job = server.deliver(0, job.version, job.sequence, spoil(message))
    assert server.version == 0
    server.deliver(0, job.version, job.sequence, message, info=JobInfo(0, 0))
    assert server.version == 1


@pytest.mark.parametrize("engine", ["threads", "processes"])
@pytest.mark.parametrize("compression", NARROW)
def test_a_real_run_replays_bit_for_bit_and_says_what_it_sent(engine, compression):
    problem, rule = SoftmaxRegression(load("digits"), batch=16), lg.Steady(lr=1.0)
    trace = lg.train(problem, rule, steps=150, workers=3, engine=engine, compression=compression, prefetch=1)
    audit(trace)
    assert torch.equal(lg.replay(trace, problem, rule).output, trace.output)
    one = Compression(compression, problem.dim, torch.float32)
    assert trace.config["bytes"]["up"] == 150 * one.message_length * one.message_dtype.itemsize
    assert trace.config["bytes"]["down"] >= 150 * 4 * problem.dim
    assert trace.config["settings"]["compression"] == compression
    other = lg.replay(trace, problem, lg.SGD(torch.tensor([[0.01], [0.1]])))
    assert other.output.shape == (2, problem.dim)


def test_int8_learns_as_float32_does():
    """Within 1% of the accuracy of float32, which is about 0.9: rounding alone would not matter much, but must not.

    One worker: the same delays and samples for both.
    """
    problem, rule = SoftmaxRegression(load("digits"), batch=32), lg.Steady(lr=1.0)
    accuracy = {
        compression: lg.train(problem, rule, steps=600, workers=1, engine="threads", compression=compression)
        .accuracy[-1]
        .item()
        for compression in ("none", "int8")
    }
    assert accuracy["none"] > 0.85
    assert accuracy["int8"] > accuracy["none"] - 0.01


def test_no_compression_is_the_default_and_sends_the_gradient_itself():
    problem = Quadratic()
    job = Job(2, 5, 0, problem.start())
    plain, named = (Oracle(problem, Streams(0), {}, CPU, *compression) for compression in ((), ("none",)))
    sample = problem.samples(lg.serve.worker.stream_seed(0, 2), 5, 1)
    want = problem.gradient(job.query.view(1, 1, -1), sample).view(-1)
    for oracle in (plain, named):
        answer = oracle.answer(job)
        assert torch.equal(answer.message, want)
        assert answer.info == (0, -1)
    assert Settings(steps=1).compression == "none"


def test_an_unknown_compression_is_named():
    with pytest.raises(ValueError, match="compression must be one of 'none', 'bfloat16', 'int8', got 'int4'"):
        Settings(steps=1, compression="int4")


@pytest.mark.filterwarnings("ignore:worker . is starved")  # on a busy machine
def test_a_replay_whose_remainders_are_unknown_is_refused():
    """Of a gradient that came too late and was dropped nobody knows what it left out."""
    problem = Quadratic(noise=0.1)

    def builds_on_one_that_was_dropped(training):
        log = training.engine.server.log
        worker, sequence, parent = (log.column(name).tolist() for name in ("worker", "sequence", "parent_job"))
        applied = {(w, -1) for w in worker} | set(zip(worker, sequence, strict=True))
        return not set(zip(worker, parent, strict=True)) <= applied

    trace = train_until(builds_on_one_that_was_dropped, problem, lg.SGD(0.05), workers=3, engine="threads",
                        compression="int8", slow="lognormal:0,1", max_delay=0)  # fmt: skip
    assert trace.config["too_late"]
    with pytest.raises(ValueError, match=r"builds on job \d+ of worker \d, which was not applied"):
        lg.replay(trace, problem, lg.SGD(0.05))


def test_a_resumed_run_keeps_its_compression(tmp_path):
    problem, rule = Quadratic(noise=0.1), lg.SGD(0.05)
    lg.train(problem, rule, steps=20, workers=1, engine="threads", compression="int8", out=tmp_path)
    with pytest.raises(TypeError, match="unexpected keyword argument 'compression'"):
        lg.resume(tmp_path, problem, rule, steps=40, compression="none")
    with pytest.warns(UserWarning, match="starts fresh"):
        trace = lg.resume(tmp_path, problem, rule, steps=40)
    assert trace.config["settings"]["compression"] == "int8"
    assert torch.equal(lg.replay(trace, problem, rule).output, trace.output)
