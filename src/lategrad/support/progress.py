"""Progress on a terminal, and where there is none."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

LINE_EVERY = 30.0  # seconds between two lines


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:,.3g}/s" if task.speed else "")


@contextmanager
def progress_of(what: str, total: int, show: bool | None) -> Iterator[Callable[..., Any]]:
    """A function that is called with ``completed=``, and shows a bar, or without a terminal a line now and then.

    ``show`` is True for the bar, False for nothing, and None for what fits.
    """
    begin = time.monotonic()

    def line(completed: int) -> None:
        nonlocal begin
        if time.monotonic() >= begin + LINE_EVERY:
            begin = time.monotonic()
            print(f"{what} {completed} of {total}", file=sys.stderr)

    if show is None and not sys.stderr.isatty():
        yield line
        return
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), _Rate(), TimeRemainingColumn())
    console = Console(stderr=True, quiet=show is False)  # quiet, because rich 13 ends a disabled bar with a line
    with Progress(*columns, console=console, transient=True, disable=show is False) as bar:
        yield partial(bar.update, bar.add_task("", total=total))
