"""Training runs for one process (mesh None) and for the ranks of a mesh, on the same numbers."""

import warnings
from dataclasses import dataclass
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import lategrad as lg
from helpers.examples import example
from helpers.memory import largest_allocation
from helpers.parameters import backends
from lategrad.execution import UnsupportedError
from lategrad.execution.codegen import run, staged
from lategrad.optim import rule_optimizer
from lategrad.registry import build_rule
from lategrad.rules import _orthogonalize, _owners

SHAPES = [(5, 3), (4,), (1,), (3, 4), (6, 4), (5, 3)]
"""Uneven over 2 and 3 ranks; one is smaller than the mesh."""
SIZE = 71
CPU = torch.device("cpu")


class Holder(nn.Module):
    """Parameters with random values, and one that is frozen."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.weights = nn.ParameterList([torch.randn(shape, generator=generator) for shape in SHAPES])
        self.weights.append(nn.Parameter(torch.ones(3), requires_grad=False))


def holder(mesh, dtype=torch.float32):
    model = Holder().to(dtype)
    return model if mesh is None else fully_shard(model, mesh=mesh)


def like(value, p):
    """A value that every rank has, in the form of a parameter."""
    return (
        distribute_tensor(value, p.device_mesh, p.placements, src_data_rank=None) if isinstance(p, DTensor) else value
    )


def set_gradients(params, t):
    """The gradient of a quadratic function, plus noise that depends on t alone."""
    generator = torch.Generator().manual_seed(t)
    for p in params:
        noise = like(torch.randn(p.shape, generator=generator).to(p.dtype), p)
        p.grad = (0.5 * p.detach() + 0.3 * noise) if p.requires_grad else None


def whole(params):
    """All entries of the parameters, on every rank."""
    return torch.cat([(p.full_tensor() if isinstance(p, DTensor) else p).detach().flatten().float() for p in params])


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
    if name == "SteadyMuon-0":
        return lg.optim.SteadyMuon(params, lr=0.05)
    if name == "SteadyMuon":
        return lg.optim.SteadyMuon(params, lr=0.05, weight_decay=0.1, **options)
    return lg.optim.FromRule(params, build_rule(name, 0.1, domain), **options)


DROP_INS = ("AnytimeSGD", "AnytimeSGD-0.5", "OptimisticAnytime", "StronglyConvexSGD", "SteadyAdam", "SteadyMuon")


def steps(optimizer, params, first, last, delay=None):
    for t in range(first, last):
        set_gradients(params, t)
        late = min(t, 3) if delay is None else [min(t, tau) for tau in delay]
        optimizer.step() if isinstance(optimizer, lg.optim.Delayed) else optimizer.step(delay=late)


def train(mesh, name, domain, count, options=None, delays=None, form="sharded"):
    """Parameters and output after some steps; late by ``delays`` if given. Forms: sharded, replicated, bfloat16.

    With ``compile=True`` among the options the ranks run loops. One process runs eagerly, whatever the options.
    """
    options = {"compile": False, **(options or {})}
    options["compile"] &= mesh is not None
    if form == "replicated" and mesh is not None:
        params = [nn.Parameter(distribute_tensor(p.detach(), mesh, [Replicate()]), p.requires_grad)
                  for p in Holder().parameters()]  # fmt: skip
    else:
        params = list(holder(mesh, torch.bfloat16 if form == "bfloat16" else torch.float32).parameters())
    own = optimizer = optimizers(name, params, domain, **options)
    if delays is not None:
        optimizer = lg.optim.Delayed(own, delays)
    steps(optimizer, params, 0, count)
    assert set(backends(own)) == {"loops" if options["compile"] else "eager"}
    with optimizer.output():
        output = whole(params)
    return torch.stack([whole(params), output])


def train_in_small_batches(mesh, *args):
    """What :func:`train` returns, with the fewest matrices in a batch."""
    with mock.patch.object(staged, "_LEAST", 1):
        return train(mesh, *args)


def train_a_few_entries(mesh, name, options):
    """Parameters that two ranks share, and a third one has no entries of; the vectors have more than one number."""
    last = [4.0, 1.0] if options.get("per_parameter") else [4.0]
    values = torch.tensor([[1.0, -2.0], [3.0, 0.5]]), torch.tensor(last)
    params = [nn.Parameter(like_shard(value, mesh)) for value in values]
    optimizer = optimizers(name, params, lg.Ball(2.0), **options)
    steps(optimizer, params, 0, 20)
    assert set(backends(optimizer)) == {"loops" if mesh else "eager"}
    return whole(params)


def like_shard(value, mesh):
    return value if mesh is None else distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None)


def train_without_a_compiler(mesh, name, count):
    """Train where only the last rank has no compiler: what requiring loops says, the backends, and the parameters."""
    params = list(holder(mesh).parameters())
    reason = "no compiler works here" if mesh.get_local_rank() == mesh.size() - 1 else None
    with mock.patch.object(run, "missing_compiler", return_value=reason):
        step = optimizers(name, params, lg.Ball(2.0), compile=True)
        set_gradients(params, 0)
        said = message(step.step)
        with mock.patch.object(rule_optimizer, "compiling_pays", return_value=True), \
             warnings.catch_warnings(record=True) as caught:  # fmt: skip
            warnings.simplefilter("always")
            optimizer = optimizers(name, params, lg.Ball(2.0))
            steps(optimizer, params, 0, count)
    told = [str(one.message) for one in caught if "running eagerly" in str(one.message)]
    return said, backends(optimizer), told, whole(params)


def train_with_the_default(mesh, name, domain):
    """Two steps of parameters that are just large enough for loops: what runs them, and the warnings."""
    params = [nn.Parameter(like_shard(torch.ones(500, 400), mesh))]
    optimizer = optimizers(name, params, domain)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps(optimizer, params, 0, 2)
    return backends(optimizer), [str(one.message) for one in caught if "running eagerly" in str(one.message)]


def temporaries(mesh, name, compile, width=128, least=2**13):
    """The memory that the first step takes above the state, and a later one, in shards of the parameters.

    The model has the proportions of GPT-2, whose width is 768; batches of matrices have ``least`` entries or more.
    """
    layers = 12
    matrices = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)] * layers
    shapes = [(round(65.44 * width), width), (2 * width, width), *matrices, (10 * width,)]
    params = [nn.Parameter(like_shard(torch.zeros(shape), mesh)) for shape in shapes]
    kinds = ["embedding"] * 2 + ["matrix"] * len(matrices) + ["other"]
    set_gradients(params, 0)
    sizes = [p.to_local().nbytes for p in params]
    is_muon = name == "SteadyMuon"
    state = 3 + sum(s for s, kind in zip(sizes, kinds, strict=True) if kind != "matrix") / sum(sizes) if is_muon else 2

    def first_step():
        groups = [{"params": params, "kinds": kinds}] if is_muon else params
        optimizer = getattr(lg.optim, name)(groups, compile=compile)
        optimizer.step()
        return optimizer

    exchange = dist.all_to_all_single

    def exchange_uncounted(received, sent, *args, **kwargs):
        """In memory that torch does not count: gloo's threads free it, which the profiler does not see."""
        theirs = torch.from_numpy(np.empty(received.shape, np.float32))
        exchange(theirs, torch.from_numpy(sent.numpy().copy()), *args, **kwargs)
        received.copy_(theirs)

    with mock.patch.object(staged, "_LEAST", least), mock.patch.object(dist, "all_to_all_single", exchange_uncounted):
        first = largest_allocation(first_step) / sum(sizes) - state
        return first, largest_allocation(first_step().step) / sum(sizes)


def orthogonalised_by_batch(mesh):
    """How many matrices of which work this rank orthogonalises between two exchanges."""
    owned, original = [], _owners.choose_owners

    def choosing(blocks, ranks):
        result = original(blocks, ranks)
        owned.append([[blocks.parts[i].size for i in own] for own in result])
        return result

    params = [
        nn.Parameter(like_shard(torch.ones(shape), mesh)) for shape in [(6, 4), (9, 9), (4, 6), (9, 9), (5, 5)] * 3
    ]
    optimizer = lg.optim.SteadyMuon(params, compile=True)
    with mock.patch.object(staged, "_LEAST", 90), mock.patch.object(_owners, "choose_owners", choosing):
        steps(optimizer, params, 0, 1)
    return owned


def train_measured(mesh, name, domain, count):
    """The drift of late gradients."""
    params = list(holder(mesh).parameters())
    optimizer = lg.optim.Delayed(optimizers(name, params, domain), 3, drift=True)
    steps(optimizer, params, 0, count)
    return optimizer.drift


def train_with_delays(mesh, name, count, delay):
    """The parameters after some steps with a delay for each of them."""
    params = list(holder(mesh).parameters())
    steps(optimizers(name, params, lg.WholeSpace()), params, 0, count, delay)
    return whole(params)


def delays_of_ranks(mesh, name):
    """What ranks say that disagree about the delay of one parameter."""
    params = list(holder(mesh).parameters())
    optimizer = optimizers(name, params, lg.WholeSpace())
    set_gradients(params, 0)
    return message(lambda: optimizer.step(delay=[2, 1, 0, 0, 0, mesh.get_rank(), 0]))


def train_all(mesh, names, *args):
    """What :func:`train` returns, for many rules."""
    return {name: train(mesh, name, *args) for name in names}


class Tied(nn.Module):
    """An embedding that is also the last layer, a frozen layer, and a parameter without a gradient."""

    def __init__(self):
        super().__init__()
        self.embedding, self.frozen, self.hidden = nn.Embedding(7, 5), nn.Linear(5, 5), nn.Linear(5, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, tokens):
        return self.head(torch.tanh(self.hidden(self.frozen(self.embedding(tokens)))))


def train_tied(mesh, name, wrapper, count=6, compile=False):
    """Training with the gradients that FSDP2 or DDP computes, each rank from its share of the batch.

    Returns the parameters at the end and the losses on the way, of the query and of the output.
    """
    torch.manual_seed(3)
    model, losses = Tied(), []
    rank, ranks = 0, 1
    if mesh is not None:
        rank, ranks = mesh.get_rank(), mesh.size()
        if wrapper == "ddp":
            model = DistributedDataParallel(model, process_group=mesh.get_group(), find_unused_parameters=True)
        else:
            fully_shard(model, mesh=mesh)
    trained = model if name == "SteadyMuon" else model.parameters()
    optimizer = optimizers(name, trained, lg.Ball(5.0), compile=compile and mesh is not None)
    for t in range(count):
        tokens = torch.randint(7, (12,), generator=torch.Generator().manual_seed(t))
        own = tokens[rank * 12 // ranks : (rank + 1) * 12 // ranks]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(own), (own + 1) % 7).backward()
        optimizer.step(delay=min(t, 2))
        losses += [validation_loss(model)]
        with optimizer.output():
            losses += [validation_loss(model)]
    if isinstance(model, FSDPModule):
        model.reshard()  # the last pass has no backward pass
    return torch.cat([whole(model.parameters()), torch.tensor(losses)])


def validation_loss(model):
    """A pass without a backward pass, after which FSDP does not shard the root's parameters again."""
    tokens = torch.arange(7)
    with torch.no_grad():
        return nn.functional.cross_entropy(model(tokens), (tokens + 1) % 7).item()


# ---- Checkpoints


def save(mesh, name, folder, count, compile=False):
    """Train for some steps and save model and optimizer with torch.distributed.checkpoint."""
    model = holder(mesh)
    params = list(model.parameters())
    optimizer = optimizers(name, params, lg.Ball(2.0), compile=compile)
    steps(optimizer, params, 0, count)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder,
             process_group=mesh.get_group())  # fmt: skip
    return whole(params)


def resume(mesh, name, folder, first, last, compile=False):
    """Load what :func:`save` saved into new objects and train on; returns the parameters as loaded and at the end."""
    model = holder(mesh)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.9)
    params = list(model.parameters())
    optimizer = optimizers(name, params, lg.Ball(2.0), compile=compile)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    assert set(backends(optimizer)) == {"loops" if compile else "eager"}
    state = {"model": model_state, "optimizer": optimizer_state}
    group = None if mesh is None else mesh.get_group()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # of dcp, for one process
        dcp.load(state, checkpoint_id=folder, process_group=group, no_dist=mesh is None)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    loaded = whole(params)
    steps(optimizer, params, first, last)
    return torch.stack([loaded, whole(params)])


def save_in_eval_mode(mesh, name, folder):
    """Save with torch.distributed.checkpoint while the parameters hold the output; what loading it says."""
    model = holder(mesh)
    params = list(model.parameters())
    optimizer = optimizers(name, params, lg.Ball(2.0))
    steps(optimizer, params, 0, 3)
    optimizer.eval()
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder,
             process_group=mesh.get_group())  # fmt: skip
    optimizer.train()
    state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder, process_group=mesh.get_group())
    return message(lambda: set_optimizer_state_dict(model, optimizer, state["optimizer"]))


def save_delayed(mesh, name, folder, count):
    """The same for late gradients, of which some are pending: the optimizer's own state dict is saved."""
    params = list(holder(mesh).parameters())
    optimizer = lg.optim.Delayed(optimizers(name, params, lg.Ball(2.0)), 3)
    steps(optimizer, params, 0, count)
    dcp.save({"params": params, "optimizer": optimizer.state_dict()}, checkpoint_id=folder,
             process_group=mesh.get_group())  # fmt: skip
    return optimizer.pending


def resume_delayed(mesh, name, file, first, last):
    """Continue from a file of whole tensors."""
    params = list(holder(mesh).parameters())
    saved = torch.load(file, weights_only=True)
    with torch.no_grad():
        for p, value in zip(params, saved["params"], strict=True):
            p.copy_(like(value, p))
    optimizer = lg.optim.Delayed(optimizers(name, params, lg.Ball(2.0)), 3)
    optimizer.load_state_dict(saved["optimizer"])
    steps(optimizer, params, first, last)
    return whole(params)


def state_in_eval_mode(mesh, name):
    """Save in eval mode and continue from that with new objects; then without reloading the model in its order."""
    model = holder(mesh)
    params = list(model.parameters())
    optimizer = optimizers(name, params, lg.Ball(2.0))
    steps(optimizer, params, 0, 5)
    optimizer.eval()
    saved_model, saved = model.state_dict(), optimizer.state_dict()
    other = holder(mesh)
    other.load_state_dict(saved_model)
    others = list(other.parameters())
    second = optimizers(name, others, lg.Ball(2.0))
    second.load_state_dict(saved)
    steps(second, others, 5, 8)
    optimizer.train()
    steps(optimizer, params, 5, 8)
    third = holder(mesh)
    thirds = list(third.parameters())
    wrong = optimizers(name, thirds, lg.Ball(2.0))
    wrong.load_state_dict(saved)
    third.load_state_dict(saved_model)
    set_gradients(thirds, 5)
    return whole(params), whole(others), message(lambda: wrong.step())


# ---- Errors


def built_before_sharding(mesh):
    """What the first step of an optimizer says that has the parameters from before ``fully_shard``."""
    model = nn.Linear(4, 3)
    optimizer = lg.optim.SteadyAdam(model.parameters(), lr=0.05)
    fully_shard(model, mesh=mesh)
    model(torch.ones(2, 4)).sum().backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    return [str(one.message) for one in caught]


def message(call):
    try:
        call()
    except (ValueError, TypeError, RuntimeError, IndexError, UnsupportedError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def refused_parameters(meshes):
    """What the optimizers say to parameters that they cannot train, by case; of the ranks in no mesh, nothing."""
    whole_tensor, said = torch.ones(4, 4), {}

    def placed(mesh, *placements):
        return nn.Parameter(distribute_tensor(whole_tensor, mesh, placements))

    def refused(case, *params, **options):
        said[case] = message(lambda: lg.optim.AnytimeSGD(list(params), lr=0.1, **options))

    square = meshes["2x2"]
    refused("two sharded dimensions", placed(square, Shard(0), Shard(0)))
    if square.get_rank() < 2:
        mesh = meshes[2]
        refused("mixed", placed(mesh, Shard(0)), nn.Parameter(torch.ones(3)))
        refused("meshes", placed(mesh, Shard(0)), placed(meshes["1x2"], Replicate(), Shard(0)))
        refused("placements", placed(mesh, Shard(0)), placed(mesh, Replicate()))
        refused("columns", placed(mesh, Shard(1)))
        refused("partial", nn.Parameter(DTensor.from_local(whole_tensor, mesh, [Partial()])))
        for use_orig_params in (True, False):
            model = FullyShardedDataParallel(nn.Linear(4, 4), process_group=mesh.get_group(), device_id=CPU,
                                             use_orig_params=use_orig_params)  # fmt: skip
            refused(f"FSDP1 {use_orig_params}", *model.parameters())
        model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), mesh=mesh)
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        said["by stage"] = message(lambda: lg.optim.Delayed(plain, lg.delays.by_stage(model, 2)))
        sharded = [placed(mesh, Shard(0))]
        set_gradients(sharded, 0)
        said["compile"] = message(lg.optim.AnytimeSGD(sharded, lr=0.1, domain=lg.Simplex(), compile=True).step)
        said["torch.compile"] = message(lambda: lg.in_place(lg.SGD(0.1), None, tensors=sharded, backend="compile"))
        said["rotated basis"] = message(lambda: lg.optim.FromRule(sharded, lg.baselines.RotatedAdam(0.1)))
    return said


@dataclass(frozen=True, eq=False)
class Reducing(lg.SGD):
    """SGD that reduces its gradient in some way."""

    way: str = "sum"

    def update(self, state, grad, delay):
        return super().update(state, grad + WAYS[self.way](grad), delay)


WAYS = {
    "sum": lambda g: g.sum(),
    "mean": lambda g: g.mean(-1, keepdim=True),
    "norm": lambda g: g.norm(),
    "norm of a part": lambda g: g[3:20].norm(dim=-1),
    "largest": lambda g: g.amax(-1) - g.amin(),
    "all": lambda g: (g > -1).all(-1, keepdim=True) + 2.0 * (g > 2).any(),
    "inner product": lambda g: (g * g.abs()).sum(-1),
    "median": lambda g: g.sort().values[35],
    "dot": lambda g: g.dot(g),
    "cumsum": lambda g: g.cumsum(-1),
    "1-norm": lambda g: g.norm(p=1),
    "max": lambda g: g.max(),
    "first": lambda g: g[0],
    "flip": lambda g: g.flip(-1),
    "noise": lambda g: torch.randn_like(g),
    "halves": lambda g: g[:35].sum() * 0 + torch.cat([g[35:], g[:35]]),
    "sort indices": lambda g: g.sort().indices[0],
    "item": lambda g: g.abs()[:1].item(),
}


def reduce_in(mesh, way):
    """Three steps with a rule that reduces in some way: the parameters, or the error."""
    params = list(holder(mesh).parameters())

    def run():
        steps(lg.optim.FromRule(params, Reducing(0.1, way=way)), params, 0, 3)

    return message(run), whole(params)


def disagree(mesh):
    """Ranks that pass different delays, then the same again, then different learning rates."""
    params = list(holder(mesh).parameters())
    optimizer = lg.optim.SteadyMuon(params, lr=0.05)
    steps(optimizer, params, 0, 3)
    before = whole(params)
    set_gradients(params, 3)
    delays = message(lambda: optimizer.step(delay=mesh.get_rank()))
    unchanged = torch.equal(before, whole(params))
    steps(optimizer, params, 3, 5)
    result = whole(params)
    optimizer.param_groups[0]["lr"] = 0.05 + mesh.get_rank()
    return delays, unchanged, result, message(lambda: optimizer.step())


def load_another(mesh):
    """Load states of other optimizers and of other parameters, then continue."""
    model = holder(mesh)
    params = list(model.parameters())
    optimizer = optimizers("AnytimeSGD", params, lg.Ball(2.0))
    steps(optimizer, params, 0, 3)
    said = []
    for name in ("SteadyAdam", "sgd-momentum", "SteadyMuon"):
        others = list(holder(mesh).parameters())
        other = optimizers(name, others, lg.Ball(2.0))
        steps(other, others, 0, 2)
        said.append(message(lambda other=other: optimizer.load_state_dict(other.state_dict())))
    said.append(message(lambda: optimizer.load_state_dict(torch.optim.Adam(params).state_dict())))
    other_shapes = [nn.Parameter(like(torch.ones(6, 4), p)) for p in params]  # as many rows as (4,) has, on some ranks
    other = optimizers("AnytimeSGD", other_shapes, lg.Ball(2.0))
    steps(other, other_shapes, 0, 2)
    said.append(message(lambda: optimizer.load_state_dict(other.state_dict())))
    steps(optimizer, params, 3, 6)
    return said, whole(params)


def count_orthogonalised(mesh):
    """The shapes of the matrices that this rank orthogonalises in one step."""
    shapes, original = [], _orthogonalize.orthogonalise

    def counting(x, out=None):
        shapes.extend([tuple(x.shape[-2:])] * x.shape[:-2].numel())
        return original(x, out)

    params = list(holder(mesh).parameters())
    optimizer = lg.optim.SteadyMuon(params)
    _orthogonalize.orthogonalise = counting
    try:
        steps(optimizer, params, 0, 1)
    finally:
        _orthogonalize.orthogonalise = original
    return shapes


def run_example(mesh, *arguments):
    module = example("fsdp_training")
    return module.train(module.parse(list(arguments)), mesh)
