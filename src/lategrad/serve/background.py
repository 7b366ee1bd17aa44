"""Run a call in a thread that does not keep the interpreter alive."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def run_in_thread(call: Callable[[], Result], name: str) -> Future[Result]:
    """Start a daemon thread, where ``concurrent.futures`` would wait for its threads when the interpreter exits."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # raised again where the result is read
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
