"""A training on a Ray of its own, as a process that tests may kill: ``python -m helpers.ray_driver FOLDER [hang]``.

It says on stdout when it begins to wait for its server, where the server and its workers are, and how it ended.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
from pathlib import Path

from torch import Tensor

import lategrad as lg
from lategrad.problems import Quadratic
from lategrad.serve import Settings, Training

RULE = lg.Anytime(lg.OGD(lr=1.0))


class SlowToBegin(Quadratic):
    """A problem whose server never begins, where it is in a process of its own."""

    def __init__(self) -> None:
        super().__init__(dim=6, noise=0.1)
        self.driver = os.getpid()

    def start(self) -> Tensor:
        if os.getpid() != self.driver:
            time.sleep(1000)
        return super().start()


def _tell(training: Training) -> None:
    while getattr(training.engine, "_server", None) is None:
        time.sleep(0.05)
    time.sleep(0.5)
    print("begins", flush=True)
    while training.version < 20 or not training.engine.mirror.logged or not training.workers:  # type: ignore[attr-defined]
        time.sleep(0.05)
    server = training.engine.server  # type: ignore[attr-defined]
    print("goes on", server.pid, *(worker.pid for worker in training.workers.values()), flush=True)


def main() -> None:
    """Train for ever."""
    warnings.simplefilter("ignore")
    folder, hang = Path(sys.argv[1]), len(sys.argv) > 2
    problem = SlowToBegin() if hang else Quadratic(dim=6, noise=0.1)
    settings = Settings(steps=10**6, workers=2, engine="ray", slow="constant:10", out=folder, progress=False)
    training = Training(problem, RULE, settings)
    threading.Thread(target=_tell, args=(training,), daemon=True).start()
    trace = training.run()
    print("ended", len(trace.delays), trace.config["stopped"], flush=True)


if __name__ == "__main__":
    main()
