"""Optimizers with a query and an output, found under the wrappers that trainers put around them."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from lategrad.optim.output_mode import OutputMode


def with_output(optimizers: Iterable[Any]) -> list[OutputMode]:
    """The optimizers of :mod:`lategrad.optim` among these, without their wrappers.

    >>> import torch, lategrad as lg
    >>> x = [torch.nn.Parameter(torch.zeros(1))]
    >>> ours = lg.optim.Delayed(lg.optim.AnytimeSGD(x, lr=1.0), delays=3)
    >>> [type(optimizer).__name__ for optimizer in with_output([ours, torch.optim.SGD(x, lr=1.0)])]
    ['AnytimeSGD']
    """
    unwrapped = []
    for optimizer in optimizers:
        while not isinstance(optimizer, OutputMode) and hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer
        if isinstance(optimizer, OutputMode):
            unwrapped.append(optimizer)
    return unwrapped


def show_output(optimizers: Iterable[Any]) -> None:
    for optimizer in with_output(optimizers):
        optimizer.eval()


def show_query(optimizers: Iterable[Any]) -> None:
    for optimizer in with_output(optimizers):
        optimizer.train()


@contextmanager
def showing_output(optimizers: Iterable[Any]) -> Iterator[None]:
    """A context in which all hold their output; afterwards each is in its previous mode."""
    with ExitStack() as stack:
        for optimizer in with_output(optimizers):
            stack.enter_context(optimizer.output())
        yield
