"""The work of a reproduction in pieces, one core each; a piece leaves what it finds in files, where sections read it.

Runs are independent of each other, so that two processes with one thread each are faster than two threads that wait
for each other at every update, and do not mind if another program takes one of the cores for a while.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Say = Callable[[str], None]


@dataclass(frozen=True)
class Job:
    """A piece of work that can be done by another process."""

    label: str
    seconds: float
    """About how long it takes on one core of a usual machine."""
    work: Callable[[], Any]
    """Picklable; what it returns is thrown away."""
    leaves: tuple[Path, ...] = ()
    """The files that it leaves: where all of them are there, it is not expected to take any time."""
    on_gpu: bool = False

    @property
    def expected(self) -> float:
        """Seconds, or 0 if it has been done before."""
        return 0.0 if self.leaves and all(path.exists() for path in self.leaves) else self.seconds


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_jobs(jobs: Sequence[Job], say: Say, *, processes: int | None = None) -> None:
    """Do all of them, the longest first: those for a GPU one after the other here, the others in processes."""
    processes = min(processes or cores(), max(1, len(jobs)))
    progress = _Progress(jobs, processes, say)
    ordered = sorted(jobs, key=lambda job: -job.expected)
    waiting = [job for job in ordered if not job.on_gpu]
    if processes == 1:
        for job in waiting:
            job.work()
            progress.done(job)
        waiting = []
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), initializer=_one_thread) as pool:
        try:
            futures: dict[Future[Any], Job] = {pool.submit(_do, job): job for job in waiting}
            for job in ordered:
                if job.on_gpu:
                    job.work()
                    progress.done(job)
            for future in as_completed(futures):
                future.result()
                progress.done(futures[future])
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _one_thread() -> None:
    torch.set_num_threads(1)


def _do(job: Job) -> None:
    job.work()


class _Progress:
    """What is done, and how long the rest will take at the pace so far."""

    def __init__(self, jobs: Sequence[Job], processes: int, say: Say) -> None:
        self.expected = {job.label: job.expected for job in jobs}  # what a job leaves changes that
        on_gpu = sum(self.expected[job.label] for job in jobs if job.on_gpu)
        on_cpu = sum(self.expected[job.label] for job in jobs if not job.on_gpu)
        total = max(on_gpu, on_cpu / processes, *self.expected.values(), 0.0)
        self.work, self.finished, self.begin, self.say = on_gpu + on_cpu, 0.0, time.monotonic(), say
        done = sum(seconds == 0 for seconds in self.expected.values())
        say(f"{len(jobs)} pieces of work on {processes} core(s), {done} of them done before: {_about(total)}")

    def done(self, job: Job) -> None:
        """One more is."""
        self.finished += self.expected[job.label]
        if not self.expected[job.label]:
            return
        share, elapsed = self.finished / self.work, time.monotonic() - self.begin
        left = elapsed * (1 - share) / share
        self.say(f"{share:4.0%} done, {_about(left)} left: {job.label}")


def _about(seconds: float) -> str:
    """A duration as one says it.

    >>> _about(50), _about(80), _about(500)
    ('less than a minute', 'about 1 minute', 'about 8 minutes')
    """
    if seconds < 60:
        return "less than a minute"
    minutes = round(seconds / 60)
    return f"about {minutes} minute{'s' * (minutes != 1)}"
