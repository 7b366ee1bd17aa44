"""Under torchrun: a run that loses a rank continues from its checkpoint, Ctrl-C ends it, and nothing is left."""

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "pipeline_training.py"


def start(*options, restarts=0):
    """torchrun with two ranks, in a session of its own.

    It looks for dead ranks every few seconds: the others say what they saw before it ends them.
    """
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", str(restarts),
                "--monitor-interval", "4"]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen([sys.executable, *torchrun, SCRIPT, *map(str, options)], env=environment, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip


def descendants(pid):
    """The processes that a process has started; torchrun puts each rank into a session of its own."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


def end(process):
    """Interrupt torchrun as Ctrl-C does, and return what it and its ranks had printed."""
    process.send_signal(signal.SIGINT)
    text, _ = process.communicate(timeout=60)
    return text


def listening(port):
    """Whether something listens at a port of this machine."""
    tables = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
    return re.search(rf":{port:04X} \S+ 0A ", tables) is not None


def losses(text):
    return re.findall(r"held-out loss (.*)", text)


@pytest.mark.slow
def test_a_run_that_loses_a_rank_continues_from_its_checkpoint_and_ends_as_if_it_had_not(tmp_path):
    options = ["--steps", 30, "--save-every", 10, "--checkpoints"]
    undisturbed, _ = start(*options, tmp_path / "a").communicate(timeout=300)
    process = start(*options, tmp_path / "b", "--die-at", 25, restarts=1)
    text, _ = process.communicate(timeout=300)
    assert process.returncode == 0, text
    assert (
        "rank 0: stage 0 of 2: could not receive from stage 1: the connection was lost: its process has ended" in text
    )
    assert "continues from step 20" in text
    assert losses(text) == losses(undisturbed) != []


@pytest.mark.slow
def test_ctrl_c_ends_all_ranks_and_leaves_no_process_and_no_port():
    process = start("--steps", 100_000)
    try:
        assert any(line.startswith("step ") for line in process.stdout)
        ranks = descendants(process.pid)
        environments = [Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace") for pid in ranks]
        ports = {int(port) for one in environments for port in re.findall(r"MASTER_PORT=(\d+)", one)}
        assert len(ranks) == 2
        assert any(map(listening, ports))
    finally:
        text = end(process)
    assert process.returncode != 0
    assert len(re.findall(r"^rank \d: (?:interrupted|stage .*)$", text, re.MULTILINE)) == 2, text
    assert "[rank" not in text  # tracebacks
    assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()]
    assert not any(map(listening, ports))
