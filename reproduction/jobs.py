"""The work of a reproduction in pieces; a piece saves its results in files, from which sections read them.

Runs are independent of each other. On a CPU, two processes with one thread each are faster than two threads that wait
for each other at every update, and lose less when another program takes one of the cores. On a GPU, a small model's
updates are many short kernels, one after the other, which leave most of it idle: several threads with a stream each
fill it. Work that is compiled runs in processes there, too, as threads would compile one after the other.
"""

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from lategrad.support.validation import require

Say = Callable[[str], None]


def to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


Lane = Literal["processes", "gpu", "streams"]
"""Where a piece runs: on a core; on the GPU in a process; on the GPU in a thread of this process, if it compiles
nothing."""

_WIDTH = {"gpu": 5, "streams": 10}  # pieces that share the GPU; each holds its own data and waiting queries there
_SPEEDUP = {"gpu": 5, "streams": 2}  # over one piece after another: processes compile most of the time, streams compute


@dataclass(frozen=True)
class Job:
    """A piece of work that can run beside others."""

    label: str
    seconds: float  # about how long it takes alone, on one core of a usual machine or on a GPU
    work: Callable[[], Any]  # picklable; its result is ignored
    files: tuple[Path, ...] = ()  # what it saves: where all of them exist, it is expected to take no time
    lane: Lane = "processes"
    after: tuple[str, ...] = ()  # labels of the jobs whose files it reads

    @property
    def expected(self) -> float:
        """Seconds, or 0 if it has been done before."""
        return 0.0 if self.files and all(path.exists() for path in self.files) else self.seconds


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_jobs(jobs: Sequence[Job], say: Say, *, processes: int | None = None) -> None:
    """Run all jobs, the longest first, in all lanes at once; a job waits for those that it comes after."""
    waiting = sorted(jobs, key=lambda job: -job.expected)
    known = {job.label for job in jobs}
    require("after", [job.after for job in jobs], all(set(job.after) <= known for job in jobs), "labels of these jobs")
    beside_a_gpu = any(job.lane != "processes" for job in jobs)  # which has its own processes and threads to feed it
    here = processes or (max(1, cores() - 2) if beside_a_gpu else cores())
    width = {"processes": min(here, max(1, len(jobs))), **_WIDTH}
    progress = Progress(jobs, width, say)
    with ExitStack() as stack:
        pools: dict[str, Executor] = {}
        for lane in {job.lane for job in jobs}:
            if lane == "streams":  # deep models: products of float32 matrices in TF32 on a GPU that has it
                pools[lane] = ThreadPoolExecutor(width[lane])
                stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
                torch.set_float32_matmul_precision("high")
            else:
                context = multiprocessing.get_context("spawn")
                pools[lane] = ProcessPoolExecutor(width[lane], context, initializer=_use_one_thread)
            stack.enter_context(pools[lane])
        try:
            running: dict[Future[float], Job] = {}
            done: set[str] = set()
            while running or waiting:
                ready = [job for job in waiting if done.issuperset(job.after)]
                waiting = [job for job in waiting if job not in ready]
                running |= {pools[job.lane].submit(_run, job): job for job in ready}
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    job = running.pop(future)
                    progress.done(job, future.result())
                    done.add(job.label)
        except BaseException:
            for pool in pools.values():
                pool.shutdown(wait=False, cancel_futures=True)
            raise


def _use_one_thread() -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # or every process starts as many again


def _run(job: Job) -> float:
    """Do the work; returns the seconds that it took."""
    begin = time.monotonic()
    if job.lane == "streams" and torch.cuda.is_available():
        with torch.cuda.stream(torch.cuda.Stream()):
            job.work()
            torch.cuda.empty_cache()  # memory of one stream cannot be used by another
    else:
        job.work()
    return time.monotonic() - begin


class Progress:
    """Prints what is done, and how long the rest will take at the pace so far; ``width`` is the number of pieces that
    run at once in a lane."""

    def __init__(self, jobs: Sequence[Job], width: dict[str, int], say: Say) -> None:
        self.expected = {job.label: job.expected for job in jobs}  # before the jobs save their files
        in_lane = {lane: sum(self.expected[job.label] for job in jobs if job.lane == lane) for lane in width}
        on_gpu = sum(in_lane.get(lane, 0.0) / speedup for lane, speedup in _SPEEDUP.items())
        self.total = max([in_lane["processes"] / width["processes"], on_gpu, *self.expected.values(), 0.0])
        self.work, self.finished, self.begin, self.say = sum(in_lane.values()), 0.0, time.monotonic(), say
        self.uses_gpu, self.spent = on_gpu > 0, 0.0
        done = sum(seconds == 0 for seconds in self.expected.values())
        gpu = " and a GPU" if any(job.lane != "processes" for job in jobs) else ""
        say(f"{len(jobs)} pieces of work on {width['processes']} core(s){gpu}, {done} of them done before: "
            f"{_duration(self.total)}")  # fmt: skip

    def done(self, job: Job, seconds: float) -> None:
        if not self.expected[job.label]:
            return
        self.finished += self.expected[job.label]
        self.spent += seconds if job.lane == "processes" else 0.0
        share, elapsed = self.finished / self.work, time.monotonic() - self.begin
        pace = elapsed / (share * self.total) if self.uses_gpu else self.spent / self.finished
        trust = share**0.5  # in the pace so far, which says little while most of what has begun is not done
        left = max(0.0, (trust * pace + 1 - trust) * self.total - elapsed)
        self.say(f"{share:4.0%} done, {_duration(left)} left: {job.label}, {seconds:.0f} s")


def _duration(seconds: float) -> str:
    """A duration in words.

    >>> _duration(50), _duration(80), _duration(500)
    ('less than a minute', 'about 1 minute', 'about 8 minutes')
    """
    if seconds < 60:
        return "less than a minute"
    minutes = round(seconds / 60)
    return f"about {minutes} minute{'s' * (minutes != 1)}"
