"""Gates: which gradients are applied. By their delay, for any training loop; by their norm, for the library's own."""

import warnings
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from lategrad.sets import norm
from lategrad.support.validation import require, require_choice, require_count, require_number

_CHECK_EVERY = 20  # gradients of each worker, on average, between two checks of the shares
_STARVED = 0.1  # of the fair share
POLICIES = ("drop", "wait", "weigh")


class Admission(NamedTuple):
    """A gate's decision."""

    action: str
    """"apply", with the weight; "drop"; or "wait": hold it and ask again after the next one that is applied."""
    weight: float = 1.0


class DelayGate:
    """Admits gradients up to a delay, applies a policy to the others, and counts both for each worker.

    - ``"drop"``: they are not applied; the worker continues from the present parameters.
    - ``"weigh"``: they are applied with the weight (1 + max_delay) / (1 + delay).
    - ``"wait"``: no delay exceeds ``max_delay``, because a gradient has to wait while applying it would make one that
      is still out too late (stale synchronous parallel). Pass :meth:`admit` the present delays of the others.

    A warning names a worker that has less than a tenth of its fair share of the updates (all, divided by the workers).

    Args:
        max_delay: the largest delay, in updates, that is admitted with weight 1.
        policy: for longer delays.
        workers: all workers; by default those that have been seen.

    >>> gate = DelayGate(max_delay=4)
    >>> gate.admit(3), gate.admit(9)
    (Admission(action='apply', weight=1.0), Admission(action='drop', weight=0.0))
    >>> DelayGate(max_delay=4, policy="weigh").admit(9)
    Admission(action='apply', weight=0.5)
    >>> DelayGate(max_delay=4, policy="wait").admit(0, out=[4]).action
    'wait'
    """

    def __init__(self, max_delay: int, policy: str = "drop", workers: Iterable[object] = ()) -> None:
        require_count("max_delay", max_delay)
        require_choice("policy", policy, POLICIES)
        self.max_delay, self.policy = max_delay, policy
        self.applied: Counter[object] = Counter(dict.fromkeys(workers, 0))  #: admitted gradients of each worker
        self.dropped: Counter[object] = Counter()  #: dropped gradients of each worker
        self.starved: set[object] = set()  #: workers that a warning has named
        self._count = 0

    def admit(self, delay: int, worker: object = None, *, out: Iterable[int] = ()) -> Admission:
        """Decide about a gradient.

        Args:
            delay: the present version less that of the parameters that the gradient was computed at.
            worker: the worker that computed it.
            out: the present delays of all other gradients that are not yet applied; only "wait" uses them.
        """
        if delay < 0:
            raise ValueError(f"delay must be >= 0, got {delay}: the gradient is from the future")
        if self.policy == "wait" and self._must_wait(delay, sorted(out, reverse=True)):
            return Admission("wait", 0.0)
        self._count += 1
        is_admitted = delay <= self.max_delay or self.policy == "weigh"
        (self.applied if is_admitted else self.dropped)[worker] += 1
        self.applied.setdefault(worker, 0)
        if self._count % (_CHECK_EVERY * max(1, len(self.applied))) == 0:
            self._check_shares()
        if not is_admitted:
            return Admission("drop", 0.0)
        return Admission("apply", min(1.0, (1 + self.max_delay) / (1 + delay)))

    def _must_wait(self, delay: int, others: list[int]) -> bool:
        """Whether, after this update, the others could no longer all be in time, at one an update, latest first."""
        in_time = delay <= self.max_delay and all(d + k <= self.max_delay for k, d in enumerate(others, start=1))
        if not in_time and (not others or delay >= others[0]):  # nothing later to wait for
            raise ValueError(f"max_delay must be >= {len(others)} with policy='wait' and {len(others)} other gradients "
                             f"out, which every call must pass; got {self.max_delay}, for one with a delay of "
                             f"{delay}")  # fmt: skip
        return not in_time

    def share(self, worker: object) -> float:
        """The worker's share of the updates as a multiple of the fair share; 1 before the first update."""
        total = sum(self.applied.values())
        return self.applied[worker] * len(self.applied) / total if total else 1.0

    def _check_shares(self) -> None:
        for worker in self.applied:
            if self.share(worker) >= _STARVED or worker in self.starved:
                continue
            self.starved.add(worker)
            dropped = self.dropped[worker]
            reason = (f"{dropped} dropped with a delay over {self.max_delay}: a larger max_delay, or policy='weigh', "
                      "uses them") if dropped else "none was dropped: it is slow"  # fmt: skip
            warnings.warn(f"worker {worker} is starved: it computed {self.applied[worker]} of "
                          f"{sum(self.applied.values())} updates, {self.share(worker):.1%} of its fair share, so that "
                          f"what only its data shows is hardly learned ({reason})", stacklevel=3)  # fmt: skip

    def summary(self) -> dict[str, dict[str, float]]:
        """For each worker: applied, dropped, and its share of the updates as a multiple of the fair share."""
        return {str(worker): {"applied": applied, "dropped": self.dropped[worker], "share": self.share(worker)}
                for worker, applied in self.applied.items()}  # fmt: skip


# ---- Norms

_WINDOW = 101  # norms that the median is taken over
_WARM_UP = 20  # norms to observe before any gradient is applied


def require_norm_options(clip: float | None, max_norm_ratio: float | None) -> None:
    for name, value, low in (("clip", clip, 0), ("max_norm_ratio", max_norm_ratio, 1)):
        if value is not None:
            require(name, value, not isinstance(value, Tensor), "one number, the same for all runs")
            require_number(name, value, low=low, strict=True)


def clip_norm(grad: Tensor, max_norm: float) -> Tensor:
    """Scale the gradient down to norm ``max_norm`` where it is longer.

    >>> clip_norm(torch.tensor([3.0, 4.0]), max_norm=1.0)
    tensor([0.6000, 0.8000])
    """
    return grad * (max_norm / norm(grad)).clamp(max=1.0).to(grad.dtype)


class NormGate:
    """Refuses gradients that are many times as long as the median of the last hundred, for each run separately.

    The first twenty are not applied either: they only show how long gradients are, and a single bad one among them
    could throw the state far away. A refused norm enters the median as the largest that would have been admitted: the
    median follows when the gradients of all workers grow, and a few bad workers cannot move it.

    Args:
        ratio: the largest admitted multiple of the median.
        runs: the run dimensions of the gradients.
        device: of the gradients.

    >>> gate = NormGate(ratio=10.0)
    >>> all(gate.learns_from(torch.tensor([1.0])) for _ in range(20))
    True
    >>> gate.learns_from(torch.tensor([50.0]))
    False
    >>> gate.objection(torch.tensor([50.0]))
    'its norm 50 is more than 10 times the median of the last 20, 1'
    """

    def __init__(self, ratio: float, runs: tuple[int, ...] = (), device: torch.device | str = "cpu") -> None:
        self.ratio = ratio
        # NaN where no norm was observed yet. The buffers keep their addresses, for compiled code and for graphs.
        self._norms = torch.full((_WINDOW, *runs, 1), torch.nan, dtype=torch.float64, device=device)
        self._count = torch.zeros(1, dtype=torch.int64, device=device)

    def _limit(self) -> Tensor:
        """The largest norm that is admitted now, for each run."""
        limit = self.ratio * self._norms.nanmedian(dim=0).values
        return torch.where((self._count < _WARM_UP) | (limit == 0), torch.inf, limit)

    def _record(self, length: Tensor) -> None:
        self._norms.index_copy_(0, self._count % _WINDOW, length.double().unsqueeze(0))
        self._count += 1

    def admits(self, length: Tensor) -> Tensor:
        """Whether to apply gradients of these norms, ``(*runs, 1)``, which are recorded."""
        limit, is_warm = self._limit(), self._count >= _WARM_UP
        self._record(torch.minimum(length, limit))
        return (length <= limit) & is_warm

    def learns_from(self, length: Tensor) -> bool:
        """Whether the gradient of a single run is among the first, which are recorded and not applied."""
        if self._count >= _WARM_UP:
            return False
        self._record(length)
        return True

    def objection(self, length: Tensor) -> str | None:
        """The reason not to apply a later gradient of a single run, if there is one; its norm is recorded."""
        limit, count = self._limit(), min(int(self._count), _WINDOW)
        self._record(torch.minimum(length, limit))
        if length <= limit:
            return None
        value, median = length.item(), limit.item() / self.ratio
        return f"its norm {value:.4g} is more than {self.ratio:g} times the median of the last {count}, {median:.4g}"
