"""Cluster clocks: bookkeeping of 10,000 workers and 100,000 updates in virtual time."""

import time

from lategrad.delays.clocks import Cluster, LogNormalTime, Worker
from timing import verdict

WORKERS, UPDATES = 10_000, 100_000


def main():
    clusters = {
        "equal workers": [Worker()] * WORKERS,
        "lognormal speeds, one 100x slower": [Worker(distribution=LogNormalTime(0.4))] * (WORKERS - 1)
        + [Worker(mean=100.0)],
        "preempted and returning": [Worker(distribution=LogNormalTime(0.4), up=20.0, down=5.0)] * WORKERS,
    }
    for name, workers in clusters.items():
        begin = time.perf_counter()
        arrivals = Cluster(workers).draw(UPDATES, seed=0)
        seconds = time.perf_counter() - begin
        print(f"  {name:<36} {seconds:6.2f} s, mean delay {arrivals.delays.double().mean():,.0f}")
        verdict("under a minute", seconds < 60)


if __name__ == "__main__":
    main()
