"""Nothing is waited for without a limit: what hangs here hangs for real, and is let go in time or at Ctrl-C."""

from __future__ import annotations

import contextlib
import multiprocessing.forkserver
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import lategrad as lg
from helpers.serving import Unread, audit, wait_until
from lategrad.cli import main as cli
from lategrad.problems import Quadratic
from lategrad.serve import Settings, Training
from lategrad.serve.checkpoints import archive
from lategrad.serve.engines import processes
from lategrad.support import files
from lategrad.support.threads import OutOfTimeError, limited

RULE = lg.SGD(lr=0.1)


# ---- The helper


def test_what_a_limited_call_returns_or_raises_is_the_callers():
    assert limited(lambda: 42, 60, "it did not come") == 42
    with pytest.raises(KeyError, match="raised by the call"):
        limited(lambda: {}["raised by the call"], 60, "it did not come")


def test_what_comes_too_late_is_undone():
    allowed, undone = threading.Event(), []

    def late():
        allowed.wait(60)
        return "late"

    with pytest.raises(OutOfTimeError, match=r"^it did not come within 0.05 s$"):
        limited(late, 0.05, "it did not come", undo=undone.append)
    assert undone == []
    allowed.set()
    wait_until(lambda: undone == ["late"])


def test_what_is_raised_too_late_is_nobodys():
    allowed, raised = threading.Event(), threading.Event()

    def late():
        allowed.wait(60)
        raised.set()
        raise ValueError("nobody hears this")

    with pytest.raises(OutOfTimeError):
        limited(late, 0.05, "it did not come")
    allowed.set()
    assert raised.wait(30)


def test_a_limit_may_shrink_while_it_is_waited_for():
    is_stopping, never = threading.Event(), threading.Event()
    threading.Timer(0.1, is_stopping.set).start()
    with pytest.raises(OutOfTimeError, match="within 0 s"):
        limited(never.wait, lambda: 0.0 if is_stopping.is_set() else 1000.0, "it did not come")


def test_where_there_is_no_time_nothing_is_called():
    called = []
    with pytest.raises(OutOfTimeError):
        limited(lambda: called.append(1), 0.0, "it did not come")
    assert called == []


def test_ctrl_c_goes_through_a_call_that_never_returns():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    begun, never, undone = threading.Event(), threading.Event(), []

    def call():
        begun.set()
        never.wait()

    def press():
        begun.wait(60)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            limited(call, 1000, "it did not come", undo=undone.append)
    finally:
        signal.signal(signal.SIGINT, before)
    never.set()
    wait_until(lambda: undone == [None])


# ---- A disk that hangs: a FIFO that nobody reads, where a part of a checkpoint is to be written


@contextlib.contextmanager
def disk_that_hangs(monkeypatch, version):
    """The file of one checkpoint does not reach the disk before the end of the context."""
    released, sync = threading.Event(), files._sync

    def sync_or_hang(path):
        if path.name.startswith(f".checkpoint-{version:012d}.safetensors"):
            released.wait()
        sync(path)

    monkeypatch.setattr(files, "_sync", sync_or_hang)
    yield
    released.set()
    wait_until(lambda: not any(thread.name == "lategrad-checkpoint" for thread in threading.enumerate()))


def test_a_disk_that_hangs_at_the_end_costs_the_last_checkpoint_and_not_the_trace(tmp_path, monkeypatch):
    def shorten(telemetry, output):  # the first checkpoint is written
        monkeypatch.setattr(archive, "WRITE_TIMEOUT", 0.2)

    with disk_that_hangs(monkeypatch, version=30):
        with pytest.warns(UserWarning, match="the checkpoint at update 30 timed out: the disk hangs"):
            trace = lg.train(Quadratic(), RULE, steps=30, workers=1, engine="threads", out=tmp_path, compile=False,
                             record_every=1, on_record=shorten, checkpoint_every=100)  # fmt: skip
        assert trace.complete
        assert lg.Trace.load(tmp_path / "trace.safetensors").complete
    monkeypatch.undo()
    assert lg.resume(tmp_path, Quadratic(), RULE).complete


@pytest.mark.filterwarnings("ignore")
def test_a_disk_that_hangs_from_the_start_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(archive, "WRITE_TIMEOUT", 0.2)
    with disk_that_hangs(monkeypatch, version=0), pytest.raises(OSError, match="no checkpoint can be written to"):
        lg.train(Quadratic(), RULE, steps=30, workers=1, engine="threads", out=tmp_path, compile=False)


# ---- Processes


@pytest.mark.slow
def test_a_worker_that_reads_nothing_does_not_hold_the_server_up(tmp_path):
    with pytest.warns(UserWarning, match=r"worker 0 died after update \d+ \(its message is about job .* restarted"):
        trace = lg.train(Unread(tmp_path / "marker"), RULE, steps=Unread.messages + 100, workers=1, compile=False)
    audit(trace)
    assert trace.complete
    assert trace.config["replaced"] == {"worker 0": 1}


@pytest.mark.slow
def test_a_fork_server_that_hangs_is_not_waited_for(monkeypatch):
    lg.train(Quadratic(), RULE, steps=10, workers=1)  # it has imported all by now
    fork_server = multiprocessing.forkserver._forkserver._forkserver_pid
    done = []

    def disturb():
        try:
            wait_until(lambda: training.version > 10 and len(training.workers) == 2)
            os.kill(fork_server, signal.SIGSTOP)
            monkeypatch.setattr(processes, "START_TIMEOUT", 0.5)
            os.kill(training.workers[1].pid, signal.SIGKILL)
            wait_until(lambda: any("worker 1 could not be started" in str(one.message) for one in said))
            monkeypatch.undo()
            os.kill(fork_server, signal.SIGCONT)
            wait_until(lambda: len(training.workers) == 2)
            done.append(True)
        finally:
            os.kill(fork_server, signal.SIGCONT)
            training.stop()

    training = Training(Quadratic(), RULE, Settings(steps=10**6, workers=2, slow="constant:2", compile=False))
    thread = threading.Thread(target=disturb)
    thread.start()
    with (
        pytest.warns(UserWarning, match="worker 1 died"),
        pytest.warns(UserWarning, match="^stopped"),
        pytest.warns(UserWarning, match=r"worker 1 could not be started \(the fork server .* within 0.5 s\)") as said,
    ):
        trace = training.run()
    thread.join()
    assert done
    audit(trace)


# ---- Ray at an address


def _free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.2", 0))
        return one.getsockname()[1]


@pytest.mark.parametrize("form", ["127.0.0.2:{}", "ray://127.0.0.2:{}"])
def test_where_nothing_listens_ray_is_not_waited_for(form, capsys):
    pytest.importorskip("ray")
    address = form.format(_free_port())
    with pytest.raises(ConnectionError, match=f"nothing listens at the address of Ray, '{address}'.*see that the clus"):
        lg.train(Quadratic(), RULE, steps=10, engine="ray", address=address)
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "--engine", "ray", "--address", address, "--steps", "10"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("error: nothing listens at the address of Ray")


@contextlib.contextmanager
def _at_an_address_that_never_answers(form, *how):
    """A driver that is connecting, and what it says."""
    pytest.importorskip("ray")
    with socket.create_server(("127.0.0.2", 0)) as silent:
        silent.settimeout(120)
        address = form.format(silent.getsockname()[1])
        paths = os.pathsep.join(
            [str(Path(__file__).parent), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        )
        driver = subprocess.Popen(
            [sys.executable, "-m", "helpers.ray_at_address", address, *how], text=True, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": paths, "RAY_USAGE_STATS_ENABLED": "0"},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )  # fmt: skip
        with driver, silent.accept()[0], silent.accept()[0]:  # we have looked whether it is there, and then Ray
            try:
                yield driver, address
            finally:
                driver.kill()


@pytest.mark.slow
@pytest.mark.parametrize("form", ["127.0.0.2:{}", "ray://127.0.0.2:{}"])
def test_a_ray_that_never_answers_is_given_up(form):
    with _at_an_address_that_never_answers(form, "3") as (driver, address):
        said, errors = driver.communicate(timeout=120)
        assert f"OutOfTimeError: there was no answer from Ray at '{address}' within 3 s: see that the cluster" in said
        assert driver.returncode == 0, errors


@pytest.mark.slow
@pytest.mark.parametrize("form", ["127.0.0.2:{}", "ray://127.0.0.2:{}"])
def test_ctrl_c_ends_a_run_that_waits_for_ray_to_answer(form):
    with _at_an_address_that_never_answers(form, "100000") as (driver, _):
        driver.send_signal(signal.SIGINT)
        said, errors = driver.communicate(timeout=120)
        assert said.splitlines()[-1] == "ended 0 interrupted", errors
        assert driver.returncode == 0, errors
