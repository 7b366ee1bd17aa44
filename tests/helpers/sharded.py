"""Training runs for one process (mesh None) and for the ranks of a mesh, on the same numbers."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import lategrad as lg
from lategrad.registry import build_rule

SHAPES = [(5, 3), (4,), (1,), (3, 2, 2), (6, 4), (5, 3)]
"""Uneven over 2 and 3 ranks; one is smaller than the mesh."""
SIZE = 71


class Holder(nn.Module):
    """Parameters with random values, and one that is frozen."""

    def __init__(self, shapes=SHAPES):
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.weights = nn.ParameterList([torch.randn(shape, generator=generator) for shape in shapes])
        self.weights.append(nn.Parameter(torch.ones(3), requires_grad=False))


def holder(mesh, shapes=SHAPES):
    model = Holder(shapes)
    return model if mesh is None else fully_shard(model, mesh=mesh)


def like(value, p):
    return distribute_tensor(value, p.device_mesh, p.placements) if isinstance(p, DTensor) else value


def set_gradients(params, t):
    """The gradient of a quadratic function, plus noise that depends on t alone."""
    generator = torch.Generator().manual_seed(t)
    for p in params:
        noise = like(torch.randn(p.shape, generator=generator), p)
        p.grad = (0.5 * p.detach() + 0.3 * noise) if p.requires_grad else None


def whole(params):
    """All entries of the parameters, on every rank."""
    return torch.cat([(p.full_tensor() if isinstance(p, DTensor) else p).detach().flatten() for p in params])


def optimizers(name, params, domain, **options):
    """A drop-in of ``lg.optim``, or FromRule with a registered rule."""
    if name == "AnytimeSGD":
        return lg.optim.AnytimeSGD(params, lr=0.3, domain=domain, **options)
    if name == "AnytimeSGD-0.5":
        return lg.optim.AnytimeSGD(params, lr=0.3, domain=domain, interpolation=0.5, weight_decay=0.1, **options)
    if name == "OptimisticAnytime":
        return lg.optim.OptimisticAnytime(params, diameter=3.0, domain=domain, **options)
    if name == "StronglyConvexSGD":
        return lg.optim.StronglyConvexSGD(params, strong_convexity=2.0, domain=domain, **options)
    if name == "SteadyAdam":
        return lg.optim.SteadyAdam(params, lr=0.05, weight_decay=0.1, **options)
    if name == "SteadyMuon":
        return lg.optim.SteadyMuon(params, lr=0.05, weight_decay=0.1, **options)
    return lg.optim.FromRule(params, build_rule(name, 0.1, domain), **options)


DROP_INS = ("AnytimeSGD", "AnytimeSGD-0.5", "OptimisticAnytime", "StronglyConvexSGD", "SteadyAdam", "SteadyMuon")


def steps(optimizer, params, first, last):
    for t in range(first, last):
        set_gradients(params, t)
        optimizer.step() if isinstance(optimizer, lg.optim.Delayed) else optimizer.step(delay=min(t, 3))


def train(mesh, name, domain, count=50, options=None, delays=None):
    """Parameters and output after some steps; late by ``delays`` if given."""
    params = list(holder(mesh).parameters())
    optimizer = optimizers(name, params, domain, **(options or {}))
    if delays is not None:
        optimizer = lg.optim.Delayed(optimizer, delays)
    steps(optimizer, params, 0, count)
    with optimizer.output():
        output = whole(params)
    return torch.stack([whole(params), output])
