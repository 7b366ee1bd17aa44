"""Any ``torch.nn.Module`` with a loss and a data set, as a function of one flat parameter vector."""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from lategrad.problems.flat_module import FlatModule, Value
from lategrad.problems.minibatches import Minibatches
from lategrad.problems.problem import Measures
from lategrad.problems.running_statistics import recompute, stop_tracking, tracking_layers
from lategrad.problems.sources import Batches, Columns, Inputs, Source, map_inputs
from lategrad.problems.splits import parts_of
from lategrad.rules.blocks import Blocks
from lategrad.support.validation import require

_EVALUATION_ROWS = 4096  # taken at once, for each run
_STATISTICS_ROWS = 2048  # of the training data, that batch norm's statistics are the mean over

Result = TypeVar("Result")
Rows = tuple[Inputs, Tensor]
Question = tuple[Source, int | None, Mapping[str, Value]]
"""A source, how many of its first rows (None for all), and what is to be the mean over them."""


class ModuleProblem:
    """Train a module: one parameter vector by plain autograd, many at once through ``torch.func``.

    Whatever autograd can differentiate can be trained. Where ``torch.func`` cannot take many runs at once (recurrent
    layers, for one), they are taken one after another, and a warning says so.

    Batch norm uses the statistics of the minibatch in gradients. Its running statistics are not kept along the way:
    whenever a point is evaluated, and in :meth:`module_at`, they are the means over the first 2,048 training rows at
    that very point. Layers that are in evaluation mode keep theirs. Other buffers stay as they are.

    Losses and accuracies are taken in evaluation mode. Parameters that do not require a gradient stay as they are.
    Random layers (dropout) draw from torch's global generator, so that runs with them are not a function of the seed
    alone. A module in bfloat16 or float16 has its vector in float32.

    Args:
        module: called with a minibatch of rows of the data set; reshape them inside (``nn.Unflatten``).
        data: a data set of :func:`lategrad.problems.load`; a ``torch.utils.data.Dataset`` or any other sequence of
            rows, each a pair (input, target) or a dict; :class:`~lategrad.problems.NpyRows`, for files that stay on
            disk; or a function from a seed to an iterable of batches, such as a ``DataLoader``. Every worker draws
            from all rows (or from a shard of them, ``lg.train(data_shards=...)``), by a stream of its own.
        loss: from (module output, targets) to the mean loss of the batch; by default cross-entropy for
            classes, which are scored along the last dimension of the output (targets may have any shape), and half
            the mean squared error otherwise.
        batch: rows in a minibatch; those of a function are as large as it makes them.
        sampling: "iid" or "epochs".
        evaluate: how many training rows the reported loss is the mean over, the first ones; by default all.
        micro_batch: rows whose gradient is taken at once; a larger minibatch is cut into pieces, one after another,
            so that it needs no more memory. The loss must be a mean over rows.
        test: held-out data of the same kind, where ``data`` has no test part of its own.
        validation: the share of the training rows, chosen at random but always the same, that is held out: records
            then show loss, accuracy and metrics on those, and the test part is left for :meth:`measure`.
        evaluate_held_out: how many held-out rows are looked at, the first ones; by default all.
        metrics: from (module output, targets) to a mean over the batch, by name; recorded on the held-out data.
        columns: where rows are dicts: ``("image", "label")``, or ``(("input_ids", "attention_mask"), "labels")``
            for inputs that are passed by name.

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
        self,
        module: nn.Module,
        data: Any,
        loss: Callable[[Any, Tensor], Tensor] | None = None,
        *,
        batch: int = 64,
        sampling: str = "iid",
        evaluate: int | None = None,
        micro_batch: int | None = None,
        test: Any = None,
        validation: float = 0.0,
        evaluate_held_out: int | None = None,
        metrics: Mapping[str, Callable[[Any, Tensor], Tensor]] | None = None,
        columns: Columns | None = None,
    ) -> None:
        counts = {"evaluate": evaluate, "micro_batch": micro_batch, "evaluate_held_out": evaluate_held_out}
        for name, value in counts.items():
            valid = value is None or (isinstance(value, int) and value >= 1)
            require(name, value, valid, "an integer >= 1, or None")
        _require_module(module)
        self.metrics = _checked_metrics(metrics)
        self.module = copy.deepcopy(module)
        tracking = set(map(id, tracking_layers(self.module)))
        self._tracking = [name for name, layer in self.module.named_modules() if id(layer) in tracking]
        self.training = FlatModule(stop_tracking(copy.deepcopy(module)))
        self.evaluated = FlatModule(copy.deepcopy(module).eval())
        self.blocks = Blocks.of_module(module)
        self.dim = self.training.dim
        require("module", module, self.dim > 0, "a module with parameters to train")

        self.data, self.parts = data, parts_of(data, test, validation, evaluate, columns)
        require("metrics", list(self.metrics), self.parts.held_out is not None or not self.metrics,
                "None without held-out data, on which they are taken: give test= or validation=")  # fmt: skip
        self.evaluate, self.evaluate_held_out = evaluate, evaluate_held_out
        self.minibatches = Minibatches(len(self.parts.judged), batch, sampling)
        self.micro_batch = micro_batch
        self.evaluation_rows = _EVALUATION_ROWS
        self.loss_of_batch: Value = loss or (_cross_entropy if self.parts.has_classes else _half_mse)
        self._takes_many_runs = True

    def fingerprint(self) -> str:
        """The data, the module with its shapes and all that is not trained, and the name of the loss.

        Not the first parameters: they are random, and a run that goes on has better ones.
        """
        contents = hashlib.sha256(self.parts.judged.fingerprint())
        trained = {block.name: block.shape for block in self.blocks.parts}
        contents.update(repr(list(trained.items())).encode())
        fixed = [part for name, part in self.module.state_dict().items() if name not in trained]
        for part in fixed:
            contents.update(part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        loss = getattr(self.loss_of_batch, "__name__", type(self.loss_of_batch).__name__)
        return f"{self.module} {loss} {contents.hexdigest()}"

    def start(self) -> Tensor:
        """The module's own parameters, as they were when the problem was made."""
        return FlatModule(self.module).vector()

    def module_at(self, x: Tensor) -> nn.Module:
        """A copy of the module with the parameters of a vector ``(dim,)``, and batch norm's statistics there."""
        require("x", tuple(x.shape), x.shape == (self.dim,), f"a vector of shape ({self.dim},)")
        module = FlatModule(self.module).copy_at(x)
        self._prepare(x)
        for name in self._tracking:
            module.get_submodule(name).load_state_dict(
                dict(self.evaluated.module.get_submodule(name).named_buffers()), strict=False
            )
        return module

    # ---- Samples

    def samples(self, seed: int, first: int, count: int) -> Tensor:
        """Row numbers, ``(count, batch)``; of a stream of batches its seed and the batch's number, ``(count, 2)``."""
        if isinstance(self.parts.train, Batches):
            return torch.stack([torch.full((count,), seed), torch.arange(first, first + count)], dim=-1)
        return self.minibatches.draw(seed, first, count)

    def samples_of_shard(self, seed: int, first: int, count: int, shard: int, shards: int) -> Tensor:
        """The same from every so many rows only, beginning with row number ``shard``."""
        if isinstance(self.parts.train, Batches):
            raise ValueError(f"data_shards must be None, got {shards}: a stream of batches has no rows to share out; "
                             "every worker has a seed of its own")  # fmt: skip
        return self.minibatches.draw_from(range(shard, self.minibatches.rows, shards), seed, first, count)

    def labels(self, samples: Tensor) -> Tensor | None:
        """The classes of those rows, where the data set has them in memory."""
        return None if self.parts.labels is None else self.parts.labels[samples]

    @property
    def on_device(self) -> bool:
        """Whether a gradient is work of the device alone: a GPU can then be told to repeat it."""
        return self.parts.train.on_device

    def _rows(self, sample: Tensor) -> Rows:
        """The inputs and targets of a sample."""
        return self.parts.train.rows(sample)

    # ---- Gradients

    def gradient(self, x: Tensor, sample: Tensor) -> Tensor:
        """For one run by plain autograd; for several through ``torch.func``, over runs and streams at once."""
        runs = x.numel() // self.dim
        if runs == 1 and not torch.compiler.is_compiling():
            return self.gradient_of_one(x.reshape(-1), sample.reshape(-1)).view(x.shape)
        streams = sample.dim() - 1
        stacked = x.reshape(*sample.shape[:-1], -1, self.dim)

        def loss(vector: Tensor, inputs: Inputs, targets: Tensor) -> Tensor:
            return self.loss_of_batch(self.training.call(vector, inputs), targets)

        def at_once() -> Tensor:
            function = vmap(grad(loss), in_dims=(0, None, None), randomness="different")
            for _ in range(streams):
                function = vmap(function, randomness="different")
            return self._over_pieces(self._rows(sample), streams, lambda *piece: function(stacked, *piece))

        def one_by_one() -> Tensor:
            samples = sample.reshape(-1, sample.shape[-1])
            points = stacked.reshape(len(samples), -1, self.dim)
            rows = map(self._rows, samples)
            return torch.stack([self._gradient_on(x, of) for xs, of in zip(points, rows, strict=True) for x in xs])

        if torch.compiler.is_compiling():
            return at_once().reshape(x.shape)
        return self._over_runs(runs, at_once, one_by_one).reshape(x.shape)

    def gradient_of_one(self, x: Tensor, sample: Tensor, out: Tensor | None = None) -> Tensor:
        """The gradient at one vector ``(dim,)``, as a worker computes it; into ``out``, if there is room for it."""
        return self._gradient_on(x, self._rows(sample), out)

    def _gradient_on(self, x: Tensor, rows: Rows, out: Tensor | None = None) -> Tensor:
        if self.micro_batch is None or len(rows[1]) <= self.micro_batch:
            return self.training.gradient(x, *rows, self.loss_of_batch, out)
        whole = self._over_pieces(rows, 0, lambda part, of: self.training.gradient(x, part, of, self.loss_of_batch))
        return whole if out is None else out.copy_(whole)

    def _over_pieces(self, rows: Rows, dimension: int, gradient: Callable[[Inputs, Tensor], Tensor]) -> Tensor:
        """The mean of the gradients on pieces of a minibatch, weighted by their rows, which lie along a dimension."""
        inputs, targets = rows
        count = targets.shape[dimension]
        size = count if self.micro_batch is None else min(self.micro_batch, count)
        if size == count:
            return gradient(inputs, targets)
        total: Tensor | None = None
        for first in range(0, count, size):
            length = min(size, count - first)
            part = map_inputs(partial(torch.narrow, dim=dimension, start=first, length=length), inputs)
            piece = length / count * gradient(part, targets.narrow(dimension, first, length))
            total = piece if total is None else total + piece
        assert total is not None
        return total

    def _over_runs(self, runs: int, at_once: Callable[[], Result], one_by_one: Callable[[], Result]) -> Result:
        """All runs at once where that can be done; a single one always by itself."""
        if runs == 1 or not self._takes_many_runs:
            return one_by_one()
        try:
            return at_once()
        except RuntimeError as error:  # torch.func's own, or one of the module's, which then comes again
            result = one_by_one()
            self._takes_many_runs = False
            reason = str(error).strip().partition("\n")[0]
            warnings.warn(f"torch.func cannot take {runs} runs of {type(self.module).__name__} at once, so they are "
                          f"taken one after another: {reason}", stacklevel=2)  # fmt: skip
            return result

    # ---- Evaluation

    def _prepare(self, x: Tensor) -> None:
        """Write a vector into the module that is evaluated, with the statistics that batch norm has there."""
        self.evaluated.write(x)
        if self._tracking:
            layers = [self.evaluated.module.get_submodule(name) for name in self._tracking]
            batches = self._chunks(self.parts.judged, _STATISTICS_ROWS, max(2, self.minibatches.batch))
            recompute(self.evaluated, layers, (inputs for inputs, _, _ in batches))  # type: ignore[arg-type]

    def _chunks(self, source: Source, first: int | None, size: int) -> Iterator[tuple[Inputs, Tensor, int]]:
        count = len(source) if first is None else min(first, len(source))
        for numbers in torch.arange(count).split(size):
            yield *source.rows(numbers), len(numbers)

    @torch.no_grad()
    def _means(self, x: Tensor, questions: list[Question]) -> dict[str, Tensor]:
        """Means over the rows of sources, each chunk of which is looked at once; float64, ``(*runs, 1)``."""
        vectors = x.reshape(-1, self.dim)

        def collected(
            of_chunk: Callable[[Inputs, Tensor, Mapping[str, Value]], dict[str, Tensor]],
        ) -> dict[str, Tensor]:
            means: dict[str, Tensor] = {}
            for source, first, wanted in questions:
                seen = 0
                for inputs, targets, rows in self._chunks(source, first, self.evaluation_rows):
                    seen += rows
                    for name, value in of_chunk(inputs, targets, wanted).items():
                        means[name] = means.get(name, 0.0) + value.double() * rows
                for name in wanted:
                    means[name] = means[name] / seen
            return means

        def at_once() -> dict[str, Tensor]:
            def of_run(
                vector: Tensor, inputs: Inputs, targets: Tensor, wanted: Mapping[str, Value]
            ) -> dict[str, Tensor]:
                output = self.evaluated.call(vector, inputs)
                return {name: value(output, targets) for name, value in wanted.items()}

            many = vmap(of_run, in_dims=(0, None, None, None), randomness="different")
            return collected(lambda inputs, targets, wanted: many(vectors, inputs, targets, wanted))

        def one_by_one() -> dict[str, Tensor]:
            def of_chunk(inputs: Inputs, targets: Tensor, wanted: Mapping[str, Value]) -> dict[str, Tensor]:
                output = self.evaluated.output(inputs)
                return {name: _number(name, value(output, targets)) for name, value in wanted.items()}

            by_run = []
            for vector in vectors:
                self._prepare(vector)
                by_run.append(collected(of_chunk))
            return {name: torch.stack([means[name] for means in by_run]) for name in by_run[0]}

        means = one_by_one() if self._tracking else self._over_runs(len(vectors), at_once, one_by_one)
        return {name: value.reshape(*x.shape[:-1], 1) for name, value in means.items()}

    def measure(self, x: Tensor, part: str | None = None) -> Measures:
        """Loss, held-out loss, accuracy and metrics, each part of the data gone through once.

        Args:
            x: points, ``(*runs, dim)``.
            part: which data is held out: "validation" or "test"; by default the validation part if there is one.
        """
        parts = {"validation": self.parts.validation, "test": self.parts.test}
        there = [name for name, source in parts.items() if source is not None]
        require("part", part, part is None or part in there, f"None or among {', '.join(there) or 'none'}")
        held_out = self.parts.held_out if part is None else parts[part]
        questions: list[Question] = [(self.parts.judged, self.evaluate, {"loss": self.loss_of_batch})]
        if held_out is not None:
            asked: dict[str, Value] = {"test_loss": self.loss_of_batch}
            asked |= {"accuracy": _accuracy} if self.parts.has_classes else {}
            asked |= {f"metric {name}": value for name, value in self.metrics.items()}
            questions.append((held_out, self.evaluate_held_out, asked))
        means = self._means(x, questions)
        metrics = {name: means[f"metric {name}"] for name in self.metrics if f"metric {name}" in means}
        return Measures(means["loss"], means.get("accuracy"), means.get("test_loss"), metrics)

    def loss(self, x: Tensor) -> Tensor:
        """The mean training loss, over all rows or the first ``evaluate`` ones."""
        return self._means(x, [(self.parts.judged, self.evaluate, {"loss": self.loss_of_batch})])["loss"]

    def test_loss(self, x: Tensor) -> Tensor | None:
        """The mean loss on the held-out data, float64, ``(*runs, 1)``; None without any."""
        return self._of_held_out(x, self.loss_of_batch)

    def accuracy(self, x: Tensor) -> Tensor | None:
        """The share of held-out rows (of their targets, if they have several) whose largest output is their class."""
        return self._of_held_out(x, _accuracy) if self.parts.has_classes else None

    def _of_held_out(self, x: Tensor, value: Value) -> Tensor | None:
        if self.parts.held_out is None:
            return None
        return self._means(x, [(self.parts.held_out, self.evaluate_held_out, {"value": value})])["value"]

    # ---- Elsewhere

    def to(self, device: torch.device | str) -> ModuleProblem:
        """A copy on the device."""
        moved = copy.copy(self)
        moved.module = copy.deepcopy(self.module).to(device)
        moved.training, moved.evaluated = self.training.to(device), self.evaluated.to(device)
        moved.parts = self.parts.to(device)
        return moved

    def __repr__(self) -> str:
        batches = self.minibatches
        return (
            f"{type(self).__name__}({type(self.module).__name__} with {self.dim} parameters, {self.parts.name}, "
            f"batch={batches.batch}, sampling={batches.sampling!r})"
        )


def _require_module(module: object) -> None:
    if isinstance(module, type) and issubclass(module, nn.Module):
        raise ValueError(f"module must be a module, got the class {module.__name__}: call it, {module.__name__}(...)")
    require("module", type(module).__name__, isinstance(module, nn.Module), "a torch.nn.Module")


def _checked_metrics(metrics: Mapping[str, Value] | None) -> dict[str, Value]:
    given = dict(metrics or {})
    for name, value in given.items():
        require("metrics", given, isinstance(name, str) and callable(value), "functions by their names")
        taken = ("loss", "test_loss", "accuracy", "step", "excess_loss")
        require("metrics", name, name not in taken, f"other names than {', '.join(taken)}")
    return given


def _number(name: str, value: Any) -> Tensor:
    """What a loss or a metric is on a batch: one number."""
    number = torch.as_tensor(value)
    if number.numel() != 1:
        raise ValueError(f"{name.removeprefix('test_')} must return one number, the mean over the batch, got a tensor "
                         f"of shape {tuple(number.shape)}")  # fmt: skip
    return number


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
