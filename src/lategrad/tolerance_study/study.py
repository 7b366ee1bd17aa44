"""The runs of a study: planned, executed in order or in parallel, and stored."""

import hashlib
import json
import os
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from lategrad.simulator.history import free_memory
from lategrad.support.files import read_plain, write_text
from lategrad.support.progress import progress_of
from lategrad.support.validation import require, require_choice, require_count, require_number, require_switch
from lategrad.tolerance_study.code_identity import identify_code
from lategrad.tolerance_study.result import BETTER, Tolerance
from lategrad.tolerance_study.run import OWN, Build, Optimizers, Run, Task, Train, parse_profile, run_training

DELAYS = (0, 1, 2, 4, 8, 16, 32, 64)


def tolerance(train: Train, delays: Sequence[int] = DELAYS, optimizers: Optimizers | None = None, seeds: int = 2, *,
              profile: str | None = None, better: str = "lower", cost: float = 0.05, workers: int | str = 1,
              out: str | os.PathLike[str] | None = None, progress: bool | None = None,
              drift: bool = False) -> Tolerance:  # fmt: skip
    """Measure which delay a training tolerates: run it at every delay, and report the cost of each.

    Args:
        train: the training, a function of ``wrap``: it calls ``optimizer = wrap(optimizer)`` once (with delays by
            stage ``wrap(optimizer, model)``), trains, and returns one value, such as a validation loss. A function
            that *yields* values over time shows more: the slowdown of a delay, and whether more updates would
            recover its cost. Nothing else changes.
        delays: in updates; 0 is always run.
        optimizers: others to compare with the training's own, by name: functions from a list of parameters to an
            optimizer, which replaces the wrapped one.
        seeds: number of seeds, 0, 1, ...; torch, numpy and random are seeded with ``wrap.seed`` before each run.
        profile: "stages:8" for the delays of a pipeline of 8 stages, from the delay at the first stage to 0 at the
            last; None for the same delay everywhere.
        better: "lower" values (losses) or "higher" ones (accuracies, returns).
        cost: the accepted loss, as a share of the value without delay; verdicts use it.
        workers: number of processes; they must be able to import ``train``. "auto" makes the run with the longest delay
            first, and then as many in parallel as fit into the cores and half of the free memory.
        out: folder for finished runs, so that an interrupted study continues; with other code of the training or of an
            optimizer it is refused.
        progress: show a progress bar; by default on a terminal.
        drift: measure how far the parameters move during the delay of a gradient (``Delayed.drift``).

    >>> import torch, lategrad as lg
    >>> def train(wrap):
    ...     x = torch.nn.Parameter(torch.ones(1))
    ...     optimizer = wrap(torch.optim.SGD([x], lr=0.4))
    ...     for step in range(40):
    ...         optimizer.zero_grad()
    ...         (x**2 / 2).backward()
    ...         optimizer.step()
    ...     return (1 + x**2).item()
    >>> result = lg.tolerance(train, delays=(0, 1, 2, 4), seeds=1)
    >>> result.largest(cost=0.05)
    2
    """
    delays = tuple(dict.fromkeys((0, *delays)))
    for delay in delays:
        require_count("each of delays", delay)
    require_count("seeds", seeds, low=1)
    require_choice("better", better, BETTER)
    require_number("cost", cost, low=0)
    require_switch("drift", drift)
    is_valid = workers == "auto" or (isinstance(workers, int) and workers >= 1)
    require("workers", workers, is_valid, "an integer >= 1, or 'auto'")
    stages = parse_profile(profile)
    builders: dict[str, Build | None] = {OWN: None, **(optimizers or {})}
    require("optimizers", optimizers, len(builders) == 1 + len(optimizers or {}), f"without the name {OWN!r}")
    tasks = [Task(name, delay, seed) for name in builders for delay in delays for seed in range(seeds)]
    code = {name: identify_code(build) for name, build in (optimizers or {}).items()}
    about: dict[str, Any] = {"train": identify_code(train), "optimizers": code, "profile": profile, "better": better,
                             "drift": drift}  # fmt: skip
    store = None if out is None else _RunStore(Path(out), about)
    done = {} if store is None else {task: run for task in tasks if (run := store.load(task)) is not None}
    remaining = [task for task in tasks if task not in done]
    if done and progress is not False:
        print(f"{len(done)} of {len(tasks)} runs are kept from before, in {out}", file=sys.stderr)
    job = partial(run_training, train, builders, stages, drift)
    try:
        with progress_of("tolerance: run", len(tasks), progress) as report:
            for run in _execute(job, remaining, workers):
                if store is not None:
                    store.save(run)
                done[run.task] = run
                report(completed=len(done))
    except KeyboardInterrupt:
        if store is not None:
            print(f"{len(done)} of {len(tasks)} runs are kept in {out}: do the same again to continue", file=sys.stderr)
        raise
    result = Tolerance(tuple(done[task] for task in tasks), better=better, cost=cost, profile=profile,
                       name=about["train"]["name"])  # fmt: skip
    if seeds > 1 and result.seeds_agree():
        warnings.warn("all seeds gave the same values: the training sets its own seed (wrap.seed is the run's)",
                      stacklevel=2)  # fmt: skip
    return result


def _execute(job: Any, tasks: list[Task], workers: int | str) -> Iterator[Run]:
    if workers == 1 or not tasks:
        yield from map(job, tasks)
        return
    try:
        pickle.dumps(job)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(f"workers must be 1 for this training: it cannot be sent to another process ({error}); "
                         "define train and the optimizers as functions of a module") from None  # fmt: skip
    if workers == "auto":
        tasks = sorted(tasks, key=lambda task: -task.delay)
        with _pool(1, os.cpu_count() or 1) as alone:
            first = alone.submit(job, tasks[0]).result()
        yield first
        tasks, workers = tasks[1:], parallel_runs(first.memory)
    assert isinstance(workers, int)
    with _pool(workers, max(1, (os.cpu_count() or 1) // workers)) as pool:
        futures = [pool.submit(job, task) for task in tasks]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _pool(workers: int, threads: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(workers, get_context("spawn"), torch.set_num_threads, (threads,))


def parallel_runs(memory: int) -> int:
    """The number of runs of ``memory`` bytes that fit into half of the free memory, at most one for each core."""
    free = free_memory(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return max(1, int(min(os.cpu_count() or 1, free / 2 // max(1, memory))))


def _read(path: Path, build: Callable[[Any], Any]) -> Any:
    try:
        return build(json.loads(read_plain(path)))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{str(path)!r} is damaged, or of another version: delete it ({error!r})") from None


class _RunStore:
    """Finished runs in a folder, a file for each."""

    def __init__(self, folder: Path, about: dict[str, Any]) -> None:
        self._folder = folder / "runs"
        description = folder / "study.json"
        before = about
        if description.exists():
            before = _read(description, lambda saved: {name: saved[name] for name in about})
        for name in ("profile", "better", "drift"):
            if before[name] != about[name]:
                raise ValueError(f"out must be another folder: the runs in {str(folder)!r} had {name} {before[name]}, "
                                 f"not {about[name]}")  # fmt: skip
        code = {"train": about["train"], **about["optimizers"]}
        code_before = {"train": before["train"], **before["optimizers"]}
        for name in code_before.keys() & code:
            if code_before[name] != code[name]:
                raise ValueError(f"out must be another folder: the code of {name} is not that of the runs in "
                                 f"{str(folder)!r}; if no result changes, delete {description}")  # fmt: skip
        optimizers = before["optimizers"] | about["optimizers"]
        write_text(description, json.dumps(about | {"optimizers": optimizers}, indent=1))

    def _path(self, task: Task) -> Path:
        name = "".join(c if c.isalnum() or c in "-_." else "_" for c in task.optimizer)
        checksum = hashlib.sha256(task.optimizer.encode()).hexdigest()[:6]  # names may differ in other characters only
        return self._folder / f"{name}-{checksum}-delay{task.delay}-seed{task.seed}.json"

    def load(self, task: Task) -> Run | None:
        path = self._path(task)
        return _read(path, Run.from_json) if path.exists() else None

    def save(self, run: Run) -> None:
        write_text(self._path(run.task), json.dumps(run.as_json()))
