"""What all optimizers made from a server rule have in common."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from lategrad.execution import StateBeside, TensorsStep, WithGradient, in_place
from lategrad.execution.parameter_state import joined, same_objects, scatter, state_form
from lategrad.execution.pays import STEPS_OF_AN_OPTIMIZER, compiling_pays
from lategrad.optim.arguments import require_known_keys, require_params, require_state_of
from lategrad.optim.output_mode import OutputMode, Values
from lategrad.rules.blocks import Blocks, fill_in
from lategrad.rules.rule import AnyRule
from lategrad.sets import WholeSpace
from lategrad.support.runs import map_tensors, runs_shape
from lategrad.support.validation import Scalar

Tickets = list[list[Tensor] | None]
"""What the queries of all groups carry, for rules that need it."""


def invalid(what: str, value: object, condition: bool) -> None:
    """Raise a ValueError in the words of torch's own optimizers."""
    if condition:
        raise ValueError(f"Invalid {what}: {value}")


class RuleOptimizer(OutputMode):
    """A ``torch.optim.Optimizer`` whose step is the update of a rule; which one, its subclasses say.

    The parameters hold the query, before and after every step. A group is one vector (or each of its
    parameters is one), with its own rule and its own count of updates. Vectors of the rule's state are in
    ``state[p]`` and scalars in the group's ``"scalars"``, both complete from the first step on.
    """

    structure: ClassVar[tuple[str, ...]] = ()
    """The entries of a group that say what is computed; a change takes effect at the next step."""
    optional: ClassVar[tuple[str, ...]] = ()
    """The entries that a group may have beside the optimizer's own arguments."""
    not_saved: ClassVar[tuple[str, ...]] = ("compile",)
    """The entries of a group that ``state_dict`` leaves out: those of the optimizer that loads it are kept."""

    def __init__(
        self, params: ParamsT, defaults: dict[str, Any], *, maximize: bool, per_parameter: bool, compile: bool | None
    ) -> None:
        self._made: dict[int, _Made] = {}
        self._reset_mode()
        require_params(type(self).__name__, params)
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
        invalid("weight_decay value", group["weight_decay"], not is_number(group["weight_decay"], low=0))

    # ---- torch.optim's contract

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group with hyper-parameters of its own, and move its parameters into its set."""
        require_known_keys(type(self).__name__, param_group, [*self.defaults, "kinds", *self.optional])
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check(group)
            _check_params(type(self).__name__, group["params"])
            group["scalars"] = []
            self._project(group)
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
        A group without any gradient is left alone, and so are parameters that require none.

        Args:
            closure: computes the gradients and returns the loss.
            delay: how many updates ago the gradients were computed, for rules that want to know.
            tickets: what :meth:`issue_tickets` gave at that time; by default they are computed now.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.require_query("step()")
        self._check_loaded()
        grads = [[p.grad for p in group["params"]] for group in self.param_groups]
        if {grad.layout for of_group in grads for grad in of_group if grad is not None} - {torch.strided}:
            raise RuntimeError(f"{type(self).__name__} does not support sparse gradients")
        for i, (group, of_group) in enumerate(zip(self.param_groups, grads, strict=True)):
            if any(grad is not None for grad in of_group):
                steps = self._ready(i)
                if len(of_group) > sum(len(step.tensors) for step in steps):  # some have no entries, or are frozen
                    pairs = zip(group["params"], of_group, strict=True)
                    of_group = [grad for p, grad in pairs if p.numel() and p.requires_grad]
                of_vectors = (tickets[i] if tickets else None) or itertools.repeat(None)
                rest = iter(of_group)
                for step, ticket in zip(steps, of_vectors, strict=False):
                    step(list(itertools.islice(rest, len(step.tensors))), delay, ticket)
        return loss

    @torch.no_grad()
    def issue_tickets(self) -> Tickets:
        """What the present queries carry: for a gradient that is computed now and applied later."""
        of_groups = [[step.ticket() for step in self._ready(i)] for i in range(len(self.param_groups))]
        return [[t for t in tickets if t is not None] or None for tickets in of_groups]

    def state_dict(self) -> dict[str, Any]:
        """The state of all groups, as plain tensors and numbers; rules and sets are not in it.

        Where the parameters hold the output (:meth:`eval`, :meth:`output`), it has the queries, too, as the model's
        ``state_dict`` does not: the output is then in the model's, and training can go on from the two.
        """
        saved = super().state_dict()
        for group in saved["param_groups"]:
            for name in self.not_saved:
                group.pop(name, None)
        return self._with_queries(saved)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a saved state; hyper-parameters are those saved, rules and sets the present ones.

        A state that was saved in eval mode puts its queries into the parameters: load the model before it.
        """
        self.require_query("load_state_dict()")
        needed = {*self.structure, "maximize", "per_parameter", "scalars"} - {*self.not_saved, "weight_decay"}
        require_state_of(type(self).__name__, state_dict, needed)
        before: dict[str, Any] = {"state": self.state, "param_groups": self.param_groups}
        super().load_state_dict(dict(state_dict))
        try:
            for old, group in zip(before["param_groups"], self.param_groups, strict=True):
                for name in self.not_saved:
                    if name in old:
                        group[name] = old[name]
                group.setdefault("weight_decay", old["weight_decay"])  # from before there was any
            with self._loading_queries(state_dict):
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
            if group["scalars"]:
                self.in_place_steps(i)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._made = {}

    # ---- The output, where it is not the query

    @torch.no_grad()
    def _write_output(self) -> Values:
        started = [i for i, group in enumerate(self.param_groups) if group["scalars"]]
        differing = [step for i in started for step in self.in_place_steps(i) if not step.output_is_query]
        queries = {p: p.detach().clone() for step in differing for p in step.tensors}
        for step in differing:
            step.write_output()
        return queries

    # ---- From groups to steps

    def _vectors(self, group: dict[str, Any], number: Tensor) -> list[tuple[Any, list[Tensor]]]:
        """The vectors of a group: each a rule and its parameters; those without entries, or frozen, are in none."""
        named = list(zip(group["params"], group.get("kinds") or itertools.repeat(None), strict=False))
        used = [(p, kind) for p, kind in named if p.numel() and p.requires_grad]
        if not used:
            return []
        device = used[0][0].device
        rule = map_tensors(lambda t: t if t is number else t.to(device), self._rule(group, number))
        if runs_shape(rule):
            raise ValueError(f"Invalid rule: {rule}: an optimizer is one run, this is {tuple(runs_shape(rule))}")
        vectors = []
        for members in [[one] for one in used] if group["per_parameter"] else [used]:
            params, kinds = [p for p, _ in members], [kind for _, kind in members]
            blocks = Blocks.of_tensors(params, kinds if group.get("kinds") else None)
            shaped = fill_in(rule, blocks)
            vectors.append((WithGradient(shaped, torch.neg) if group["maximize"] else shaped, params))
        return vectors

    @torch.no_grad()
    def _project(self, group: dict[str, Any]) -> None:
        """Move the parameters to the nearest point of the set."""
        device = group["params"][0].device if group["params"] else None
        for rule, params in self._vectors(group, torch.ones(1, dtype=torch.float64, device=device)):
            state_form(rule, params)  # raises for a state that cannot be kept
            if not isinstance(rule.domain, WholeSpace):
                scatter(rule.domain.project(joined(params)), params)

    def in_place_steps(self, i: int) -> list[TensorsStep]:
        """The step of each vector of group i, whose ``backend`` says what runs it.

        Made at the first update, and anew when what they depend on has changed.
        """
        made, group = self._made.get(i), self.param_groups[i]
        params: list[Tensor] = group["params"]
        if not params:
            return []
        entries = ("maximize", "per_parameter", "compile", "kinds", *self.structure)
        options = tuple(group.get(name) for name in entries)
        trained = [p.requires_grad for p in params]
        if made is not None and made.trained != trained and group["scalars"]:
            raise RuntimeError(
                "requires_grad of a parameter has changed since the first step, but its group is one vector: make "
                "a new optimizer, or put what is thawed later into a group of its own"
            )
        kinds = ([p.dtype for p in params], [p.shape for p in params], [p.stride() for p in params], params[0].device)
        same = made is not None and made.options == options and made.kinds == kinds
        if made is not None and same and group["scalars"] and same_objects(made.params, params):
            return made.steps
        number = torch.ones(1, dtype=torch.float64, device=params[0].device)
        vectors = self._vectors(group, number)
        compile = group["compile"]
        if compile is None:
            total = sum(p.numel() for p in params)
            shaped = any(getattr(rule, "blocks", None) is not None for rule, _ in vectors)  # slow to compile
            compile = not shaped and compiling_pays(STEPS_OF_AN_OPTIMIZER, total, backend="loops")
        saved = group["scalars"] or [None] * len(vectors)
        if len(saved) != len(vectors):
            raise ValueError(f"the state is of {len(saved)} vectors, the group has {len(vectors)}")
        steps = []
        for (rule, of_vector), numbers in zip(vectors, saved, strict=True):
            state = None if numbers is None else StateBeside([self.state[p] for p in of_vector], numbers)
            step = in_place(rule, state, tensors=of_vector, backend=None if compile else "eager")
            self.state.update(zip(of_vector, step.state.long, strict=True))
            steps.append(step)
        group["scalars"] = [step.state.numbers for step in steps]
        self._made[i] = _Made(options, kinds, list(params), trained, steps, number)
        return steps

    def _ready(self, i: int) -> list[TensorsStep]:
        """The steps of a group, with their hyper-parameter up to date."""
        steps = self.in_place_steps(i)
        if steps:
            made, value = self._made[i], self._number(self.param_groups[i])
            if isinstance(value, Tensor):
                made.number.copy_(value.reshape(-1))
            elif value != made.last_value:
                made.number.fill_(value)
                made.last_value = value
        return steps


@dataclass
class _Made:
    """A group's steps, and what they were made for."""

    options: tuple[object, ...]
    kinds: tuple[object, ...]
    """Dtypes, shapes, strides and device of the parameters."""
    params: list[Tensor]
    trained: list[bool]
    """Whether each of them requires a gradient."""
    steps: list[TensorsStep]
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
