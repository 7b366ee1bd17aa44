"""How a rule is tuned, what delays leave of its accuracy, and which rules are ahead of which."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from reproduction.study import Candidate, finite_loss


@dataclass(frozen=True, eq=False)
class SoftmaxScores:
    """A rule in one setting: its accuracies and how it was tuned."""

    rule: str
    candidate: Candidate
    accuracy: Tensor
    """``(seeds, delays, knobs, lrs)`` at the point that the rule is judged by; 0 for runs that diverged."""
    at_query: Tensor  # the same at the last query
    loss: Tensor  # the training loss at the point that the rule is judged by; infinite for runs that diverged
    test_rows: int  # how many rows an accuracy is a mean of

    @cached_property
    def choice(self) -> tuple[int, int]:
        """The frozen knob and learning rate: the rate has the smallest training loss without delay; the knob, which
        often makes no difference there, is granted in hindsight, the best mean test accuracy over all delays."""
        mean = self.accuracy.mean(0)
        lrs = self.loss.mean(0)[0].argmin(-1)  # for each value of the knob
        late = mean[1:].gather(-1, lrs.view(1, -1, 1).expand(len(mean) - 1, -1, 1))
        knob = int(late.squeeze(-1).mean(0).argmax())
        return knob, int(lrs[knob])

    @property
    def frozen(self) -> Tensor:
        """``(seeds, delays)`` with the frozen learning rate."""
        knob, lr = self.choice
        return self.accuracy[..., knob, lr]

    @property
    def oracle(self) -> Tensor:
        """``(seeds, delays)`` with the learning rate and the knob of the smallest training loss at each delay."""
        flat = self.accuracy.flatten(2)
        best = self.loss.flatten(2).mean(0).argmin(-1)
        return flat.gather(-1, best.view(1, -1, 1).expand(len(flat), -1, 1)).squeeze(-1)


def mean_late(accuracy: Tensor) -> float:
    return accuracy[:, 1:].mean().item()


def worst_drop(accuracy: Tensor) -> float:
    """How much is lost, on the mean over seeds, from delay 0 to the worst delay."""
    by_delay = accuracy.mean(0)
    return (by_delay[0] - by_delay.min()).item()


def spread(accuracy: Tensor) -> float:
    """The largest difference between two seeds' means over the delays but 0."""
    by_seed = accuracy[:, 1:].mean(1)
    return (by_seed.max() - by_seed.min()).item()


def is_ahead(first: SoftmaxScores, second: SoftmaxScores, protocol: str) -> bool:
    """Whether a mean is better by more than both rules' seeds differ, and by more than two rows of the test part.

    All else is a tie.
    """
    mine, other = getattr(first, protocol), getattr(second, protocol)
    return mean_late(mine) - mean_late(other) > max(spread(mine), spread(other), 2 / first.test_rows)


def place(scores: SoftmaxScores, panel: Sequence[SoftmaxScores], protocol: str) -> int:
    """One more than the number of rules that are ahead; tied rules share the best place."""
    return 1 + sum(is_ahead(other, scores, protocol) for other in panel)


def ranked(panel: Iterable[SoftmaxScores], protocol: str = "frozen") -> list[SoftmaxScores]:
    """The best mean over the delays first."""
    return sorted(panel, key=lambda scores: -mean_late(getattr(scores, protocol)))


def split_points(candidate: Candidate, loss: Tensor, accuracy: Tensor, test_rows: int) -> list[SoftmaxScores]:
    """The rule judged by its own output; SGD also by its last iterate, as a rule of its own.

    The last dimension of losses and accuracies is output and query.
    """
    at_output, at_query = torch.where(torch.isfinite(loss), accuracy, 0.0).unbind(-1)
    losses = finite_loss(loss).unbind(-1)
    own = SoftmaxScores(candidate.rule, candidate, at_output, at_query, losses[0], test_rows)
    if candidate.rule != "sgd-linear":
        return [own]
    return [SoftmaxScores("sgd", candidate, at_query, at_query, losses[1], test_rows), own]
