"""Late gradients in any PyTorch loop: a wrapper that delays the gradients of an optimizer."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import zip_longest
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.optim.optimizer import Optimizer

from lategrad.delays import DelayModel, Recorded, as_delay_model
from lategrad.delays.stages import StageDelays
from lategrad.execution.dtensors import is_dtensor, like_dtensor, local_part_of
from lategrad.optim.arguments import require_object
from lategrad.optim.output_mode import output_of, shipped_state
from lategrad.optim.rule_optimizer import RuleOptimizer, Tickets
from lategrad.optim.stage_versions import StageVersions
from lategrad.rules.rule import needs_ticket
from lategrad.support.runs import map_tensors
from lategrad.support.validation import require, require_count, require_switch

_FIRST_DRAW = 1024
_SPARSE = (torch.optim.SGD, torch.optim.SparseAdam, torch.optim.Adagrad)  # the optimizers that take sparse gradients
_STATE = ("optimizer", "delays", "delay_cap", "seed", "steps", "updates", "_pending", "_versions", "_drift")


class PendingGradient(NamedTuple):
    """A gradient that waits for its update."""

    grads: list[Tensor | None]  # one for each parameter of all groups
    tickets: Tickets | None
    point: list[Tensor] | None = None  # the parameters that it was computed at, where drift is measured


class Delayed(Optimizer):
    r"""Any optimizer, with late gradients: what would a delay of 8 do to my training?

    >>> import torch, lategrad as lg
    >>> x = torch.nn.Parameter(torch.ones(1))
    >>> optimizer = lg.optim.Delayed(torch.optim.SGD([x], lr=0.5), delays=2)
    >>> for step in range(5):
    ...     optimizer.zero_grad()
    ...     (x**2 / 2).backward()  # the gradient is x
    ...     optimizer.step()
    ...     print(step + 1, x.item())
    1 1.0
    2 1.0
    3 0.5
    4 0.0
    5 -0.5

    The loop stays as it is: every pass computes one gradient, at the parameters of that moment, and every gradient is
    applied exactly once. Update t of the wrapped optimizer gets a gradient that was computed at
    :math:`x_{t - \tau_t}`, the parameters after :math:`t - \tau_t - 1` updates, where :math:`\tau_t \le t - 1` is what
    the delay model draws for update t, as in :func:`lategrad.simulate`. So a step only stores its gradient as long as
    later updates need more gradients of the present parameters; then it makes the next update, and at once the ones
    after it up to the first parameters that some update needs a gradient of. With a constant delay step s makes update
    :math:`s - \tau` with the gradient of pass :math:`s - \tau`, and at the end the last :math:`\tau` are still pending.
    At most ``delay_cap + 1`` gradients are stored, each as large as the parameters. If the wrapped optimizer raises,
    the next step tries the same gradient again; one that fails twice is dropped, and that of the next pass takes its
    place.

    **Delays by stage**, from :func:`lategrad.delays.by_stage`, work differently, because the gradient of a pipeline
    belongs to parameters of several versions: update t gets the gradient at the point whose tensor b is that of
    :math:`x_{\max(1, t - \tau_b)}`. Instead of gradients, past versions of the delayed parameters are stored, as many
    as each one's delay. The model's forward puts them in place, in training mode and where gradients are recorded, and
    ``step`` puts the newest back, so that validation sees the newest parameters. Each pass makes one update. Rules
    with ``delay_blocks`` are told the delay of each parameter, others the longest one of a group; rules with tickets
    are refused.

    It is a ``torch.optim.Optimizer`` that shares ``param_groups`` and ``state`` with the wrapped one, so LR schedulers
    and ``GradScaler`` take it; other attributes, such as ``train()`` and ``eval()`` of a schedule-free optimizer, are
    those of the wrapped one. ``state_dict`` has the pending gradients, too. Rules that use the delays
    (:class:`~lategrad.optim.FromRule`) get them.

    Args:
        optimizer: any optimizer that takes one gradient for each step (not LBFGS).
        delays: an integer, a delay model, a text such as ``"uniform:0,16"`` (see ``lategrad.delays.specs``), or delays
            by stage.
        delay_cap: longer delays are cut to it. Required when the delay model has no bound of its own.
        seed: of the delays.
        steps: the largest number of updates; required only for models that depend on the length of the run
            (fractions in ``Regimes``).
        drift: measure :attr:`drift`; stores the parameters beside every pending gradient.
    """

    optimizer: Optimizer
    delays: DelayModel | StageDelays
    delay_cap: int
    seed: int
    steps: int | None
    updates: int  #: the number of updates that the wrapped optimizer has made
    _pending: dict[int, PendingGradient]  # the pending gradients, each under the number of its update
    _taus: Tensor  # the delays of the first updates, as far as they have been needed
    _updates_for: dict[int, list[int]]  # the updates that need a gradient of the parameters x_s, under s
    _versions: StageVersions | None  # the past parameters, where delays are by stage
    _drift: Tensor | float | None = None  # the sum of distances so far, where drift is measured
    _failed: int = 0  # the last update in which the wrapped optimizer has raised

    def __init__(
        self, optimizer: Optimizer, delays: DelayModel | StageDelays | int | str, *, delay_cap: int | None = None,
        seed: int = 0, steps: int | None = None, drift: bool = False,
    ) -> None:  # fmt: skip
        require_object("optimizer", optimizer)
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise TypeError("LBFGS computes several gradients in each step: they cannot be delayed")
        if not isinstance(delays, StageDelays):
            delays = as_delay_model(delays)
            require("delays", delays, not delays.needs_labels, "a model that does not need labels")
        delay_cap = delays.largest if delay_cap is None else delay_cap
        if delay_cap is None:
            raise ValueError(f"delay_cap must be given, to bound the memory: {delays!r} has no largest delay")
        require_count("delay_cap", delay_cap)
        require_count("seed", seed)
        require_switch("drift", drift)
        if isinstance(delays, Recorded):
            steps = len(delays.delays) if steps is None else min(steps, len(delays.delays))
        if steps is not None:
            endless = isinstance(delays, StageDelays)
            require("steps", steps, not endless, "left out with delays by stage, which never end")
            require_count("steps", steps, low=1)
        versions = None
        if isinstance(delays, StageDelays):
            carrying = [g["rule"] for g in optimizer.param_groups if "rule" in g and needs_ticket(g["rule"])]
            require("optimizer", carrying, not carrying, "one whose rule carries no ticket, with delays by stage")
            params = [p for group in optimizer.param_groups for p in group["params"]]
            sharded = sum(map(is_dtensor, params))
            require("params", f"{sharded} DTensors", not sharded, "plain tensors, with delays by stage")
            versions = StageVersions(delays, params, delay_cap)
        values: tuple[Any, ...] = (optimizer, delays, delay_cap, seed, steps, 0, {}, versions, 0.0 if drift else None)
        self.__setstate__(dict(zip(_STATE, values, strict=True)))

    # ---- Shared with the wrapped optimizer

    param_groups = property(attrgetter("optimizer.param_groups"), doc="Those of the wrapped optimizer.")
    state = property(attrgetter("optimizer.state"), doc="That of the wrapped optimizer.")
    defaults = property(attrgetter("optimizer.defaults"), doc="Those of the wrapped optimizer.")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "optimizer" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.optimizer, name)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer; pending gradients are zero for it."""
        self.optimizer.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients; pending ones are copies."""
        self.optimizer.zero_grad(set_to_none)

    @contextmanager
    def output(self) -> Iterator[None]:
        """Within this context the parameters hold what the wrapped optimizer ships (its output, if it has one)."""
        with nullcontext() if self._versions is None else self._versions.suspended(), output_of(self.optimizer):
            yield

    def output_state_dict(self, model: torch.nn.Module) -> dict[str, Any]:
        """A copy of the model's ``state_dict`` as it is inside :meth:`output`: what to ship."""
        return shipped_state(self, model)

    # ---- The delays

    @property
    def pending(self) -> int:
        return len(self._pending)

    @property
    def drift(self) -> float | None:
        """Mean distance, over updates, of the parameters from those that the gradient was computed at.

        None without ``drift=True``; NaN after loading a state without it.
        """
        return None if self._drift is None else float(self._drift) / max(1, self.updates)

    def _updates_from(self, s: int) -> list[int]:
        """The updates that need a gradient of :math:`x_s`: all t with t - tau_t = s."""
        last = s + self.delay_cap if self.steps is None else min(s + self.delay_cap, self.steps)
        if last > len(self._taus):
            self._draw(last)
        return self._updates_for.get(s, [])

    def _draw(self, until: int) -> None:
        """Draw the delays of at least ``until`` updates, and list each update under the parameters that it needs."""
        assert isinstance(self.delays, DelayModel)
        drawn_before = len(self._taus)
        count = max(until, 2 * drawn_before, _FIRST_DRAW) if self.steps is None else self.steps
        drawn = self.delays.draw(count, self.seed).delays
        if not torch.equal(drawn[:drawn_before], self._taus):
            raise ValueError(f"steps must be given: the delays of {self.delays!r} depend on the length of the run")
        for t, tau in enumerate(drawn[drawn_before:].tolist(), start=drawn_before + 1):
            source = t - min(tau, self.delay_cap)
            if source > self.updates:  # those of earlier parameters are pending already
                self._updates_for.setdefault(source, []).append(t)
        self._taus = drawn

    # ---- One pass of the loop

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Store the present gradient, and make the updates that are ready."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        if isinstance(self.optimizer, RuleOptimizer):
            self.optimizer.require_query("step()")
        grads = [p.grad for p in self._params()]
        if not isinstance(self.optimizer, _SPARSE) and any(g is not None and g.layout != torch.strided for g in grads):
            raise RuntimeError(f"Delayed({type(self.optimizer).__name__}) does not support sparse gradients; of SGD, "
                               "SparseAdam and Adagrad it does: use one, or a layer with sparse=False")  # fmt: skip
        if self._versions is not None:
            newest = self._versions.to_newest()
            delays = [min(delay, self.updates) for delay in self._versions.delays]
            delays += [0] * (len(grads) - len(delays))  # of groups added later
            self._apply(PendingGradient(grads, None, self._versions.used(self._params())), delays)
            self._versions.append(newest)
            return loss
        s = self.updates + 1  # the parameters are x_s
        if self.steps is not None and s > self.steps:
            raise RuntimeError(f"all {self.steps} updates have been made: there are no delays for more")
        missing = [t for t in self._updates_from(s) if t not in self._pending]
        if not missing and s not in self._pending:  # its gradient was dropped
            missing = [s]
        tickets = self.optimizer.issue_tickets() if isinstance(self.optimizer, RuleOptimizer) else None
        if missing == [s]:
            self._apply(PendingGradient(grads, tickets), delay=0)
        elif missing:
            copies = [None if grad is None else grad.detach().clone() for grad in grads]
            point = None if self._drift is None else [p.detach().clone() for p in self._params()]
            self._pending[missing[0]] = PendingGradient(copies, tickets, point)
        if len(missing) <= 1:
            while self.updates + 1 in self._pending and (self.updates < s or not self._updates_from(self.updates + 1)):
                self._apply_pending(self.updates + 1)
        return loss

    def _apply_pending(self, t: int) -> None:
        try:
            self._apply(self._pending[t], delay=min(int(self._taus[t - 1]), self.delay_cap))
        except BaseException:
            if self._failed == t:
                del self._pending[t]
            self._failed = t
            raise
        del self._pending[t]

    def _params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _apply(self, gradient: PendingGradient, delay: int | list[int]) -> None:
        """One update of the wrapped optimizer; afterwards ``.grad`` is what it was before."""
        params = self._params()
        present = [p.grad for p in params]
        distance: Tensor | float = 0.0
        if self._drift is not None and delay:
            distance = math.nan if gradient.point is None else _distance(params, gradient.point)
        try:
            for p, grad in zip_longest(params, gradient.grads):
                p.grad = None if grad is None else grad.to(p.dtype)  # the model's may have changed meanwhile
            if isinstance(self.optimizer, RuleOptimizer):
                self.optimizer.step(delay=delay, tickets=gradient.tickets)
            else:
                self.optimizer.step()
        finally:
            for p, grad in zip(params, present, strict=True):
                p.grad = grad
        self.updates += 1
        if self._drift is not None:
            self._drift = self._drift + distance
        self._updates_for.pop(self.updates, None)

    # ---- Saving

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's, and under ``"delayed"`` the pending gradients."""
        pending = {t: one._asdict() for t, one in self._pending.items()}
        own = {"updates": self.updates, "seed": self.seed, "delay_cap": self.delay_cap, "pending": pending}
        if self._drift is not None:
            own["drift"] = float(self._drift)
        if self._versions is not None:
            own["versions"] = self._versions.state()
        return {**self.optimizer.state_dict(), "delayed": own}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state of the same optimizer with the same delays."""
        inner = dict(state_dict)
        if "delayed" not in inner:
            raise ValueError("the state is not of a Delayed optimizer: it has no pending gradients")
        own = inner.pop("delayed")
        for name in ("seed", "delay_cap"):
            if own.get(name) != getattr(self, name):
                raise ValueError(f"the state is of another sequence of delays: {name} {own.get(name)}, "
                                 f"not {getattr(self, name)}")  # fmt: skip
        if ("versions" in own) != (self._versions is not None):
            raise ValueError("the state is of other delays: one of the two is by stage")
        if "state" in inner:
            inner["state"] = _with_numbers(inner["state"])
        self.optimizer.load_state_dict(inner)
        if self._versions is not None:
            self._versions.load(own["versions"])
        self.updates, self._pending = own["updates"], {}
        self._drift = None if self._drift is None else own.get("drift", math.nan)
        self._reset_draws()
        devices = [p.device for p in self._params()]
        group_devices = [group["params"][0].device if group["params"] else None for group in self.param_groups]

        def copied(parts: Any, devices: Sequence[Any]) -> Any:
            """Each part, which may be None, on a device of its own."""
            pairs = zip(parts or (), devices, strict=False)
            return parts and [map_tensors(partial(Tensor.to, device=device, copy=True), part) for part, device in pairs]

        for t, saved in _with_numbers(own["pending"]).items():
            grads, point = copied(saved["grads"], devices), copied(saved.get("point"), devices)
            self._pending[t] = PendingGradient(grads, copied(saved["tickets"], group_devices), point)

    def _reset_draws(self) -> None:
        self._taus, self._updates_for = torch.zeros(0, dtype=torch.int64), {}

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in _STATE}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._reset_draws()
        super().__setstate__(state)
        if self._versions is not None:
            self._versions.belong_to(self)

    def __repr__(self) -> str:
        return f"Delayed({self.optimizer!r}, {self.delays!r}, delay_cap={self.delay_cap})"


def _distance(params: list[Tensor], point: list[Tensor]) -> Tensor:
    """Over all parameters, and all ranks that they are sharded over."""
    point = [like_dtensor(local_part_of(at, p), p) for at, p in zip(point, params, strict=False)]
    norms = [vector_norm(p.detach() - at, dtype=torch.float64) for p, at in zip(params, point, strict=False)]
    whole = [norm.full_tensor() if is_dtensor(norm) else norm for norm in norms]
    return torch.stack([norm.to(params[0].device) for norm in whole]).square().sum().sqrt()


def _with_numbers(saved: Mapping[Any, Any]) -> dict[Any, Any]:
    """Numbers as keys, of which ``torch.distributed.checkpoint`` makes texts."""
    return {int(key) if isinstance(key, str) and key.isdigit() else key: value for key, value in saved.items()}
