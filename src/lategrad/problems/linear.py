r"""Linear models on a data set: softmax regression, least squares, smoothed-hinge SVM.

The parameters are a matrix W of shape (outputs, features + 1), the last column a bias, flattened row by row.
With scores :math:`s = W z` for a row z of the data, every model here is

.. math:: f(W) = \frac1n \sum_i s_i\, \ell(W z_i, y_i) + \frac{\lambda}{2} \|W\|^2,
          \qquad \nabla = \frac1B \sum_{i \in \text{batch}} s_i\, \ell'(W z_i, y_i)\, z_i^\top + \lambda W,

with weights :math:`s_i` of the rows, 1 unless they are given, so that a gradient of many runs at once is two matrix
products around the residuals :math:`\ell'`.
"""

import copy
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from lategrad.problems.data import Dataset
from lategrad.problems.minibatches import Minibatches
from lategrad.problems.sparse_rows import SparseRows
from lategrad.support.runs import checksum, tensors
from lategrad.support.validation import require, require_number

_CHUNK = 4_000_000
"""Scores, or entries of rows made dense, held at once when all the data are evaluated: 16 MB in float32."""

_FEW_ROWS = 32
"""Rows of a minibatch below which products of many runs are written the other way round, and simulated in C."""

Self = TypeVar("Self", bound="LinearModel")
Value = Callable[[Tensor, Tensor], Tensor]
Rows = Tensor | SparseRows


class LinearModel(ABC):
    """Base of the three linear models; see the module.

    Args:
        data: the data set; its rows may be sparse tensors, of which only minibatches become dense.
        batch: rows in a minibatch.
        sampling: "iid" or "epochs" (:class:`~lategrad.problems.minibatches.Minibatches`).
        l2: the factor of the quadratic penalty, which makes the objective l2-strongly convex.
        dtype: of data and parameters.
        weights: of the training rows, >= 0; not normalised.
    """

    name: ClassVar[str]
    curvature: ClassVar[float]  #: The largest second derivative of the loss in the scores.
    residual_in_c: ClassVar[str]  #: :meth:`residual` in C, for one row: overwrites its scores s, given its targets y.

    def __init__(
        self, data: Dataset, *, batch: int = 64, sampling: str = "iid", l2: float = 0.0,
        dtype: torch.dtype = torch.float32, weights: Tensor | None = None,
    ) -> None:  # fmt: skip
        require_number("l2", l2, low=0)
        require("dtype", dtype, dtype in (torch.float32, torch.float64), "torch.float32 or torch.float64")
        self.data_name, self.classes, self.l2 = data.name, data.classes, l2
        self.minibatches = Minibatches(len(data.x_train), batch, sampling)
        self.train, self.test = (_with_bias(x.to(dtype)) for x in (data.x_train, data.x_test))
        self.y_train, self.y_test = data.y_train, data.y_test
        self.targets, self.test_targets = (self._as_targets(y, dtype) for y in (data.y_train, data.y_test))
        self.outputs = self.targets.shape[-1]
        self.dim = self.outputs * self.train.shape[-1]
        self.tensor_shapes = {"weight": (self.outputs, self.train.shape[-1])}  # the last column is the bias
        self.weights = None if weights is None else weights.to(dtype)
        if weights is not None:
            require("weights", tuple(weights.shape), weights.shape == (len(self.train),), "one for each training row")
            require("weights", weights, (weights >= 0) & weights.isfinite(), "finite and >= 0")

    def _as_targets(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        """One column for every output: here the classes, one-hot."""
        require("data", self.data_name, self.classes is not None, "a data set with classes, not for regression")
        return torch.nn.functional.one_hot(y, self.classes or -1).to(dtype)

    @abstractmethod
    def residual(self, scores: Tensor, targets: Tensor) -> Tensor:
        """The derivative of the loss in the scores; outputs are the dimension before the last."""

    @abstractmethod
    def row_loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        """The loss of every row; the outputs' dimension (before the last) is gone."""

    def start(self) -> Tensor:
        return torch.zeros(self.dim, dtype=self.train.dtype, device=self.train.device)

    def samples(self, seed: int, first: int, count: int) -> Tensor:
        """Row numbers, ``(count, batch)``."""
        return self.minibatches.draw(seed, first, count)

    def samples_of_shard(self, seed: int, first: int, count: int, shard: int, shards: int) -> Tensor:
        """The same from rows ``shard, shard + shards, ...`` only."""
        return self.minibatches.draw_from(range(shard, self.minibatches.rows, shards), seed, first, count)

    def labels(self, samples: Tensor) -> Tensor | None:
        return None if self.classes is None else self.y_train[samples]

    def gradient(self, x: Tensor, sample: Tensor) -> Tensor:
        """Two matrix products; the runs of a stream are stacked into one large product each."""
        streams = sample.shape[:-1]
        rows, targets = self.train[sample], self.targets[sample].mT
        stacked = x.reshape(*streams, -1, self.train.shape[-1])  # (*streams, runs x outputs, features)
        # The same product either way; a few rows times many runs is twice as fast as many runs times a few rows.
        product = (rows @ stacked.mT).mT if sample.shape[-1] < _FEW_ROWS else stacked @ rows.mT
        scores = product.unflatten(-2, (-1, self.outputs))
        residual = self.residual(scores, targets.unsqueeze(-3)) / sample.shape[-1]
        if self.weights is not None:
            residual = residual * self.weights[sample][..., None, None, :]
        grad = (residual.flatten(-3, -2) @ rows).reshape(x.shape)
        return grad + self.l2 * x if self.l2 else grad

    def gradient_source(self) -> tuple[str, list[Tensor]] | None:
        """The gradient in C; None for sparse rows, large batches, and subclasses with a gradient of their own."""
        batch = self.minibatches.batch
        if isinstance(self.train, SparseRows) or batch >= _FEW_ROWS or "residual_in_c" not in vars(type(self)):
            return None
        group = max(k for k in range(1, 6) if self.outputs % k == 0)
        sizes = f"BATCH = {batch}, OUTPUTS = {self.outputs}, FEATURES = {self.train.shape[-1]}, GROUP = {group}"
        real = "double" if self.train.dtype == torch.float64 else "float"
        weight = "1" if self.weights is None else "((const real*)data[2])[sample[n]]"
        code = Path(__file__).with_name("linear_gradient.cpp").read_text(encoding="utf-8")
        code = code.replace("RESIDUAL", self.residual_in_c).replace("WEIGHT", weight)
        code = f"typedef {real} real;\nenum {{ {sizes} }};\nstatic const real L2 = {float(self.l2)!r};\n{code}"
        return code, [value.contiguous() for value in tensors((self.train, self.targets, self.weights))]

    def _mean(self, x: Tensor, rows: Rows, targets: Tensor, value: Value, weights: Tensor | None = None) -> Tensor:
        """The mean over all rows of ``value(scores, targets)`` times weight, in chunks; float64, ``(*runs, 1)``."""
        stacked = x.reshape(-1, rows.shape[-1])
        total = torch.zeros(len(stacked) // self.outputs, dtype=torch.float64, device=x.device)
        for part, target, weight in _chunks(max(1, _CHUNK // len(stacked)), rows, targets, weights):
            scores = (stacked @ part.mT).unflatten(0, (-1, self.outputs))
            total += (value(scores, target.mT) * weight).sum(-1, dtype=torch.float64)
        return (total / len(rows)).reshape(*x.shape[:-1], 1)

    def loss(self, x: Tensor) -> Tensor:
        mean = self._mean(x, self.train, self.targets, self.row_loss, self.weights)
        return mean + 0.5 * self.l2 * x.double().square().sum(-1, keepdim=True)

    def value_and_gradient(self, x: Tensor) -> tuple[float, Tensor]:
        """The objective and its gradient on all the data at one vector, in the dtype of ``x``; sums are in float64."""
        matrix = x.view(self.outputs, -1)
        value, gradient = 0.0, torch.zeros_like(matrix, dtype=torch.float64)
        for rows, targets, weight in _chunks(1000, self.train, self.targets, self.weights):
            part, target = rows.to(x.dtype), targets.to(x.dtype).mT
            scores = matrix @ part.mT
            value += (self.row_loss(scores, target) * weight).sum(dtype=torch.float64).item()
            gradient += self.residual(scores, target) * weight @ part
        count, penalty = len(self.train), 0.5 * self.l2 * (x @ x).item()
        return value / count + penalty, gradient.flatten() / count + self.l2 * x

    def fingerprint(self) -> str:
        return f"{self.name} l2={self.l2!r} data={checksum((self.train, self.targets, self.weights))}"

    def accuracy(self, x: Tensor) -> Tensor | None:
        """The share of test rows whose largest score is their class."""
        if self.classes is None:
            return None
        return self._mean(x, self.test, self.test_targets, lambda scores, y: scores.argmax(-2) == y.argmax(-2))

    @cached_property
    def _gram_extremes(self) -> tuple[float, float]:
        """The smallest and the largest eigenvalue of the weighted mean of z zᵀ over the training rows."""
        if isinstance(self.train, SparseRows):
            return self.train.gram_extremes(self.weights)
        rows = self.train.double()
        weighted = rows if self.weights is None else rows * self.weights.double().unsqueeze(-1)
        eigenvalues = torch.linalg.eigvalsh(rows.mT @ weighted / len(rows)).clamp_min(0)
        return eigenvalues[0].item(), eigenvalues[-1].item()

    @property
    def smoothness(self) -> float:
        """L: the curvature of the loss times the largest eigenvalue of the mean of z zᵀ, plus l2."""
        return self.curvature * self._gram_extremes[1] + self.l2

    @property
    def strong_convexity(self) -> float:
        return self.l2

    def to(self: Self, device: torch.device | str) -> Self:
        moved = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Tensor | SparseRows) and not name.startswith("y_"):  # labels stay on the CPU
                setattr(moved, name, value.to(device))
        return moved

    def __repr__(self) -> str:
        batch, sampling = self.minibatches.batch, self.minibatches.sampling
        return f"{type(self).__name__}({self.data_name}, batch={batch}, sampling={sampling!r}, l2={self.l2})"


def _chunks(size: int, rows: Rows, targets: Tensor, weights: Tensor | None) -> Iterator[tuple[Tensor, Tensor, Any]]:
    """All rows with their targets and weights, a chunk at a time."""
    if isinstance(rows, SparseRows):
        size = max(1, min(size, _CHUNK // rows.width))
    weight_chunks = itertools.repeat(1.0) if weights is None else weights.split(size)
    return zip(rows.split(size), targets.split(size), weight_chunks, strict=False)


def _with_bias(x: Tensor) -> Rows:
    if x.is_sparse:
        return SparseRows.of_tensor(x, bias=True)
    return torch.cat([x, x.new_ones(len(x), 1)], dim=-1).contiguous()


class SoftmaxRegression(LinearModel):
    r"""Multi-class logistic regression, :math:`\ell(s, y) = \log \sum_c e^{s_c} - s_y`.

    >>> from lategrad.problems import load
    >>> problem = SoftmaxRegression(load("digits"))
    >>> problem.dim, problem.loss(problem.start()).item()  # 10 x (64 + 1), and log 10
    (650, 2.302585...)
    """

    name = "softmax"
    curvature = 0.5
    residual_in_c = """
    real top = s[0], total = 0;
    for (int o = 1; o < OUTPUTS; ++o) top = s[o] > top ? s[o] : top;
    for (int o = 0; o < OUTPUTS; ++o) total += s[o] = exp(s[o] - top);
    for (int o = 0; o < OUTPUTS; ++o) s[o] = s[o] / total - y[o];"""

    def residual(self, scores: Tensor, targets: Tensor) -> Tensor:
        return torch.softmax(scores, dim=-2) - targets

    def row_loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        return torch.logsumexp(scores, dim=-2) - (scores * targets).sum(-2)


class LeastSquares(LinearModel):
    r"""Least squares, :math:`\ell(s, y) = \tfrac12 \|s - y\|^2`; classes are fitted as one-hot vectors."""

    name = "least-squares"
    curvature = 1.0
    residual_in_c = "for (int o = 0; o < OUTPUTS; ++o) s[o] -= y[o];"

    def _as_targets(self, y: Tensor, dtype: torch.dtype) -> Tensor:
        return y.to(dtype).unsqueeze(-1) if self.classes is None else super()._as_targets(y, dtype)

    def residual(self, scores: Tensor, targets: Tensor) -> Tensor:
        return scores - targets

    def row_loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        return 0.5 * (scores - targets).square().sum(-2)

    @property
    def strong_convexity(self) -> float:
        """H: the smallest eigenvalue of the mean of z zᵀ, plus l2."""
        return self._gram_extremes[0] + self.l2


class SmoothedSVM(LinearModel):
    r"""Linear SVMs, one class against the rest, with the hinge smoothed over a width of 1.

    With the margin :math:`m = \pm s_c`, the loss of an output is 0 for m >= 1, :math:`(1-m)^2/2` for
    0 <= m <= 1 and 1/2 - m below.
    """

    name = "svm"
    curvature = 1.0
    residual_in_c = """
    for (int o = 0; o < OUTPUTS; ++o) {
      const real sign = 2 * y[o] - 1, margin = 1 - sign * s[o];
      s[o] = -sign * (margin < 0 ? 0 : margin > 1 ? 1 : margin);
    }"""

    def residual(self, scores: Tensor, targets: Tensor) -> Tensor:
        sign = 2 * targets - 1
        return -sign * (1 - sign * scores).clamp(0, 1)

    def row_loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        short = (1 - (2 * targets - 1) * scores).clamp_min(0)
        return torch.where(short <= 1, 0.5 * short.square(), short - 0.5).sum(-2)


MODELS: dict[str, type[LinearModel]] = {model.name: model for model in (SoftmaxRegression, LeastSquares, SmoothedSVM)}
"""The models by their names on the command line."""
