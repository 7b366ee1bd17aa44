"""The results of several rules: a table on the terminal, a CSV file, a figure, and a trace of each."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from lategrad.trace import Trace, plot_traces, write_csv

_PLACE = ("seed", "delay")


@dataclass(frozen=True)
class Contender:
    """The result of a rule: a trace with the axes seed and delay, and those of its sweep."""

    label: str
    trace: Trace
    settings: Mapping[str, Any] = field(default_factory=dict)  # its options with one value

    def rows(self) -> Iterator[dict[str, Any]]:
        for row in self.trace.rows():
            place = {name: row.pop(name) for name in _PLACE}
            options = {axis.name: row.pop(axis.name) for axis in self.trace.axes if axis.name not in _PLACE}
            yield {"rule": self.label, **place, **self.settings, **options, **row}


def file_name(label: str) -> str:
    """A rule's text as part of a file's name.

    >>> file_name("steady:lr=0.1|1,c=20"), file_name("own/rules.py:Mine")
    ('steady-lr=0.1-1-c=20', 'own-rules.py-Mine')
    """
    return re.sub(r"[^\w.=+-]+", "-", label).strip("-")


def require_new(out: Path | None, overwrite: bool) -> None:
    if out is not None and (out / "results.csv").exists() and not overwrite:
        raise ValueError(f"--out {out} holds results already: choose another folder, or add --overwrite")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)  # before anything runs


def write_results(contenders: list[Contender], out: Path) -> str:
    """Write results.csv and results.png, and return a line that names the files."""
    rows = [row for contender in contenders for row in contender.rows()]
    last = ("step", "accuracy", "loss", "excess_loss")
    columns = [name for name in dict.fromkeys(key for row in rows for key in row) if name not in last]
    write_csv(out / "results.csv", ({name: row.get(name, "") for name in (*columns, *last)} for row in rows))
    plot_traces({contender.label: contender.trace for contender in contenders}, out / "results.png")
    traces = ", ".join(f"{file_name(contender.label)}.safetensors" for contender in contenders)
    return f"written to {out}: results.csv, results.png, {traces}"


def table(contenders: list[Contender]) -> Table:
    """A row for every rule, delay and setting: means over seeds of the last record, the best of each delay marked."""
    several = any(len(contender.trace.axis("seed").values) > 1 for contender in contenders)
    swept = any(len(contender.trace.axes) > len(_PLACE) for contender in contenders)
    judged = any(contender.trace.accuracy is not None for contender in contenders)
    optional = {"setting": swept, "accuracy": judged, "spread": judged and several,
                "drift": any("drift" in contender.trace.metrics for contender in contenders)}  # fmt: skip
    names = ("rule", "delay", "setting", "accuracy", "spread", "loss", "drift")
    columns = [name for name in names if optional.get(name, True)]
    result = Table(header_style="bold")
    for column in columns:
        result.add_column(column, justify="left" if column in ("rule", "delay") else "right")
    for contender in contenders:
        trace = contender.trace
        drift = trace.certificate().drift if "drift" in trace.metrics and len(trace.delays) else None
        sweep = trace.axes[len(_PLACE) :]
        places = list(product(*(range(len(axis.values)) for axis in sweep)))
        for i, delay in enumerate(trace.axis("delay").values):
            losses = trace.loss[-1, :, i].reshape(len(trace.loss[-1]), -1)  # (seeds, places)
            accuracies = None if trace.accuracy is None else trace.accuracy[-1, :, i].reshape(losses.shape)
            scores = (-losses if accuracies is None else accuracies).mean(0)
            best = int(torch.nan_to_num(scores, nan=-math.inf).argmax())  # a diverged run is not the best
            for k, at in enumerate(places):
                setting = ", ".join(axis.at(p) for axis, p in zip(sweep, at, strict=True))
                loss = f"{losses[:, k].mean():.5g}"
                cells = {"rule": contender.label, "delay": str(delay), "setting": setting, "loss": loss}
                if drift is not None:
                    cells["drift"] = f"{drift[:, i].reshape(losses.shape)[:, k].mean():.4g}"
                if accuracies is not None:
                    of_seeds = accuracies[:, k]
                    cells["accuracy"] = f"{of_seeds.mean():.4f}"
                    cells["spread"] = f"{of_seeds.max() - of_seeds.min():.4f}"
                marked = len(places) > 1 and k == best
                result.add_row(*(cells.get(c, "") for c in columns), style="bold green" if marked else "")
    return result
