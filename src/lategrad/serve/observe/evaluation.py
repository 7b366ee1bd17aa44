"""Evaluations beside the updates: a thread measures copies of the output while the server goes on."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import NamedTuple

from torch import Tensor

_MOST_WAITING = 2  # copies of the output: one that is being measured, and one after it


class Evaluation(NamedTuple):
    """An output, after how many updates it was the output, and what is measured of it."""

    version: int
    output: Tensor
    values: Future[dict[str, float]]


class Evaluator:
    """Measures outputs in a thread that ends where there is no more to do, and does not keep the interpreter alive.

    Args:
        evaluate: from an output to numbers by name; what it raises is raised where the numbers are asked for.
    """

    def __init__(self, evaluate: Callable[[Tensor], dict[str, float]]) -> None:
        self._evaluate = evaluate
        self.waiting: deque[Evaluation] = deque()
        """All that was begun and not taken, the oldest first."""
        self._to_do: deque[Evaluation] = deque()
        self._lock = threading.Lock()
        self._working = False
        self.quickest = float("inf")
        """Seconds that the quickest evaluation so far took."""

    @property
    def is_full(self) -> bool:
        """Whether those that were begun should be waited for before another is."""
        return len(self.waiting) >= _MOST_WAITING

    def now(self, output: Tensor) -> dict[str, float]:
        """Measure an output here, and how long that takes."""
        begin = time.perf_counter()
        values = self._evaluate(output)
        self.quickest = min(self.quickest, time.perf_counter() - begin)
        return values

    def begin(self, version: int, output: Tensor) -> None:
        """Measure an output soon, which nobody may write to any more."""
        evaluation = Evaluation(version, output, Future())
        with self._lock:
            self.waiting.append(evaluation)
            self._to_do.append(evaluation)
            if not self._working:
                self._working = True
                threading.Thread(target=self._work, name="lategrad-evaluation", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._to_do:
                    self._working = False
                    return
                evaluation = self._to_do.popleft()
            try:
                evaluation.values.set_result(self.now(evaluation.output))
            except Exception as error:  # a user's metric may raise anything; it is raised again in the server's thread
                evaluation.values.set_exception(error)

    def take(self, timeout: float = 0.0) -> Evaluation | None:
        """The oldest evaluation, if it is done within so many seconds."""
        if not self.waiting:
            return None
        wait([self.waiting[0].values], timeout)
        return self.waiting.popleft() if self.waiting[0].values.done() else None

    def forget(self) -> None:
        """Nobody will ask for what was begun."""
        with self._lock:
            self._to_do.clear()
            self.waiting.clear()
