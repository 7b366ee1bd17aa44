"""A parameter server with one slow worker, the only one with data of two of the ten classes.

Four workers train softmax regression on the digits. Worker 3 takes twenty times as long for a gradient, and the eights
and nines are on its machine alone. What happens when late gradients are dropped, weighted or waited for? Time is
virtual (a gradient of a fast worker takes one second), so the numbers are the same on every machine.

    python examples/slow_worker.py --out slow   # writes a table and a picture; seconds
"""

from __future__ import annotations

import argparse
import heapq
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import lategrad as lg
from lategrad.problems import load
from lategrad.rules.rule import AnyRule

WORKERS, SLOW, SLOWER, RARE = 4, 3, 20.0, (8, 9)
BATCH, MAX_DELAY = 32, 10

RULES: dict[str, Callable[[], AnyRule]] = {
    "SGD": lambda: lg.SGD(lr=0.5),
    "Steady": lambda: lg.Steady(lr=3.0),
}


class Outcome(NamedTuple):
    """The result of a policy."""

    accuracy: float
    rare: float
    """Accuracy on the classes that only the slow worker has."""
    seconds: float
    gate: lg.DelayGate
    recorder: lg.DelayRecorder


def gradient(x: Tensor, rows: Tensor, labels: Tensor) -> Tensor:
    scores = rows @ x.view(10, -1).T
    return ((scores.softmax(1) - torch.nn.functional.one_hot(labels, 10)).T @ rows / len(rows)).flatten()


def serve(rule: AnyRule, gate: lg.DelayGate, updates: int, seed: int = 0) -> Outcome:
    """The server's loop, with virtual time: the next event is the next gradient that comes back."""
    data = load("digits", preprocessing="standardise")
    rare = torch.isin(data.y_train, torch.tensor(RARE))
    rows_of = [((rare if worker == SLOW else ~rare).nonzero()[:, 0]) for worker in range(WORKERS)]
    generator = torch.Generator().manual_seed(seed)
    state = rule.init(torch.zeros(10 * data.x_train.shape[1], dtype=data.x_train.dtype))
    recorder, version, now = lg.DelayRecorder(), 0, 0.0
    out: dict[int, tuple[int, Tensor]] = {}  # of each worker: version and query
    events: list[tuple[float, int]] = []
    waiting: list[int] = []

    def send_off(worker: int) -> None:
        out[worker] = version, rule.query(state).clone()
        heapq.heappush(events, (now + (SLOWER if worker == SLOW else 1.0), worker))

    for worker in range(WORKERS):
        send_off(worker)
    while version < updates:
        now, worker = heapq.heappop(events)
        waiting.append(worker)
        for arrived in sorted(waiting, key=lambda w: out[w][0]):  # waiting ones are asked again, latest first
            issued, query = out[arrived]
            others = [version - v for other, (v, _) in out.items() if other != arrived]
            admission = gate.admit(version - issued, arrived, out=others)
            if admission.action == "wait":
                continue
            waiting.remove(arrived)
            dropped = admission.action == "drop"
            recorder.observe(issued, version, weight=admission.weight, worker=arrived, dropped=dropped)
            if not dropped:
                rows = rows_of[arrived][torch.randint(len(rows_of[arrived]), (BATCH,), generator=generator)]
                grad = admission.weight * gradient(query, data.x_train[rows], data.y_train[rows])
                state = rule.update(state, grad, torch.tensor([version - issued]))
                version += 1
            send_off(arrived)
    predicted = (data.x_test @ rule.output(state).view(10, -1).T).argmax(1)
    right, rare = predicted == data.y_test, torch.isin(data.y_test, torch.tensor(RARE))
    return Outcome(right.double().mean().item(), right[rare].double().mean().item(), now, gate, recorder)


def run_all(updates: int) -> dict[tuple[str, str], Outcome]:
    gates = {
        "apply all": lambda: lg.DelayGate(10**9, workers=range(WORKERS)),
        f"drop > {MAX_DELAY}": lambda: lg.DelayGate(MAX_DELAY, "drop", workers=range(WORKERS)),
        f"weigh > {MAX_DELAY}": lambda: lg.DelayGate(MAX_DELAY, "weigh", workers=range(WORKERS)),
        f"wait, <= {MAX_DELAY}": lambda: lg.DelayGate(MAX_DELAY, "wait", workers=range(WORKERS)),
    }
    return {
        (rule, name): serve(build(), gate(), updates) for rule, build in RULES.items() for name, gate in gates.items()
    }


def table(outcomes: dict[tuple[str, str], Outcome]) -> str:
    lines = [
        "| rule | policy | accuracy | on 8 and 9 | virtual seconds | delay mean, max | slow worker: applied, dropped |",
        "|---|---|---|---|---|---|---|",
    ]
    for (rule, policy), one in outcomes.items():
        delays = one.recorder.summary()
        counts = f"{one.gate.applied[SLOW]}, {one.gate.dropped[SLOW]}"
        lines.append(f"| {rule} | {policy} | {one.accuracy:.3f} | {one.rare:.3f} | {one.seconds:,.0f} | "
                     f"{delays.mean:.1f}, {delays.max} | {counts} |")  # fmt: skip
    return "\n".join(lines)


def figure(outcomes: dict[tuple[str, str], Outcome], path: Path) -> None:
    from matplotlib.figure import Figure

    policies = list(dict.fromkeys(policy for _, policy in outcomes))
    drawing = Figure(figsize=(6.4, 3.6), layout="constrained")
    axis = drawing.add_subplot()
    for i, rule in enumerate(RULES):
        places = [k + 0.4 * i for k in range(len(policies))]
        of_rule = [outcomes[rule, policy] for policy in policies]
        axis.bar(
            places, [one.accuracy for one in of_rule], 0.36, alpha=0.4, color=f"C{i}", label=f"{rule}, all classes"
        )
        axis.bar(places, [one.rare for one in of_rule], 0.18, color=f"C{i}", label=f"{rule}, 8 and 9")
    axis.set_xticks([k + 0.2 for k in range(len(policies))], policies)
    axis.set(ylabel="accuracy", ylim=(0, 1))
    axis.legend(fontsize="small", loc="lower center", bbox_to_anchor=(0.5, 1.0), ncol=2)
    drawing.savefig(path, dpi=120)


def main(arguments: list[str] | None = None) -> dict[tuple[str, str], Outcome]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=Path("slow_worker"), help="folder for table and picture")
    options = parser.parse_args(arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_, **__: print(f"warning: {message}")
        outcomes = run_all(options.updates)
    print(table(outcomes))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "slow_worker.md").write_text(table(outcomes) + "\n")
    figure(outcomes, options.out / "slow_worker.png")
    return outcomes


if __name__ == "__main__":
    main()
