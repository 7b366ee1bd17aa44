"""Any server rule as a ``torch.optim.Optimizer``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from lategrad.optim.group_step import GroupStep, same_objects
from lategrad.registry import parse_rule
from lategrad.rules.rule import AnyRule
from lategrad.sets import WholeSpace
from lategrad.support.runs import map_tensors, runs_shape
from lategrad.support.validation import Scalar

COMPILE_FROM = 2**18
"""With ``compile=None``, the number of entries from which a group's step is compiled (takes seconds)."""

Tickets = list[list[Tensor] | None]
"""What the queries of all groups carry, for rules that need it."""


def invalid(what: str, value: object, condition: bool) -> None:
    """Raise a ValueError in the words of torch's own optimizers."""
    if condition:
        raise ValueError(f"Invalid {what}: {value}")


class RuleOptimizer(Optimizer):
    """What all optimizers made from a rule have in common; see :class:`FromRule`.

    The parameters hold the query, before and after every step. A group is one vector (or each of its
    parameters is one), with its own rule and its own count of updates. Vectors of the rule's state are in
    ``state[p]`` and scalars in the group's ``"scalars"``, both complete from the first step on.
    """

    structure: ClassVar[tuple[str, ...]] = ()
    """The entries of a group that say what is computed; a change takes effect at the next step."""
    not_saved: ClassVar[tuple[str, ...]] = ("compile",)
    """The entries of a group that ``state_dict`` leaves out: those of the optimizer that loads it are kept."""

    def __init__(
        self, params: ParamsT, defaults: dict[str, Any], *, maximize: bool, per_parameter: bool, compile: bool | None
    ) -> None:
        self._made: dict[int, _Made] = {}
        self._showing_output = False
        defaults |= {"maximize": maximize, "per_parameter": per_parameter, "compile": compile}
        super().__init__(params, defaults)

    # ---- What a kind of optimizer says about itself

    def _rule(self, group: dict[str, Any], number: Tensor) -> AnyRule[Any]:
        """The group's rule, with ``number`` for the hyper-parameter that is read at every step."""
        raise NotImplementedError

    def _number(self, group: dict[str, Any]) -> Scalar:
        """That hyper-parameter now."""
        raise NotImplementedError

    def _check(self, group: dict[str, Any]) -> None:
        """Raise a ValueError for bad hyper-parameters."""
        for name in ("maximize", "per_parameter"):
            invalid(f"{name} value", group[name], not isinstance(group[name], bool))
        invalid("compile value", group["compile"], not isinstance(group["compile"], bool | None))

    # ---- torch.optim's contract

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group with hyper-parameters of its own, and move its parameters into its set."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check(group)
            _check_params(type(self).__name__, group["params"])
            group["scalars"] = []
            step = self._step_of(len(self.param_groups) - 1)
            if step is not None and not isinstance(step.rule.domain, WholeSpace):
                with torch.no_grad():
                    step.project()
        except Exception:
            self.param_groups.pop()
            raise

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # it is compiled already
    @torch.no_grad()
    def step(
        self, closure: Callable[[], float] | None = None, *, delay: int = 0, tickets: Tickets | None = None
    ) -> float | None:
        """One update of every group, with the gradients in ``.grad``; returns what the closure returns.

        In a group in which some parameter has a gradient, a parameter without one has a gradient of zero.
        A group without any gradient is left alone.

        Args:
            closure: computes the gradients and returns the loss.
            delay: how many updates ago the gradients were computed, for rules that want to know.
            tickets: what :meth:`issue_tickets` gave at that time; by default they are computed now.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._showing_output:
            raise RuntimeError("step() inside output(): the parameters do not hold the query now")
        grads = [[p.grad for p in group["params"]] for group in self.param_groups]
        if {grad.layout for of_group in grads for grad in of_group if grad is not None} - {torch.strided}:
            raise RuntimeError(f"{type(self).__name__} does not support sparse gradients")
        for i, (group, of_group) in enumerate(zip(self.param_groups, grads, strict=True)):
            if any(grad is not None for grad in of_group):
                step = self._ready(i)
                if step is not None:
                    if len(of_group) > len(step.params):  # some parameters have no entries
                        of_group = [grad for p, grad in zip(group["params"], of_group, strict=True) if p.numel()]
                    step.run(self.state, group["scalars"], of_group, delay, tickets[i] if tickets else None)
        return loss

    @torch.no_grad()
    def issue_tickets(self) -> Tickets:
        """What the present queries carry: for a gradient that is computed now and applied later."""
        steps = [self._ready(i) for i in range(len(self.param_groups))]
        groups = zip(steps, self.param_groups, strict=True)
        return [step.tickets(self.state, group["scalars"]) if step else None for step, group in groups]

    def state_dict(self) -> dict[str, Any]:
        """The state of all groups, as plain tensors and numbers; rules and sets are not in it."""
        saved = super().state_dict()
        for group in saved["param_groups"]:
            for name in self.not_saved:
                group.pop(name, None)
        return saved

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a saved state; hyper-parameters are those saved, rules and sets the present ones."""
        if self._showing_output:
            raise RuntimeError("load_state_dict() inside output(): the parameters do not hold the query now")
        before: dict[str, Any] = {"state": self.state, "param_groups": self.param_groups}
        super().load_state_dict(dict(state_dict))
        try:
            for old, group in zip(before["param_groups"], self.param_groups, strict=True):
                for name in self.not_saved:
                    if name in old:
                        group[name] = old[name]
            self._restore(state_dict)
        except Exception:
            self.__setstate__(before)
            raise

    def _restore(self, saved: Mapping[str, Any]) -> None:
        """Copies of the saved tensors: torch has cast them to the parameters' dtype, or shares their memory."""
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for number, p in zip(numbers, params, strict=True):
            if number in saved["state"]:
                values = saved["state"][number]
                self.state[p] = {n: v.to(p.device, copy=True) for n, v in values.items()}
        for i, group in enumerate(self.param_groups):
            group.setdefault("scalars", [])
            self._step_of(i)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._made, self._showing_output = {}, False

    # ---- The output, where it is not the query

    @contextmanager
    def output(self) -> Iterator[None]:
        """Within this context the parameters hold the rules' output: what to evaluate, save and ship.

        Afterwards they hold the query again, whatever happened in between. Where the two are the same
        (``AnytimeSGD`` with the paper's settings) nothing is copied.
        """
        steps = [(i, self._step_of(i)) for i in range(len(self.param_groups))]
        differing = [(i, step) for i, step in steps if step is not None and not step.output_is_query
                     and self.param_groups[i]["scalars"]]  # fmt: skip
        if self._showing_output or not differing:
            yield
            return
        queries = [(p, p.detach().clone()) for _, step in differing for p in step.params]
        try:
            self._showing_output = True
            with torch.no_grad():
                for i, step in differing:
                    step.outputs(self.state, self.param_groups[i]["scalars"])
            yield
        finally:
            with torch.no_grad():
                for p, query in queries:
                    p.copy_(query)
            self._showing_output = False

    def output_state_dict(self, model: torch.nn.Module) -> dict[str, Any]:
        """A copy of the model's ``state_dict`` with the output in place of the query: what to ship."""
        with self.output():
            items = model.state_dict().items()
            return {name: v.detach().clone() if isinstance(v, Tensor) else v for name, v in items}

    # ---- From groups to steps

    def _step_of(self, i: int) -> GroupStep | None:
        """The step of a group; made anew when what it depends on has changed. None when it has no entries."""
        made = self._made.get(i)
        group = self.param_groups[i]
        params: list[Tensor] = group["params"]
        options = tuple(group[name] for name in ("maximize", "per_parameter", "compile", *self.structure))
        if not params:
            return None
        kinds = ([p.dtype for p in params], [p.shape for p in params], [p.stride() for p in params], params[0].device)
        if made is not None and made.options == options and made.kinds == kinds and same_objects(made.params, params):
            return made.step
        used = [p for p in params if p.numel()]
        if not used:
            return None
        device = used[0].device
        number = torch.ones(1, dtype=torch.float64, device=device)
        rule = map_tensors(lambda t: t if t is number else t.to(device), self._rule(group, number))
        if runs_shape(rule):
            raise ValueError(f"Invalid rule: {rule}: an optimizer is one run, this is {tuple(runs_shape(rule))}")
        compile = group["compile"]
        if compile is None:
            compile = sum(p.numel() for p in used) >= COMPILE_FROM
        vectors = [[p] for p in used] if group["per_parameter"] else [used]
        step = GroupStep(rule, vectors, maximize=group["maximize"], compile=compile)
        if group["scalars"]:
            group["scalars"] = [{n: v.to(device) for n, v in own.items()} for own in group["scalars"]]
            step.adopt(self.state, group["scalars"])
        self._made[i] = _Made(options, kinds, list(params), step, number)
        return step

    def _ready(self, i: int) -> GroupStep | None:
        """The step of a group, with its state in place and its hyper-parameter up to date."""
        step = self._step_of(i)
        if step is None:
            return None
        group, made = self.param_groups[i], self._made[i]
        if not group["scalars"]:
            group["scalars"] = step.init(self.state)
        value = self._number(group)
        if isinstance(value, Tensor):
            made.number.copy_(value.reshape(-1))
        elif value != made.last_value:
            made.number.fill_(value)
            made.last_value = value
        return step


@dataclass
class _Made:
    """A group's step, and what it was made for."""

    options: tuple[object, ...]
    kinds: tuple[object, ...]
    """Dtypes, shapes, strides and device of the parameters."""
    params: list[Tensor]
    step: GroupStep
    number: Tensor
    """The hyper-parameter that is read at every step, as the rule has it."""
    last_value: float = 1.0


def _check_params(name: str, params: list[Tensor]) -> None:
    devices = {p.device for p in params}
    if len(devices) > 1:
        raise ValueError(f"{name} needs the parameters of a group on one device, got {sorted(map(str, devices))}")
    for p in params:
        if not p.is_floating_point():
            raise ValueError(f"{name} needs floating-point parameters, got {p.dtype}")
        if p.layout != torch.strided:
            raise ValueError(f"{name} needs dense parameters, got {p.layout}")


def check_lr(group: dict[str, Any]) -> None:
    """Raise for a bad learning rate, as torch's own optimizers do."""
    lr = group["lr"]
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise ValueError("Tensor lr must be 1-element")
        lr = lr.item()
    invalid("learning rate", lr, not is_number(lr, low=0))


def is_number(value: object, *, low: float, strict: bool = False) -> bool:
    """Whether it is a finite number >= low, or > low when strict."""
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and low <= value < float("inf") and not (strict and value == low)  # type: ignore[operator]


def _find_lr(part: Any) -> Scalar | None:
    """The rule's learning rate, or its learner's."""
    if hasattr(part, "lr"):
        return part.lr  # type: ignore[no-any-return]
    return _find_lr(part.learner) if hasattr(part, "learner") else None


def _with_lr(part: Any, lr: Tensor) -> Any:
    """The same rule with another learning rate."""
    if hasattr(part, "lr"):
        return dataclasses.replace(part, lr=lr)
    return dataclasses.replace(part, learner=_with_lr(part.learner, lr))


class FromRule(RuleOptimizer):
    """Any server rule as an optimizer.

    The rule's learning rate, or that of its learner, becomes the groups' ``lr``, which is read at every step,
    so that LR schedulers work. A rule without one has groups without ``lr``.

    Args:
        params: as for any optimizer; a group may have a ``rule`` of its own.
        rule: one run of any rule (no hyper-parameter with a dimension of runs), or a text such as ``"steady:lr=1"``.
        maximize: ascend instead of descend.
        per_parameter: each parameter is a vector of its own, with its own projection and its own norms,
            instead of the whole group.
        compile: compile the step (takes seconds, once), or run it operation by operation. None compiles for
            groups of at least 2^18 entries.

    >>> import lategrad as lg
    >>> x = torch.nn.Parameter(torch.zeros(2))
    >>> optimizer = lg.optim.FromRule([x], lg.SGD(lr=0.5, domain=lg.Ball(1.0)))
    >>> for t in range(3):
    ...     optimizer.zero_grad()
    ...     (x - torch.tensor([3.0, 4.0])).square().sum().backward()
    ...     optimizer.step()
    >>> x.data
    tensor([0.6000, 0.8000])
    """

    structure = ("rule",)
    not_saved = ("rule", "compile")

    def __init__(
        self,
        params: ParamsT,
        rule: AnyRule[Any] | str,
        *,
        maximize: bool = False,
        per_parameter: bool = False,
        compile: bool | None = None,
    ) -> None:
        rule = parse_rule(rule) if isinstance(rule, str) else rule
        super().__init__(params, {"rule": rule}, maximize=maximize, per_parameter=per_parameter, compile=compile)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its ``lr`` is that of its rule unless it is given."""
        lr = _find_lr(param_group.get("rule", self.defaults["rule"]))
        if lr is not None:
            param_group.setdefault("lr", lr)
        super().add_param_group(param_group)

    def _check(self, group: dict[str, Any]) -> None:
        super()._check(group)
        missing = [name for name in ("init", "query", "update", "output", "domain") if not hasattr(group["rule"], name)]
        invalid("rule", f"{group['rule']!r} has no {', '.join(missing)}", bool(missing))
        if "lr" in group:
            invalid("learning rate", group["lr"], _find_lr(group["rule"]) is None)
            check_lr(group)

    def _rule(self, group: dict[str, Any], number: Tensor) -> AnyRule[Any]:
        rule: AnyRule[Any] = _with_lr(group["rule"], number) if "lr" in group else group["rule"]
        return rule

    def _number(self, group: dict[str, Any]) -> Scalar:
        lr: Scalar = group.get("lr", 1.0)
        return lr
