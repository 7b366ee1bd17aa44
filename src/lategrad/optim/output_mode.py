"""Query and output: which of the two the parameters hold, and what is saved meanwhile.

Training needs the query in the parameters; evaluating and shipping need the output. ``with optimizer.output():``
switches for the length of a block. ``optimizer.eval()`` and ``optimizer.train()`` do the same for loops and trainers
with modes.
"""

import warnings
import weakref
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from lategrad.execution.dtensors import GatherAnew, is_dtensor, local_part_of, local_parts, max_over_ranks
from lategrad.support.validation import require

Values = dict[Tensor, Tensor]  # a value for some parameters


@torch.no_grad()
def write_values(values: Values) -> None:
    for p, value in values.items():
        local_parts([p])[0].copy_(local_part_of(value, p))


@contextmanager
def output_of(optimizer: Any) -> Iterator[None]:
    """Within this context the parameters hold what any optimizer ships, whatever a trainer has wrapped around it.

    Those of this library have ``output()``. Schedule-free ones have modes, which their groups name; they are restored
    afterwards. All others ship the parameters that they train.
    """
    while not hasattr(optimizer, "output") and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    if hasattr(optimizer, "output"):
        with optimizer.output():
            yield
    elif hasattr(optimizer, "eval") and any(group.get("train_mode", True) for group in optimizer.param_groups):
        optimizer.eval()
        try:
            yield
        finally:
            optimizer.train()
    else:
        require("optimizer", optimizer, hasattr(optimizer, "param_groups"), "an optimizer, or have it as .optimizer")
        yield


def shipped_state(optimizer: Any, model: torch.nn.Module) -> dict[str, Any]:
    """A copy of the model's ``state_dict`` with what the optimizer ships."""
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    require("model", type(model).__name__, any(id(p) in own for p in model.parameters()),
            "the one that is trained, with the optimizer's parameters")  # fmt: skip
    with output_of(optimizer):
        items = model.state_dict().items()
        return {name: v.detach().clone() if isinstance(v, Tensor) else v for name, v in items}


class _Reminder:
    """A forward hook, until the output is first used: warns once of a model that is evaluated while it holds the query.

    A copy of the model gets a hook that returns the inputs as they are; a file of it is read without this library.
    """

    def __init__(self, optimizer: "OutputMode", model: torch.nn.Module) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.remove = model.register_forward_pre_hook(self).remove

    def __call__(self, module: torch.nn.Module, inputs: Any) -> None:
        if torch.compiler.is_compiling() or module.training or torch.is_grad_enabled():
            return
        optimizer = self._optimizer()
        if optimizer is not None and any(group["scalars"] for group in optimizer.param_groups):
            self.remove()
            warnings.warn(f"the model is evaluated at the query of {type(optimizer).__name__}, where gradients are "
                          "taken; what it ships is another point: evaluate and save inside `with optimizer.output():`",
                          stacklevel=5)  # fmt: skip

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, ({}, "get")


class OutputMode(Optimizer):
    """An optimizer whose parameters hold the query, and on demand the output."""

    evaluating: bool = False  #: between :meth:`eval` and :meth:`train`
    _queries: Values | None = None  # of the parameters that hold an output now; None when they hold the query
    _loaded: Values  # the queries that came with a state saved in eval mode, until the first step
    _reminder: _Reminder | None = None
    _gathering: GatherAnew | None = None

    def _remind(self, params: object) -> None:
        """If it is a module: warn once if that is evaluated, in evaluation mode, while it holds the query."""
        if isinstance(params, torch.nn.Module):
            self._reminder = _Reminder(self, params)

    @abstractmethod
    def _write_output(self) -> Values:
        """Put the output into the parameters where it is not the query; returns the queries that were there."""

    @contextmanager
    def output(self) -> Iterator[None]:
        """Within this context the parameters hold the rules' output: what to evaluate, save and ship.

        Afterwards they hold the query again, whatever happened in between. Where the two are the same
        (``AnytimeSGD`` with the paper's settings) nothing is copied. In eval mode the parameters hold it already.
        """
        if self._queries is not None:
            yield
            return
        self._show_output()
        try:
            yield
        finally:
            self._show_query()

    def eval(self) -> None:
        """Put the output into the parameters, until :meth:`train` puts the query back; idempotent.

        In eval mode ``step`` and ``load_state_dict`` raise, and ``state_dict`` holds the query, too.

        >>> import lategrad as lg
        >>> x = torch.nn.Parameter(torch.zeros(1))
        >>> optimizer = lg.optim.FromRule([x], lg.SGD(lr=1.0, average="uniform"))
        >>> for gradient in (1.0, 1.0):
        ...     x.grad = torch.tensor([gradient])
        ...     optimizer.step()
        >>> optimizer.eval()
        >>> x.item()  # the mean of 0 and -1, where the gradients were taken
        -0.5
        >>> optimizer.train()
        >>> x.item()
        -2.0
        """
        self._not_inside_output("eval()")
        if not self.evaluating:
            self._show_output()
            self.evaluating = True

    def train(self) -> None:
        """Put the query back into the parameters after :meth:`eval`; otherwise do nothing."""
        self._not_inside_output("train()")
        if self.evaluating:
            self._show_query()
            self.evaluating = False

    def output_state_dict(self, model: torch.nn.Module) -> dict[str, Any]:
        """A copy of the model's ``state_dict`` with the output in place of the query: what to ship."""
        return shipped_state(self, model)

    def require_query(self, what: str) -> None:
        """Raise unless the parameters hold the query, which ``what`` needs."""
        self._not_inside_output(what)
        if self.evaluating:
            raise RuntimeError(f"{what} in eval mode: the parameters do not hold the query now; call train() first")

    def _not_inside_output(self, what: str) -> None:
        if self._queries is not None and not self.evaluating:
            raise RuntimeError(f"{what} inside output(): the parameters do not hold the query now")

    @torch.inference_mode(False)  # parameters and states are for training, whatever is computed from them meanwhile
    def _show_output(self) -> None:
        if self._reminder is not None:
            self._reminder.remove()
        self._queries = self._write_output() or None
        if any(map(is_dtensor, self._queries or ())):
            self._gathering = GatherAnew()

    @torch.inference_mode(False)
    def _show_query(self) -> None:
        write_values(self._queries or {})
        self._queries = None
        if self._gathering is not None:
            self._gathering.close()
            self._gathering = None

    # ---- Saving while the parameters hold the output

    def _all_params(self) -> list[Tensor]:
        """In the order in which ``state_dict`` numbers them."""
        return [p for group in self.param_groups for p in group["params"]]

    def _saved_queries(self, saved: Mapping[str, Any]) -> Values:
        queries = saved.get("query", {})
        values = {p: queries[i] for i, p in enumerate(self._all_params()) if i in queries}
        for p, query in values.items():
            if query.shape != p.shape:
                raise ValueError(f"the state has a query of shape {tuple(query.shape)} for {tuple(p.shape)} parameters")
        return values

    def _check_loaded(self) -> None:
        """Before the first step after loading: raise if the model, with its output, was loaded over the queries."""
        loaded, self._loaded = self._loaded, {}
        queries = [local_part_of(query, p).to(p.device, p.dtype) for p, query in loaded.items()]
        equal = all(map(torch.equal, local_parts(list(loaded)), queries))
        if loaded and max_over_ranks(next(iter(loaded)), [not equal])[0]:
            raise RuntimeError("the parameters have changed since load_state_dict() put the query there: the state was "
                               "saved in eval mode, so load the model before the optimizer")  # fmt: skip

    def __getstate__(self) -> dict[str, Any]:
        evaluating = self.evaluating or self._queries is not None  # a copy made inside output() is in eval mode
        return {**super().__getstate__(), "_queries": self._queries, "evaluating": evaluating}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._loaded = {}
