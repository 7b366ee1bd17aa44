"""A rule as a worker's own optimizer: started again at every job's query, with the rest of its state kept.

One large vector on a CPU is walked in place: fresh memory for every step would cost more than the step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from lategrad.execution import StateStep, in_place
from lategrad.execution.backend import EXPECTED_STEPS, compiling_pays
from lategrad.rules.rule import AnyRule, Rule, needs_ticket
from lategrad.support.runs import map_tensors, owned, tensors
from lategrad.support.validation import require

_MAKING = threading.Lock()
"""Workers may be threads of one process, and torch traces one function at a time."""


class InnerOptimizer:
    """Takes steps with a rule at no delay; between jobs it keeps the rule's state without its iterate.

    Args:
        rule: one whose query and output are its iterate, and nothing else in whose state depends on where it starts.
        x0: a point to check that at.

    >>> import lategrad as lg
    >>> inner = InnerOptimizer(lg.baselines.SGDMomentum(lr=0.1), torch.zeros(1))
    >>> x, memory = torch.tensor([5.0]), inner.memory(torch.zeros(1))
    >>> inner.walk(x, memory, lambda y, h: torch.ones(1), steps=2)[0]  # -0.1, then -0.19 more
    tensor([4.7100])
    """

    def __init__(self, rule: AnyRule[Any], x0: Tensor) -> None:
        require("inner", rule, not needs_ticket(rule), "a rule without tickets")
        self.rule = cast("Rule[Any]", rule)
        state = rule.init(x0)
        query = rule.query(state)
        places = [i for i, leaf in enumerate(tensors(state)) if leaf is query]
        alone = len(places) == 1 and torch.equal(rule.output(state), query)
        self._place = places[0] if places else -1
        others = zip(tensors(state), tensors(rule.init(x0 + 1)), strict=True)
        fixed = all(i == self._place or torch.equal(here, there) for i, (here, there) in enumerate(others))
        self._in_place: StateStep | None = None
        valid = "a rule whose query and output are its iterate, and which can go on from elsewhere, such as AdamW"
        require("inner", rule, alone and fixed, valid)

    def memory(self, x: Tensor) -> Any:
        """Before any step."""
        return self.kept(self.rule.init(x))

    def start(self, x: Tensor, memory: Any) -> Any:
        """The state at ``x``, with what was kept."""
        return self._with_iterate(memory, x)

    def step(self, state: Any, grad: Tensor) -> Any:
        """The state after one step."""
        return self.rule.update(state, grad, 0)

    def at(self, state: Any) -> Tensor:
        """The iterate."""
        return self.rule.query(state)

    def kept(self, state: Any) -> Any:
        """The state without its iterate."""
        return self._with_iterate(state, self.at(state)[..., :0].clone())

    def walk(self, x: Tensor, memory: Any, gradient: Callable[[Tensor, int], Tensor], steps: int) -> tuple[Tensor, Any]:
        """Where so many steps lead, and what is then kept.

        Args:
            x: where they begin.
            memory: what was kept.
            gradient: at a point, for step 0, 1, ...
            steps: how many.
        """
        if self._pays_in_place(x):
            return self._walk_in_place(x, memory, gradient, steps)
        state = self.start(x, memory)
        for h in range(steps):
            state = self.step(state, gradient(self.at(state), h))
        return self.at(state), self.kept(state)

    def _pays_in_place(self, x: Tensor) -> bool:
        one = x.numel() == x.shape[-1] and x.device.type == "cpu" and not torch.compiler.is_compiling()
        shaped = getattr(self.rule, "blocks", None) is not None  # its matrix products gain little
        return one and not shaped and compiling_pays(EXPECTED_STEPS, x.numel(), backend="loops")

    def _walk_in_place(
        self, x: Tensor, memory: Any, gradient: Callable[[Tensor, int], Tensor], steps: int
    ) -> tuple[Tensor, Any]:
        """The same in one state, that of a single run without run dimensions."""
        start = self.start(x, memory)
        if self._in_place is None:
            with _MAKING:
                self._in_place = in_place(self.rule, owned(map_tensors(lambda leaf: leaf.reshape(-1), start)))
        step = self._in_place
        for buffer, value in zip(tensors(step.state), tensors(start), strict=True):
            buffer.copy_(value.reshape(-1))
        y = self.at(step.state)
        for h in range(steps):
            step(gradient(y.view(x.shape), h).reshape(-1), 0)
        after = iter(tensors(step.state))
        end = map_tensors(lambda leaf: next(after).clone().view(leaf.shape), start)
        return self.at(end), self.kept(end)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_in_place": None}  # compiled where it is used

    def _with_iterate(self, state: Any, x: Tensor) -> Any:
        leaves = tensors(state)
        leaves[self._place] = x
        following = iter(leaves)
        return map_tensors(lambda _: next(following), state)
