"""The links of a stage to its neighbours: activations forward, gradients back, and news of failures."""

import os
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

_FAILURE = "lategrad-pipeline-failure"


def connect(backend: str = "gloo") -> None:
    """``torch.distributed.init_process_group`` for ranks that ``torchrun`` starts, and starts again when one has died.

    By default the ranks of all attempts share the store of ``torchrun``, where those of a later attempt find the
    addresses of processes that are gone. Here each attempt has its own part of the store.

    Args:
        backend: "gloo", or "nccl" where each rank has a GPU of its own.
    """
    store, rank, world = next(rendezvous("env://"))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"attempt-{attempt}", store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)


class PipelineError(RuntimeError):
    """A pipeline that cannot continue: one line that names the stage at fault, the same on every rank."""


class LinkError(Exception):
    """A neighbour cannot be reached."""


class TensorSpec(NamedTuple):
    """The form of a tensor in a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool  # whether a gradient comes back for it

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorSpec":
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


def forms(specs: Iterable[TensorSpec]) -> str:
    return ", ".join(f"{str(spec.dtype).removeprefix('torch.')} {spec.shape}" for spec in specs)


class Link:
    """One direction between two neighbouring stages. All messages have the form of the first.

    Receiving is posted only for messages that are certain to come, whatever this stage does next: with NCCL a posted
    receive occupies the device until its message is there.
    """

    def __init__(self, peer: int, group: dist.ProcessGroup, timeout: float) -> None:
        self.peer, self.group, self.timeout = peer, group, timeout
        self.device = self.wire = torch.device("cpu")
        self.specs: list[TensorSpec] | None = None  # the form of all messages, known after the first
        self._sent: deque[list[tuple[dist.Work, Tensor]]] = deque()
        self._posted: list[tuple[dist.Work, Tensor]] | None = None

    def send_object(self, value: object) -> None:
        self._call(lambda: dist.send_object_list([value], self.peer, self.group, self.wire), "send to")

    def receive_object(self) -> Any:
        received: list[Any] = [None]
        self._call(lambda: dist.recv_object_list(received, self.peer, self.group, self.wire), "receive from")
        return received[0]

    def send(self, tensors: Sequence[Tensor], *, unfinished: int) -> None:
        """Start to send; at most ``unfinished`` messages remain on their way, which must be those not yet used."""
        values = [tensor.detach().to(self.wire).contiguous() for tensor in tensors]
        works = [self._call(lambda v=value: dist.isend(v, self.peer, self.group), "send to") for value in values]
        self._sent.append(list(zip(works, values, strict=True)))
        self.finish(unfinished)

    def finish(self, unfinished: int = 0) -> None:
        """Wait until at most ``unfinished`` messages are on their way."""
        while len(self._sent) > unfinished:
            for work, _ in self._sent.popleft():
                self._call(work.wait, "send to")

    def post(self, specs: Sequence[TensorSpec] | None = None) -> None:
        """Begin to receive the next message, unless that has been done; of another form if one is given."""
        specs = self.specs if specs is None else specs
        if self._posted is None and specs is not None:
            buffers = [torch.empty(spec.shape, dtype=spec.dtype, device=self.wire) for spec in specs]
            works = [self._call(lambda b=b: dist.irecv(b, self.peer, self.group), "receive from") for b in buffers]
            self._posted = list(zip(works, buffers, strict=True))

    def receive(self, specs: Sequence[TensorSpec] | None = None) -> list[Tensor]:
        self.post(specs)
        assert self._posted is not None
        posted, self._posted = self._posted, None
        for work, _ in posted:
            self._call(work.wait, "receive from")
        return [buffer.to(self.device) for _, buffer in posted]

    def _call(self, call: Any, what: str) -> Any:
        try:
            return call()
        except RuntimeError as error:
            why = str(error).splitlines()[0]
            if "timed out" in why.lower() or "timeout" in why.lower():
                why = f"nothing came or went for {self.timeout:g} s: it hangs, or its loop has made fewer steps"
            elif any(word in why.lower() for word in ("connection", "peer", "broken pipe")):
                why = "the connection was lost: its process has ended"
            raise LinkError(f"could not {what} stage {self.peer}: {why}") from error


class Neighbour(NamedTuple):
    """The two links to a neighbouring stage."""

    activations: Link
    gradients: Link


class Links:
    """The links of one stage, of ``count``, to the stages before and after it, with process groups of their own."""

    def __init__(self, index: int, count: int, timeout: float) -> None:
        # Two groups: NCCL executes the messages of two ranks in one group one after another, in both directions.
        self._groups = [dist.new_group(timeout=timedelta(seconds=timeout)) for _ in range(2)]
        self.index, self.count = index, count
        self.store = self._groups[0].get_group_store()
        self.before, self.after = (
            Neighbour(*(Link(peer, group, timeout) for group in self._groups)) if 0 <= peer < count else None
            for peer in (index - 1, index + 1)
        )

    def all(self) -> list[Link]:
        return [*(self.before or ()), *(self.after or ())]

    def gather(self, value: object) -> list[Any] | None:
        """The values of all stages at the first one, None at the others."""
        values: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        try:
            dist.gather_object(value, values, group=self._groups[0])
        except RuntimeError as error:
            raise LinkError("could not gather what all stages know: one has ended") from error
        return values

    def use_device(self, device: torch.device) -> None:
        """Hand over messages on the device where the stage computes."""
        for link in self.all():
            link.device = device
            if dist.get_backend(link.group) != "gloo":  # which takes no tensors of a GPU
                link.wire = device

    def report(self, reason: str) -> str:
        """Tell the other ranks why this one stops; returns the first line that any rank reported."""
        line = f"stage {self.index} of {self.count}: {reason}"
        with suppress(RuntimeError):  # the store is gone with the process that held it
            line = self.store.compare_set(_FAILURE, "", line).decode()
        return line

    def close(self) -> None:
        """Close the connections, which ends the neighbours' waiting."""
        groups, self._groups = self._groups, []
        for link in self.all():  # which a traceback may refer to; a connection is open until nothing refers to it
            vars(link).clear()
        self.before = self.after = None
        for group in groups:
            dist.destroy_process_group(group)
