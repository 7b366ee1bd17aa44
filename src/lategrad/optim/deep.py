"""The rules for deep models as optimizers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from lategrad.optim.rule_optimizer import RuleOptimizer, invalid
from lategrad.rules import SteadyAdam as SteadyAdamRule
from lategrad.rules import SteadyMuon as SteadyMuonRule
from lategrad.rules.blocks import KINDS, Blocks, kind_of
from lategrad.rules.rule import AnyRule


class SteadyAdam(RuleOptimizer):
    """:class:`lategrad.SteadyAdam` as an optimizer: Adam's steps, averaged and braked, for late gradients.

    The parameters are the query, mostly the average of the iterates; what you ship is the average itself: see
    :meth:`output`, :meth:`output_state_dict`. Two vectors of state, as AdamW has.

    Args:
        params: a module, or as for any optimizer; every other argument can be set for each group. With a module a
            warning says when it is evaluated outside :meth:`output`.
        lr: as for Adam; the best one without delay is meant to stay the best under delay. LR schedulers work.
        weight_decay: decoupled.
        maximize: ascend instead of descend.
        compile: compile the step (takes a second, once), or run it operation by operation; None decides by size.

    >>> import torch, lategrad as lg
    >>> x = torch.nn.Parameter(torch.zeros(2))
    >>> optimizer = lg.optim.SteadyAdam([x], lr=0.1)
    >>> for t in range(500):
    ...     optimizer.zero_grad()
    ...     (x - torch.tensor([3.0, 4.0])).square().sum().backward()
    ...     optimizer.step(delay=0)  # the number of steps since the gradient was computed
    >>> with optimizer.output():
    ...     print(x.data.round(decimals=1))
    tensor([3., 4.])
    """

    recompile_keys = ("weight_decay",)

    def __init__(
        self, params: ParamsT | nn.Module, lr: float | Tensor = 0.003, *, weight_decay: float = 0.0,
        maximize: bool = False, compile: bool | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            params.parameters() if isinstance(params, nn.Module) else params, lr=lr, weight_decay=weight_decay,
            maximize=maximize, per_parameter=False, compile=compile,
        )  # fmt: skip
        self._remind(params)

    def _rule(self, group: dict[str, Any], lr: Tensor) -> AnyRule[Any]:
        return SteadyAdamRule(lr, weight_decay=group["weight_decay"])


class SteadyMuon(RuleOptimizer):
    """:class:`lategrad.SteadyMuon` as an optimizer: orthogonalised steps that look a delay ahead.

    The parameters are the query; what you ship is the average: see :meth:`output`, :meth:`output_state_dict`. Three
    vectors of state, and one more for what is not a matrix.

    Args:
        params: a module, whose embeddings are then not treated as matrices, and which warns when it is evaluated
            outside :meth:`output`; or as for any optimizer: then everything
            with two dimensions and more is a matrix, unless its group says ``kinds``: one of "matrix", "embedding" and
            "other" for all its parameters, or a list with one for each. The last layer is a matrix here, as in all our
            measurements; most users of Muon give it to Adam: ``{"params": head.parameters(), "kinds": "other"}``.
        lr: as for Muon with its updates scaled to Adam's; the best one without delay is meant to stay the best under
            delay. LR schedulers work.
        weight_decay: decoupled.
        maximize: ascend instead of descend.
        compile: compile the step, which takes long for this rule, or run it operation by operation (the default).

    >>> import torch, lategrad as lg
    >>> model = torch.nn.Linear(3, 2)
    >>> optimizer = lg.optim.SteadyMuon(model, lr=0.1)
    >>> x = torch.eye(3)
    >>> for t in range(300):
    ...     optimizer.zero_grad()
    ...     (model(x) - x[:, :2]).square().sum().backward()
    ...     optimizer.step(delay=0)  # the number of steps since the gradient was computed
    >>> with optimizer.output():
    ...     print(bool((model(x) - x[:, :2]).abs().max() < 0.1))
    True
    """

    recompile_keys = ("weight_decay", "kinds")

    def __init__(
        self, params: ParamsT | nn.Module, lr: float | Tensor = 0.01, *, weight_decay: float = 0.0,
        maximize: bool = False, compile: bool | None = None,
    ) -> None:  # fmt: skip
        model = params
        if isinstance(params, nn.Module):
            trained = [p for p in params.parameters() if p.requires_grad]
            params = [{"params": trained, "kinds": [block.kind for block in Blocks.of_module(params).parts]}]
        super().__init__(params, lr=lr, weight_decay=weight_decay, kinds=None, maximize=maximize, per_parameter=False,
                         compile=compile)  # fmt: skip
        self._remind(model)

    def _check(self, group: dict[str, Any]) -> None:
        super()._check(group)
        kinds, params = group["kinds"], group["params"]
        if kinds is None:
            kinds = [kind_of(p) for p in params]
        if isinstance(kinds, str):
            kinds = [kinds] * len(params)
        invalid("kinds", f"{kinds}, for {len(params)} parameters", len(kinds) != len(params))
        for kind, p in zip(kinds, params, strict=True):
            invalid("kinds", f"{kind!r}, valid: {', '.join(KINDS)}", kind not in KINDS)
            invalid("kinds", f"'matrix' for a parameter of shape {tuple(p.shape)}", kind == "matrix" and p.dim() < 2)
        group["kinds"] = list(kinds)

    def _rule(self, group: dict[str, Any], lr: Tensor) -> AnyRule[Any]:
        return SteadyMuonRule(lr, weight_decay=group["weight_decay"])
