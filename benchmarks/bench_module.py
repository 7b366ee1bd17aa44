"""A worker's gradient of an nn.Module, against plain autograd on the same rows, side by side, in processor time."""

import time

import torch
from torch import nn

from lategrad.problems import Dataset, ModuleProblem
from timing import report, side_by_side, verdict

PLAIN, OURS, BATCHED = "plain autograd", "a worker's gradient", "torch.func, as for many runs"
CALLS = 20  # of each contender in a turn


def data(features: int) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(10_000, features, generator=generator), torch.randint(10, (10_000,), generator=generator)
    return Dataset("noise", x, y, x[:10], y[:10], 10)


def mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(784, width), nn.ReLU(), nn.Linear(width, 10))


def repeated(call):
    def run():
        for _ in range(CALLS):
            call()

    return run


def contenders(module, rows, batch):
    problem = ModuleProblem(module, rows, batch=batch)
    x, sample = problem.start(), problem.samples(0, 0, 1)[0]
    parameters = list(module.parameters())

    def plain():
        loss = nn.functional.cross_entropy(module(rows.x_train[sample]), rows.y_train[sample])
        return torch.autograd.grad(loss, parameters)

    segment = torch.empty_like(x)  # where a worker process hands its gradient over

    @torch.no_grad()
    def ours():
        return problem.gradient_of_one(x, sample, segment)

    inputs, targets = rows.x_train[sample], rows.y_train[sample]
    grad = torch.func.vmap(
        torch.func.grad(lambda v: problem.loss_of_batch(problem.training.call(v, inputs), targets)),
        randomness="different",
    )
    return {PLAIN: repeated(plain), OURS: repeated(ours), BATCHED: repeated(lambda: grad(x.unsqueeze(0)))}


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = data(784)
    for width, batch in ((64, 64), (64, 8), (512, 64)):
        seconds = side_by_side(contenders(mlp(width), rows, batch), rounds=41, clock=time.thread_time)
        per_call = {name: value / CALLS for name, value in seconds.items()}
        report(f"MLP 784-{width}-10, batch {batch}", per_call, PLAIN)
        ratio = per_call[OURS] / per_call[PLAIN]
        verdict(f"at most 1.15 times plain autograd ({ratio:.2f})", ratio <= 1.15)


if __name__ == "__main__":
    main()
