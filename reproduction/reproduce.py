"""The main job: run the parts of the reproduction and write the report."""

import platform
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lategrad.support.validation import require, require_choice, require_device
from reproduction.baselines.study import Baselines
from reproduction.deep.study import Deep
from reproduction.figures import fig1, fig3, horizon, lr_range
from reproduction.figures.sweep import PLANS, FigurePart, own_experiment
from reproduction.jobs import Say, run_jobs
from reproduction.local.real import LocalReal
from reproduction.local.study import Local
from reproduction.report import Section, write_report
from reproduction.study import Part, Request, Workspace
from reproduction.theorems.study import Theorems

PARTS: tuple[Part, ...] = (
    FigurePart("fig1", fig1.needed, fig1.section),
    FigurePart("horizon", fig3.needed, horizon.section),
    FigurePart("fig2", lr_range.FIG2.needed, lr_range.FIG2.section),
    fig3.Figure3(),
    FigurePart("fig4", lr_range.FIG4.needed, lr_range.FIG4.section),
    Baselines(),
    Deep(),
    Theorems(),
    Local(),
    LocalReal(),
)
"""In the order of the report."""

NAMES = tuple(part.name for part in PARTS)


def reproduce(
    parts: Sequence[str], scale: str, out: Path, *, device: str = "cpu", models: Sequence[str] = (),
    rules: Sequence[str] = (), data: str = "", delays: Sequence[int | str] = (), updates: int = 0, say: Say = print,
) -> tuple[Path, list[Section]]:  # fmt: skip
    """Run some parts ("all": those that do not run only by name) and write the report.

    What is finished under ``out/traces`` is not run again. ``say`` is called with a line that forecasts the duration,
    and with one for every piece of work that is done. With ``data`` (a file or a name), ``delays`` or ``updates``,
    which are for "fig1" alone, Figure 1 is of your own experiment.
    """
    parts = list(parts) or ["all"]
    for name in parts:
        require_choice("PART", name, (*NAMES, "all"))
    require_choice("--scale", scale, tuple(PLANS))
    require_device("--device", device)
    begin = time.monotonic()
    own = bool(data or delays or updates)
    require("--data, --delays and --updates", (data, *delays, updates), not own or parts == ["fig1"],
            "left out: they are for fig1 alone")  # fmt: skip
    request = Request(scale, Workspace(Path(out), device), tuple(models), tuple(rules),
                      own_experiment(data, delays, updates) if own else ())  # fmt: skip
    chosen = [part for part in PARTS if part.name in parts or ("all" in parts and not part.only_by_name)]
    limits = any(part.has_models for part in chosen) or not (models or rules)
    require("--models and --rules", (*models, *rules), limits, "left out: they limit deep, local and local-real")
    if scale != "quick" and device == "cpu":
        for part in [part for part in chosen if part.hours_on_cpu and part.name not in parts]:
            say(f"left out, as it takes hours on a CPU: python -m reproduction {part.name} --scale {scale}")
            chosen.remove(part)
    Path(out).mkdir(parents=True, exist_ok=True)  # before anything runs
    run_jobs(list({job.label: job for part in chosen for job in part.jobs(request)}.values()), say)
    sections = [part.section(request) for part in chosen]
    report = write_report(sections, out, _about(parts, request, time.monotonic() - begin))
    return report, sections


def _about(parts: Sequence[str], request: Request, seconds: float) -> dict[str, Any]:
    device = request.space.device
    return {
        "command": f"python -m reproduction {' '.join(parts)} --scale {request.scale} --device {device}",
        "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else f"cpu, {platform.machine()}",
        "seeds": PLANS[request.scale].seeds,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "numpy": np.__version__,
    }
