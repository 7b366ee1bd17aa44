"""Any ``torch.nn.Module`` with a loss and a data set, as a function of one flat parameter vector."""

import copy
import hashlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import cached_property, partial
from typing import Any, TypeVar, cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.func import grad, vmap

from lategrad.problems.flat_module import FlatModule, Value, recompute_statistics, stop_tracking, tracking_layers
from lategrad.problems.minibatches import Minibatches
from lategrad.problems.problem import Measures, require_free_names
from lategrad.problems.sources import Batches, Columns, Inputs, Source, map_inputs, split_data
from lategrad.rules.blocks import Blocks
from lategrad.support.seeds import Stream, derived_seed, seeded
from lategrad.support.validation import require

_EVALUATION_ROWS = 4096  # taken at once, for each run
_STATISTICS_ROWS = 2048  # of the training data, that batch norm's statistics are the mean over

Result = TypeVar("Result")
Rows = tuple[Inputs, Tensor]
Values = Mapping[str, Value]
Request = tuple[Source, int | None, Values]
"""A source, the number of its first rows (None for all), and the values to average over them."""


class ModuleProblem:
    """Train a module: one parameter vector by plain autograd, many at once through ``torch.func``.

    Any module that autograd can differentiate can be trained. Where ``torch.func`` cannot take many runs at once (for
    example with recurrent layers), they are computed one after another, with a warning.

    Batch norm uses the statistics of the minibatch in gradients. It has no running statistics during training:
    whenever a point is evaluated, and in :meth:`module_at`, they are the means over the first 2,048 training rows at
    that point. Layers in evaluation mode keep theirs. Other buffers stay as they are.

    Losses and accuracies are taken in evaluation mode. Parameters that do not require a gradient stay as they are.
    A module in bfloat16 or float16 has its vector in float32.

    Random layers (dropout), and rows that are augmented at random, draw from a seed that is part of the sample, so that
    a worker, the simulator and a replay draw the same; many runs are then computed one after another. A first batch
    tells whether the global generators of torch, Python or numpy are used; generators of your own are not seeded.

    Args:
        module: called with a minibatch of rows of the data set; reshape them inside (``nn.Unflatten``).
        data: a data set of :func:`lategrad.problems.load`; a ``torch.utils.data.Dataset`` or any other sequence of
            rows, each a pair (input, target) or a dict; :class:`~lategrad.problems.NpyRows`, for files that stay on
            disk; or a function from a seed to an iterable of batches, such as a ``DataLoader``. Every worker draws
            from all rows (or from a shard of them, ``lg.train(data_shards=...)``), with its own stream.
        loss: from (module output, targets) to the mean loss of the batch; by default cross-entropy for
            classes, which are scored along the last dimension of the output (targets may have any shape), and half
            the mean squared error otherwise.
        batch: rows in a minibatch; those of a function are as large as it makes them.
        sampling: "iid" or "epochs".
        evaluate: number of training rows, the first ones, in the reported loss; by default all.
        micro_batch: rows whose gradient is taken at once; a larger minibatch is cut into pieces, one after another,
            to save memory. The loss must be a mean over rows.
        test: held-out data of the same kind, where ``data`` has no test part of its own.
        validation: the share of the training rows, chosen at random but always the same, that is held out: records
            then show ``val_loss``, accuracy and metrics on those, and the test part is left for :meth:`measure`.
        evaluate_held_out: number of held-out rows, the first ones, that are evaluated; by default all.
        metrics: from (module output, targets) to a mean over the batch, by name; recorded on the held-out data.
        columns: where rows are dicts: ``("image", "label")``, or ``(("input_ids", "attention_mask"), "labels")``
            for inputs that are passed by name.
        kinds: which parameters are matrices, where rules such as :class:`~lategrad.SteadyMuon` should not find it out:
            see :meth:`lategrad.Blocks.of_module`; ``{"head.*": "other"}``.

    >>> from lategrad.problems import load
    >>> mlp = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    >>> problem = ModuleProblem(mlp, load("digits"))
    >>> problem.dim  # 16 x 65 + 10 x 17
    1210
    >>> x = problem.start() - 0.1 * problem.gradient(problem.start(), problem.samples(0, 0, 1)[0])
    >>> trained = problem.module_at(x)
    """

    name = "module"
    smoothness = None
    strong_convexity = None

    def __init__(
        self, module: nn.Module, data: Any, loss: Callable[[Any, Tensor], Tensor] | None = None, *, batch: int = 64,
        sampling: str = "iid", evaluate: int | None = None, micro_batch: int | None = None, test: Any = None,
        validation: float = 0.0, evaluate_held_out: int | None = None,
        metrics: Mapping[str, Callable[[Any, Tensor], Tensor]] | None = None, columns: Columns | None = None,
        kinds: Mapping[str | nn.Module, str] | None = None,
    ) -> None:  # fmt: skip
        counts = {"evaluate": evaluate, "micro_batch": micro_batch, "evaluate_held_out": evaluate_held_out}
        for name, value in counts.items():
            require(name, value, value is None or (isinstance(value, int) and value >= 1), "an integer >= 1, or None")
        if isinstance(module, type) and issubclass(module, nn.Module):
            raise ValueError(f"module must be a module, got the class {module.__name__}: call it, "
                             f"{module.__name__}(...)")  # fmt: skip
        require("module", type(module).__name__, isinstance(module, nn.Module), "a torch.nn.Module")
        self.metrics = dict(metrics or {})
        require_free_names(self.metrics)
        require("loss", loss, loss is None or callable(loss), "a function of the module's output and the targets")
        require("metrics", self.metrics, all(map(callable, self.metrics.values())), "functions by their names")
        self.module = copy.deepcopy(module)
        self._tracking = list(tracking_layers(self.module))
        self.training = FlatModule(stop_tracking(FlatModule.sharing(self.module)))
        self.evaluated = FlatModule(FlatModule.sharing(self.module).eval())
        self.blocks = Blocks.of_module(module, kinds)
        self._labels = self.blocks.labels if kinds else []  # what was told is part of the problem
        self.dim = self.training.dim
        require("module", module, self.dim > 0, "a module with parameters to train")
        self.data, self.splits = data, split_data(data, test, validation, evaluate, columns)
        require("metrics", list(self.metrics), self.splits.held_out is not None or not self.metrics,
                "None without held-out data, on which they are taken: give test= or validation=")  # fmt: skip
        self.evaluate, self.evaluate_held_out, self.micro_batch = evaluate, evaluate_held_out, micro_batch
        self.minibatches = Minibatches(len(self.splits.loss_rows), batch, sampling)
        self.evaluation_rows = _EVALUATION_ROWS
        self.loss_of_batch: Value = loss or (_cross_entropy if self.splits.has_classes else _half_mse)
        self._takes_many_runs = True

    def fingerprint(self) -> str:
        """Data, module with all that is not trained, name of the loss; not the first parameters, which are random."""
        with seeded(0):  # rows may be augmented at random
            contents = hashlib.sha256(self.splits.loss_rows.fingerprint())
        trained = {block.name: block.shape for block in self.blocks.parts}
        contents.update(repr(list(trained.items()) + self._labels).encode())
        for part in (part for name, part in self.module.state_dict().items() if name not in trained):
            contents.update(part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        loss = getattr(self.loss_of_batch, "__name__", type(self.loss_of_batch).__name__)
        return f"{self.module} {loss} {contents.hexdigest()}"

    def start(self) -> Tensor:
        """The module's own parameters, as they were when the problem was made."""
        return FlatModule(self.module).vector()

    def module_at(self, x: Tensor) -> nn.Module:
        """A copy of the module with the parameters of a vector ``(dim,)``, in evaluation mode.

        Batch norm's statistics are those at that point.
        """
        require("x", tuple(x.shape), x.shape == (self.dim,), f"a vector of shape ({self.dim},)")
        module = FlatModule(self.module).copy_at(x)
        self._prepare(x)
        for name in self._tracking:
            statistics = dict(self.evaluated.module.get_submodule(name).named_buffers())
            module.get_submodule(name).load_state_dict(statistics, strict=False)
        return module.eval()

    def load_best(self, folder: str | os.PathLike[str], module: nn.Module | None = None) -> nn.Module:
        """The module with the best output of a run (``monitor`` of :func:`lategrad.train`), in evaluation mode.

        It is a copy of the problem's, or the given ``module``.
        """
        best = self.module_at(load_file(os.path.join(folder, "best.safetensors"))["output"])
        if module is None:
            return best
        module.load_state_dict(best.state_dict())
        return module.eval()

    # ---- Samples

    @cached_property
    def is_random(self) -> bool:
        """Whether a gradient draws from global generators: dropout does, and rows that are augmented at random."""
        with seeded(0) as draw:
            first = draw()
        size = self.micro_batch or self.minibatches.batch
        with seeded(0) as draw, torch.no_grad():
            inputs, targets, _ = next(self._chunks(self.splits.loss_rows, None, size))
            self.loss_of_batch(self.training.output(inputs), targets)
            return draw() != first

    def samples(self, seed: int, first: int, count: int) -> Tensor:
        """Row numbers, ``(count, batch)``; of a stream of batches its seed and the batch's number, ``(count, 2)``.

        Where the module has random layers, their seed follows.
        """
        if isinstance(self.splits.train, Batches):
            numbers = torch.stack([torch.full((count,), seed), torch.arange(first, first + count)], dim=-1)
            return self._with_seeds(numbers, seed, first)
        return self._with_seeds(self.minibatches.draw(seed, first, count), seed, first)

    def _with_seeds(self, numbers: Tensor, seed: int, first: int) -> Tensor:
        if not self.is_random:
            return numbers
        seeds = [derived_seed(seed, Stream.LAYERS, k) for k in range(first, first + len(numbers))]
        return torch.cat([numbers, torch.tensor(seeds, dtype=numbers.dtype).unsqueeze(-1)], dim=-1)

    def samples_of_shard(self, seed: int, first: int, count: int, shard: int, shards: int) -> Tensor:
        """The same from rows ``shard, shard + shards, ...`` only."""
        if isinstance(self.splits.train, Batches):
            raise ValueError(f"data_shards must be None, got {shards}: a stream of batches has no rows to share out; "
                             "every worker has a seed of its own")  # fmt: skip
        rows = range(shard, self.minibatches.rows, shards)
        return self._with_seeds(self.minibatches.draw_from(rows, seed, first, count), seed, first)

    def labels(self, samples: Tensor) -> Tensor | None:
        numbers = samples[..., :-1] if self.is_random else samples
        return None if self.splits.labels is None else self.splits.labels[numbers]

    @property
    def on_device(self) -> bool:
        """Whether a gradient needs nothing but its device, so that a GPU can repeat it as a graph."""
        return self.splits.train.on_device and not self.is_random

    # ---- Gradients

    def gradient(self, x: Tensor, sample: Tensor) -> Tensor:
        """For one run by plain autograd; for several through ``torch.func``, over runs and streams at once."""
        runs = x.numel() // self.dim
        if runs == 1 and not torch.compiler.is_compiling():
            return self.gradient_of_one(x.reshape(-1), sample.reshape(-1)).view(x.shape)
        streams = sample.dim() - 1
        stacked = x.reshape(*sample.shape[:-1], -1, self.dim)

        def loss(vector: Tensor, inputs: Inputs, targets: Tensor) -> Tensor:
            if targets.is_floating_point():  # torch's mse_loss needs both of its arguments in all vmaps, or in none
                targets = targets + torch.zeros_like(vector[:1])
            return self.loss_of_batch(self.training.call(vector, inputs), targets)

        def at_once() -> Tensor:
            function = vmap(grad(loss), in_dims=(0, None, None))
            for _ in range(streams):
                function = vmap(function)
            return self._over_pieces(self.splits.train.rows(sample), streams, lambda *piece: function(stacked, *piece))

        def one_by_one() -> Tensor:
            samples = sample.reshape(-1, sample.shape[-1])
            points = stacked.reshape(len(samples), -1, self.dim)
            if self.is_random:
                pairs = zip(points, samples, strict=True)
                return torch.stack([self.gradient_of_one(x, of) for xs, of in pairs for x in xs])
            rows = map(self.splits.train.rows, samples)
            return torch.stack([self._gradient_on(x, of) for xs, of in zip(points, rows, strict=True) for x in xs])

        if self.is_random:  # torch.func would draw other numbers than a single run does
            return one_by_one().reshape(x.shape)
        if torch.compiler.is_compiling():
            return at_once().reshape(x.shape)
        return self._over_runs(runs, at_once, one_by_one).reshape(x.shape)

    def gradient_of_one(self, x: Tensor, sample: Tensor, out: Tensor | None = None) -> Tensor:
        """The gradient at one vector ``(dim,)``, as a worker computes it; written into ``out`` if given."""
        if not self.is_random:
            return self._gradient_on(x, self.splits.train.rows(sample), out)
        with seeded(int(sample[-1])):
            return self._gradient_on(x, self.splits.train.rows(sample[:-1]), out)

    def _gradient_on(self, x: Tensor, rows: Rows, out: Tensor | None = None) -> Tensor:
        if self.micro_batch is None or len(rows[1]) <= self.micro_batch:
            return self.training.gradient(x, *rows, self.loss_of_batch, out)
        whole = self._over_pieces(rows, 0, lambda part, of: self.training.gradient(x, part, of, self.loss_of_batch))
        return whole if out is None else out.copy_(whole)

    def _over_pieces(self, rows: Rows, dimension: int, gradient: Callable[[Inputs, Tensor], Tensor]) -> Tensor:
        """The mean of the gradients on pieces of a minibatch, weighted by their rows."""
        inputs, targets = rows
        count = targets.shape[dimension]
        size = count if self.micro_batch is None else min(self.micro_batch, count)
        if size == count:
            return gradient(inputs, targets)
        total: Tensor | float = 0.0
        for first in range(0, count, size):
            length = min(size, count - first)
            part = map_inputs(partial(torch.narrow, dim=dimension, start=first, length=length), inputs)
            total = total + length / count * gradient(part, targets.narrow(dimension, first, length))
        return cast(Tensor, total)

    def _over_runs(self, runs: int, at_once: Callable[[], Result], one_by_one: Callable[[], Result]) -> Result:
        """All runs at once where ``torch.func`` can; a single run always by itself."""
        if runs == 1 or not self._takes_many_runs:
            return one_by_one()
        try:
            return at_once()
        except RuntimeError as error:  # torch.func's own, or one of the module's, which is then raised again
            result = one_by_one()
            self._takes_many_runs = False
            reason = str(error).strip().partition("\n")[0]
            warnings.warn(f"torch.func cannot take {runs} runs of {type(self.module).__name__} at once, so they are "
                          f"computed one after another: {reason}", stacklevel=2)  # fmt: skip
            return result

    # ---- Evaluation

    def _prepare(self, x: Tensor) -> None:
        """Write a vector into the evaluated module, with batch norm's statistics at that point."""
        self.evaluated.write(x)
        if self._tracking:
            layers = [self.evaluated.module.get_submodule(name) for name in self._tracking]
            batches = self._chunks(self.splits.loss_rows, _STATISTICS_ROWS, max(2, self.minibatches.batch))
            recompute_statistics(self.evaluated, layers, (inputs for inputs, _, _ in batches))  # type: ignore[arg-type]

    def _chunks(self, source: Source, first: int | None, size: int) -> Iterator[tuple[Inputs, Tensor, int]]:
        count = len(source) if first is None else min(first, len(source))
        for numbers in torch.arange(count).split(size):
            yield *source.rows(numbers), len(numbers)

    @torch.no_grad()
    def _means(self, x: Tensor, requests: list[Request]) -> dict[str, Tensor]:
        """Means over the rows of sources, each of which is read once; float64, ``(*runs, 1)``."""
        vectors = x.reshape(-1, self.dim)

        def over_chunks(evaluate: Callable[[Inputs, Tensor, Values], dict[str, Tensor]]) -> dict[str, Tensor]:
            means: dict[str, Tensor] = {}
            for source, first, values in requests:
                total = 0
                for inputs, targets, rows in self._chunks(source, first, self.evaluation_rows):
                    total += rows
                    for name, value in evaluate(inputs, targets, values).items():
                        means[name] = means.get(name, 0.0) + value.double() * rows
                means |= {name: means[name] / total for name in values}
            return means

        def at_once() -> dict[str, Tensor]:
            def of_run(vector: Tensor, inputs: Inputs, targets: Tensor, values: Values) -> dict[str, Tensor]:
                output = self.evaluated.call(vector, inputs)
                return {name: value(output, targets) for name, value in values.items()}

            many = vmap(of_run, in_dims=(0, None, None, None), randomness="different")
            return over_chunks(lambda *chunk: many(vectors, *chunk))

        def of_chunk(inputs: Inputs, targets: Tensor, values: Values) -> dict[str, Tensor]:
            output = self.evaluated.output(inputs)
            return {name: _scalar(name, value(output, targets)) for name, value in values.items()}

        def one_by_one() -> dict[str, Tensor]:
            by_run = []
            for vector in vectors:
                self._prepare(vector)
                by_run.append(over_chunks(of_chunk))
            return {name: torch.stack([means[name] for means in by_run]) for name in by_run[0]}

        # Some modules draw in evaluation mode too: also then a loss is a function of the vector.
        with seeded(0) if self.is_random else nullcontext():
            means = one_by_one() if self._tracking else self._over_runs(len(vectors), at_once, one_by_one)
        return {name: value.reshape(*x.shape[:-1], 1) for name, value in means.items()}

    def measure(self, x: Tensor, part: str | None = None) -> Measures:
        """Loss, held-out loss, accuracy and metrics, with each split of the data read once.

        Args:
            x: points, ``(*runs, dim)``.
            part: which split is held out: "validation" or "test"; by default the validation split if there is one.
        """
        parts = {"validation": self.splits.validation, "test": self.splits.test}
        names = [name for name, source in parts.items() if source is not None]
        require("part", part, part is None or part in names, f"None or among {', '.join(names) or 'none'}")
        part = part or next(iter(names), None)
        held_out = None if part is None else parts[part]
        requests: list[Request] = [(self.splits.loss_rows, self.evaluate, {"loss": self.loss_of_batch})]
        if held_out is not None:
            values: dict[str, Value] = {"held-out loss": self.loss_of_batch}
            values |= {"accuracy": _accuracy} if self.splits.has_classes else {}
            values |= {f"metric {name}": value for name, value in self.metrics.items()}
            requests.append((held_out, self.evaluate_held_out, values))
        means = self._means(x, requests)
        metrics = {name: means[f"metric {name}"] for name in self.metrics if f"metric {name}" in means}
        name = "val_loss" if part == "validation" else "test_loss"
        return Measures(means["loss"], means.get("accuracy"), metrics=metrics, **{name: means.get("held-out loss")})

    def loss(self, x: Tensor) -> Tensor:
        """The mean training loss, over all rows or the first ``evaluate`` ones."""
        return self._means(x, [(self.splits.loss_rows, self.evaluate, {"loss": self.loss_of_batch})])["loss"]

    def test_loss(self, x: Tensor) -> Tensor | None:
        """The mean loss on the test split, float64, ``(*runs, 1)``; None without any."""
        return self._mean_over(self.splits.test, x, self.loss_of_batch)

    def accuracy(self, x: Tensor) -> Tensor | None:
        """The share of held-out targets whose class has the largest output; None for a regression."""
        return self._mean_over(self.splits.held_out, x, _accuracy) if self.splits.has_classes else None

    def _mean_over(self, source: Source | None, x: Tensor, value: Value) -> Tensor | None:
        return None if source is None else self._means(x, [(source, self.evaluate_held_out, {"value": value})])["value"]

    # ---- Elsewhere

    def to(self, device: torch.device | str) -> "ModuleProblem":
        moved = copy.copy(self)
        moved.module = FlatModule.sharing(self.module).to(device)
        moved.training, moved.evaluated = self.training.to(device), self.evaluated.to(device)
        moved.splits = self.splits.to(device)
        return moved

    def __repr__(self) -> str:
        return (f"{type(self).__name__}({type(self.module).__name__} with {self.dim} parameters, {self.splits.name}, "
                f"batch={self.minibatches.batch}, sampling={self.minibatches.sampling!r})")  # fmt: skip


def _scalar(name: str, value: Any) -> Tensor:
    scalar = torch.as_tensor(value)
    if scalar.numel() != 1:
        raise ValueError(f"{name.removeprefix('held-out ')} must return one number, the mean over the batch, got a "
                         f"tensor of shape {tuple(scalar.shape)}")  # fmt: skip
    return scalar


def _cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    if output.dim() > 2:
        output, target = output.reshape(-1, output.shape[-1]), target.reshape(-1)
    return nn.functional.cross_entropy(output, target)


def _half_mse(output: Tensor, target: Tensor) -> Tensor:
    if output.shape != target.shape:
        output = output.squeeze(-1)
        if output.shape != target.shape:  # torch would make a table of all differences
            raise ValueError(f"the module's output must have the shape of a batch's targets, {tuple(target.shape)}, or "
                             f"one dimension of size 1 more, got {tuple(output.shape)}; or give loss=")  # fmt: skip
    return 0.5 * (output - target).square().mean()


def _accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(-1) == target).double().mean()
