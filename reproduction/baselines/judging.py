"""How a rule is tuned, what is left of it under delays, and who is ahead of whom."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lategrad.trace import Trace
from reproduction.baselines.setup import Contender


@dataclass(frozen=True, eq=False)
class Result:
    """A rule in one panel: its accuracies and how it was tuned."""

    rule: str
    contender: Contender
    steps: tuple[float, ...]
    """Those that were run."""
    accuracy: Tensor
    """``(seeds, delays, knobs, steps)`` at the point that the rule is judged by; what diverged counts as zero."""
    at_query: Tensor
    """The same at the last query."""
    loss: Tensor
    """The training loss at the point that the rule is judged by, which it is tuned by; infinite if it diverged."""
    test_rows: int
    """How many rows an accuracy is a mean of."""

    @cached_property
    def choice(self) -> tuple[int, int]:
        """The frozen knob and step: the step has the smallest training loss without delay; the knob, which often makes
        no difference there, is granted in hindsight, the best test accuracy on average over all delays."""
        mean = self.accuracy.mean(0)
        steps = self.loss.mean(0)[0].argmin(-1)  # for each value of the knob
        late = mean[1:].gather(-1, steps.view(1, -1, 1).expand(len(mean) - 1, -1, 1))
        knob = int(late.squeeze(-1).mean(0).argmax())
        return knob, int(steps[knob])

    @property
    def frozen(self) -> Tensor:
        """``(seeds, delays)`` with the frozen step."""
        knob, step = self.choice
        return self.accuracy[:, :, knob, step]

    @property
    def frozen_at_query(self) -> Tensor:
        """The same runs at their last query."""
        knob, step = self.choice
        return self.at_query[:, :, knob, step]

    @property
    def oracle(self) -> Tensor:
        """``(seeds, delays)`` with the step and the knob of the smallest training loss at each delay."""
        flat = self.accuracy.flatten(2)
        best = self.loss.flatten(2).mean(0).argmin(-1)
        return flat.gather(-1, best.view(1, -1, 1).expand(len(flat), -1, 1)).squeeze(-1)


def mean_late(accuracy: Tensor) -> float:
    """The mean over all delays but 0."""
    return accuracy[:, 1:].mean().item()


def worst_drop(accuracy: Tensor) -> float:
    """How much is lost, on the mean over seeds, from delay 0 to the worst delay."""
    by_delay = accuracy.mean(0)
    return (by_delay[0] - by_delay.min()).item()


def spread(accuracy: Tensor) -> float:
    """How far the means over the late delays of two seeds are apart."""
    by_seed = accuracy[:, 1:].mean(1)
    return (by_seed.max() - by_seed.min()).item()


def is_ahead(first: Result, second: Result, protocol: str) -> bool:
    """Whether a mean is better by more than both rules' seeds differ, and by more than two rows of the test part.

    All else is a tie.
    """
    mine, other = getattr(first, protocol), getattr(second, protocol)
    return mean_late(mine) - mean_late(other) > max(spread(mine), spread(other), 2 / first.test_rows)


def place(result: Result, panel: Sequence[Result], protocol: str) -> int:
    """One more than the number of rules that are ahead; tied rules share the best place."""
    return 1 + sum(is_ahead(other, result, protocol) for other in panel)


def results(trace: Trace, contender: Contender, test_rows: int) -> list[Result]:
    """The rule judged by its own output; SGD also by its last iterate, as a rule of its own."""
    assert trace.accuracy is not None
    finite = torch.isfinite(trace.loss[-1])
    output, query = torch.where(finite, trace.accuracy[-1], 0.0).unbind(-1)
    loss, loss_at_query = torch.where(finite, trace.loss[-1], torch.inf).unbind(-1)
    steps = trace.axis("lr").values
    own = Result(contender.rule, contender, steps, output, query, loss, test_rows)
    if contender.rule != "sgd-linear":
        return [own]
    return [Result("sgd", contender, steps, query, query, loss_at_query, test_rows), own]


def ranked(panel: Iterable[Result]) -> list[Result]:
    """The best mean over the delays first, steps frozen."""
    return sorted(panel, key=lambda result: -mean_late(result.frozen))
