"""What a pipeline is made of: a model cut into stages, and the batches of a problem."""

from collections.abc import Iterator, Sequence
from typing import Any, cast

from torch import Tensor, nn

from lategrad.delays.stages import by_stage
from lategrad.rules.blocks import Block, Blocks
from lategrad.support.validation import require


def cut(model: nn.Sequential, stages: int) -> list[nn.Sequential]:
    """Cut a sequence of layers into stages, so that the largest has as few parameters as possible.

    It is the cut of :func:`lategrad.delays.by_stage`, with the children of the sequence left whole; those without
    parameters stay with the one before them.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> [len(stage) for stage in cut(model, 2)]
    [2, 3]

    Args:
        model: its children keep their parameters: the stages share them with the model.
        stages: how many.
    """
    require("model", type(model).__name__, isinstance(model, nn.Sequential),
            "an nn.Sequential; cut other models by hand, or with torch.distributed.pipelining.pipeline")  # fmt: skip
    children = list(model)  # not model.children(), which leaves out what occurs twice
    sizes = {i: sum(p.numel() for p in child.parameters() if p.requires_grad) for i, child in enumerate(children)}
    blocks = Blocks(tuple(Block(f"{i}.parameters", (size,), "other") for i, size in sizes.items() if size))
    delays = iter(by_stage(blocks, stages).delays)
    parts: list[list[nn.Module]] = [[] for _ in range(stages)]
    stage = 0
    for i, child in enumerate(children):
        stage = stages - 1 - next(delays) if sizes[i] else stage
        parts[stage].append(child)
    return [nn.Sequential(*part) for part in parts]


def own_stage(stages: Any, rank: int, world: int) -> nn.Module:
    """This rank's module, from anything that describes a pipeline."""
    if all(hasattr(stages, name) for name in ("submod", "stage_index", "num_stages")):  # PipelineStage, build_stage()
        index, count = stages.stage_index, stages.num_stages
        require("stage_index", index, index == rank, f"{rank}, the rank: each rank runs the stage of its number")
        module: Any = stages.submod
    elif hasattr(stages, "get_stage_module"):  # Pipe
        require("stages", stages.replicated_params, not stages.replicated_params,
                "without shared parameters (tied embeddings), which each stage would train a copy of")  # fmt: skip
        count, module = stages.num_stages, stages.get_stage_module(rank) if rank < stages.num_stages else None
    else:
        listed = isinstance(stages, Sequence | nn.ModuleList) and all(isinstance(one, nn.Module) for one in stages)
        require("stages", type(stages).__name__, listed and not isinstance(stages, nn.Sequential),
                "a list of modules, a PipelineStage or what torch.distributed.pipelining.pipeline returns; "
                "lategrad.pipeline.cut(model, stages) cuts an nn.Sequential")  # fmt: skip
        _require_disjoint(stages)
        count, module = len(stages), stages[rank] if rank < len(stages) else None
    require("the world size", world, world == count, f"the number of stages, {count}: start torchrun with "
            f"--nproc-per-node {count}, or cut the model into {world} stages")  # fmt: skip
    trained = [p for p in module.parameters() if p.requires_grad]
    require(f"stage {rank}", module, len(trained) > 0, "a module with parameters that are trained")
    return cast(nn.Module, module)


def _require_disjoint(stages: Sequence[nn.Module]) -> None:
    owner: dict[Tensor, int] = {}
    for k, stage in enumerate(stages):
        for name, p in stage.named_parameters():
            first = owner.setdefault(p, k)
            require(f"{name} of stage {k}", f"one that stage {first} has, too", first == k,
                    "its own: stages cannot share parameters (tied embeddings)")  # fmt: skip


def batches(problem: Any, seed: int = 0, *, first: int = 0, count: int) -> Iterator[tuple[Any, Tensor]]:
    """Inputs and targets of samples ``first, first + 1, ...`` of a problem: what the simulator uses in those updates.

    >>> import lategrad as lg
    >>> model = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    >>> problem = lg.problems.ModuleProblem(model, lg.problems.load("digits"), batch=32)
    >>> [inputs.shape[0] for inputs, targets in batches(problem, count=2)]
    [32, 32]

    Args:
        problem: a :class:`~lategrad.problems.ModuleProblem`.
        seed: of the samples.
        first: number of the first sample; where a resumed run continues.
        count: how many batches.
    """
    for t in range(first, first + count):
        inputs, targets = problem.splits.train.rows(problem.samples(seed, t, 1)[0])
        yield inputs, targets
