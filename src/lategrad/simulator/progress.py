"""The progress bar of a simulation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text


class _Rate(ProgressColumn):
    """Updates per second, once there are some."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:,.0f} updates/s" if task.speed else "")


@contextmanager
def progress_bar(show: bool, total: int) -> Iterator[Any]:
    """A bar with the rate and the time left; yields a function that takes the number of updates done."""
    if not show:
        yield lambda done: None
        return
    columns = (TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), _Rate(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda done: bar.update(task, completed=done)
