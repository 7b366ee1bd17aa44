r"""The past queries that late gradients still need, and no others.

Update t reads the query :math:`x_{t - \tau_t}`. When all delays are known beforehand, so is which queries will be
read at all (about 63% under independent random delays) and when each is read for the last time. A plan gives
every query that will be read a slot, and the slot to another query after the last read. Memory is then the
largest number of queries waiting at once, of the order of the *mean* delay, not the largest one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class SlotPlan(NamedTuple):
    """Where each update writes its query and reads a late one from."""

    write: Tensor
    """int64 ``(updates,)``: the slot for the query of each update; ``slots - 1`` for those never read."""
    read: Tensor
    """int64 ``(updates,)``: the slot that holds the query each update's gradient is taken at."""
    slots: int
    """Slots needed, the last of them a bin for queries that nobody will read."""


def plan_slots(delays: Tensor) -> SlotPlan:
    """A plan for one sequence of delays; t - 1 is the largest possible delay of update t.

    >>> plan = plan_slots(torch.tensor([0, 1, 1, 1]))  # updates read x_1, x_1, x_2, x_3; x_4 is never read
    >>> plan.read.tolist(), plan.write.tolist(), plan.slots
    ([0, 0, 1, 0], [0, 1, 0, 2], 3)
    """
    updates = len(delays)
    source = torch.arange(updates) - delays.long()
    last_read = torch.full((updates,), -1).scatter_reduce(0, source, torch.arange(updates), "amax").tolist()
    slot_of: list[int] = [-1] * updates
    read: list[int] = []
    free: list[int] = []
    slots = 0
    for t, s in enumerate(source.tolist()):
        if last_read[t] >= 0:
            if free:
                slot_of[t] = free.pop()
            else:
                slot_of[t], slots = slots, slots + 1
        read.append(slot_of[s])
        if last_read[s] == t:
            free.append(slot_of[s])
    write = torch.tensor(slot_of)
    return SlotPlan(write=torch.where(write < 0, slots, write), read=torch.tensor(read), slots=slots + 1)


class History:
    """Query vectors (or what else must be remembered with them) in the slots of several plans.

    Args:
        plans: one for every sequence of delays.
        shape: of what is remembered at each update for one sequence: its runs and their vectors.
        like: a tensor whose dtype and device to use.
    """

    def __init__(self, plans: list[SlotPlan], shape: torch.Size, like: Tensor) -> None:
        sizes = torch.tensor([plan.slots for plan in plans])
        first_row = sizes.cumsum(0) - sizes
        self.write = torch.stack([plan.write for plan in plans], dim=1) + first_row
        self.read = torch.stack([plan.read for plan in plans], dim=1) + first_row
        self.memory = torch.empty(int(sizes.sum()), *shape, dtype=like.dtype, device=like.device)

    @staticmethod
    def bytes_needed(plans: list[SlotPlan], width: int, itemsize: int) -> int:
        """Memory that the slots of these plans take, ``width`` numbers each."""
        return sum(plan.slots for plan in plans) * width * itemsize
