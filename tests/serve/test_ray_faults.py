"""Faults done to real runs on a Ray of their own: what listens, what is left behind, and what a full disk ends."""

import contextlib
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

import pytest

import lategrad as lg
from lategrad.problems import Quadratic
from lategrad.serve import Settings, Training
from lategrad.serve.checkpoints.checkpoint import checkpoint_paths

ray = pytest.importorskip("ray")

from helpers.paths import python_path  # noqa: E402
from helpers.ray_driver import RULE  # noqa: E402
from helpers.serving import PATIENCE, audit, read_only, wait_until  # noqa: E402
from lategrad.serve.engines import reaper  # noqa: E402
from lategrad.serve.engines.ray import connect  # noqa: E402

PROBLEM = Quadratic(dim=6, noise=0.1)


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    """Ray's processes import the tests' problems, and no folder of theirs may stay."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv(
        "PYTHONPATH",
        python_path(__file__),
    )
    with tempfile.TemporaryDirectory(
        prefix="r"
    ) as own:  # other tests may have a Ray meanwhile; sockets need short paths
        monkeypatch.setenv("RAY_TMPDIR", own)
        yield
        assert folders() == set()


def folders():
    return set(Path(os.environ["RAY_TMPDIR"]).glob("lategrad-ray-*"))


# ---- Without Ray


def _mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_the_token_can_be_read_by_its_user_alone(tmp_path, monkeypatch):
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    token = tmp_path / ".ray" / "auth_token"
    connect.protect_token()
    assert _mode(token) == 0o600
    written = token.read_text()
    assert len(written) == 64
    token.chmod(0o644)  # as Ray itself writes it
    connect.protect_token()
    assert _mode(token) == 0o600
    assert token.read_text() == written


def test_no_token_is_made_where_none_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    connect.protect_token()
    assert not list(tmp_path.iterdir())


def test_what_belongs_to_a_folder_ends_with_whoever_holds_its_pipe(tmp_path):
    folder = tmp_path / "ray"
    (folder / "logs").mkdir(parents=True)
    sleep = [sys.executable, "-c", "import time; time.sleep(1000)"]
    ours, other = (subprocess.Popen(sleep, env=os.environ | {reaper.MARK: f"{folder}{end}"}) for end in ("", "x"))
    with open(folder / "logs" / "agent.log", "w") as log:  # a title that it sets is written over its environment
        untold = subprocess.Popen(sleep, stdout=log)
    cleaner = subprocess.Popen([sys.executable, "-I", "-S", reaper.__file__, folder], stdin=subprocess.PIPE)
    try:
        assert ours.poll() is None
        cleaner.stdin.close()
        assert ours.wait(PATIENCE) == untold.wait(PATIENCE) == -signal.SIGKILL
        assert cleaner.wait(PATIENCE) == 0
        assert not folder.exists()
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


# ---- With Ray


def _listening():
    """Local addresses that processes of a Ray of our own, or this one, listen on, with the process's name."""
    ours = {os.getpid(), *(pid for folder in folders() for pid in reaper.processes_of(str(folder)))}
    lines = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout.splitlines()
    found = []
    for line in lines:
        if {int(pid) for pid in re.findall(r"pid=(\d+),", line)} & ours:
            found.append((line.split()[3].rpartition(":")[0].strip("[]"), re.findall(r'\("([^"]+)"', line)[0]))
    return found


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("ss") is None, reason="ss says what listens")
def test_a_ray_of_its_own_listens_on_the_loopback_address_alone():
    heard = []

    def look(training):
        wait_until(lambda: training.version > 20, 180)
        heard.extend(_listening())
        training.stop()

    with pytest.warns(UserWarning, match="^stopped"):
        _disturbed(look, workers=2)
    assert {"gcs_server", "raylet"} <= {name for _, name in heard}
    assert {address.removeprefix("::ffff:") for address, _ in heard} == {"127.0.0.1"}, heard


def _disturbed(disturb, **settings):
    """The trace of a run that something is done to."""
    run = Training(PROBLEM, RULE, Settings(steps=10**6, engine="ray", slow="constant:5", progress=False, **settings))
    failed = []

    def guarded():
        try:
            disturb(run)
        except BaseException as error:
            failed.append(error)
            run.stop()

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    trace = run.run()
    thread.join()
    if failed:
        raise failed[0]
    audit(trace)
    return trace


@contextlib.contextmanager
def _full_disk(folder):
    """Real writes, which really fail."""
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.slow
@pytest.mark.parametrize("until_the_end", [False, True])
@pytest.mark.parametrize("fault", [_full_disk, read_only])
def test_a_disk_that_takes_nothing_ends_no_run(fault, until_the_end, tmp_path):
    made = []
    with contextlib.ExitStack() as stack:

        def disturb(training):
            wait_until(lambda: training.version > 50, 180)
            inner = stack.enter_context(contextlib.ExitStack())
            inner.enter_context(fault(tmp_path))
            made.append(training.version)
            wait_until(lambda: training.version > made[0] + 200, 180)
            if not until_the_end:
                inner.close()
                wait_until(lambda: training.version > made[0] + 400, 180)
            training.stop()

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trace = _disturbed(disturb, workers=1, out=tmp_path, checkpoint_every=50)
    said = [str(warning.message) for warning in caught]
    assert any(re.search("checkpoint at update .* failed, training continues", line) for line in said)
    assert any("the trace could not be saved" in line for line in said) == until_the_end
    assert len(trace.delays) > made[0] + 200
    resumed = lg.resume(tmp_path, PROBLEM, RULE, engine="threads", steps=len(trace.delays) + 10)
    assert resumed.complete  # from an old checkpoint, or from the last
    assert bool((resumed.delays[: made[0] // 2] == trace.delays[: made[0] // 2]).all())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_folder_that_takes_nothing_is_said_at_the_start(tmp_path):
    with (
        read_only(tmp_path),
        pytest.raises(OSError, match="no checkpoint can be written to .*: choose another folder"),
    ):
        _disturbed(lambda training: None, workers=1, out=tmp_path)


def _heed_signals():
    """A shell may have told its background jobs to ignore them."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@contextlib.contextmanager
def _driver(folder, *how):
    """A run in a process of its own; what it says, line by line."""
    with subprocess.Popen(
        [sys.executable, "-m", "helpers.ray_driver", str(folder), *how],
        stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent,
        preexec_fn=_heed_signals,
    ) as driver:  # fmt: skip
        try:
            yield driver
        finally:
            driver.kill()


def _said(driver, word):
    """The line that begins with a word."""
    for line in driver.stdout:
        if line.startswith(word):
            return line.removeprefix(word).split()
    raise AssertionError(f"it has ended before it said {word!r}")


def _exists(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_a_killed_driver_leaves_no_process_and_no_folder(tmp_path):
    with _driver(tmp_path) as driver:
        _said(driver, "begins")
        server, *workers = map(int, _said(driver, "goes on"))
        (folder,) = folders()
        all_of_it = reaper.processes_of(str(folder))
        assert {server, *workers} < set(all_of_it)
        os.kill(workers[0], signal.SIGSTOP)  # nothing that it could notice makes it end
        driver.kill()
        driver.wait()
        wait_until(lambda: not any(map(_exists, all_of_it)) and not folder.exists(), 10)
    assert lg.resume(tmp_path, PROBLEM, RULE, engine="threads", steps=50).complete


def _stop_process_of_ray(program):
    (folder,) = folders()
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode()
                for pid in reaper.processes_of(str(folder))}  # fmt: skip
    (pid,) = (pid for pid, command in commands.items() if Path(command).name == program)
    os.kill(pid, signal.SIGSTOP)


@pytest.mark.slow
@pytest.mark.parametrize("program", ["raylet", "gcs_server"])
def test_ctrl_c_ends_a_run_within_seconds_also_where_ray_itself_hangs(program, tmp_path):
    with _driver(tmp_path) as driver:
        _said(driver, "goes on")
        _stop_process_of_ray(program)
        driver.send_signal(signal.SIGINT)
        made, why = _said(driver, "ended")
        driver.wait(60)  # Ray, whose processes are killed, may end it with a code of its own
    assert why == "interrupted"
    assert lg.resume(tmp_path, PROBLEM, RULE, engine="threads", steps=int(made) + 10).complete


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "why"), [(signal.SIGTERM, "terminated"), (signal.SIGHUP, "hung")])
def test_sigterm_and_sighup_end_a_run_as_ctrl_c_does(sent, why, tmp_path):
    with _driver(tmp_path) as driver:
        _said(driver, "goes on")
        driver.send_signal(sent)
        made, said, *_ = _said(driver, "ended")
        assert driver.wait(60) == 0
    assert said == why
    assert lg.resume(tmp_path, PROBLEM, RULE, engine="threads", steps=int(made) + 10).complete


@pytest.mark.slow
def test_sigusr1_makes_a_checkpoint_at_once_and_the_run_goes_on(tmp_path):
    with _driver(tmp_path) as driver:
        _said(driver, "goes on")
        for _ in range(2):
            newest = checkpoint_paths(tmp_path)[0]
            driver.send_signal(signal.SIGUSR1)
            wait_until(lambda was=newest: checkpoint_paths(tmp_path)[0] != was)
        driver.send_signal(signal.SIGINT)
        _, why = _said(driver, "ended")
        assert driver.wait(60) == 0
    assert why == "interrupted"


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["begin", "server stopped", "server lost", "at work"])
def test_ctrl_c_ends_a_run_within_seconds_with_what_there_is(moment, tmp_path):
    with _driver(tmp_path, *(["hang"] if moment == "begin" else [])) as driver:
        _said(driver, "begins")
        if moment != "begin":
            server, *_ = map(int, _said(driver, "goes on"))
            if moment != "at work":
                os.kill(server, signal.SIGSTOP if moment == "server stopped" else signal.SIGKILL)
        asked = time.monotonic()
        driver.send_signal(signal.SIGINT)
        made, why = _said(driver, "ended")
        assert time.monotonic() - asked < 60  # of which others may take most of both cores
        assert driver.wait(60) == 0
    assert why == "interrupted"
    if moment == "begin":
        assert made == "0"
    else:
        assert lg.resume(tmp_path, PROBLEM, RULE, engine="threads", steps=int(made) + 10).complete
