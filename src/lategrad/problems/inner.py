"""A rule as a worker's own optimizer: started again at every job's query, with the rest of its state kept."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from lategrad.rules.rule import AnyRule, Rule, needs_ticket
from lategrad.support.runs import map_tensors, tensors
from lategrad.support.validation import require


class InnerOptimizer:
    """Takes steps with a rule at no delay; between jobs it keeps the rule's state without its iterate.

    Args:
        rule: one whose query and output are its iterate, and nothing else in whose state depends on where it starts.
        x0: a point to check that at.

    >>> import lategrad as lg
    >>> inner = InnerOptimizer(lg.rivals.SGDMomentum(lr=0.1), torch.zeros(1))
    >>> state = inner.step(inner.start(torch.zeros(1), inner.memory(torch.zeros(1))), torch.ones(1))
    >>> again = inner.start(torch.tensor([5.0]), inner.kept(state))
    >>> inner.at(again), again.velocity
    (tensor([5.]), tensor([1.]))
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

    def _with_iterate(self, state: Any, x: Tensor) -> Any:
        leaves = tensors(state)
        leaves[self._place] = x
        following = iter(leaves)
        return map_tensors(lambda _: next(following), state)
