"""What the ranks of a pipeline do in the tests; they are forked from a process that has imported this."""

import copy
import os
import signal
import time
import warnings
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.pipelining import PipelineStage, SplitPoint, pipeline
from torch.utils.checkpoint import checkpoint as recompute

import lategrad as lg
import lategrad.optim
from lategrad.pipeline import Pipeline, batches, cut
from lategrad.problems.data import Dataset

INPUTS, CLASSES, BATCH = 12, 5, 8
PATIENCE = 120.0
"""Seconds for what takes less than one: the machine may have much else to do."""


def layers(dtype=torch.float64, width=6):
    """Four layers of different sizes, always with the same values."""
    torch.manual_seed(1)
    widths = [INPUTS, width + 2, width, width + 1, CLASSES]
    parts = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*parts[:-1]).to(dtype)


def classification(model):
    """Classes that a function of the inputs determines."""
    x = torch.randn(300, INPUTS, dtype=next(model.parameters()).dtype, generator=torch.Generator().manual_seed(0))
    y = x[:, :CLASSES].argmax(1)
    return lg.problems.ModuleProblem(model, Dataset("rows", x[:200], y[:200], x[200:], y[200:], CLASSES), batch=BATCH)


RULES = {
    "sgd": lg.SGD(lr=0.3),
    "anytime": lg.Anytime(lg.OGD(lr=0.3)),
    "schedule-free": lg.Anytime(lg.OGD(lr=0.3, schedule="constant"), power=0, interpolation=0.9),
    "dc-asgd": lg.baselines.DCASGD(lr=0.3),  # has a ticket
    "steady-muon": lg.SteadyMuon(lr=0.02),  # and the others use the delay of each stage
    "pipemare": lg.baselines.PipeMare(lr=0.01),
    "weight-prediction": lg.baselines.WeightPrediction(lr=0.01),
}


def make_optimizer(name, stage):
    if name == "steady-muon":
        return lg.optim.SteadyMuon(stage, lr=0.02)
    if name == "steady-adam":
        return lg.optim.SteadyAdam(stage, lr=0.02)
    if name in RULES:
        return lg.optim.FromRule(stage.parameters(), RULES[name])
    return torch.optim.AdamW(stage.parameters(), lr=0.01)


def build(optimizer="sgd", *, stages=None, timeout=PATIENCE, **options):
    """A problem and the pipeline that trains it."""
    model = layers()
    problem = classification(model)
    stages = stages or cut(model, dist.get_world_size())
    make = partial(make_optimizer, optimizer)
    return problem, Pipeline(stages, problem.loss_of_batch, make, timeout=timeout, **options)


def train(steps, optimizer="sgd", *, drain_at=(), **options):
    problem, pipe = build(optimizer, **options)
    losses = []
    for t, (inputs, targets) in enumerate(batches(problem, count=steps)):
        if t in drain_at:
            pipe.drain()
        losses.append(pipe.step(inputs, targets))
    trace = pipe.trace(problem)
    stash = pipe.stash_bytes / sum(p.nbytes for p in pipe.module.parameters())
    pipe.close()
    return {"delays": pipe.delays, "losses": losses, "trace": trace, "stash": stash}


def train_each(runs):
    """Several runs, one after another; by name what each rank knows of them."""
    return {name: train(**options) for name, options in runs.items()}


def from_torch(steps):
    """The same run with the stages of torch.distributed.pipelining."""
    rank, world = dist.get_rank(), dist.get_world_size()
    by_hand = PipelineStage(cut(layers(), world)[rank], rank, world, torch.device("cpu"))
    split = {"2": SplitPoint.BEGINNING}
    traced = pipeline(layers(), (torch.zeros(BATCH, INPUTS, dtype=torch.float64),), split_spec=split)
    return {name: train(steps, stages=stages) for name, stages in (("by hand", by_hand), ("traced", traced))}


class Mixed(nn.Module):
    """Passes on integers and something constant with its activation, and has a parameter that is frozen."""

    def __init__(self, part, first):
        super().__init__()
        self.part, self.first = part, first
        self.frozen = nn.Parameter(torch.ones((), dtype=torch.float64), requires_grad=False)

    def forward(self, h, numbers=None, constant=None):
        if self.first:
            numbers, constant = torch.arange(len(h)), torch.ones(len(h), 1, dtype=h.dtype)
        assert numbers.dtype == torch.int64
        return self.part(h) * self.frozen * constant, numbers, constant


class First(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, h, numbers, constant):
        return self.part(h)


class Recomputed(nn.Sequential):
    """Keeps no activations: the backward pass computes them again."""

    def forward(self, h):
        return recompute(super().forward, h, use_reentrant=False)


def recomputed(steps):
    return train(steps, stages=[Recomputed(*part) for part in cut(layers(), dist.get_world_size())])


def tuples(steps):
    parts = cut(layers(), dist.get_world_size())
    stages = [Mixed(part, first=k == 0) for k, part in enumerate(parts[:-1])]
    return train(steps, stages=[*stages, First(parts[-1])])


def evaluate(steps):
    """The loss of what ships, by the pipeline and by the whole model; and what training does afterwards."""
    problem, pipe = build("schedule-free")
    for inputs, targets in batches(problem, count=steps):
        pipe.step(inputs, targets)
    test = problem.splits.held_out
    inputs, targets = test.rows(torch.arange(len(test)))
    loss, inside = pipe.evaluate(inputs, targets), []
    with pipe.output():
        scores = pipe.evaluate(inputs)
    trace = pipe.trace(problem)
    expected = None if trace is None else problem.test_loss(trace.output).item()
    in_flight = len(pipe._in_flight)
    pipe.step(*next(batches(problem, count=1)))
    pipe.module[0].eval()  # a layer that the user has frozen
    with pipe.output():
        pipe.evaluate(inputs)
        with pipe.output():
            pass
        for call in (pipe.trace, partial(pipe.step, inputs, targets)):
            try:
                call()
            except RuntimeError as error:
                inside.append(str(error))
    return {"loss": loss, "scores": scores, "expected": expected, "in flight": in_flight, "inside": inside,
            "modes": [part.training for part in pipe.module]}  # fmt: skip


def several_targets():
    """The loss of a batch in training and in evaluation, where targets are a tuple."""
    problem = classification(layers())
    stages = cut(problem.module, dist.get_world_size())
    pipe = Pipeline(stages, lambda scores, pair: problem.loss_of_batch(scores, pair[0] + pair[1]),
                    lambda stage: torch.optim.SGD(stage.parameters(), lr=0.0), timeout=PATIENCE)  # fmt: skip
    inputs, targets = next(batches(problem, count=1))
    return [run(inputs, (targets, torch.zeros_like(targets))) for run in (pipe.step, pipe.evaluate)]


def checkpoint(steps, optimizer, folder):
    """Train, save, train on; and load into a fresh pipeline, which trains on alike."""
    problem, pipe = build(optimizer, scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.9))
    data = list(batches(problem, count=2 * steps))
    for batch in data[:steps]:
        pipe.step(*batch)
    dcp.save({"pipe": pipe}, checkpoint_id=folder)
    torch.save(pipe.state_dict(), f"{folder}/{dist.get_rank()}.pt")
    for batch in data[steps:]:
        pipe.step(*batch)
    straight = pipe.trace(problem)
    traces = []
    for way in ("dcp", "file"):
        _, fresh = build(optimizer, scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.9))
        with torch.no_grad():
            for p in fresh.module.parameters():
                p.zero_()
        if way == "dcp":
            dcp.load({"pipe": fresh}, checkpoint_id=folder)
        else:
            fresh.load_state_dict(torch.load(f"{folder}/{dist.get_rank()}.pt"))
        for batch in data[fresh.steps :]:
            fresh.step(*batch)
        traces.append(fresh.trace(problem))
    return {"straight": straight, "resumed": traces}


def back_to_the_start(optimizer):
    """A run, and after it the same run again from a state of before its first update."""
    problem, pipe = build(optimizer)
    start = copy.deepcopy(pipe.state_dict())
    ends = []
    for _ in range(2):
        pipe.load_state_dict(start)
        for batch in batches(problem, count=4):
            pipe.step(*batch)
        ends.append(pipe.trace(problem))
    return ends


def other_scheduler(folder):
    """The errors of checkpoints with a scheduler in a pipeline without one, and the other way round; two ways each."""
    make = partial(torch.optim.lr_scheduler.StepLR, step_size=2)
    errors = []
    for name, saved, loaded in (("with", make, None), ("without", None, make)):
        problem, pipe = build("adamw", scheduler=saved)
        for batch in batches(problem, count=2):
            pipe.step(*batch)
        dcp.save({"pipe": pipe}, checkpoint_id=f"{folder}/{name}")
        _, fresh = build("adamw", scheduler=loaded)
        load_all = partial(dcp.load, {"pipe": fresh}, checkpoint_id=f"{folder}/{name}")
        for load in (load_all, partial(fresh.load_state_dict, pipe.state_dict())):
            try:
                load()
            except (ValueError, dcp.CheckpointException) as error:
                errors.append(str(error))
    return errors


# ---- What goes wrong


class Broken(nn.Module):
    """A stage that does something wrong in its pass number ``at``."""

    def __init__(self, part, wrong, at):
        super().__init__()
        self.part, self.wrong, self.at, self.passes = part, wrong, at, 0

    def forward(self, h):
        h = self.part(h)
        self.passes += 1
        return self.wrong(h) if self.passes > self.at else h


def to_nan(h):
    return h * torch.nan


def to_error(h):
    raise ZeroDivisionError("by the stage itself")


def to_death(h):
    Path(os.environ["READY"]).touch()
    while True:  # signal.pause would miss a signal that comes just before it
        time.sleep(0.05)


def handled(wrong, stage, folder):
    """The broken stage handles its error and lives on until the others have ended, too."""
    rank, world = dist.get_rank(), dist.get_world_size()
    ended = [Path(folder) / str(k) for k in range(world)]
    try:
        broken(wrong, stage)
    except lg.pipeline.PipelineError as error:
        ended[rank].touch()
        deadline = time.monotonic() + PATIENCE / 4
        while not all(path.exists() for path in ended):
            assert time.monotonic() < deadline, "the others still wait"
            time.sleep(0.01)
        return str(error)


def to_words(h):
    return "words"


def broken(wrong, stage=1, at=3, timeout=PATIENCE):
    stages = cut(layers(), dist.get_world_size())
    stages[stage] = Broken(stages[stage], globals()[wrong], at)
    problem, pipe = build(stages=stages, timeout=timeout)
    for inputs, targets in batches(problem, count=10):
        pipe.step(inputs, targets)


def short_batch(microbatches=1, rows=BATCH - 1):
    problem, pipe = build(microbatches=microbatches)
    data = list(batches(problem, count=4))
    data[2] = tuple(part[:rows] for part in data[2])
    for batch in data:
        pipe.step(*batch)


def misfit():
    stages = cut(layers(), dist.get_world_size())
    stages[1] = nn.Linear(77, 3).double()
    problem, pipe = build(stages=stages)
    for batch in batches(problem, count=3):
        pipe.step(*batch)


def tied():
    stages = cut(layers(), dist.get_world_size())
    stages[2].register_parameter("tied", next(stages[0].parameters()))
    build(stages=stages)


def tied_by_torch():
    model = nn.Sequential(*(nn.Linear(INPUTS, INPUTS) for _ in range(3)))
    model[2].weight = model[0].weight
    split = {"1": SplitPoint.BEGINNING, "2": SplitPoint.BEGINNING}
    build(stages=pipeline(model, (torch.zeros(BATCH, INPUTS),), split_spec=split))


def nothing_to_evaluate():
    build()[1].evaluate()


def trace_of_nothing():
    build()[1].trace()


def not_drained():
    """The first rank closes while the others go on."""
    problem, pipe = build()
    with warnings.catch_warnings(record=True) as caught:
        for t, batch in enumerate(batches(problem, count=9)):
            if t == 4 and dist.get_rank() == 0:
                pipe.close()
                raise RuntimeError(str(caught[-1].message))
            pipe.step(*batch)


def wrong_world():
    build(stages=cut(layers(), dist.get_world_size() - 1))


def wrong_options():
    build(microbatches=4 if dist.get_rank() == 1 else 2)


def wrong_optimizer():
    model = layers()
    stages = cut(model, dist.get_world_size())
    Pipeline(stages, nn.functional.cross_entropy, lambda stage: torch.optim.SGD(stages[0].parameters()),
             timeout=PATIENCE)  # fmt: skip


def delayed_optimizer():
    Pipeline(cut(layers(), dist.get_world_size()), nn.functional.cross_entropy,
             lambda stage: lg.optim.Delayed(torch.optim.SGD(stage.parameters()), 2), timeout=PATIENCE)  # fmt: skip


def fewer_steps(timeout):
    """The loop of rank 1 ends before that of rank 0, but its process does not."""
    problem, pipe = build(timeout=timeout)
    try:
        for batch in batches(problem, count=2 if dist.get_rank() == 1 else 5):
            pipe.step(*batch)
    except lg.pipeline.PipelineError:
        Path(os.environ["READY"]).touch()
        raise
    signal.pause()
