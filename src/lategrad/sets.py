r"""Convex sets and their exact Euclidean projections.

A set acts on the last dimension of a tensor of shape ``(*runs, d)``; all leading dimensions are runs.
Its parameters are floats, or tensors of shape ``(*runs, 1)`` (one value for each run) or ``(*runs, d)``.
Everything is branch-free, so that the same lines run batched, compiled and on a GPU. Norms and sums are
accumulated in float64, so that float32 entries of 1e30 do not overflow.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lategrad.support.options import Entry, entry_of, parse_spec
from lategrad.support.validation import NonNegative, Scalar, Validated, require

__all__ = ["Ball", "Box", "ConvexSet", "HalfSpace", "L1Ball", "Product", "Simplex", "WholeSpace"]


class ConvexSet(Protocol):
    r"""A closed convex set :math:`K \subseteq \mathbb{R}^d`.

    A set of your own has these members, by subclassing or not; :func:`lategrad.checks.check_set` tests them.
    """

    @property
    def diameter(self) -> Scalar:
        r"""The paper's D: :math:`\max_{x, y \in K} \|x - y\|`; ``inf`` when the set is not bounded."""

    def diameter_in(self, dim: int) -> Scalar:
        """The diameter in ``dim`` dimensions, for sets such as a box whose bounds are numbers."""
        return self.diameter

    def support(self, direction: Tensor) -> Tensor:
        r"""The support function :math:`\max_{u \in K} \langle \mathrm{direction}, u \rangle`.

        float64, shape ``(*runs, 1)``; ``inf`` where the set has no end in that direction.
        """

    def project(self, x: Tensor) -> Tensor:
        r"""The nearest point of the set: :math:`\Pi_K(x) = \arg\min_{u \in K} \|u - x\|`."""

    def contains(self, x: Tensor, tol: float = 1e-5) -> Tensor:
        """Whether each vector is in the set, up to ``tol`` relative to its size; bool, ``(*runs, 1)``."""


def norm(x: Tensor) -> Tensor:
    """Euclidean norm over the last dimension, kept; accumulated and returned in float64."""
    length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float64)
    return length


def _dot(x: Tensor, y: Tensor) -> Tensor:
    """Inner product over the last dimension, kept; accumulated and returned in float64."""
    return (x.double() * y).sum(-1, keepdim=True)


def _near_zero(violation: Tensor, size: Tensor, tol: float) -> Tensor:
    return violation <= tol * size.clamp_min(1.0)


@dataclass(frozen=True, eq=False)
class WholeSpace(ConvexSet):
    r"""All of :math:`\mathbb{R}^d`: no constraint.

    >>> WholeSpace().project(torch.tensor([3.0, 4.0]))
    tensor([3., 4.])
    """

    @property
    def diameter(self) -> float:
        return math.inf

    def project(self, x: Tensor) -> Tensor:
        return x

    def contains(self, x: Tensor, tol: float = 1e-5) -> Tensor:
        return torch.isfinite(x).all(-1, keepdim=True)

    def support(self, direction: Tensor) -> Tensor:
        return torch.where(norm(direction) > 0, math.inf, 0.0).double()


@dataclass(frozen=True, eq=False)
class Ball(Validated, ConvexSet):
    r"""The Euclidean ball :math:`\{u : \|u - c\| \le r\}`, :math:`\Pi(x) = c + \min(1, r/\|x-c\|)(x-c)`.

    Args:
        radius: r >= 0.
        center: c, the origin by default.

    >>> Ball(1.0).project(torch.tensor([3.0, 4.0]))
    tensor([0.6000, 0.8000])
    >>> Ball(1.0).diameter
    2.0
    """

    radius: NonNegative[Scalar]
    center: Tensor | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.center is not None:
            require("center", self.center, torch.isfinite(self.center), "finite")

    @property
    def diameter(self) -> Scalar:
        return 2 * self.radius

    def _from_center(self, x: Tensor) -> Tensor:
        return x if self.center is None else x - self.center.to(x.dtype)

    def project(self, x: Tensor) -> Tensor:
        """Shrink the vector from the centre to length ``radius`` where it is longer."""
        offset = self._from_center(x)
        length = norm(offset)
        on_sphere = offset * (self.radius / length).to(x.dtype)  # inf at the centre, where it is not used
        if self.center is not None:
            on_sphere = self.center.to(x.dtype) + on_sphere
        return torch.where(length > self.radius, on_sphere, x)

    def contains(self, x: Tensor, tol: float = 1e-5) -> Tensor:
        return _near_zero(norm(self._from_center(x)) - self.radius, norm(x), tol)

    def support(self, direction: Tensor) -> Tensor:
        r""":math:`\langle g, c \rangle + r \|g\|`."""
        reach = self.radius * norm(direction)
        return reach if self.center is None else reach + _dot(direction, self.center)


@dataclass(frozen=True, eq=False)
class Box(ConvexSet):
    r"""The box :math:`\{u : \mathrm{low} \le u \le \mathrm{high}\}`, coordinate by coordinate.

    Args:
        low: lower bound, a float for all coordinates or a tensor.
        high: upper bound, likewise.

    >>> Box(0.0, 1.0).project(torch.tensor([-2.0, 0.5, 7.0]))
    tensor([0.0000, 0.5000, 1.0000])
    """

    low: Scalar
    high: Scalar

    def __post_init__(self) -> None:
        low, high = torch.as_tensor(self.low), torch.as_tensor(self.high)
        require("low", self.low, torch.isfinite(low), "finite")
        require("high", self.high, torch.isfinite(high), "finite")
        require("low", self.low, low <= high, f"<= high = {self.high!r}")

    @property
    def diameter(self) -> Scalar:
        """The length of the diagonal; bounds that are numbers leave it to :meth:`diameter_in`."""
        width = torch.as_tensor(self.high, dtype=torch.float64) - torch.as_tensor(self.low)
        require("low, high", (self.low, self.high), width.dim() > 0 and width.shape[-1] > 1,
                "tensors of shape (d,) for the diameter to be known (it grows with the dimension)")  # fmt: skip
        return norm(width)

    def diameter_in(self, dim: int) -> Scalar:
        width = self.high - self.low
        if not isinstance(width, Tensor):
            return width * math.sqrt(dim)  # a number is good on every device
        return norm(width.double().expand(torch.broadcast_shapes(width.shape, (dim,))))

    def _bounds(self, like: Tensor) -> list[Tensor]:
        return [torch.as_tensor(bound, dtype=like.dtype, device=like.device) for bound in (self.low, self.high)]

    def project(self, x: Tensor) -> Tensor:
        low, high = self._bounds(x)
        return torch.minimum(torch.maximum(x, low), high)

    def contains(self, x: Tensor, tol: float = 1e-5) -> Tensor:
        return _near_zero(torch.maximum(self.low - x, x - self.high).amax(-1, keepdim=True), norm(x), tol)

    def support(self, direction: Tensor) -> Tensor:
        direction = direction.double()
        low, high = self._bounds(direction)
        return torch.maximum(direction * low, direction * high).sum(-1, keepdim=True)


def _project_on_simplex(x: Tensor, total: Scalar) -> Tensor:
    """Project on {u >= 0, sum u = total} by sorting: find theta with sum max(x - theta, 0) = total."""
    shifted = x - x.amax(-1, keepdim=True)  # the projection does not change, and 1e30 + 1 keeps its 1
    largest_first = shifted.sort(dim=-1, descending=True).values.double()
    k = torch.arange(1, x.shape[-1] + 1, dtype=torch.float64, device=x.device)
    theta = (largest_first.cumsum(-1) - total) / k  # the threshold if exactly the k largest are positive
    positive = (largest_first > theta).sum(-1, keepdim=True).clamp_min(1)
    return (shifted - theta.gather(-1, positive - 1)).clamp_min(0).to(x.dtype)


@dataclass(frozen=True, eq=False)
class Simplex(Validated, ConvexSet):
    r"""The scaled probability simplex :math:`\{u \ge 0 : \sum_j u_j = \mathrm{total}\}`.

    >>> Simplex().project(torch.tensor([0.4, 0.4, -9.0]))
    tensor([0.5000, 0.5000, 0.0000])
    """

    total: NonNegative[Scalar] = 1.0

    @property
    def diameter(self) -> Scalar:
        return math.sqrt(2) * self.total

    def project(self, x: Tensor) -> Tensor:
        """Subtract the one threshold after which the positive parts sum to ``total``; O(d log d)."""
        return _project_on_simplex(x, self.total)

    def contains(self, x: Tensor, tol: float = 1e-5) -> Tensor:
        sum_error = (x.sum(-1, keepdim=True, dtype=torch.float64) - self.total).abs()
        return _near_zero(torch.maximum(sum_error, -x.amin(-1, keepdim=True)), norm(x), tol)

    def support(self, direction: Tensor) -> Tensor:
        return self.total * direction.double().amax(-1, keepdim=True)


@dataclass(frozen=True, eq=False)
class L1Ball(Validated, ConvexSet):
    r"""The cross-polytope :math:`\{u : \sum_j |u_j| \le r\}`, whose projection makes vectors sparse.

    >>> L1Ball(1.0).project(torch.tensor([3.0, -2.5, 0.1]))
    tensor([ 0.7500, -0.2500,  0.0000])
    """

    radius: NonNegative[Scalar]

    @property
    def diameter(self) -> Scalar:
        return 2 * self.radius

    def project(self, x: Tensor) -> Tensor:
        """Project the absolute values on the simplex where their sum is too large; O(d log d)."""
        size = x.abs()
        outside = size.sum(-1, keepdim=True, dtype=torch.float64) > self.radius
        return torch.where(outside, x.sign() * _project_on_simplex(size, self.radius), x)

    def contains(self, x: Tensor, tol: float = 1e-5) -> Tensor:
        return _near_zero(x.abs().sum(-1, keepdim=True, dtype=torch.float64) - self.radius, norm(x), tol)

    def support(self, direction: Tensor) -> Tensor:
        return self.radius * direction.double().abs().amax(-1, keepdim=True)


@dataclass(frozen=True, eq=False)
class HalfSpace(ConvexSet):
    r"""The half-space :math:`\{u : \langle a, u \rangle \le b\}`.

    Args:
        normal: a, not zero.
        offset: b.

    >>> HalfSpace(torch.tensor([1.0, 0.0]), 1.0).project(torch.tensor([3.0, 4.0]))
    tensor([1., 4.])
    """

    normal: Tensor
    offset: Scalar

    def __post_init__(self) -> None:
        require("normal", self.normal, torch.isfinite(self.normal), "finite")
        require("normal", self.normal, norm(self.normal) > 0, "a vector that is not zero")
        require("offset", self.offset, torch.isfinite(torch.as_tensor(self.offset)), "finite")

    @property
    def diameter(self) -> float:
        return math.inf

    def _excess(self, x: Tensor) -> Tensor:
        return _dot(self.normal, x) - self.offset

    def project(self, x: Tensor) -> Tensor:
        r"""Step back along the normal by :math:`\max(0, \langle a, x\rangle - b) / \|a\|^2`."""
        back = self._excess(x).clamp_min(0) / norm(self.normal) ** 2
        return (x - back * self.normal).to(x.dtype)

    def contains(self, x: Tensor, tol: float = 1e-5) -> Tensor:
        return _near_zero(self._excess(x) / norm(self.normal), norm(x), tol)

    def support(self, direction: Tensor) -> Tensor:
        r""":math:`\lambda b` in the direction :math:`\lambda a`, :math:`\lambda \ge 0`; infinite in all others."""
        along = _dot(direction, self.normal) / norm(self.normal) ** 2
        finite = (along >= 0) & (norm(direction - along * self.normal) <= 1e-12 * norm(direction))
        return torch.where(finite, along * self.offset, math.inf)


@dataclass(frozen=True, eq=False, init=False)
class Product(ConvexSet):
    r"""A product :math:`K_1 \times K_2 \times \dots`: consecutive slices of the vector, a set for each.

    Args:
        parts: pairs ``(set, size)``; the sizes add up to the dimension.

    >>> Product((Simplex(), 2), (Ball(1.0), 2)).project(torch.tensor([5.0, 5.0, 3.0, 4.0]))
    tensor([0.5000, 0.5000, 0.6000, 0.8000])
    """

    parts: tuple[tuple[ConvexSet, int], ...]

    def __init__(self, *parts: tuple[ConvexSet, int]) -> None:
        require("parts", parts, len(parts) > 0, "at least one pair (set, size)")
        for part in parts:
            is_pair = isinstance(part, tuple) and len(part) == 2 and callable(getattr(part[0], "project", None))
            require("parts", part, is_pair, "pairs (set, size)")
            require("size", part[1], isinstance(part[1], int) and part[1] > 0, "a positive integer")
        object.__setattr__(self, "parts", tuple(parts))

    def _slices(self, x: Tensor) -> Iterator[tuple[ConvexSet, Tensor]]:
        sets, sizes = [part for part, _ in self.parts], [size for _, size in self.parts]
        valid = f"a split of the last dimension, {x.shape[-1]}"
        require("the sizes of the parts", sizes, sum(sizes) == x.shape[-1], valid)
        return zip(sets, torch.split(x, sizes, dim=-1), strict=True)

    @property
    def diameter(self) -> Scalar:
        return sum(part.diameter_in(size) ** 2 for part, size in self.parts) ** 0.5

    def project(self, x: Tensor) -> Tensor:
        return torch.cat([part.project(piece) for part, piece in self._slices(x)], dim=-1)

    def contains(self, x: Tensor, tol: float = 1e-5) -> Tensor:
        return torch.cat([part.contains(piece, tol) for part, piece in self._slices(x)], dim=-1).all(-1, keepdim=True)

    def support(self, direction: Tensor) -> Tensor:
        return torch.cat([part.support(piece) for part, piece in self._slices(direction)], dim=-1).sum(-1, keepdim=True)


SETS: dict[str, Entry[ConvexSet]] = {
    "whole": entry_of("no constraint", WholeSpace, "whole"),
    "ball": entry_of("Euclidean ball around the origin", Ball, "ball:RADIUS"),
    "box": entry_of("the same bounds for every coordinate", Box, "box:LOW,HIGH"),
    "simplex": entry_of("non-negative, with a given sum", Simplex, "simplex or simplex:TOTAL"),
    "l1": entry_of("l1 ball around the origin", L1Ball, "l1:RADIUS"),
}


def parse_set(text: str) -> ConvexSet:
    """The constraint set that a text describes: a name of ``lategrad list``, or a class of your own.

    >>> parse_set("ball:5")
    Ball(radius=5.0, center=None)
    >>> parse_set("cube:1")
    Traceback (most recent call last):
    ...
    ValueError: unknown constraint set 'cube'; valid: whole, ball:RADIUS, box:LOW,HIGH, simplex or ..., l1:RADIUS
    """
    return parse_spec(text, "constraint set", SETS)


def as_set(domain: ConvexSet | str | None) -> ConvexSet:
    """A constraint set from what users write: a set, a text such as ``ball:5``, or None for no constraint."""
    if isinstance(domain, str):
        return parse_set(domain)
    return WholeSpace() if domain is None else domain


class OnDomain(Validated):
    """A rule or learner on a constraint set; a ``domain`` that is given as a text or as None becomes its set.

    >>> import lategrad as lg
    >>> lg.Steady(lr=1.0, domain="ball:5").domain
    Ball(radius=5.0, center=None)
    """

    domain: ConvexSet

    def __post_init__(self) -> None:
        object.__setattr__(self, "domain", as_set(self.domain))
        super().__post_init__()
