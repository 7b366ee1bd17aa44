"""The rules for deep models as optimizers."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from lategrad.optim.rule_optimizer import RuleOptimizer
from lategrad.rules import SteadyAdam as SteadyAdamRule
from lategrad.rules import SteadyMuon as SteadyMuonRule
from lategrad.rules.blocks import Blocks, Kinds
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
        super().__init__(params.parameters() if isinstance(params, nn.Module) else params, lr=lr,
                         weight_decay=weight_decay, maximize=maximize, per_parameter=False,
                         compile=compile)  # fmt: skip
        self._remind(params)

    def _rule(self, group: dict[str, Any], lr: Tensor) -> AnyRule[Any]:
        return SteadyAdamRule(lr, weight_decay=group["weight_decay"])


class SteadyMuon(RuleOptimizer):
    """:class:`lategrad.SteadyMuon` as an optimizer: orthogonalised steps that look a delay ahead.

    The parameters are the query; what you ship is the average: see :meth:`output`, :meth:`output_state_dict`. Three
    vectors of state, and one more for what is not a matrix; compiled, a step takes about a third of a vector besides.

    Args:
        params: a module, whose layers say which of their parameters are matrices, and which warns when it is evaluated
            outside :meth:`output`; or as for any optimizer: then the shapes tell, or the groups' ``kinds``.
        lr: as for Muon with its updates scaled to Adam's; the best one without delay is meant to stay the best under
            delay. LR schedulers work.
        weight_decay: decoupled.
        kinds: what the parameters are, where it should not be found out: "matrix", "tokens", "embedding", "other" or,
            for several in one tensor, "n matrices" (attention heads in the rows, experts in the first dimension). One
            for all, a list, or a mapping from name patterns or modules, such as ``{"head.*": "other"}``, for a module
            or ``named_parameters()``; in a group, for that group. Print :meth:`parameter_table` to see the result. A
            parameter of which nothing tells is refused. "tokens", a last layer with thousands of outputs, is a matrix
            whose rows have bounded steps (docs/kinds.md).
        maximize, compile: as for :class:`SteadyAdam`.

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
        self, params: ParamsT | nn.Module, lr: float | Tensor = 0.01, *, weight_decay: float = 0.0, kinds: Kinds = None,
        maximize: bool = False, compile: bool | None = None,
    ) -> None:  # fmt: skip
        model = params
        if isinstance(params, nn.Module):
            if not isinstance(kinds, Mapping | None):
                raise ValueError(f"kinds must be a mapping where params is a module, got {kinds!r}")
            named = [(name, p) for name, p in params.named_parameters() if p.requires_grad]
            params = [{"params": named, "kinds": Blocks.of_module(params, kinds).require_decided().labels}]
            kinds = None
        super().__init__(params, lr=lr, weight_decay=weight_decay, kinds=kinds, maximize=maximize, per_parameter=False,
                         compile=compile)  # fmt: skip
        self._remind(model)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its parameters get names if only the others have them, as torch requires of all or none."""
        params = param_group["params"]
        params = [params] if isinstance(params, Tensor) else list(params)
        if any("param_names" in group for group in self.param_groups) and params and isinstance(params[0], Tensor):
            params = [(f"group {len(self.param_groups)}: {i}", p) for i, p in enumerate(params)]
        super().add_param_group({**param_group, "params": params})

    def parameter_table(self) -> str:
        """How every parameter is taken, as text with a line for each.

        >>> import torch, lategrad as lg
        >>> optimizer = lg.optim.SteadyMuon(torch.nn.Conv2d(2, 4, 3))
        >>> print(optimizer.parameter_table())
        name    shape          taken as
        weight  4 x 2 x 3 x 3  matrix of 4 x 18
        bias    4              other
        >>> optimizer
        SteadyMuon(lr=0.01, weight_decay=0.0, Blocks(1 matrix, 1 other; 76 entries))
        """
        return "\n\n".join(_blocks_of(group).table() for group in self.param_groups)

    def __repr__(self) -> str:
        groups = [f"lr={group['lr']}, weight_decay={group['weight_decay']}, {_blocks_of(group)!r}"
                  for group in self.param_groups]  # fmt: skip
        return f"{type(self).__name__}({'; '.join(groups)})"

    def _rule(self, group: dict[str, Any], lr: Tensor) -> AnyRule[Any]:
        return SteadyMuonRule(lr, weight_decay=group["weight_decay"])


def _blocks_of(group: dict[str, Any]) -> Blocks:
    return Blocks.of_tensors(group["params"], group["kinds"], group.get("param_names"))
