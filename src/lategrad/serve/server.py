r"""The server: a rule, its state, and the gradients that come back late; it knows nothing of any transport.

Every engine drives it the same way, from one thread:

1. ``job = server.issue(worker)`` hands out a query with its version v (the number of updates behind it) and
   a sequence number k: the worker is to use sample k of its own stream.
2. ``job = server.exchange(worker, version, sequence, grad)`` takes the gradient in, as update t with the
   delay :math:`\tau_t = (t - 1) - v`, and hands out the worker's next job.

A gradient is applied once or refused, or dropped where it is later than ``max_delay``. It is refused, with the
state untouched, if nobody asked for it (its sequence number is unknown or was used before), if its version is
not the one that was handed out, or if it is not a finite vector of the right length and dtype.

Finite gradients can still make a state that is not. It is checked when it is recorded, before it is saved, and when a
gradient is refused (at such a state all are); whoever drives the server sees ``poisoned``, and goes back to a
checkpoint.
"""

from __future__ import annotations

import math
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lategrad.execution import compiling_pays, in_place
from lategrad.gradient_norms import NormGate, clipped
from lategrad.problems.problem import Problem
from lategrad.problems.worker_state import is_stateful
from lategrad.rules.blocks import fill_in
from lategrad.rules.rule import AnyRule, first_state, issue_ticket, needs_ticket, weigh_ticket
from lategrad.serve.checkpoints.checkpoint import Checkpoint
from lategrad.serve.checkpoints.identity import identify, require_same
from lategrad.serve.compression import Compression
from lategrad.serve.messages import PLAIN, Job, Made, is_finite, malformed, unusable
from lategrad.serve.observe.records import Records
from lategrad.serve.observe.telemetry import Telemetry, measure
from lategrad.serve.observe.update_log import UpdateLog
from lategrad.serve.settings import Settings
from lategrad.serve.worker import keeps_something
from lategrad.sets import norm
from lategrad.staleness import StalenessGate
from lategrad.support.runs import map_tensors, tensors
from lategrad.support.validation import require
from lategrad.trace import Trace, describe

_TO_EVALUATE = "record."
"""Before the version in the name of a tensor of a checkpoint: an output whose record was not ready."""


class _Issued(NamedTuple):
    """What the server keeps of a job until its gradient is back."""

    version: int
    ticket: Tensor


class Server:
    """Holds a rule and its state; hands out queries, takes gradients, and keeps account of both.

    Args:
        problem: whose loss and accuracy are recorded; workers take gradients of it.
        rule: any server rule, for one run (no hyper-parameter may have run dimensions). One that looks at the shapes
            of the problem's tensors gets them.
        settings: of which the server uses ``steps``, ``record_every``, ``compile``, ``max_refusals``, ``max_delay``,
            ``clip``, ``max_norm_ratio``, ``compression`` and ``server_device``, which its
            checkpoints and its trace keep.
        query_in_place: whether :meth:`exchange` may hand out a query that is part of the state, which the next exchange
            overwrites: for engines that have sent it off by then. Saves a pass over the vector.

    >>> import lategrad as lg
    >>> from lategrad.problems import Quadratic
    >>> problem = Quadratic(noise=0.0)
    >>> server = Server(problem, lg.SGD(lr=0.5), Settings(steps=3))
    >>> fast, slow = server.issue(worker=0), server.issue(worker=1)
    >>> while not server.done:  # worker 0 returns twice, then worker 1 once: two updates late
    ...     job = fast if server.version < 2 else slow
    ...     fast = server.exchange(job.worker, job.version, job.sequence, problem.gradient(job.query, torch.zeros(10)))
    >>> server.trace().delays
    tensor([0, 0, 2], dtype=torch.int32)
    """

    def __init__(
        self, problem: Problem, rule: AnyRule[Any], settings: Settings, *, query_in_place: bool = False
    ) -> None:
        rule = fill_in(rule, getattr(problem, "blocks", None))
        device = torch.device(settings.server_device)
        self.problem, self.steps, self.max_refusals = problem, settings.steps, settings.max_refusals
        self.rule: AnyRule[Any] = map_tensors(lambda leaf: leaf.to(device), rule)
        self.state = first_state(self.rule, problem.start().to(device))
        query = self.rule.query(self.state)
        require("rule", describe(rule), query.dim() == 1, "for one run: a number for every hyper-parameter")
        self.dim, self.dtype, self.device = query.shape[-1], query.dtype, device
        self.compression = Compression(settings.compression, self.dim, self.dtype)
        in_state = any(query is leaf for leaf in tensors(self.state))
        self._query_in_place = query_in_place and in_state
        self._writes_query = not self._query_in_place and device.type == "cpu"  # in the pass of the update
        shaped = getattr(rule, "blocks", None) is not None  # its matrix products gain little, and compile for long
        automatic = not shaped and compiling_pays(self.steps, self.dim)
        self.compiled = automatic if settings.compile is None else settings.compile
        self._update = in_place(self.rule, self.state, backend=None if self.compiled else "eager")
        self.config: dict[str, Any] = {
            **identify(problem), "rule": describe(rule), "steps": self.steps, "compiled": self.compiled,
            "backend": self._update.backend, "torch": torch.__version__, "settings": settings.saved(), "replaced": {},
            "returns": 0,
        }  # fmt: skip

        self.log = UpdateLog()
        # A copy of its own: a thread may evaluate while the user's callback does.
        self.records = Records(problem.to(device), settings.record_every or max(1, self.steps // 10))
        self.refusals: Counter[str] = Counter()
        self.traffic: Counter[str] = Counter(up=0, down=0)
        """Bytes of the vectors that came from workers and that went to them."""
        self._keeps = keeps_something(problem, settings.compression)
        self.memories_lost: Counter[str] = Counter()
        """How often each worker had to begin without what the one before it had kept."""
        self._begun: set[int] = set()
        self._most_steps = problem.steps if is_stateful(problem) else 0
        self.gate = None if settings.max_delay is None else StalenessGate(settings.max_delay)
        self._clip = settings.clip
        self._norm_gate = None if settings.max_norm_ratio is None else NormGate(settings.max_norm_ratio)
        self.poisoned = False
        """Whether the state was found not to be finite."""
        self.returns_in_a_row = 0
        """How often the run went back to a checkpoint and did not get past where it was poisoned."""
        self._poisoned_at = 0
        self._refused_in_a_row: Counter[int] = Counter()
        self.last_refusal: str | None = None
        self._next_sequence: Counter[int] = Counter()
        self._issued: dict[tuple[int, int], _Issued] = {}
        self._no_ticket = query[:0].clone()
        self._begin = time.monotonic()
        self.whole = True
        """False within an update: a state that was left there must not be saved."""

        self.records.take(0, self.output())

    @property
    def version(self) -> int:
        """Updates made so far."""
        return len(self.log)

    @property
    def done(self) -> bool:
        """Whether all updates have been made."""
        return self.version >= self.steps

    @property
    def seconds(self) -> float:
        """Since the run began, time before a resumption counted in."""
        return time.monotonic() - self._begin

    def issue(self, worker: int, out: Tensor | None = None) -> Job | None:
        """The next job for a worker; None if there is none, because the run is done or the worker was dropped.

        Args:
            worker: its number.
            out: where to write the query; by default into fresh memory.
        """
        if self.done or self.dropped(worker):
            return None
        query = self._room_for_query(out)
        query.copy_(self.rule.query(self.state))
        return self._enter(worker, query)

    def _room_for_query(self, out: Tensor | None) -> Tensor:
        return self._no_ticket.new_empty(self.dim) if out is None else out

    def _enter(self, worker: int, query: Tensor) -> Job:
        sequence = self._next_sequence[worker]
        self._next_sequence[worker] += 1
        ticket = issue_ticket(self.rule, self.state).clone() if needs_ticket(self.rule) else self._no_ticket
        self._issued[worker, sequence] = _Issued(self.version, ticket)
        self.traffic["down"] += query.nbytes
        return Job(worker, sequence, self.version, query)

    def exchange(
        self,
        worker: int,
        version: int,
        sequence: int,
        grad: Tensor,
        out: Tensor | None = None,
        *,
        checked: bool = False,
        made: Made = PLAIN,
    ) -> Job | None:
        """Take a gradient in, apply or refuse it, and hand out the worker's next job as :meth:`issue` does.

        Args:
            worker: who sends it.
            version: of the query that it was taken at.
            sequence: of the job that it answers.
            grad: the gradient, as it travels; read before this returns, and not kept.
            out: where to write the next query.
            checked: whether it has been found usable (``lategrad.serve.messages.unusable``) where it was made.
            made: how the worker made it.
        """
        with torch.no_grad():
            self.traffic["up"] += grad.nbytes
            objection = self._wrong_answer(worker, version, sequence, made)
            if objection is None:
                self._note_memory(worker, made)
                grad, objection = self._received(grad, checked)
            if objection is None and self._norm_gate is not None:
                length = norm(grad).cpu()
                if self._norm_gate.learns_from(length):
                    self.forget(worker, sequence)
                    return self.issue(worker, out)
                objection = self._norm_gate.objection(length)
            if objection is not None:
                self.refuse(worker, sequence, objection)
                return self.issue(worker, out)
            if self.gate is not None and self.gate.admit(self.version - version, worker).action == "drop":
                self.forget(worker, sequence)
                return self.issue(worker, out)
            if self._clip is not None:
                grad = clipped(grad, self._clip)
            if self._writes_query:
                query = self._room_for_query(out)
                self._apply(worker, sequence, grad, query, made)
            else:
                self._apply(worker, sequence, grad.to(self.device), None, made)
                query = self.rule.query(self.state)
                if not self._query_in_place:
                    query = self._room_for_query(out).copy_(query)
        self._refused_in_a_row.pop(worker, None)
        self.records.collect()
        if self.done or self.records.is_due(self.version):
            self._record()
        return None if self.done else self._enter(worker, query)

    def _wrong_answer(self, worker: int, version: int, sequence: int, made: Made) -> str | None:
        """Why a gradient is none that was asked for, if so."""
        if version > self.version:
            return f"version {version} is from the future: the server is at {self.version}"
        issued = self._issued.get((worker, sequence))
        if issued is None:
            used = "was used before" if 0 <= sequence < self._next_sequence[worker] else "was never handed out"
            return f"sequence number {sequence} {used}"
        if version != issued.version:
            return f"version {version} instead of {issued.version}, which job {sequence} was handed out with"
        if made.steps > self._most_steps or (self._most_steps > 0 and made.steps < 1):
            return f"{made.steps} steps of the worker's own instead of 1 to {self._most_steps}"
        return None

    def _note_memory(self, worker: int, made: Made) -> None:
        """Tell of a worker that began anew under a number that had kept something."""
        if not self._keeps:
            return
        if made.previous < 0 and worker in self._begun:
            self.memories_lost[f"worker {worker}"] += 1
            warnings.warn(f"what worker {worker} had kept from job to job was lost with it: its replacement began anew",
                          stacklevel=3)  # fmt: skip
        self._begun.add(worker)

    def _received(self, message: Tensor, checked: bool) -> tuple[Tensor, str | None]:
        """The gradient that a message stands for, and why it cannot be applied, if so."""
        if self.compression.exact:
            return message, None if checked else unusable(message, self.dim, self.dtype)
        if form := malformed(message, self.compression.message_length, self.compression.message_dtype):
            return message, form
        grad = self.compression.decode(message)
        return grad, None if is_finite(grad) else "not finite"

    def _record(self) -> None:
        if self.is_sound():
            self.records.note(self.version, self.output())

    def is_sound(self) -> bool:
        """Whether the state is finite; if not, it is to be given up (:meth:`go_back`)."""
        self.poisoned = not all(is_finite(leaf) for leaf in tensors(self.state) if leaf.is_floating_point())
        if not self.poisoned and self.version > self._poisoned_at:
            self.returns_in_a_row = 0
        return not self.poisoned

    def _apply(self, worker: int, sequence: int, grad: Tensor, next_query: Tensor | None, made: Made) -> None:
        """The one place where the state changes."""
        version, ticket = self._issued.pop((worker, sequence))
        delay = self.version - version
        if 0 < made.steps < self._most_steps:
            ticket = weigh_ticket(self.rule, ticket, ticket.new_tensor([made.steps / self._most_steps]))
        self.whole = False
        self._update(grad, delay, ticket, next_query)
        self.log.append(worker, sequence, delay, self.seconds, made)
        self.whole = True

    def refuse(self, worker: int, sequence: int, reason: str) -> None:
        """Count and report a gradient that was not applied; its job is over."""
        self._issued.pop((worker, sequence), None)
        if not self.is_sound():
            return  # the worker is not to blame
        self.refusals[f"worker {worker}"] += 1
        self._refused_in_a_row[worker] += 1
        self.last_refusal = f"refused a gradient of worker {worker} at update {self.version + 1}: {reason}"
        warnings.warn(self.last_refusal, stacklevel=2)
        if self.dropped(worker):
            in_a_row = self._refused_in_a_row[worker]
            warnings.warn(f"worker {worker} is dropped: {in_a_row} gradients in a row were refused", stacklevel=2)

    def dropped(self, worker: int) -> bool:
        """Whether a worker gets no more work because too many of its gradients in a row were refused."""
        return self.max_refusals is not None and self._refused_in_a_row[worker] >= self.max_refusals

    def all_dropped(self) -> frozenset[int]:
        """The workers that get no more work."""
        return frozenset(worker for worker in self._refused_in_a_row if self.dropped(worker))

    @property
    def too_late(self) -> dict[str, int]:
        """How many gradients of each worker were dropped because they were later than ``max_delay``."""
        return {} if self.gate is None else {f"worker {w}": n for w, n in sorted(self.gate.dropped.items()) if n}

    def forget(self, worker: int, sequence: int) -> None:
        """Give up a job whose gradient will not arrive."""
        self._issued.pop((worker, sequence), None)

    def output(self) -> Tensor:
        """What to evaluate and ship."""
        return self.rule.output(self.state)

    def telemetry(self) -> Telemetry:
        """How the run is doing."""
        refused = sum(self.refusals.values())
        return measure(self.log, self.records, steps=self.steps, seconds=self.seconds, refused=refused,
                       traffic=self.traffic, memories_lost=sum(self.memories_lost.values()))  # fmt: skip

    def trace(self, patience: float = math.inf) -> Trace:
        """What has happened so far, with a record of the present moment; evaluations have so many seconds."""
        self._record()
        if missing := self.records.drain(patience):
            steps = " and ".join(map(str, missing))
            warnings.warn(f"the trace has no record after {steps} updates: their evaluation takes longer than "
                          f"{patience:g} s; resuming from the checkpoint makes up for it", stacklevel=2)  # fmt: skip
        return Trace(
            **self.records.tensors(),
            delays=self.log.column("delay"),
            output=self.output().cpu().clone(),
            query=self.rule.query(self.state).cpu().clone(),
            config={**self.config, "seconds": self.seconds, "refusals": dict(self.refusals), "too_late": self.too_late,
                    "bytes": dict(self.traffic), "memories_lost": dict(self.memories_lost)},
            time=self.log.column("time"),
            worker=self.log.column("worker"),
            sequence=self.log.column("sequence"),
            previous=self.log.column("previous") if self._keeps else None,
            local_steps=self.log.column("steps") if self._most_steps else None,
        )  # fmt: skip

    def checkpoint(self, logged: int = 0, room: Mapping[str, Tensor] | None = None) -> Checkpoint:
        """All that is needed to go on, as a copy; of the log what is new after ``logged`` updates.

        Args:
            logged: updates whose rows are not needed.
            room: tensors of an earlier checkpoint that nobody needs any more, to be written over: fresh memory takes
                several times as long as the copying itself.
        """
        if not self.whole:
            raise RuntimeError(f"no checkpoint: update {self.version + 1} was broken off half-way")
        description = {
            "config": {**self.config, "replaced": dict(self.config["replaced"])},
            "records": self.records.saved(),
            "refusals": dict(self.refusals),
            "bytes": dict(self.traffic),
            "memories_lost": dict(self.memories_lost),
            "gate": {} if self.gate is None else self.gate.summary(),
            "next_sequence": {str(worker): k for worker, k in self._next_sequence.items()},
            "seconds": self.seconds,
        }
        return Checkpoint(self.version, self._copies(room or {}), description, self.log.rows(logged))

    def _copies(self, room: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of the state, and of the output where that is not a part of it: otherwise it shares the part's copy."""
        output, leaves = self.output(), {f"state.{i}": leaf for i, leaf in enumerate(tensors(self.state))}
        part = next((name for name, leaf in leaves.items() if leaf is output), None)
        if part is None:
            leaves["output"] = output
        leaves |= {f"{_TO_EVALUATE}{version}": output for version, output in self.records.waiting().items()}
        copies = {name: room[name].copy_(leaf) if name in room else leaf.detach().to("cpu", copy=True)
                  for name, leaf in leaves.items()}  # fmt: skip
        return copies if part is None else {"output": copies[part], **copies}

    def go_back(self, checkpoint: Checkpoint) -> None:
        """Give up a state that is not finite for one that was; the samples that led to it are not drawn again."""
        found_at, begin, sequences = self.version, self._begin, self._next_sequence
        returns, refusals, in_a_row = self.config["returns"] + 1, self.refusals, self.returns_in_a_row + 1
        traffic, memories_lost, begun = self.traffic, self.memories_lost, self._begun
        self.restore(checkpoint)
        self.traffic, self.memories_lost, self._begun = traffic, memories_lost, begun
        self._begin, self._next_sequence, self.refusals = begin, self._next_sequence | sequences, refusals
        self._poisoned_at, self.returns_in_a_row, self.config["returns"] = found_at, in_a_row, returns
        self._refused_in_a_row.clear()
        self.poisoned = False
        warnings.warn(f"the state was not finite any more at update {found_at}: the run goes back to update "
                      f"{self.version}", stacklevel=2)  # fmt: skip

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint; jobs that were out then are void."""
        saved = checkpoint.description
        require_same(self.problem, saved["config"], "of the checkpoint", same_start=False)
        ours, theirs = self.config["rule"], saved["config"]["rule"]
        require("rule", ours, ours == theirs, f"that of the checkpoint, {theirs!r}")
        made = checkpoint.version
        require("steps", self.steps, self.steps >= made, f">= {made}, the updates made already")
        mine = tensors(self.state)
        saved_leaves = [checkpoint.tensors[name] for name in _numbered("state.", checkpoint.tensors).values()]
        forms = [[(leaf.shape, leaf.dtype) for leaf in leaves] for leaves in (mine, saved_leaves)]
        require("the form of the checkpoint's state", forms[1], forms[0] == forms[1], f"that of the rule's, {forms[0]}")
        for leaf, saved_leaf in zip(mine, saved_leaves, strict=True):
            leaf.copy_(saved_leaf)
        self.log = UpdateLog(checkpoint.rows)
        waiting = _numbered(_TO_EVALUATE, checkpoint.tensors)
        self.records.restore(
            saved["records"], {version: checkpoint.tensors[name].to(self.device) for version, name in waiting.items()}
        )
        self.refusals = Counter(saved["refusals"])
        self.traffic, self.memories_lost = Counter(saved["bytes"]), Counter(saved["memories_lost"])
        self._begun = set(self.log.column("worker").tolist())
        if self.gate is not None:
            for worker, counts in saved["gate"].items():
                self.gate.applied[int(worker)], self.gate.dropped[int(worker)] = counts["applied"], counts["dropped"]
        self.config["replaced"] = saved["config"]["replaced"]
        self.config["start"] = saved["config"].get("start", self.config["start"])
        self.config["returns"] = saved["config"].get("returns", 0)
        self._next_sequence = Counter({int(worker): k for worker, k in saved["next_sequence"].items()})
        self._issued.clear()
        self._begin = time.monotonic() - saved["seconds"]


def _numbered(prefix: str, names: Iterable[str]) -> dict[int, str]:
    """The names that are a prefix and a number, by their numbers, in order."""
    found = {int(name.removeprefix(prefix)): name for name in names if name.startswith(prefix)}
    return dict(sorted(found.items()))
