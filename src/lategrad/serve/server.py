r"""The server: a rule, its state, and the gradients that come back late; it knows nothing of any transport.

Every engine drives it the same way, from one thread:

1. ``job = server.join(member, worker)`` gives a worker process its first job: a query with its version v (the number of
   updates behind it) and a sequence number k. The worker uses sample k of its own stream.
2. ``job = server.deliver(member, version, sequence, grad)`` applies the gradient as update t, with the delay
   :math:`\tau_t = (t - 1) - v`, and returns the worker's next job.

A gradient is applied once, or refused if it is not a finite vector of the right length and dtype, or dropped if its
delay exceeds ``max_delay``. Finite gradients can still produce a state that is not. It is checked when it is recorded,
before it is saved, and when a gradient is refused; if ``poisoned`` is set then, the engine goes back to a checkpoint.
"""

import math
import os
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lategrad.execution import compiling_pays, in_place
from lategrad.gates import DelayGate, NormGate, clip_norm
from lategrad.problems.problem import Problem, is_stateful, tensor_shapes
from lategrad.rules.blocks import fill_in
from lategrad.rules.rule import AnyRule, first_state, issue_ticket, needs_ticket, weigh_ticket
from lategrad.serve.checkpoints.checkpoint import Checkpoint
from lategrad.serve.checkpoints.identity import identify, require_same
from lategrad.serve.compression import Compression
from lategrad.serve.jobs import JobTable, Location, Member, OpenJob
from lategrad.serve.messages import STATELESS, Job, JobInfo, is_finite
from lategrad.serve.observe.records import Records, Telemetry
from lategrad.serve.observe.update_log import UpdateLog
from lategrad.serve.settings import Settings
from lategrad.serve.worker import keeps_state
from lategrad.sets import norm
from lategrad.support.runs import map_tensors, tensors
from lategrad.support.threads import worthwhile_threads
from lategrad.support.validation import require
from lategrad.trace import Trace, describe

_PENDING_RECORD = "record."  # and the version: a tensor of a checkpoint, an output that is not evaluated yet
_UNKNOWN = Location(None, "unknown")
_LONGEST = 60  # characters of a value in a message
_RECENT = 1000  # updates over which telemetry takes delays and rate


class Server:
    """Holds a rule and its state; issues jobs and applies the gradients that answer them.

    Args:
        problem: whose loss and accuracy are recorded; workers take gradients of it.
        rule: any server rule, for one run (no hyper-parameter may have run dimensions); it gets the problem's blocks.
        settings: of the run.
        query_in_place: whether :meth:`deliver` may return a query that is part of the state, which the next update
            overwrites: for engines that have sent it by then. Saves a pass over the vector.

    >>> import lategrad as lg
    >>> from lategrad.problems import Quadratic
    >>> problem = Quadratic(noise=0.0)
    >>> server = Server(problem, lg.SGD(lr=0.5), Settings(steps=3))
    >>> fast, slow = server.join(member=0), server.join(member=1)
    >>> while not server.done:  # worker 0 returns twice, then worker 1 once, with a delay of two updates
    ...     job = fast if server.version < 2 else slow
    ...     fast = server.deliver(job.worker, job.version, job.sequence, problem.gradient(job.query, torch.zeros(10)))
    >>> server.trace().delays
    tensor([0, 0, 2], dtype=torch.int32)
    """

    def __init__(self, problem: Problem, rule: AnyRule[Any], settings: Settings, *,
                 query_in_place: bool = False) -> None:  # fmt: skip
        rule = fill_in(rule, getattr(problem, "blocks", None))
        device = torch.device(settings.server_device)
        self.problem, self.steps, self._max_refusals = problem, settings.steps, settings.max_refusals
        self.rule: AnyRule[Any] = map_tensors(lambda leaf: leaf.to(device), rule)
        self.state = first_state(self.rule, problem.start().to(device))
        query = self.rule.query(self.state)
        require("rule", describe(rule), query.dim() == 1, "for one run: a number for every hyper-parameter")
        self.dim, self.dtype, self.device = query.shape[-1], query.dtype, device
        self.compression = Compression(settings.compression, self.dim, self.dtype)
        vector = query.nbytes if device.type == "cpu" else 0
        cores = len(os.sched_getaffinity(0)) - settings.worker_range()[1]  # those that the workers leave
        self.threads = worthwhile_threads(vector, cores) if settings.threads is None else settings.threads
        self._query_in_place = query_in_place and any(query is leaf for leaf in tensors(self.state))
        self._writes_query = not self._query_in_place and device.type == "cpu"  # in the pass of the update
        shaped = getattr(rule, "blocks", None) is not None  # its matrix products gain little, and compile for long
        automatic = not shaped and compiling_pays(self.steps, self.dim)
        self.compiled = automatic if settings.compile is None else settings.compile
        self._update = in_place(self.rule, self.state, backend=None if self.compiled else "eager")
        self.config: dict[str, Any] = {
            **identify(problem), "rule": describe(rule), "steps": self.steps, "compiled": self.compiled,
            "threads": self.threads, "backend": self._update.backend, "torch": torch.__version__,
            "settings": settings.saved(), "replaced": {}, "returns": 0, "tensors": tensor_shapes(problem),
        }  # fmt: skip
        self.log = UpdateLog()
        # A copy of its own: a thread may evaluate while the user's callback does.
        self.records = Records(problem.to(device), settings.record_every or max(1, self.steps // 10))
        self.refusals: Counter[str] = Counter()
        self.traffic: Counter[str] = Counter(up=0, down=0)  # bytes of the vectors from workers, and to them
        self._drift, self._spare = settings.drift, list[Tensor]()  # spare: memory for copies of queries
        if settings.drift:
            self.records.since = self._mean_drift
        self._keeps_state = keeps_state(problem, settings.compression)
        self.memories_lost: Counter[str] = Counter()  # starts of a worker without the state of the process before it
        self._started: set[int] = set()
        self._most_steps = problem.local_steps if is_stateful(problem) else 0
        self.gate = None if settings.max_delay is None else DelayGate(settings.max_delay)
        self._norm_gate = None if settings.max_norm_ratio is None else NormGate(settings.max_norm_ratio)
        self._clip, self._poisoned_at = settings.clip, 0
        self.poisoned = False  # whether the state was found not to be finite
        self.returns_in_a_row = 0  # returns to a checkpoint since the run last got past where it was poisoned
        self._refused_in_a_row: Counter[int] = Counter()
        self.dropped: set[int] = set()  # workers that get no more jobs: too many refused gradients in a row
        self.last_refusal: str | None = None
        self.jobs = JobTable()
        self._needs_ticket = needs_ticket(self.rule)
        self._no_ticket = query[:0].clone()
        self._begin = time.monotonic()
        self.whole = True  # False within an update: a state that was left there must not be saved
        self.records.take(0, self.output())

    @property
    def version(self) -> int:
        return len(self.log)

    @property
    def done(self) -> bool:
        return self.version >= self.steps

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begin

    def join(self, member: int, worker: int | None = None, location: Location = _UNKNOWN,
             out: Tensor | None = None) -> Job | None:  # fmt: skip
        """Issue a job to a worker process that has started, that can hold another, or that has lost the server.

        Args:
            member: the number of the process; it gets None if there is no more work for it.
            worker: the number that it serves under, by default the same.
            location: where it runs.
            out: where to write the query, by default into new memory.
        """
        return self._next_job(self.jobs.join(member, member if worker is None else worker, location), out)

    def deliver(self, member: int, version: int, sequence: int, grad: Tensor, out: Tensor | None = None, *,
                checked: bool = False, info: JobInfo = STATELESS) -> Job | None:  # fmt: skip
        """Apply, refuse or drop the gradient of a job, and issue the sender's next one as :meth:`join` does.

        A message that answers no job of its sender raises ``lategrad.serve.jobs.ForeignMessageError``.

        Args:
            member: the process that sends it; one that was removed meanwhile gets no other job.
            version: of the query that it was taken at.
            sequence: of the job that it answers.
            grad: the gradient, as it travels; not kept.
            out: where to write the next query.
            checked: whether the sender has found it usable (``lategrad.serve.messages.unusable``).
            info: how the worker computed it.
        """
        sender = self.jobs.member(member)
        job = sender.take(sequence, version)
        query = None
        if self.done:
            pass  # it came too late to be of use
        elif job is None:
            self._refuse(sender.worker, f"job {sequence} was given up when its process ended")
        elif job.wanted:
            query = self._use(sender.worker, sequence, job, grad, out, checked, info)
        sender.delivered += 1
        return self._next_job(sender, out, query)

    def fail(self, member: int, sequence: int, reason: str, out: Tensor | None = None) -> Job | None:
        """Count a job whose gradient could not be computed as refused, and issue the next one."""
        sender = self.jobs.member(member)
        job = sender.take(sequence)
        if job is None or job.wanted:
            self._refuse(sender.worker, reason)
        return self._next_job(sender, out)

    def _next_job(self, member: Member, out: Tensor | None, query: Tensor | None = None) -> Job | None:
        """The next job, whose query may have been written with the update; None for a member that gets no more."""
        if not self.jobs.answer(member) or self.done or member.worker in self.dropped:
            if self.jobs.has_joined(member.number):
                self.jobs.release(member.number)
            return None
        if query is None:
            query = self._room_for_query(out).copy_(self.rule.query(self.state))
        ticket = issue_ticket(self.rule, self.state).clone() if self._needs_ticket else self._no_ticket
        self.traffic["down"] += query.nbytes
        kept = None
        if self._drift:
            kept = self._spare.pop() if self._spare else torch.empty(self.dim, dtype=self.dtype, device=self.device)
            kept.copy_(query)
        return Job(member.worker, self.jobs.issue(member, self.version, ticket, kept), self.version, query)

    def _room_for_query(self, out: Tensor | None) -> Tensor:
        return self._no_ticket.new_empty(self.dim) if out is None else out

    def _use(self, worker: int, sequence: int, job: OpenJob, grad: Tensor, out: Tensor | None, checked: bool,
             info: JobInfo) -> Tensor | None:  # fmt: skip
        """Apply a gradient and return the next query; None if it was refused or dropped."""
        with torch.no_grad():
            self.traffic["up"] += grad.nbytes
            objection: str | None
            if not min(1, self._most_steps) <= info.local_steps <= self._most_steps:
                objection = f"{info.local_steps} local steps instead of 1 to {self._most_steps}"
            else:
                if self._keeps_state:
                    self._count_lost_state(worker, info)
                grad, objection = self.compression.receive(grad, checked)
            if objection is None and self._norm_gate is not None:
                length = norm(grad).cpu()
                if self._norm_gate.learns_from(length):
                    return None
                objection = self._norm_gate.objection(length)
            if objection is not None:
                self._refuse(worker, objection)
                return None
            if self.gate is not None and self.gate.admit(self.version - job.version, worker).action == "drop":
                return None
            if self._clip is not None:
                grad = clip_norm(grad, self._clip)
            delay, ticket = self.version - job.version, job.ticket
            if 0 < info.local_steps < self._most_steps:
                ticket = weigh_ticket(self.rule, ticket, ticket.new_tensor([info.local_steps / self._most_steps]))
            query = self._room_for_query(out) if self._writes_query else None
            drift = math.nan
            if job.query is not None:
                drift = float(norm(job.query.sub_(self.rule.query(self.state))))
                self._spare.append(job.query)
            self.whole = False  # the one place where the state changes
            self._update(grad if query is not None else grad.to(self.device), delay, ticket, query)
            self.log.append(worker, sequence, delay, self.seconds, info, drift)
            self.whole = True
            if query is None:
                query = self.rule.query(self.state)
                if not self._query_in_place:
                    query = self._room_for_query(out).copy_(query)
        self._refused_in_a_row.pop(worker, None)
        self.dropped.discard(worker)
        self.records.collect()
        if self.done or self.records.is_due(self.version):
            self._record()
        return query

    def _count_lost_state(self, worker: int, info: JobInfo) -> None:
        if info.parent_job < 0 and worker in self._started:
            self.memories_lost[f"worker {worker}"] += 1
            warnings.warn(f"worker {worker} starts fresh: the local state of the process before it is lost",
                          stacklevel=4)  # fmt: skip
        self._started.add(worker)

    def _mean_drift(self, first: int, last: int) -> dict[str, float]:
        distances = self.log.column("drift", self.version - first)[: last - first]
        return {"drift": float(distances.mean()) if last > first else 0.0}

    def _record(self) -> None:
        if self.is_sound():
            self.records.note(self.version, self.output())

    def is_sound(self) -> bool:
        """Whether the state is finite; if not, the run has to :meth:`go_back`."""
        self.poisoned = not all(is_finite(leaf) for leaf in tensors(self.state) if leaf.is_floating_point())
        if not self.poisoned and self.version > self._poisoned_at:
            self.returns_in_a_row = 0
        return not self.poisoned

    def _refuse(self, worker: int, reason: str) -> None:
        if not self.is_sound():
            return  # the worker is not to blame
        self.refusals[f"worker {worker}"] += 1
        self._refused_in_a_row[worker] += 1
        self.last_refusal = f"refused a gradient of worker {worker} at update {self.version + 1}: {reason}"
        warnings.warn(self.last_refusal, stacklevel=2)
        in_a_row = self._refused_in_a_row[worker]
        if self._max_refusals is not None and in_a_row >= self._max_refusals:
            self.dropped.add(worker)
            warnings.warn(f"worker {worker} is dropped: {in_a_row} gradients in a row were refused", stacklevel=2)

    @property
    def too_late(self) -> dict[str, int]:
        """How many gradients of each worker were dropped because their delay exceeded ``max_delay``."""
        return {} if self.gate is None else {f"worker {w}": n for w, n in sorted(self.gate.dropped.items()) if n}

    def output(self) -> Tensor:
        return self.rule.output(self.state)

    def telemetry(self) -> Telemetry:
        times, last, seconds = self.log.column("time", _RECENT), self.records.last(), self.seconds
        elapsed = seconds - float(times[0]) if len(times) else 0.0
        delays = self.log.column("delay", _RECENT).double().sort().values if len(times) else torch.zeros(1)
        return Telemetry(version=self.version, steps=self.steps, seconds=seconds, delay_mean=float(delays.mean()),
                         delay_p95=float(delays[math.ceil(0.95 * len(delays)) - 1]), delay_max=int(delays[-1]),
                         updates_per_second=len(times) / elapsed if elapsed > 0 else 0.0, loss=last.pop("loss"),
                         accuracy=last.pop("accuracy", None), test_loss=last.pop("test_loss", None),
                         val_loss=last.pop("val_loss", None), metrics=last, record=self.records.steps[-1],
                         refused=self.refusals.total(), memories_lost=self.memories_lost.total(), threads=self.threads,
                         bytes_up=self.traffic["up"], bytes_down=self.traffic["down"])  # fmt: skip

    def trace(self, patience: float = math.inf) -> Trace:
        """What has happened so far, with a record of this moment; evaluations time out after ``patience`` seconds."""
        self._record()
        if missing := self.records.drain(patience):
            steps = " and ".join(map(str, missing))
            warnings.warn(f"the trace has no record after {steps} updates: their evaluation takes longer than "
                          f"{patience:g} s; resuming from the checkpoint makes up for it", stacklevel=2)  # fmt: skip
        column, config = self.log.column, {**self.config, **self._counts(), "too_late": self.too_late}
        return Trace(**self.records.tensors(), delays=column("delay"), output=self.output().cpu().clone(),
                     query=self.rule.query(self.state).cpu().clone(), config=config, time=column("time"),
                     worker=column("worker"), sequence=column("sequence"),
                     parent_job=column("parent_job") if self._keeps_state else None,
                     local_steps=column("local_steps") if self._most_steps else None)  # fmt: skip

    def _counts(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "refusals": dict(self.refusals), "bytes": dict(self.traffic),
                "memories_lost": dict(self.memories_lost)}  # fmt: skip

    def checkpoint(self, logged: int = 0, room: Mapping[str, Tensor] | None = None) -> Checkpoint:
        """A copy of all that a run needs to continue, without the first ``logged`` updates of the log.

        It overwrites ``room``, the tensors of an earlier one: new memory takes several times as long as the copying.
        """
        if not self.whole:
            raise RuntimeError(f"no checkpoint: update {self.version + 1} was interrupted")
        description = {**self._counts(), "config": {**self.config, "replaced": dict(self.config["replaced"])},
                       "records": self.records.saved(), "gate": {} if self.gate is None else self.gate.summary(),
                       "next_sequence": {str(worker): k for worker, k in self.jobs.next_sequence.items()}}  # fmt: skip
        return Checkpoint(self.version, self._copies(room or {}), description, self.log.rows(logged))

    def _copies(self, room: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of the state, and of the output where that is not a part of it: otherwise it shares the part's copy."""
        output, leaves = self.output(), {f"state.{i}": leaf for i, leaf in enumerate(tensors(self.state))}
        part = next((name for name, leaf in leaves.items() if leaf is output), None)
        if part is None:
            leaves["output"] = output
        leaves |= {f"{_PENDING_RECORD}{version}": output for version, output in self.records.waiting().items()}
        copies = {name: room[name].copy_(leaf) if name in room else leaf.detach().to("cpu", copy=True)
                  for name, leaf in leaves.items()}  # fmt: skip
        return copies if part is None else {"output": copies[part], **copies}

    def go_back(self, checkpoint: Checkpoint) -> None:
        """Replace a state that is not finite by an earlier one and cancel all jobs; no sample is drawn twice."""
        self._poisoned_at, self.poisoned = self.version, False
        self._load(checkpoint)
        self.returns_in_a_row += 1
        self.config["returns"] += 1
        self._refused_in_a_row.clear()
        self.dropped.clear()
        self.jobs.cancel_all()
        warnings.warn(f"the state was not finite at update {self._poisoned_at}: the run goes back to update "
                      f"{self.version}", stacklevel=2)  # fmt: skip

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint; the jobs that were out when it was made are not issued again."""
        saved = checkpoint.description
        config = saved["config"]
        require_same(self.problem, config, "of the checkpoint", same_start=False)
        if differences := ", ".join(_differences(self.config["rule"], config["rule"], "it")):
            raise ValueError(f"rule must be that of the checkpoint: {differences}")
        done = checkpoint.version
        require("steps", self.steps, self.steps >= done, f">= {done}, the updates made already")
        self._load(checkpoint)
        self.refusals, self.traffic = Counter(saved["refusals"]), Counter(saved["bytes"])
        self.memories_lost, self._started = Counter(saved["memories_lost"]), set(self.log.column("worker").tolist())
        self.config |= {"replaced": config["replaced"], "start": config.get("start", self.config["start"]),
                        "returns": config.get("returns", 0)}  # fmt: skip
        self.jobs.next_sequence = Counter({int(worker): k for worker, k in saved["next_sequence"].items()})
        self._begin = time.monotonic() - saved["seconds"]

    def _load(self, checkpoint: Checkpoint) -> None:
        leaves = tensors(self.state)
        saved_leaves = [checkpoint.tensors[name] for name in _numbered("state.", checkpoint.tensors).values()]
        ours, theirs = ([(leaf.shape, leaf.dtype) for leaf in some] for some in (leaves, saved_leaves))
        require("the form of the checkpoint's state", theirs, ours == theirs, f"that of the rule's, {ours}")
        for leaf, saved_leaf in zip(leaves, saved_leaves, strict=True):
            leaf.copy_(saved_leaf)
        self.log = UpdateLog(checkpoint.rows)
        waiting = {version: checkpoint.tensors[name].to(self.device)
                   for version, name in _numbered(_PENDING_RECORD, checkpoint.tensors).items()}  # fmt: skip
        self.records.restore(checkpoint.description["records"], waiting)
        if self.gate is not None:
            for worker, counts in checkpoint.description["gate"].items():
                self.gate.applied[int(worker)], self.gate.dropped[int(worker)] = counts["applied"], counts["dropped"]


def _differences(now: Any, before: Any, name: str) -> Iterator[str]:
    """``lr is 0.01, was 0.03``, for all that differs in the descriptions of two rules."""
    if isinstance(now, dict) and isinstance(before, dict) and now.get("type") == before.get("type"):
        for key in {**now, **before}:
            yield from _differences(now.get(key), before.get(key), key)
    elif now != before:
        texts = (str(part["type"] if isinstance(part, dict) and "type" in part else part) for part in (now, before))
        is_now, was = (text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..." for text in texts)
        yield f"{name} is {is_now}, was {was}"


def _numbered(prefix: str, names: Iterable[str]) -> dict[int, str]:
    """The names that are a prefix and a number, by their numbers, in order."""
    return dict(sorted((int(name.removeprefix(prefix)), name) for name in names if name.startswith(prefix)))
