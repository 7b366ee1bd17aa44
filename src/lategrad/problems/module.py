"""Any ``torch.nn.Module`` with a loss and a data set, as a function of one flat parameter vector."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from lategrad.problems.data import Dataset
from lategrad.problems.minibatches import Minibatches
from lategrad.rules.blocks import Blocks
from lategrad.support.validation import require

_EVALUATION_ROWS = 4096  # taken at once, for each run

Value = Callable[[Tensor, Tensor], Tensor]


class ModuleProblem:
    """Train a module: many parameter vectors at once, through ``torch.func``.

    Modules that keep statistics of the batches they saw (batch norm with running averages) are refused:
    with late gradients there is no one history for them to average over. Losses and accuracies are taken in
    evaluation mode. Parameters that do not require a gradient stay as they are. Random layers (dropout) draw from
    torch's global generator, so that runs with them are not a function of the seed alone.

    Args:
        module: called with a minibatch of rows of the data set; reshape them inside (``nn.Unflatten``).
        loss: from (module output, targets) to the mean loss of the batch; by default cross-entropy for
            classes, which are scored along the last dimension of the output (targets may have any shape), and half
            the mean squared error otherwise.
        data: the data set.
        batch: rows in a minibatch.
        sampling: "iid" or "epochs".
        evaluate: how many training rows the reported loss is the mean over, the first ones; by default all.
        micro_batch: rows whose gradient is taken at once; a larger minibatch is cut into pieces, one after another,
            so that it needs no more memory. The loss must be a mean over rows.

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
        data: Dataset,
        loss: Callable[[Tensor, Tensor], Tensor] | None = None,
        *,
        batch: int = 64,
        sampling: str = "iid",
        evaluate: int | None = None,
        micro_batch: int | None = None,
    ) -> None:
        for name, value in (("evaluate", evaluate), ("micro_batch", micro_batch)):
            valid = value is None or (isinstance(value, int) and value >= 1)
            require(name, value, valid, "an integer >= 1, or None")
        buffers = [name for name, _ in module.named_buffers() if "running" in name or "num_batches" in name]
        require("module", buffers, not buffers, "without running statistics (track_running_stats=False)")
        self.module = copy.deepcopy(module)
        self.evaluated = copy.deepcopy(module).eval()
        self.data = data
        self.minibatches = Minibatches(len(data.x_train), batch, sampling)
        self.loss_of_batch = loss or (_cross_entropy if data.classes is not None else _half_mse)
        self.evaluate = evaluate
        self.micro_batch = micro_batch or batch
        self.evaluation_rows = _EVALUATION_ROWS
        self.blocks = Blocks.of_module(module)
        self.shapes = {name: p.shape for name, p in module.named_parameters() if p.requires_grad}
        require("module", module, len(self.shapes) > 0, "a module with parameters to train")
        self.dim = sum(shape.numel() for shape in self.shapes.values())
        self.labels_on_cpu = data.y_train

    def fingerprint(self) -> str:
        """The data, the module with its shapes and all that is not trained, and the name of the loss.

        Not the first parameters: they are random, and a run that goes on has better ones.
        """
        contents = hashlib.sha256(repr(list(self.shapes.items())).encode())
        fixed = [part for name, part in self.module.state_dict().items() if name not in self.shapes]
        for part in (self.data.x_train, self.data.y_train, *fixed):
            contents.update(part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        loss = getattr(self.loss_of_batch, "__name__", type(self.loss_of_batch).__name__)
        return f"{self.module} {loss} {contents.hexdigest()}"

    def start(self) -> Tensor:
        """The module's own parameters, as they were when the problem was made."""
        return torch.cat([p.detach().flatten() for p in self.module.parameters() if p.requires_grad])

    def _parameters(self, x: Tensor) -> dict[str, Tensor]:
        pieces = torch.split(x, [shape.numel() for shape in self.shapes.values()], dim=-1)
        return {name: piece.view(shape) for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True)}

    def module_at(self, x: Tensor) -> nn.Module:
        """A copy of the module with the parameters of a vector of shape ``(dim,)``."""
        module = copy.deepcopy(self.module)
        module.load_state_dict(self._parameters(x.detach().clone()), strict=False)
        return module

    def samples(self, seed: int, first: int, count: int) -> Tensor:
        """Row numbers, ``(count, batch)``."""
        return self.minibatches.draw(seed, first, count)

    def labels(self, samples: Tensor) -> Tensor | None:
        """The classes of those rows."""
        return None if self.data.classes is None else self.labels_on_cpu[samples]

    def _batch_loss(self, x: Tensor, rows: Tensor, targets: Tensor) -> Tensor:
        return self.loss_of_batch(functional_call(self.module, self._parameters(x), (rows,)), targets)

    def gradient(self, x: Tensor, sample: Tensor) -> Tensor:
        """``torch.func.grad``, vectorised over runs and streams."""
        function = vmap(grad(self._batch_loss), in_dims=(0, None, None), randomness="different")
        streams = sample.shape[:-1]
        stacked = x.reshape(*streams, -1, self.dim)
        for _ in streams:
            function = vmap(function, randomness="different")
        pieces = sample.split(self.micro_batch, dim=-1)
        result: Tensor = function(stacked, *self._rows(pieces[0]))
        if len(pieces) > 1:
            shares = [piece.shape[-1] / sample.shape[-1] for piece in pieces]
            result = shares[0] * result
            for piece, share in zip(pieces[1:], shares[1:], strict=True):
                result = result + share * function(stacked, *self._rows(piece))
        return result.reshape(x.shape)

    def _rows(self, sample: Tensor) -> tuple[Tensor, Tensor]:
        """The inputs and targets of row numbers of any shape."""
        return self.data.x_train[sample], self.data.y_train[sample]

    def _mean_over_rows(self, x: Tensor, rows: Tensor, targets: Tensor, value: Value) -> Tensor:
        """The mean over all rows of ``value(outputs, targets)``, in chunks; float64, ``(*runs, 1)``."""

        def of_one_run(vector: Tensor, part: Tensor, target: Tensor) -> Tensor:
            return value(functional_call(self.evaluated, self._parameters(vector), (part,)), target)

        total = torch.zeros(x.shape[:-1].numel(), dtype=torch.float64, device=x.device)
        with torch.no_grad():
            for part, target in zip(rows.split(self.evaluation_rows), targets.split(self.evaluation_rows), strict=True):
                mean = vmap(of_one_run, in_dims=(0, None, None), randomness="different")(
                    x.reshape(-1, self.dim), part, target
                )
                total += mean.double() * len(part)
        return (total / len(rows)).reshape(*x.shape[:-1], 1)

    def loss(self, x: Tensor) -> Tensor:
        """The mean training loss, over all rows or the first ``evaluate`` ones."""
        rows, targets = self.data.x_train[: self.evaluate], self.data.y_train[: self.evaluate]
        return self._mean_over_rows(x, rows, targets, self.loss_of_batch)

    def test_loss(self, x: Tensor) -> Tensor:
        """The mean loss on the test data, float64, ``(*runs, 1)``."""
        return self._mean_over_rows(x, self.data.x_test, self.data.y_test, self.loss_of_batch)

    def accuracy(self, x: Tensor) -> Tensor | None:
        """The share of test rows (of their targets, if they have several) whose largest output is their class."""
        if self.data.classes is None:
            return None
        return self._mean_over_rows(
            x,
            self.data.x_test,
            self.data.y_test,
            lambda outputs, target: (outputs.argmax(-1) == target).double().mean(),
        )

    def to(self, device: torch.device | str) -> ModuleProblem:
        """A copy on the device."""
        moved = copy.copy(self)
        moved.module = copy.deepcopy(self.module).to(device)
        moved.evaluated = copy.deepcopy(self.evaluated).to(device)
        moved.data = self.data._replace(
            **{name: getattr(self.data, name).to(device) for name in ("x_train", "y_train", "x_test", "y_test")}
        )
        return moved

    def __repr__(self) -> str:
        batches = self.minibatches
        return (
            f"{type(self).__name__}({type(self.module).__name__} with {self.dim} parameters, {self.data.name}, "
            f"batch={batches.batch}, sampling={batches.sampling!r})"
        )


def _cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.reshape(-1, output.shape[-1]), target.reshape(-1))


def _half_mse(output: Tensor, target: Tensor) -> Tensor:
    return 0.5 * (output.squeeze(-1) - target).square().mean()
