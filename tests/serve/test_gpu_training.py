"""Workers and server on one GPU hand vectors over in its memory. Skipped without a GPU."""

import os
import signal
import threading
import time

import pytest
import torch

import lategrad as lg
from lategrad.problems import Quadratic
from lategrad.serve import Settings, Training
from lategrad.serve.compression import Compression
from lategrad.serve.engines.segment import GpuSegment

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
ON_GPU = {"device": "cuda", "server_device": "cuda", "progress": False}


@pytest.mark.parametrize("compression", ["none", "bfloat16", "int8"])
def test_a_run_replays_to_the_same_point(compression):
    problem = Quadratic(dim=1000, noise=0.1)
    trace = lg.train(problem, lg.SGD(lr=0.05), steps=200, workers=3, prefetch=1, compression=compression, **ON_GPU)
    assert trace.complete
    assert trace.loss[-1] < trace.loss[0] / 10
    replayed = lg.replay(trace, problem, lg.SGD(lr=0.05))
    torch.testing.assert_close(replayed.output, trace.output, rtol=1e-10, atol=1e-12)


def test_a_killed_worker_is_replaced_and_no_gradient_is_lost_or_doubled():
    problem = Quadratic(dim=1000, noise=0.1)
    training = Training(problem, lg.SGD(lr=0.05), Settings(steps=3000, workers=2, slow="constant:1", **ON_GPU))
    before = torch.cuda.mem_get_info()[0]

    def kill():
        while training.version < 100:
            time.sleep(0.01)
        os.kill(training.workers[0].pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.warns(UserWarning, match="worker 0"):
        trace = training.run()
    thread.join()
    assert trace.complete
    replayed = lg.replay(trace, problem, lg.SGD(lr=0.05))
    torch.testing.assert_close(replayed.output, trace.output, rtol=1e-10, atol=1e-12)
    assert before - torch.cuda.mem_get_info()[0] < 2**28  # its workers' contexts are gone


def test_a_segment_gives_its_memory_back():
    device = torch.device("cuda", torch.cuda.current_device())
    free = torch.cuda.mem_get_info()[0]
    segment = GpuSegment.create(Compression("none", 2**26, torch.float32), 1, device)
    assert free - torch.cuda.mem_get_info()[0] >= 2**29
    del segment
    assert free - torch.cuda.mem_get_info()[0] < 2**26
