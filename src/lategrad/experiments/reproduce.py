"""The main job: run the paper's experiments and write the report."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lategrad.experiments import deep, fig1, fig2, fig3, fig4, rivals, step_range, theorems
from lategrad.experiments.report import write_report
from lategrad.experiments.results import Section
from lategrad.experiments.sweep import REGIMES, SCALES, Say, SweepConfig, sweep
from lategrad.support.validation import require, require_choice, require_device

PARTS = ("fig1", "fig2", "fig3", "fig4", "theorems", "rivals", "deep")
HOURS_ON_A_CPU = ("rivals", "deep")
"""At any scale but quick."""


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
    """Run one part or all of them; finished sweeps under ``out/traces`` are not run again.

    Args:
        what: fig1, fig2, fig3, fig4, theorems, rivals, deep or all.
        scale: quick (minutes on two cores), paper (under an hour on two cores), full (for a GPU). The rivals and
            the deep models take hours on a CPU at any but the quick scale: there, ``all`` leaves them out and says so.
        out: where the report, its figures and CSV files go.
        device: cpu or cuda.
        models, rules: limit ``deep`` to these; by default all.
        say: called with a line for each thing that starts.
    """
    require_choice("what", what, (*PARTS, "all"))
    require_choice("scale", scale, tuple(SCALES))
    require_device("device", device)
    begin = time.monotonic()
    wanted: tuple[str, ...] = PARTS if what == "all" else (what,)
    if what == "all" and scale != "quick" and device == "cpu":
        wanted = tuple(part for part in PARTS if part not in HOURS_ON_A_CPU)
        for part in HOURS_ON_A_CPU:
            say(f"left out, as it takes hours on a CPU: lategrad reproduce {part} --scale {scale}")
    if "deep" not in wanted:
        require("--models and --rules", (*models, *rules), not (models or rules), "left out: they limit deep alone")
    deep_config = deep.CONFIGS[scale].limited(models, rules)
    config = SweepConfig(SCALES[scale])
    sections: list[Section] = []
    if any(part.startswith("fig") for part in wanted):
        sweeps = {regime: sweep(config, regime, out, device=device, say=say) for regime in REGIMES}
        if "fig1" in wanted:
            sections.append(fig1.section(fig1.Config(), config, sweeps))
        if "fig2" in wanted:
            sections.append(step_range.section(fig2.CONFIG, config, sweeps))
        if "fig3" in wanted:
            sections.append(fig3.section(fig3.Config(), config, sweeps, out, device=device, say=say))
        if "fig4" in wanted:
            sections.append(step_range.section(fig4.CONFIG, config, sweeps))
    if "theorems" in wanted:
        sections.append(theorems.section(scale, progress=say))  # too small to gain anything on a GPU
    if "rivals" in wanted:
        sections.append(rivals.section(rivals.CONFIGS[scale], out, device=device, say=say))
    if "deep" in wanted:
        sections.append(deep.section(deep_config, out, device=device, say=say))
    report = write_report(sections, out, _about(what, scale, device, time.monotonic() - begin))
    return report, sections


def _about(what: str, scale: str, device: str, seconds: float) -> dict[str, Any]:
    return {
        "command": f"lategrad reproduce {what} --scale {scale} --device {device}",
        "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else f"cpu, {platform.machine()}",
        "threads": torch.get_num_threads(),
        "seeds": SCALES[scale].seeds,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "numpy": np.__version__,
    }
