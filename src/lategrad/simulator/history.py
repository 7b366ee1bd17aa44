r"""The past queries that delayed gradients still need, and no others.

Update t reads the query :math:`x_{t - \tau_t}`. When all delays are known beforehand, so is which queries will be
read at all (about 63% under independent random delays) and when each is read for the last time. A plan gives
every query that will be read a slot, and the slot to another query after the last read. Memory is then the
largest number of queries waiting at once, of the order of the *mean* delay, not the largest one.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class SlotPlan(NamedTuple):
    """Where each update writes its query and reads a late one from."""

    write: Tensor  # int64 ``(updates,)``: the slot for the query of each update; ``slots - 1`` for those never read
    read: Tensor  # likewise: the slot of the query that each gradient is taken at; ``(updates, stages)`` by stage
    slots: int  # slots needed, the last of them for queries that are never read


def plan_slots(delays: Tensor) -> SlotPlan:
    """A plan for one sequence of delays, ``(updates,)``, or for one of each stage, ``(updates, stages)``.

    The largest possible delay of update t is t - 1.

    >>> plan = plan_slots(torch.tensor([0, 1, 1, 1]))  # updates read x_1, x_1, x_2, x_3; x_4 is never read
    >>> plan.read.tolist(), plan.write.tolist(), plan.slots
    ([0, 0, 1, 0], [0, 1, 0, 2], 3)
    """
    updates, times = len(delays), torch.arange(len(delays))
    source = times[:, None] - delays.long().reshape(updates, -1)
    reader = times[:, None].expand_as(source)
    last_read = torch.full((updates,), -1).scatter_reduce(0, source.flatten(), reader.flatten(), "amax")
    kept = (last_read >= 0).nonzero().squeeze(1)
    released = torch.bincount(last_read[kept] + 1, minlength=updates)[:updates]  # free for the query of that time
    slots = int(((last_read >= 0).long() - released).cumsum(0).max())
    # A query takes the slot that has been free for longest; following the queries that had it before leads to a first.
    slot_of = torch.cat([times[:slots], last_read[kept].argsort(stable=True)[: len(kept) - slots]])
    while (slot_of >= slots).any():
        slot_of = slot_of[slot_of]
    write = torch.full((updates,), slots).index_copy(0, kept, slot_of)
    return SlotPlan(write, write[source].reshape(delays.shape), slots + 1)


class History:
    """Past queries (or their tickets) in the slots of several plans, one for every sequence of delays.

    ``like`` is a value as it is stored at each update, ``(seeds, delays, *runs, k)``; ``stage_of`` says for each entry
    of a vector which of the plan's stages it belongs to, ``(sequences, dim)``, where there are stages.
    """

    def __init__(self, plans: list[SlotPlan], like: Tensor, stage_of: Tensor | None = None) -> None:
        sizes = torch.tensor([plan.slots for plan in plans])
        first_row = sizes.cumsum(0) - sizes
        self.write = torch.stack([plan.write for plan in plans], dim=1) + first_row
        read = [plan.read if stage_of is None else plan.read.reshape(len(plan.read), -1) for plan in plans]
        if stage_of is not None:  # a plan with fewer stages repeats its last one, which no entry uses
            most = max(one.shape[1] for one in read)
            read = [torch.cat([one, one[:, -1:].expand(-1, most - one.shape[1])], dim=1) for one in read]
            first_row = first_row[:, None]
        self.read = torch.stack(read, dim=1) + first_row
        self.stage_of = None if stage_of is None else stage_of.to(like.device)
        self.memory = torch.empty(int(sizes.sum()), *like.shape[2:], dtype=like.dtype, device=like.device)

    def fetch(self, read: Tensor) -> Tensor:
        """A row for every sequence, each stage from its own slot."""
        if self.stage_of is None:
            return self.memory.index_select(0, read)
        slot = read.gather(1, self.stage_of)  # of each entry
        runs = self.memory.view(len(self.memory), -1, self.memory.shape[-1])  # that share a sequence
        return runs.gather(0, slot.unsqueeze(1).expand(-1, runs.shape[1], -1)).view(-1, *self.memory.shape[1:])

    @staticmethod
    def bytes_needed(plans: list[SlotPlan], like: Tensor) -> int:
        return sum(plan.slots for plan in plans) * like.nbytes // len(plans)


def free_memory(device: torch.device) -> float:
    """Bytes that are free on a device; infinite where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":") for line in file)
    except OSError:  # not Linux
        return math.inf
    return int(fields["MemAvailable"].split()[0]) * 1024


def check_memory(what: str, needed: int, device: torch.device) -> None:
    """Raise a MemoryError unless ``needed`` bytes are free; ``what`` says what they are for."""
    if needed > (available := free_memory(device)):
        raise MemoryError(f"{what} would take {needed / 2**30:.1f} GiB and {available / 2**30:.1f} GiB are free: "
                          "simulate fewer runs in one call, or shorter delays")  # fmt: skip
