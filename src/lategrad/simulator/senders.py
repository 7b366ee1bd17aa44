"""Who could have sent gradients of which only the delays are known."""

from __future__ import annotations

from bisect import bisect_right, insort

import torch
from torch import Tensor


def fewest_workers(delays: Tensor) -> Tensor:
    r"""A worker for every update, as few as there can be: each sends its gradients one after another.

    The sender of update t fetched its query after :math:`v = t - 1 - \tau_t` updates, so it is one whose last update
    was number v, or an earlier one if it has waited; the one that has waited least, or a new one where there is none.
    At a constant delay :math:`\tau` that is :math:`\tau + 1` workers in turn.

    Args:
        delays: of the updates t = 1..T, ``(T,)``.

    >>> fewest_workers(torch.tensor([0, 1, 2, 2, 2, 2, 2]))  # a constant delay of 2
    tensor([0, 1, 2, 0, 1, 2, 0])
    >>> fewest_workers(torch.tensor([0, 0, 2, 0, 1]))  # the third update is of someone who was there from the start
    tensor([0, 0, 1, 1, 0])
    """
    last: list[tuple[int, int]] = []  # (its last update, worker), in this order
    senders = []
    for t, delay in enumerate(delays.tolist(), start=1):
        place = bisect_right(last, (t - 1 - delay, len(last)))
        worker = last.pop(place - 1)[1] if place else len(last)
        insort(last, (t, worker))
        senders.append(worker)
    return torch.tensor(senders)
