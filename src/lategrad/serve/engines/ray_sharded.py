"""The parameter vector over several server actors of a Ray cluster.

Vectors travel between workers and shards only. For each update a worker *stages* the parts of its gradient with the
shards; when all have them, it sends a message without a vector to the coordinator, which is the server of the
unsharded engine with a rule whose vectors are elsewhere: it counts, checks, refuses, logs and decides the order. It
tells all shards to *commit*, and Ray carries out calls of one caller in their order, so that all shards make the same
updates in the same order. The reply to the worker refers to what the commits return: its next query, all of one
version. A worker that dies between the two steps has changed nothing. A shard that dies takes the coordinator
with it, and the run goes on from the newest checkpoint, in which the shards' states are joined: it has the same form
as that of a single server, and can be resumed with any number of shards, or without.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from typing import Any

import ray
import torch
from numpy.typing import NDArray
from ray.exceptions import RayActorError
from torch import Tensor

from lategrad.execution.pays import compiling_pays
from lategrad.problems.problem import Problem
from lategrad.rules.rule import AnyRule, Delay
from lategrad.serve.checkpoint import Checkpoint
from lategrad.serve.engines.ray import Header, RayLink, Reply, ServerActor, Status, WorkerActor, pack, unpack
from lategrad.serve.server import Server
from lategrad.serve.settings import Settings
from lategrad.serve.sharding import Shard, bounds, join_leaves, require_splittable, split_leaves, split_rule
from lategrad.serve.updates import LogMark
from lategrad.sets import WholeSpace
from lategrad.trace import Trace, describe


class Reducer:
    """Adds the shards' shares of norms: an asynchronous actor that answers when the last share is in."""

    def __init__(self, shards: int) -> None:
        self._shards = shards
        self._open: dict[int, tuple[dict[int, float], asyncio.Event]] = {}

    async def add(self, count: int, shard: int, share: float) -> float:
        """The total of the ``count``-th sum, always added in the same order."""
        shares, complete = self._open.setdefault(count, ({}, asyncio.Event()))
        shares[shard] = share
        if len(shares) == self._shards:
            complete.set()
            del self._open[count]
        await complete.wait()
        return sum(shares[k] for k in range(self._shards))


class ShardActor:
    """A :class:`~lategrad.serve.sharding.Shard` that Ray calls, one call at a time."""

    def __init__(
        self, rule: Any, position: int, start: Tensor, reducer: Any, settings: Settings, compile: bool
    ) -> None:
        torch.set_num_threads(settings.threads)
        self._count = 0

        def total(share: Tensor) -> Tensor:
            self._count += 1
            return torch.full_like(share, ray.get(reducer.add.remote(self._count, position, share.item())))

        self._shard = Shard(rule, start, total, compile)

    def stage(self, *parts: Any) -> bool:
        """Keep a gradient, in place, until it is committed."""
        header, grad = unpack(*parts)
        return self._shard.stage(header.member, header.sequence, grad)

    def drop(self, member: int) -> None:
        """Forget what a member has staged."""
        self._shard.drop(member)

    def commit(self, member: int, sequence: int, delay: int) -> NDArray[Any]:
        """Apply a gradient; returns this part of the next query."""
        return self._shard.commit(member, sequence, delay).numpy()

    def query(self) -> NDArray[Any]:
        """This part of the query."""
        return self._shard.query().numpy()

    def output(self) -> NDArray[Any]:
        """This part of the output."""
        return self._shard.output().numpy()

    def leaves(self) -> list[Tensor]:
        """This part of the state."""
        return self._shard.leaves()

    def load(self, leaves: list[Tensor]) -> None:
        """Take over a state."""
        self._shard.load(leaves)

    def ping(self) -> None:
        """Still there."""


class _Shards:
    """The coordinator's end; for its server it is the rule. Between updates there is one query, of all parts."""

    domain = WholeSpace()

    def __init__(self, rule: AnyRule[Any], start: Tensor, settings: Settings) -> None:
        self.dim, self._dtype = len(start), start.dtype
        self._bounds = bounds(self.dim, settings.shards)
        needs_norms = require_splittable(rule, self.dim, settings.shards)
        wanted = compiling_pays(settings.steps, self.dim // settings.shards)
        compile = (wanted if settings.compile is None else settings.compile) and not needs_norms
        self._reducer = ray.remote(num_cpus=0)(Reducer).remote(settings.shards)
        actor = ray.remote(num_cpus=0, enable_task_events=False, scheduling_strategy="SPREAD")(ShardActor)
        self.actors = [
            actor.remote(split_rule(rule, begin, end), k, start[begin:end].clone(), self._reducer, settings, compile)
            for k, (begin, end) in enumerate(self._bounds)
        ]
        self.queries = self._all("query")
        self.now = (0, 0)  # the member and the sequence number of the gradient that is being applied
        self._pings = self._all("ping")

    def _all(self, method: str, *args: Any) -> list[Any]:
        return [getattr(actor, method).remote(*args) for actor in self.actors]

    def check(self) -> None:
        """End this process if a shard is dead: its restart is the one way back."""
        ready, _ = ray.wait(self._pings, num_returns=len(self._pings), timeout=0)
        try:
            ray.get(ready)
        except RayActorError:
            os._exit(1)
        if len(ready) == len(self._pings):
            self._pings = self._all("ping")

    def init(self, x0: Tensor) -> tuple[()]:
        return ()

    def query(self, state: Any) -> Tensor:
        return torch.zeros(1)

    def update(self, state: Any, grad: Tensor, delay: Delay) -> Any:
        self.queries = self._all("commit", *self.now, int(delay))
        return state

    def output(self, state: Any) -> Tensor:
        return _joined(ray.get(self._all("output")), self._dtype)

    def whole_query(self) -> Tensor:
        return _joined(ray.get(self.queries), self._dtype)

    def leaves(self) -> list[Tensor]:
        return join_leaves(ray.get(self._all("leaves")))

    def load(self, leaves: list[Tensor]) -> None:
        parts = [split_leaves(leaves, self.dim, begin, end) for begin, end in self._bounds]
        ray.get([actor.load.remote(part) for actor, part in zip(self.actors, parts, strict=True)])
        self.queries = self._all("query")

    def drop(self, member: int) -> None:
        self._all("drop", member)


def _joined(parts: list[NDArray[Any]], dtype: torch.dtype) -> Tensor:
    return torch.cat([torch.tensor(part, dtype=dtype) for part in parts])


class _ShardedServer(Server):
    """The server of vectors that are elsewhere; its checkpoints and its trace are those of the whole."""

    def __init__(self, shards: _Shards, problem: Problem, rule: AnyRule[Any], options: dict[str, Any]) -> None:
        self.shards = shards
        config = {**options["config"], "rule": describe(rule)}
        super().__init__(problem, shards, **{**options, "config": config, "compile": False})

    def _as_checkpoint(self, mark: LogMark) -> Checkpoint:
        whole = super()._as_checkpoint(mark)
        state = {f"state.{i}": leaf for i, leaf in enumerate(self.shards.leaves())}
        return replace(whole, tensors={**whole.tensors, **state})

    def _restore(self, checkpoint: Checkpoint) -> dict[str, Any]:
        state = dict(checkpoint.tensors)
        own = replace(checkpoint, tensors={"output": state.pop("output")})
        config = super()._restore(own)
        self.shards.load([state[f"state.{i}"] for i in range(len(state))])
        return config

    def trace(self) -> Trace:
        """What has happened so far."""
        return replace(super().trace(), query=self.shards.whole_query())


class ShardedServerActor(ServerActor):
    """The coordinator."""

    def _make_server(self, problem: Problem, rule: AnyRule[Any], settings: Settings, options: dict[str, Any]) -> Server:
        self._shards = _Shards(rule, problem.start(), settings)
        return _ShardedServer(self._shards, problem, rule, options)

    def join(self, *who: Any) -> Reply:
        """A job, and the shards."""
        reply = super().join(*who)
        return (*reply, self._shards.actors) if isinstance(reply, tuple) else reply  # type: ignore[return-value]

    def exchange(self, *parts: Any) -> Reply:
        """Commit what the worker has staged."""
        header, _ = unpack(*parts)
        self._shards.now = (header.member, header.sequence)
        return super().exchange(*parts)

    def _answer(self, header: Header, query: Tensor) -> Reply:
        return (pack(header, query)[0], self._shards.queries)  # type: ignore[return-value]

    def status(self, seen: int) -> Status | None:
        """As before, if all shards are alive."""
        if self._server is not None:
            self._shards.check()
        return super().status(seen)

    def bury(self, member: int) -> None:
        """As before; the shards need not keep its last gradient."""
        super().bury(member)
        if member not in self._duties and self._server is not None:
            self._shards.drop(member)


class _ShardedLink(RayLink):
    """The worker's end: vectors to and from the shards, numbers to and from the coordinator."""

    def _read(self, reply: Any) -> tuple[Header, Tensor]:
        head, queries, *shards = reply
        if shards:
            (self._shards,) = shards
        header, _ = unpack(head)
        parts = [torch.from_numpy(part) for part in ray.get(queries)]
        self._ends = torch.tensor([len(part) for part in parts]).cumsum(0).tolist()
        return header, torch.cat(parts)

    def _send(self, header: Header, grad: Tensor) -> None:
        parts = grad.tensor_split(self._ends[:-1])
        staged = [shard.stage.remote(*pack(header, part)) for shard, part in zip(self._shards, parts, strict=True)]
        try:
            finite = all(ray.get(staged))
        except RayActorError:  # a shard is lost, and so is this gradient
            self._reply = self._join()
            return
        super()._send(header, torch.zeros(1) if finite else torch.full((1,), torch.nan))


class ShardedWorkerActor(WorkerActor):
    """A worker of a sharded server."""

    _make_link = _ShardedLink
