"""What the ranks of a pipeline do in the tests; they are forked from a process that has imported this."""

import lategrad as lg
import torch
import torch.distributed as dist
from lategrad.pipeline import Pipeline, batches, cut
from torch import nn


def layers(dtype=torch.float64, width=6):
    """Five layers of different sizes, always with the same values."""
    torch.manual_seed(1)
    widths = [64, width + 2, width, width + 1, 10]
    parts = [part for a, b in zip(widths, widths[1:], strict=False) for part in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*parts[:-1]).to(dtype)


def digits(model, batch=8):
    data = lg.problems.load("digits")
    dtype = next(model.parameters()).dtype
    data = data._replace(x_train=data.x_train.to(dtype), x_test=data.x_test.to(dtype))
    return lg.problems.ModuleProblem(model, data, batch=batch)


RULES = {
    "sgd": lg.SGD(lr=0.3),
    "anytime": lg.Anytime(lg.OGD(lr=0.3)),
    "schedule-free": lg.Anytime(lg.OGD(lr=0.3, schedule="constant"), power=0, interpolation=0.9),
}


def optimizer_of(name):
    def make(stage):
        if name == "torch-sgd":
            return torch.optim.SGD(stage.parameters(), lr=0.3)
        if name == "steady-muon":
            return lg.optim.SteadyMuon(stage, lr=0.02)
        if name == "adamw":
            return torch.optim.AdamW(stage.parameters(), lr=0.01)
        return lg.optim.FromRule(stage.parameters(), RULES[name])

    return make


def made(optimizer="sgd", stages=None, **options):
    model = layers()
    problem = digits(model)
    stages = stages or cut(model, dist.get_world_size())
    return problem, Pipeline(stages, problem.loss_of_batch, optimizer_of(optimizer), timeout=20.0, **options)


def train(steps, optimizer="sgd", drain_at=(), **options):
    problem, pipe = made(optimizer, **options)
    losses = []
    for t, (inputs, targets) in enumerate(batches(problem, count=steps)):
        if t in drain_at:
            pipe.drain()
        losses.append(pipe.step(inputs, targets))
    trace = pipe.trace(problem)
    return {"delays": pipe.delays, "losses": losses, "trace": trace, "stash": pipe.stash_bytes,
            "size": sum(p.nbytes for p in pipe.module.parameters())}  # fmt: skip
