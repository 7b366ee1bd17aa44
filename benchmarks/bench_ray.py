"""Our Ray engine against Ray's own asynchronous parameter-server pattern, with two workers, side by side.

Ours makes the anytime update (two vectors and their average), counts delays, checks and logs every gradient; the
pattern subtracts a multiple of the gradient. Both are run in turns in one Ray.
"""

import statistics
import sys
import threading
import time
import warnings

import lategrad as lg
from async_baselines import FreeGradient, local_ray, processor_seconds, ray_parameter_server_and_cost, softmax_problem
from lategrad.serve import Settings, Training
from timing import verdict

WORKERS, WARM_UP, SECONDS = 2, 3.0, 5.0


def ours(problem, rule):
    """Updates per second of lategrad's engine, and the processor seconds of all processes for an update."""
    settings = Settings(steps=10**9, workers=WORKERS, engine="ray", compile=True, progress=False)
    training = Training(problem, rule, settings)
    measured = []

    def stop_after_a_while():
        while len(training.workers) < WORKERS or training.version < 10 * WORKERS:
            time.sleep(0.1)
        time.sleep(WARM_UP)
        before, first = processor_seconds(), training.version
        time.sleep(SECONDS)
        measured.append((processor_seconds() - before) / (training.version - first))
        training.stop()

    threading.Thread(target=stop_after_a_while, daemon=True).start()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trace = training.run()
    window = trace.time > trace.time[-1] - SECONDS
    return (int(window.sum()) - 1) / float(trace.time[-1] - trace.time[window][0]), measured[0]


def main(rounds=3):
    rule = lg.Anytime(lg.OGD(lr=1e-3))
    with local_ray():
        for problem, claim in ((softmax_problem(), 1.5), (FreeGradient(10**6), 1.5), (FreeGradient(10**7), 1.0)):
            print(f"{problem}, updates per second and processor time of all processes for each")
            ratios = []
            for _ in range(rounds):
                (mine, my_cost), (theirs, their_cost) = (
                    ours(problem, rule),
                    ray_parameter_server_and_cost(problem, warm_up=WARM_UP),
                )
                ratios.append((mine / theirs, their_cost / my_cost))
                print(f"  lategrad {mine:8,.1f} {1e3 * my_cost:7.2f} ms   ", end="")
                print(f"Ray's pattern {theirs:8,.1f} {1e3 * their_cost:7.2f} ms", flush=True)
            speed, thrift = (statistics.median(column) for column in zip(*ratios, strict=True))
            verdict(f"at least {claim} times as fast: {speed:.2f} times, at 1/{thrift:.2f} of the cost", speed >= claim)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
