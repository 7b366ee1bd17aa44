"""Rows of a sparse matrix that become dense when they are taken, a minibatch at a time."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import scipy.sparse
import torch
from scipy.sparse.linalg import svds
from torch import Tensor

_DENSE_GRAM = 1000
"""Up to this many rows or columns the Gram matrix is made, beyond it its largest eigenvalue is found by iteration."""


@dataclass(frozen=True, eq=False)
class SparseRows:
    """A sparse matrix (compressed rows) that is indexed and split like a dense tensor, and gives dense tensors.

    >>> rows = SparseRows.of_tensor(torch.tensor([[0.0, 2.0], [0.0, 0.0], [3.0, 0.0]]).to_sparse(), bias=True)
    >>> rows[torch.tensor([2, 0])]
    tensor([[3., 0., 1.],
            [0., 2., 1.]])
    """

    starts: Tensor  #: Where each row starts in the two below; one more for the end.
    columns: Tensor
    values: Tensor
    width: int
    bias: bool = False  #: Whether a column of ones follows the stored ones; it is counted in the width.

    @staticmethod
    def of_tensor(matrix: Tensor, *, bias: bool = False) -> "SparseRows":
        """The rows of a sparse tensor in torch's coordinate format, with a column of ones for a bias."""
        matrix = matrix.coalesce()  # sorted by rows
        row, columns = matrix.indices()
        counts = torch.bincount(row, minlength=matrix.shape[0])
        starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        return SparseRows(starts, columns.contiguous(), matrix.values(), matrix.shape[1] + bias, bias)

    def to(self, device: torch.device | str) -> "SparseRows":
        starts, columns, values = (part.to(device) for part in (self.starts, self.columns, self.values))
        return SparseRows(starts, columns, values, self.width, self.bias)

    @property
    def shape(self) -> torch.Size:
        return torch.Size([len(self), self.width])

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, rows: Tensor) -> Tensor:
        """Those rows, dense, shape ``(*rows.shape, width)``."""
        flat = rows.to(self.device).reshape(-1)
        first, counts = self.starts[flat], self.starts[flat + 1] - self.starts[flat]
        row = torch.repeat_interleave(torch.arange(len(flat), device=self.device), counts)
        within = torch.arange(len(row), device=self.device) - (counts.cumsum(0) - counts)[row]
        entry = first[row] + within
        dense = self.values.new_zeros(len(flat), self.width)
        dense[row, self.columns[entry]] = self.values[entry]
        if self.bias:
            dense[:, -1] = 1
        return dense.view(*rows.shape, self.width)

    def split(self, size: int) -> Iterator[Tensor]:
        """All rows in their order, ``size`` at a time, each part dense only while it is used."""
        return (self[rows] for rows in torch.arange(len(self)).split(size))

    def gram_extremes(self, weights: Tensor | None) -> tuple[float, float]:
        """The smallest and the largest eigenvalue of the mean of z zᵀ; of large ones 0 for the smallest."""
        parts = (part.cpu().numpy() for part in (self.values.double(), self.columns, self.starts))
        matrix = scipy.sparse.csr_array(tuple(parts), shape=(len(self), self.width))
        if self.bias:
            matrix = scipy.sparse.hstack([matrix[:, :-1], np.ones((len(self), 1))], format="csr")
        if weights is not None:
            matrix = scipy.sparse.diags_array(weights.double().sqrt().cpu().numpy()) @ matrix
        rows, columns = matrix.shape
        if min(rows, columns) > _DENSE_GRAM:
            start = np.ones(min(rows, columns))
            return 0.0, float(svds(matrix, k=1, v0=start, return_singular_vectors=False)[0] ** 2 / rows)
        gram = (matrix.T @ matrix if columns <= rows else matrix @ matrix.T).toarray() / rows
        eigenvalues = np.linalg.eigvalsh(gram).clip(min=0)
        return float(eigenvalues[0]) if columns <= rows else 0.0, float(eigenvalues[-1])
