"""Any server rule as a ``torch.optim.Optimizer``."""

import dataclasses
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from lategrad.optim.rule_optimizer import RuleOptimizer, invalid
from lategrad.registry import as_rule
from lategrad.rules.rule import AnyRule
from lategrad.support.validation import Scalar


class FromRule(RuleOptimizer):
    """Any server rule as an optimizer.

    The rule's learning rate, or that of its learner or of a rule that it wraps, becomes the groups' ``lr``, which is
    read at every step, so that LR schedulers work. A rule without one has groups without ``lr``. Likewise its
    ``weight_decay`` is the groups' default; a rule without one takes none.

    Args:
        params: as for any optimizer; a group may have a ``rule`` of its own, ``lr`` and ``weight_decay``.
        rule: one run of any rule (no hyper-parameter with a dimension of runs), or a text such as ``"steady:lr=1"``.
        maximize, per_parameter, compile: as for :class:`AnytimeSGD`.

    >>> import torch, lategrad as lg
    >>> x = torch.nn.Parameter(torch.zeros(2))
    >>> optimizer = lg.optim.FromRule([x], lg.SGD(lr=0.5, domain=lg.Ball(1.0)))
    >>> for t in range(3):
    ...     optimizer.zero_grad()
    ...     (x - torch.tensor([3.0, 4.0])).square().sum().backward()
    ...     optimizer.step()
    >>> x.data
    tensor([0.6000, 0.8000])
    """

    recompile_keys = ("rule", "weight_decay")
    optional = ("lr", "weight_decay")

    def __init__(
        self, params: ParamsT, rule: AnyRule[Any] | str, *, maximize: bool = False, per_parameter: bool = False,
        compile: bool | None = None,
    ) -> None:  # fmt: skip
        super().__init__(params, rule=as_rule(rule), maximize=maximize, per_parameter=per_parameter, compile=compile)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its ``lr`` and ``weight_decay`` default to those of its rule."""
        rule = param_group["rule"] = as_rule(param_group.get("rule", self.defaults["rule"]))
        if (lr := _find("lr", rule)) is not None:
            param_group.setdefault("lr", lr)
        decay = _find("weight_decay", rule)
        param_group.setdefault("weight_decay", 0.0 if decay is None else decay)
        super().add_param_group(param_group)

    def _check(self, group: dict[str, Any]) -> None:
        super()._check(group)
        invalid("learning rate", group.get("lr"), "lr" in group and _find("lr", group["rule"]) is None)
        has_none = _find("weight_decay", group["rule"]) is None
        refused = f"{group['weight_decay']}: {group['rule']!r} has none; put the penalty into the loss"
        invalid("weight_decay value", refused, has_none and group["weight_decay"] > 0)

    def _rule(self, group: dict[str, Any], lr: Tensor) -> AnyRule[Any]:
        rule: AnyRule[Any] = _replace("lr", group["rule"], lr) if "lr" in group else group["rule"]
        has_decay = _find("weight_decay", rule) is not None
        return _replace("weight_decay", rule, group["weight_decay"]) if has_decay else rule


def _find(name: str, part: Any) -> Any:
    """A hyper-parameter of the rule, or of the learner or rule inside it; None when neither has it."""
    if hasattr(part, name):
        return getattr(part, name)
    inside = _inside(part)
    return None if inside is None else _find(name, getattr(part, inside))


def _replace(name: str, part: Any, value: Scalar) -> Any:
    inside = None if hasattr(part, name) else _inside(part)
    if inside is None:
        return dataclasses.replace(part, **{name: value})
    return dataclasses.replace(part, **{inside: _replace(name, getattr(part, inside), value)})


def _inside(part: Any) -> str | None:
    return next((field for field in ("rule", "learner") if hasattr(part, field)), None)
