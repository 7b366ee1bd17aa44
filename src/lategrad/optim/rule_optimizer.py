"""What all optimizers made from a server rule have in common."""

import itertools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from lategrad.execution import ParameterState, ParameterStep, in_place
from lategrad.execution.backend import EXPECTED_STEPS, compiling_pays
from lategrad.execution.codegen.staged import is_staged
from lategrad.execution.dtensors import check_sharding, is_dtensor, local_parts, max_over_ranks, shards_of
from lategrad.execution.parameter_state import Ticket, in_shards, sharded, state_template
from lategrad.optim.arguments import require_known_keys, require_object, require_params, require_state_of
from lategrad.optim.output_mode import OutputMode, Values, write_values
from lategrad.registry import parse_set
from lategrad.rules.blocks import Blocks, fill_in, fill_in_delays
from lategrad.rules.rule import AnyRule
from lategrad.sets import WholeSpace
from lategrad.support.runs import map_tensors, runs_shape
from lategrad.support.sharded_vector import local_of
from lategrad.support.torch_private import gather, scatter
from lategrad.support.validation import Scalar, is_count, require

ALWAYS_CHECKED = 8  # steps in which ranks always compare their delays; later in step 16, 32, 64, ... only

Tickets = list[list[Ticket] | None]  # the tickets of the queries of all groups, for rules that need them


def invalid(what: str, value: object, condition: bool) -> None:
    """Raise a ValueError in the words of torch's own optimizers."""
    if condition:
        raise ValueError(f"Invalid {what}: {value}")


class RuleOptimizer(OutputMode):
    """A ``torch.optim.Optimizer`` whose step is the update of a rule, which subclasses choose.

    The parameters hold the query, before and after every step. A group is one vector (or each of its
    parameters is one), with its own rule and its own count of updates. Vectors of the rule's state are in
    ``state[p]`` and scalars in the group's ``"scalars"``, both complete from the first step on.
    """

    recompile_keys: ClassVar[tuple[str, ...]] = ()  #: entries of a group that take effect at the next step
    optional: ClassVar[tuple[str, ...]] = ()  #: the entries that a group may have beside the optimizer's own arguments
    _has_warned = False  # of a step without gradients
    _has_warned_of_changes = False
    _versions: list[int] | None = None  # of the parameters after the last step: changes in place raise them
    not_saved: ClassVar[tuple[str, ...]] = ("rule", "domain", "compile")  #: loading keeps the present ones

    def __init__(self, params: ParamsT, **defaults: Any) -> None:
        self._cache: dict[int, _CachedSteps] = {}
        self._loaded = {}
        require_params(type(self).__name__, params)
        super().__init__(params, defaults)

    # ---- What subclasses define

    def _rule(self, group: dict[str, Any], lr: Tensor) -> AnyRule[Any]:
        """The group's rule, with ``lr`` for the hyper-parameter that :meth:`_current_lr` reads at every step."""
        raise NotImplementedError

    def _current_lr(self, group: dict[str, Any]) -> Scalar:
        return cast(Scalar, group.get("lr", 1.0))

    def _check(self, group: dict[str, Any]) -> None:
        lr = group.get("lr", 0.0)
        if isinstance(lr, Tensor):
            if lr.numel() != 1:
                raise ValueError("Tensor lr must be 1-element")
            lr = lr.item()
        invalid("learning rate", lr, not is_number(lr, low=0))
        if "domain" in group:
            require_object("domain", group["domain"])
            if isinstance(group["domain"], str):
                group["domain"] = parse_set(group["domain"])
            # Not isinstance: that would need the diameter, which a box without a dimension does not have.
            is_set = all(hasattr(group["domain"], name) for name in ("project", "contains"))
            invalid("domain", group["domain"], not is_set)
        for name in ("maximize", "per_parameter", "block_delays"):
            invalid(f"{name} value", group.get(name), not isinstance(group.get(name, False), bool))
        invalid("compile value", group["compile"], not isinstance(group["compile"], bool | None))
        invalid("weight_decay value", group["weight_decay"], not is_number(group["weight_decay"], low=0))
        if "kinds" in group:
            blocks = Blocks.of_tensors(group["params"], group["kinds"], group.get("param_names"))
            group["kinds"] = blocks.require_decided().labels

    # ---- torch.optim's contract

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group with hyper-parameters of its own, and project its parameters onto its constraint set."""
        require_known_keys(type(self).__name__, param_group, [*self.defaults, "kinds", "block_delays", *self.optional])
        super().add_param_group(param_group)
        with ExitStack() as undo:
            undo.callback(self.param_groups.pop)
            group = self.param_groups[-1]
            self._check(group)
            _check_params(type(self).__name__, group["params"])
            group["scalars"] = []
            self._project(group)
            self._versions = None
            undo.pop_all()

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # it is compiled already
    def step(
        self, closure: Callable[[], float] | None = None, *, delay: int | Sequence[int] = 0,
        tickets: Tickets | None = None,
    ) -> float | None:  # fmt: skip
        """One update of every group, with the gradients in ``.grad``; returns what the closure returns.

        In a group in which some parameter has a gradient, a parameter without one has a gradient of zero.
        A group without any gradient is left alone, as are parameters that require none; with none at all it warns once.

        Args:
            closure: computes the gradients and returns the loss.
            delay: number of updates since the gradients were computed, for rules that use it; or one for each
                parameter of all groups, in their order, as in a pipeline. Rules with ``delay_blocks`` use each, and
                others the longest one of a group.
            tickets: what :meth:`issue_tickets` gave at that time; by default they are computed now.
        """
        self._warn_of_changes()
        loss = None if closure is None else torch.enable_grad()(closure)()
        self.require_query("step()")
        self._check_loaded()
        all_grads = [[p.grad for p in group["params"]] for group in self.param_groups]
        if {grad.layout for grads in all_grads for grad in grads if grad is not None} - {torch.strided}:
            raise RuntimeError(f"{type(self).__name__} does not support sparse gradients")
        delays = self._delays_of_groups(delay)
        present = [i for i, grads in enumerate(all_grads) if any(grad is not None for grad in grads)]
        if not present and not self._has_warned:
            self._has_warned = True
            warnings.warn(f"no parameter of {type(self).__name__} has a gradient, and nothing is updated: build the "
                          f"optimizer after fully_shard(model), and check requires_grad", stacklevel=4)  # fmt: skip
        for i in present:
            if isinstance(delays[i], list):  # from now on, and in the saved state
                self.param_groups[i]["block_delays"] = True
        steps_of = {i: self._steps_with_current_lr(i) for i in present}
        for i in present:
            self._cache[i].require_same_training()
            self._cache[i].require_agreement(delays[i])
        for i, steps in steps_of.items():
            grads, late = all_grads[i], delays[i]
            group_tickets = (tickets[i] if tickets else None) or itertools.repeat(None)
            for step, places, ticket in zip(steps, self._cache[i].places, group_tickets, strict=False):
                step([grads[k] for k in places], [late[k] for k in places] if isinstance(late, list) else late, ticket)
        self._versions = self._present_versions()
        return loss

    def _present_versions(self) -> list[int]:
        groups = [group["params"] for group in self.param_groups]  # each is plain or sharded as a whole
        return [p._version for params in groups if not any(map(is_dtensor, params[:1])) for p in params]

    def _warn_of_changes(self) -> None:
        before, self._versions = self._versions, None
        if before is not None and before != self._present_versions() and not self._has_warned_of_changes:
            self._has_warned_of_changes = True
            warnings.warn(f"parameters were changed in place since the last step (load_state_dict, clamp_, an "
                          f"embedding with max_norm?): {type(self).__name__} continues from its own state, which "
                          f"does not have the change. To start from changed values build a new optimizer; for a "
                          f"constraint use one with domain=.", stacklevel=4)  # fmt: skip

    def _delays_of_groups(self, delay: int | Tensor | Sequence[int]) -> list[Any]:
        """The delay of each group; a list with that of each parameter where they differ."""
        counts = [len(group["params"]) for group in self.param_groups]
        if isinstance(delay, Tensor) and delay.numel() == 1:
            if delay.device.type != "cpu":
                return [delay] * len(counts)  # to read it, the CPU would have to wait
            delay = delay.reshape(())
        values: Any = delay.tolist() if hasattr(delay, "tolist") else delay
        valid = f"an integer >= 0, or {sum(counts)} of them, one for each parameter"
        if not isinstance(values, Sequence):
            require("delay", delay, is_count(values), valid)
            return [int(values)] * len(counts)
        require("delay", delay, len(values) == sum(counts) and all(map(is_count, values)), valid)
        remaining = iter(map(int, values))
        groups = [list(itertools.islice(remaining, count)) for count in counts]
        return [own if len(set(own)) > 1 else max(own, default=0) for own in groups]

    @torch.no_grad()
    def issue_tickets(self) -> Tickets:
        """The tickets of the present queries: for a gradient that is computed now and applied later."""
        by_group = [[step.ticket() for step in self._steps_with_current_lr(i)] for i in range(len(self.param_groups))]
        return [[t for t in tickets if t is not None] or None for tickets in by_group]

    def state_dict(self) -> dict[str, Any]:
        """The state of all groups, as plain tensors and numbers, without rules and constraint sets.

        While the parameters hold the output (:meth:`eval`, :meth:`output`) it also has the queries, which the model's
        ``state_dict`` then lacks, so that training can continue from the two.
        """
        saved = super().state_dict()
        for group in saved["param_groups"]:
            for name in self.not_saved:
                group.pop(name, None)
            group["without_query"] = self._queries is not None  # then the model's state lacks it
        if self._queries is not None:
            numbered = enumerate(self._all_params())
            saved["query"] = {i: self._queries[p].clone() for i, p in numbered if p in self._queries}
        return saved

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state; its hyper-parameters are used, with the present rules and constraint sets.

        A state that was saved in eval mode puts its queries into the parameters: load the model before it.
        """
        self.require_query("load_state_dict()")
        needed = {*self.recompile_keys, "maximize", "per_parameter", "scalars"} - {*self.not_saved, "weight_decay"}
        require_state_of(type(self).__name__, state_dict, needed)
        if "query" not in state_dict and any(group.get("without_query") for group in state_dict["param_groups"]):
            raise ValueError("the state was saved in eval mode or inside output(), and the query has been dropped, as "
                             "torch.distributed.checkpoint does: save it in train mode")  # fmt: skip
        before: dict[str, Any] = {"state": self.state, "param_groups": self.param_groups}
        super().load_state_dict(dict(state_dict))
        with ExitStack() as undo:
            undo.callback(self.__setstate__, before)
            for old, group in zip(before["param_groups"], self.param_groups, strict=True):
                group |= {name: old[name] for name in self.not_saved if name in old}
                group.pop("without_query", None)
                group.setdefault("weight_decay", old["weight_decay"])  # missing in old states
            queries = self._saved_queries(state_dict)
            undo.callback(write_values, {p: p.detach().clone() for p in self._all_params()})
            write_values(queries)
            self._restore(state_dict)
            self._loaded = {p: p.detach().clone() for p in queries}
            undo.pop_all()

    def _restore(self, saved: Mapping[str, Any]) -> None:
        """Copy the saved tensors: torch has cast them to the parameters' dtype, or shares their memory."""
        for index, p in zip((i for g in saved["param_groups"] for i in g["params"]), self._all_params(), strict=True):
            if index in saved["state"]:
                self.state[p] = {name: v.to(p.device, copy=True) for name, v in saved["state"][index].items()}
        for i, group in enumerate(self.param_groups):
            if group["scalars"]:
                self.in_place_steps(i)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._cache, self._versions = {}, None

    # ---- The output, where it is not the query

    @torch.no_grad()
    def _write_output(self) -> Values:
        self._warn_of_changes()
        started = [i for i, group in enumerate(self.param_groups) if group["scalars"]]
        differing = [step for i in started for step in self.in_place_steps(i) if not step.output_is_query]
        queries = {p: p.detach().clone() for step in differing for p in step.tensors}
        for step in differing:
            step.write_output()
        return queries

    def _show_query(self) -> None:
        super()._show_query()
        self._versions = self._present_versions()

    # ---- From groups to steps

    def _vectors(self, group: dict[str, Any], lr: Tensor) -> list[tuple[Any, list[Tensor]]]:
        """The vectors of a group: each a rule and its parameters, without frozen and empty ones."""
        named = zip(group["params"], group.get("kinds") or itertools.repeat(None), strict=False)
        # What has a state was trained when the first step was made, and stays part of the vector when it is frozen.
        used = [(p, kind) for p, kind in named
                if p.numel() and (p.requires_grad or (group.get("scalars") and self.state.get(p)))]  # fmt: skip
        if not used:
            return []
        device = used[0][0].device
        rule = map_tensors(lambda t: t if t is lr else t.to(device), self._rule(group, lr))
        if runs_shape(rule):
            raise ValueError(f"Invalid rule: {rule}: an optimizer is one run, this is {tuple(runs_shape(rule))}")
        vectors = []
        for members in [[one] for one in used] if group["per_parameter"] else [used]:
            params, kinds = [p for p, _ in members], [kind for _, kind in members]
            blocks = Blocks.of_tensors(params, kinds if group.get("kinds") else None)
            filled = fill_in_delays(rule, blocks) if group.get("block_delays") and len(params) > 1 else rule
            vectors.append((fill_in(filled, blocks), params))
        return vectors

    @torch.no_grad()
    def _project(self, group: dict[str, Any]) -> None:
        device = group["params"][0].device if group["params"] else None
        for rule, params in self._vectors(group, torch.ones(1, dtype=torch.float64, device=device)):
            state_template(rule, params)  # raises for a state that cannot be saved
            if not isinstance(rule.domain, WholeSpace):
                shards, parts = shards_of(params), local_parts(params)
                scatter(local_of(in_shards(rule, shards).domain.project(sharded(gather(parts), shards))), parts)

    def in_place_steps(self, i: int) -> list[ParameterStep]:
        """The step of each vector of group i; ``backend`` says what runs it.

        They are built at the first update, and again when something that they depend on has changed.
        """
        cache, group = self._cache.get(i), self.param_groups[i]
        params: list[Tensor] = group["params"]
        keys = ("maximize", "per_parameter", "compile", "kinds", "block_delays", *self.recompile_keys)
        options = [group.get(key) for key in keys]
        trained = [p.requires_grad for p in params]
        forms = (list(map(id, params)), [p.dtype for p in params], [p.shape for p in params],
                 [p.stride() for p in params], [p.device for p in params[:1]])  # fmt: skip
        if cache is not None and group["scalars"] and (cache.options, cache.forms) == (options, forms):
            return cache.steps
        lr = torch.ones(1, dtype=torch.float64, device=params[0].device if params else None)
        vectors = self._vectors(group, lr)
        compile = group["compile"]
        required = "loops" if compile and any(shards_of(members) is not None for _, members in vectors) else None
        if compile is None:
            total = sum(p.numel() for p in params)
            staged = all(p.is_contiguous() for p in params)  # else torch.compile would run, for a minute at first
            shaped = any(getattr(rule, "blocks", None) is not None and not (staged and is_staged(rule))
                         for rule, _ in vectors)  # fmt: skip
            shaped = shaped or any(getattr(rule, "delay_blocks", None) is not None for rule, _ in vectors)
            compile = not shaped and compiling_pays(EXPECTED_STEPS, total, backend="loops")
        saved = group["scalars"] or [None] * len(vectors)
        if len(saved) != len(vectors):
            raise ValueError(f"the state is of {len(saved)} vectors, the group has {len(vectors)}")
        steps = []
        for (rule, members), scalars in zip(vectors, saved, strict=True):
            state = None if scalars is None else ParameterState([self.state[p] for p in members], scalars)
            backend = required if compile else "eager"
            step = in_place(rule, state, tensors=members, maximize=group["maximize"], backend=backend)
            self.state.update(zip(members, step.state.vectors, strict=True))
            steps.append(step)
        group["scalars"] = [step.state.scalars for step in steps]
        place = {id(p): k for k, p in enumerate(params)}
        places = [[place[id(p)] for p in step.tensors] for step in steps]
        self._versions = None  # building them may have written the first query
        self._cache[i] = _CachedSteps(steps, lr, places, options, forms, list(params), trained)
        return steps

    def _steps_with_current_lr(self, i: int) -> list[ParameterStep]:
        steps = self.in_place_steps(i)
        cache, value = self._cache[i], self._current_lr(self.param_groups[i])
        if isinstance(value, Tensor):
            cache.lr.copy_(value.detach().reshape(-1))
            cache.last_lr = math.nan
        elif value != cache.last_lr:
            lr = self.param_groups[i].get("lr", 0.0)
            invalid("learning rate", lr, not is_number(lr, low=0))
            cache.lr.fill_(value)
            cache.last_lr = value
        return steps


@dataclass
class _CachedSteps:
    """A group's steps, and what they were built for."""

    steps: list[ParameterStep]
    lr: Tensor  # the learning rate that the rules of the steps read
    places: list[list[int]]  # the group's parameters that each step has; some have no entries, or are frozen
    options: list[object]
    forms: tuple[list[Any], ...]  # identities, dtypes, shapes, strides and device of the parameters
    params: list[Tensor]
    trained: list[bool]  # whether each parameter requires a gradient
    last_lr: float = 1.0
    calls: int = 0

    def require_same_training(self) -> None:
        if self.trained != [p.requires_grad for p in self.params]:
            raise RuntimeError("requires_grad of a parameter has changed since the first step, but its group is one "
                               "vector: set it as it was, make a new optimizer, or put what is thawed later into a "
                               "group of its own")  # fmt: skip

    def require_agreement(self, delay: int | Tensor | list[int]) -> None:
        """Raise if ranks that share a parameter disagree about the delay or the learning rate.

        That takes a collective operation, so it is checked in the first steps, and then ever more rarely.
        """
        self.calls += 1
        often = self.calls <= ALWAYS_CHECKED or self.calls & (self.calls - 1) == 0
        if self.steps and is_dtensor(self.params[0]) and often:
            late = delay if isinstance(delay, list) else [delay] * len(self.params)
            own = [self.lr.item(), *map(float, late)]
            both = max_over_ranks(self.params[0], [*own, *(-one for one in own)])
            for i, (high, low) in enumerate(zip(both[: len(own)], both[len(own) :], strict=True)):
                valid = "the same on every rank"
                require("delay" if i else "lr", f"values from {-low:g} to {high:g}", -low == high, valid)


def _check_params(name: str, params: list[Tensor]) -> None:
    devices = {p.device for p in params}
    if len(devices) > 1:
        raise ValueError(f"{name} needs the parameters of a group on one device, got {sorted(map(str, devices))}")
    check_sharding(name, params)
    for p in params:
        if not p.is_floating_point():
            raise ValueError(f"{name} needs floating-point parameters, got {p.dtype}")
        if p.layout != torch.strided:
            raise ValueError(f"{name} needs dense parameters, got {p.layout}")


def is_number(value: object, *, low: float, strict: bool = False) -> bool:
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and low <= value < float("inf") and not (strict and value == low)  # type: ignore[operator]
