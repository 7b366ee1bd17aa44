"""Progress where there is no terminal."""

import sys
import time

LINE_EVERY = 30.0  # seconds between two lines


class Lines:
    """A line on stderr now and then: ``what``, how many are done, and of how many."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._next = what, total, time.monotonic() + LINE_EVERY

    def __call__(self, completed: int) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + LINE_EVERY
            print(f"{self._what} {completed} of {self._total}", file=sys.stderr)
