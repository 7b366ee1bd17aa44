"""A GPT of tens of millions of parameters, trained by optimizers of ``lategrad.optim`` in a plain loop.

What is measured is what users run: :class:`~lategrad.optim.FromRule` inside :class:`~lategrad.optim.Delayed`, torch's
learning rate scheduler, and the weights inside ``optimizer.output()``.
"""

import math
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR

from lategrad.delays.stages import StageDelays
from lategrad.optim import Delayed, FromRule
from lategrad.problems.language import Windows, spaced_windows
from lategrad.problems.minibatches import Minibatches
from lategrad.rules import AnyRule
from lategrad.rules.blocks import Blocks
from lategrad.simulator import Delays
from reproduction.deep.models import GPT, Block
from reproduction.text import Tokens

STAGES = 8  # of a pipeline, whose delays are 7, ..., 0
DELAY_CAP = 1_000  # of log-normal delays: about one in 15,000 is longer
_CHECK_EVERY = 50  # passes: asking whether the loss is finite makes the CPU wait for the GPU
_EVALUATED_TOGETHER = 64  # windows; their scores take half a gigabyte


class _FusedBlock(Block):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class LargeGPT(GPT):
    """:class:`GPT` for one vector of parameters: tokens are looked up, attention is fused, and a GPU
    multiplies in bfloat16.

    >>> large, small = LargeGPT(vocabulary=84).double(), GPT(vocabulary=84).double()
    >>> for model in (large, small):
    ...     _ = torch.nn.init.eye_(model.scores.weight)
    >>> torch.testing.assert_close(large(torch.arange(64).view(2, 32)), small(torch.arange(64).view(2, 32)))
    """

    block = _FusedBlock

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
            h = self.blocks(self.characters(tokens) + self.positions.weight[: tokens.shape[-1]])
            scores: Tensor = self.scores(self.norm(h))
        return scores.to(self.norm.weight.dtype)


def warm_up_and_decay(updates: int, done: int) -> float:
    """The share of the learning rate after so many updates: up over the first twentieth of all, linearly down to 0.

    >>> [warm_up_and_decay(40, done) for done in (0, 1, 2, 21, 40)]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    warm = max(1, updates // 20)
    return min((done + 1) / warm, (updates - done) / max(1, updates - warm))


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


class Losses(NamedTuple):
    """After a number of updates, on training and on held-out text; infinite if the run diverged."""

    updates: int
    train: float
    held_out: float
    drift: float  # the mean distance between a gradient's query and the one at its update


def train(
    model: nn.Module, tokens: Tokens, rule: AnyRule[Any], delays: Delays, *, updates: int, batch: int, context: int,
    evaluate: int, micro_batches: int = 1, scheduled: bool = True, kinds: Mapping[str | nn.Module, str] | None = None,
    seed: int = 0, device: str = "cpu", parts: int = 1,
) -> Iterator[Losses]:  # fmt: skip
    """Train a model for a number of updates, each with ``micro_batches`` times ``batch`` windows of ``context`` tokens.

    Yields its losses after each of so many ``parts`` of the updates.

    Args:
        model: from tokens to scores of the next one; where delays are by stage, the one that they were made from.
        evaluate: windows of each part that a loss is the mean over.
        scheduled: whether the learning rate follows :func:`warm_up_and_decay`.
        kinds: what some parameters are, as for :meth:`lategrad.Blocks.of_module`.
        seed: of samples and delays.
    """
    model.to(device)
    groups = [{"params": list(model.named_parameters()), "kinds": Blocks.of_module(model, kinds).labels}]
    rule_optimizer = FromRule(groups, rule)
    if scheduled:  # by updates: a pass may make none, or several
        scheduler = LambdaLR(rule_optimizer, partial(warm_up_and_decay, updates))
        rule_optimizer.register_step_post_hook(lambda *_: scheduler.step())
    steps = None if isinstance(delays, StageDelays) else updates
    optimizer = Delayed(rule_optimizer, delays, delay_cap=DELAY_CAP, seed=seed, steps=steps, drift=True)
    windows = Windows(tokens.train.to(device, torch.int64), context)
    minibatches = Minibatches(len(windows), batch)
    due = [round(updates * part / parts) for part in range(1, parts + 1)]
    for number in count():
        while due and optimizer.updates >= due[0]:
            with optimizer.output():
                losses = [mean_loss(model, part.long(), context, evaluate) for part in tokens[:2]]
            train, held_out = losses if all(map(math.isfinite, losses)) else (math.inf, math.inf)
            yield Losses(due.pop(0), train, held_out, optimizer.drift or 0.0)
        if not due:
            return
        optimizer.zero_grad()
        for places in minibatches.draw(seed, number * micro_batches, micro_batches).to(device):
            loss = loss_of(model, *windows.rows(places))
            (loss / micro_batches).backward()
        optimizer.step()
        if number % _CHECK_EVERY == 0 and not math.isfinite(loss.item()):
            yield from (Losses(done, math.inf, math.inf, math.inf) for done in due)
            return


@torch.no_grad()
def mean_loss(model: nn.Module, tokens: Tensor, context: int, windows: int) -> float:
    """Over fixed windows that are spread over all tokens."""
    device = next(model.parameters()).device
    parts = [part.to(device).split(_EVALUATED_TOGETHER) for part in spaced_windows(tokens, context, windows)]
    total = sum(len(inputs) * loss_of(model, inputs, targets).item() for inputs, targets in zip(*parts, strict=True))
    return total / sum(map(len, parts[0]))
