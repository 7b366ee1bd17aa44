"""The main job: run the paper's experiments and write the report."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lategrad.support.validation import require, require_choice, require_device
from reproduction import baselines, deep, fig1, fig2, fig3, fig4, local, step_range, theorems
from reproduction.jobs import Job, Say, run_jobs
from reproduction.local import real
from reproduction.part import Part, Run
from reproduction.report import write_report
from reproduction.results import Section
from reproduction.sweep import REGIMES, SCALES, SweepConfig, sweep, sweep_jobs


def _config(run: Run) -> SweepConfig:
    return SweepConfig(SCALES[run.scale])


@lru_cache(maxsize=1)
def _sweeps(run: Run) -> step_range.Sweeps:
    return {regime: sweep(_config(run), regime, run.out, device=run.device) for regime in REGIMES}


def _sweep_jobs(run: Run) -> list[Job]:
    return sweep_jobs(_config(run), run.out, run.device)


PARTS = (
    Part("fig1", _sweep_jobs, lambda run: fig1.section(fig1.Config(), _config(run), _sweeps(run))),
    Part("fig2", _sweep_jobs, lambda run: step_range.section(fig2.CONFIG, _config(run), _sweeps(run))),
    Part("fig3", lambda run: [*fig3.jobs(_config(run)), *_sweep_jobs(run)],
         lambda run: fig3.section(fig3.Config(), _config(run), _sweeps(run), run.out, device=run.device)),
    Part("fig4", _sweep_jobs, lambda run: step_range.section(fig4.CONFIG, _config(run), _sweeps(run), fig4.ABOUT)),
    Part("baselines", baselines.jobs, baselines.section),
    Part("deep", deep.jobs, deep.section, hours_on_a_cpu=True),
    Part("theorems", theorems.jobs, theorems.section),
    Part("local", local.jobs, local.section, only_by_name=True),
    Part("local-real", real.jobs, real.section, only_by_name=True),
)  # fmt: skip
"""In the order of the report. Whoever adds an experiment adds it here, and nowhere else."""

NAMES = tuple(part.name for part in PARTS)


def reproduce(
    what: str,
    scale: str,
    out: Path,
    *,
    device: str = "cpu",
    models: Sequence[str] = (),
    rules: Sequence[str] = (),
    say: Say = print,
) -> tuple[Path, list[Section]]:
    """Run one part or all of them; what is finished under ``out/traces`` is not run again.

    Args:
        what: one of the parts, or all, which leaves out those that are run only by name (``local``, ``local-real``).
        scale: quick (ten minutes on two cores), paper (under an hour on two cores), full (for a GPU). Beyond the quick
            scale the deep models and the baselines on Fashion-MNIST take hours on a CPU; there ``all`` leaves them out.
        out: where the report, its figures and CSV files go.
        device: cpu or cuda.
        models, rules: limit ``deep``, ``local`` or ``local-real`` to these; by default all.
        say: called with a line on how long it will take, and on every piece that is done.
    """
    require_choice("what", what, (*NAMES, "all"))
    require_choice("scale", scale, tuple(SCALES))
    require_device("device", device)
    begin = time.monotonic()
    run = Run(scale, Path(out), device, tuple(models), tuple(rules))
    wanted = [part for part in PARTS if what == part.name or (what == "all" and not part.only_by_name)]
    if what not in ("deep", "local", "local-real", "all"):
        unused = not (models or rules)
        require("--models and --rules", (*models, *rules), unused, "left out: they limit deep, local and local-real")
    if what == "all" and scale != "quick" and device == "cpu":
        for part in [part for part in wanted if part.hours_on_a_cpu]:
            say(f"left out, as it takes hours on a CPU: python -m reproduction {part.name} --scale {scale}")
            wanted.remove(part)
    run_jobs(list({job.label: job for part in wanted for job in part.jobs(run)}.values()), say)
    sections = [part.section(run) for part in wanted]
    _sweeps.cache_clear()
    report = write_report(sections, out, _about(what, run, time.monotonic() - begin))
    return report, sections


def _about(what: str, run: Run, seconds: float) -> dict[str, Any]:
    on_gpu = run.device.startswith("cuda")
    return {
        "command": f"python -m reproduction {what} --scale {run.scale} --device {run.device}",
        "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
        "device": torch.cuda.get_device_name(run.device) if on_gpu else f"cpu, {platform.machine()}",
        "seeds": SCALES[run.scale].seeds,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "numpy": np.__version__,
    }
