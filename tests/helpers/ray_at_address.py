"""A training on a Ray that never answers, in a process: ``python -m helpers.ray_at_address ADDRESS SECONDS``.

It says on stdout how it ended.
"""

from __future__ import annotations

import sys
import warnings

import lategrad as lg
from lategrad.problems import Quadratic
from lategrad.serve.engines.ray import connect as ray_connection


def main() -> None:
    """Try to train."""
    warnings.simplefilter("ignore")
    address, ray_connection.CONNECT_TIMEOUT = sys.argv[1], float(sys.argv[2])
    try:
        trace = lg.train(Quadratic(), lg.SGD(lr=0.1), steps=10, engine="ray", address=address, progress=False)
    except OSError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
    else:
        print("ended", len(trace.delays), trace.config["stopped"], flush=True)


if __name__ == "__main__":
    main()
