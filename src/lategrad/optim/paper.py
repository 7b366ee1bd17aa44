"""The paper's algorithms under the names and arguments that a PyTorch user expects."""

from typing import Any, cast

from torch import Tensor
from torch.optim.optimizer import ParamsT

from lategrad.learners import OGD, OptimisticOGD
from lategrad.optim.rule_optimizer import RuleOptimizer, invalid, is_number
from lategrad.rules import Anytime, StronglyConvexOGD
from lategrad.rules.rule import AnyRule
from lategrad.sets import ConvexSet, WholeSpace
from lategrad.support.validation import Scalar

_NO_CONSTRAINT = WholeSpace()


def _check_averaging(group: dict[str, Any]) -> None:
    invalid("power value", group["power"], not is_number(group["power"], low=0))
    in_range = is_number(group["interpolation"], low=0) and group["interpolation"] <= 1
    invalid("interpolation value", group["interpolation"], not in_range)


class AnytimeSGD(RuleOptimizer):
    r"""Algorithm 1 of the paper with online gradient descent: SGD for late gradients.

    .. math:: w_{t+1} = \Pi_K\big(w_t - \tfrac{\mathrm{lr}}{\sqrt t}\, g_t\big), \qquad
        x_{t+1} = x_t + \tfrac{\alpha_{t+1}}{\alpha_{1:t+1}} (w_{t+1} - x_t), \qquad \alpha_t = t^{\mathrm{power}}

    The parameters are :math:`x_t`, where the gradients are taken and which is also what you ship; w is the
    one vector of state. ``lr`` is the learning rate of w at t = 1, typically larger than for SGD, as x averages it.

    Args:
        params: as for any optimizer; every other argument can be set for each group.
        lr: read at every step, so that LR schedulers work; the decay by :math:`\sqrt t` is applied in addition.
        power: the weights are :math:`t^{\mathrm{power}}`; the paper: 1.
        interpolation: gradients are taken at (1 - interpolation) w + interpolation x; the paper: 1. With
            less than 1 the output x is not what the parameters hold: see :meth:`output`.
        domain: the constraint set K, of the whole group or of each parameter; a set, or a text such as ``"ball:5"``.
        schedule: "sqrt" for :math:`\mathrm{lr}/\sqrt{t}`, "constant" for lr.
        weight_decay: decoupled: before each step w is multiplied by 1 - weight_decay times its learning rate.
        maximize: ascend instead of descend.
        per_parameter: each parameter is a vector of its own, with its own projection and norms.
        compile: compile the step (takes seconds, once), or run it operation by operation. None compiles groups of
            about 190,000 entries and more.

    >>> import torch, lategrad as lg
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = lg.optim.AnytimeSGD(model.parameters(), lr=0.5, domain=lg.Ball(3.0))
    >>> x, y = torch.eye(2), torch.tensor([[1.0], [2.0]])
    >>> for t in range(200):
    ...     optimizer.zero_grad()
    ...     torch.nn.functional.mse_loss(model(x), y).backward()
    ...     optimizer.step()
    >>> bool(torch.nn.functional.mse_loss(model(x), y) < 1e-3)
    True

    Reference: R. Aviv, I. Hakimi, A. Schuster and K. Levy, Learning under delayed feedback: implicitly
    adapting to gradient delays, 2021, Algorithm 1.
    """

    recompile_keys = ("power", "interpolation", "domain", "schedule", "weight_decay")

    def __init__(
        self, params: ParamsT, lr: float | Tensor, *, power: float = 1, interpolation: float = 1.0,
        domain: ConvexSet | str = _NO_CONSTRAINT, schedule: str = "sqrt", weight_decay: float = 0.0,
        maximize: bool = False, per_parameter: bool = False, compile: bool | None = None,
    ) -> None:  # fmt: skip
        super().__init__(params, lr=lr, power=power, interpolation=interpolation, domain=domain, schedule=schedule,
                         weight_decay=weight_decay, maximize=maximize, per_parameter=per_parameter,
                         compile=compile)  # fmt: skip

    def _check(self, group: dict[str, Any]) -> None:
        super()._check(group)
        _check_averaging(group)
        invalid("schedule", group["schedule"], group["schedule"] not in ("sqrt", "constant"))

    def _rule(self, group: dict[str, Any], lr: Tensor) -> AnyRule[Any]:
        learner = OGD(lr, group["domain"], group["schedule"], group["weight_decay"])
        return Anytime(learner, group["power"], group["interpolation"])


class OptimisticAnytime(RuleOptimizer):
    r"""Algorithm 2 of the paper: anytime averaging of an optimistic learner that sets its own learning rate.

    .. math:: y_t = \Pi_K(y_{t-1} - \eta_t \alpha_t g_t), \qquad
        w_{t+1} = \Pi_K(y_t - \eta_{t+1} \alpha_{t+1} g_t), \qquad
        \eta_t = \mathrm{lr} \cdot D / \sqrt{1 + \textstyle\sum_{i<t} \alpha_i^2 \|g_i - M_i\|^2}

    where :math:`M_i` is the gradient received before. The parameters are the weighted average of the w, and
    that is also what you ship. Three vectors of state: w, y and the last gradient.

    Args:
        params: as for any optimizer; every other argument can be set for each group.
        diameter: D, that of the constraint set; without a bounded one, the expected distance to the solution.
        lr: a factor on the diameter for LR schedulers to change; the paper: 1.
        power: the weights are :math:`\alpha_t = t^{\mathrm{power}}`; the paper: 1.
        weight_decay: decoupled: before each step y is multiplied by 1 - weight_decay times its learning rate.
        interpolation, domain, maximize, per_parameter, compile: as for :class:`AnytimeSGD`.

    >>> import torch, lategrad as lg
    >>> x = torch.nn.Parameter(torch.zeros(2))
    >>> optimizer = lg.optim.OptimisticAnytime([x], diameter=2.0, domain=lg.Ball(1.0))
    >>> for t in range(200):
    ...     optimizer.zero_grad()
    ...     (x - torch.tensor([3.0, 4.0])).square().sum().backward()
    ...     optimizer.step()
    >>> x.data
    tensor([0.6000, 0.8000])

    Reference: Aviv, Hakimi, Schuster and Levy 2021, Algorithm 2.
    """

    recompile_keys = ("power", "interpolation", "domain", "weight_decay")

    def __init__(
        self, params: ParamsT, diameter: float, *, lr: float | Tensor = 1.0, power: float = 1,
        interpolation: float = 1.0, domain: ConvexSet | str = _NO_CONSTRAINT, weight_decay: float = 0.0,
        maximize: bool = False, per_parameter: bool = False, compile: bool | None = None,
    ) -> None:  # fmt: skip
        super().__init__(params, lr=lr, diameter=diameter, power=power, interpolation=interpolation, domain=domain,
                         weight_decay=weight_decay, maximize=maximize, per_parameter=per_parameter,
                         compile=compile)  # fmt: skip

    def _check(self, group: dict[str, Any]) -> None:
        super()._check(group)
        invalid("diameter value", group["diameter"], not is_number(group["diameter"], low=0))
        _check_averaging(group)

    def _rule(self, group: dict[str, Any], lr: Tensor) -> AnyRule[Any]:
        learner = OptimisticOGD(lr, group["domain"], group["weight_decay"])
        return Anytime(learner, group["power"], group["interpolation"])

    def _current_lr(self, group: dict[str, Any]) -> Scalar:
        return cast(Scalar, group["lr"] * group["diameter"])


class StronglyConvexSGD(RuleOptimizer):
    r"""Algorithms 3 and 4 of the paper, for strongly convex objectives (such as those with weight decay).

    .. math:: y_t = \Pi_K(y_{t-1} - \tilde\eta_t g_t), \qquad x_{t+1} = \Pi_K(y_t - \tilde\eta_{t+1} g_t), \qquad
        \tilde\eta_t = \mathrm{lr} \cdot \frac{48\, t}{H (t+1)(2t+1)}

    The parameters are :math:`x_t`, where the gradients are taken. What you ship is their average with weights
    :math:`t^2`: see :meth:`output` and :meth:`output_state_dict`. Two vectors of state: y and the average.

    Args:
        params: as for any optimizer; every other argument can be set for each group.
        strong_convexity: H > 0.
        lr: a factor on the learning rates for LR schedulers to change; the paper: 1.
        weight_decay: decoupled: before each step y is multiplied by 1 - weight_decay times its learning rate.
        domain, maximize, per_parameter, compile: as for :class:`AnytimeSGD`.

    >>> import torch, lategrad as lg
    >>> x = torch.nn.Parameter(torch.zeros(2))
    >>> optimizer = lg.optim.StronglyConvexSGD([x], strong_convexity=2.0, domain=lg.Ball(1.0))
    >>> for t in range(100):
    ...     optimizer.zero_grad()
    ...     (x - torch.tensor([0.5, 0.0])).square().sum().backward()
    ...     optimizer.step()
    >>> with optimizer.output():
    ...     print(x.data)
    tensor([0.4987, 0.0000])

    Reference: Aviv, Hakimi, Schuster and Levy 2021, Algorithms 3 and 4.
    """

    recompile_keys = ("domain", "weight_decay")

    def __init__(
        self, params: ParamsT, strong_convexity: float, *, lr: float | Tensor = 1.0,
        domain: ConvexSet | str = _NO_CONSTRAINT, weight_decay: float = 0.0, maximize: bool = False,
        per_parameter: bool = False, compile: bool | None = None,
    ) -> None:  # fmt: skip
        super().__init__(params, lr=lr, strong_convexity=strong_convexity, domain=domain, weight_decay=weight_decay,
                         maximize=maximize, per_parameter=per_parameter, compile=compile)  # fmt: skip

    def _check(self, group: dict[str, Any]) -> None:
        super()._check(group)
        H = group["strong_convexity"]
        invalid("strong_convexity value", H, not is_number(H, low=0, strict=True))

    def _rule(self, group: dict[str, Any], lr: Tensor) -> AnyRule[Any]:
        return StronglyConvexOGD(lr, group["domain"], group["weight_decay"])

    def _current_lr(self, group: dict[str, Any]) -> Scalar:
        lr: Scalar = group["lr"]
        H: float = group["strong_convexity"]
        return H / lr if isinstance(lr, Tensor) or lr > 0 else float("inf")  # the learning rate is lr / H
