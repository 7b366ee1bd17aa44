r"""The server: a rule, its state, and the gradients that come back late; it knows nothing of any transport.

Every engine drives it the same way, from one thread:

1. ``job = server.issue(worker)`` hands out a query with its version v (the number of updates behind it) and
   a sequence number k: the worker is to use sample k of its own stream.
2. ``job = server.exchange(worker, version, sequence, grad)`` takes the gradient in, as update t with the
   delay :math:`\tau_t = (t - 1) - v`, and hands out the worker's next job.

A gradient is applied once or refused, or dropped where it is later than ``max_delay``. It is refused, with the
state untouched, if nobody asked for it (its sequence number is unknown or was used before), if its version is
not the one that was handed out, or if it is not a finite vector of the right length and dtype.
"""

from __future__ import annotations

import hashlib
import math
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lategrad.execution import in_place
from lategrad.execution.pays import compiling_pays
from lategrad.problems.problem import Problem
from lategrad.rules.rule import AnyRule, first_state, issue_ticket, needs_ticket
from lategrad.serve.checkpoint import Checkpoint, newest, save_checkpoint
from lategrad.serve.updates import LogMark, UpdateLog
from lategrad.staleness import StalenessGate
from lategrad.support.runs import tensors
from lategrad.support.validation import require
from lategrad.trace import Trace, describe

_RECENT = 1000  # updates that the reported delays and rates are taken over
_CHECKPOINT_SECONDS = 60.0


class Job(NamedTuple):
    """What a worker is to do: the gradient at ``query`` on sample ``sequence`` of its stream."""

    worker: int
    sequence: int
    version: int
    query: Tensor


class _Issued(NamedTuple):
    """What the server keeps of a job until its gradient is back."""

    version: int
    ticket: Tensor


class Telemetry(NamedTuple):
    """How a run is doing."""

    version: int
    steps: int
    seconds: float
    updates_per_second: float
    loss: float
    accuracy: float | None
    delay_mean: float
    delay_p95: float
    delay_max: int
    refused: int


def identify(problem: Problem) -> dict[str, str]:
    """What a problem says it is, and a checksum of what is in it, where it has one."""
    contents = getattr(problem, "fingerprint", lambda: "")()
    silent = type(problem).__repr__ is object.__repr__  # it would give its address in memory
    name = type(problem).__qualname__ if silent else repr(problem)
    return {"problem": name, "contents": hashlib.sha256(contents.encode()).hexdigest()}


def require_same(problem: Problem, saved: dict[str, Any], where: str) -> None:
    """Require the problem that a configuration was made with."""
    now = identify(problem)
    require("problem", now["problem"], now["problem"] == saved["problem"], f"the one {where}, {saved['problem']}")
    if now["contents"] != saved["contents"]:
        raise ValueError(f"problem must be the one {where}: {saved['problem']} had other data or another preprocessing")


def malformed(grad: Tensor, dim: int, dtype: torch.dtype) -> str | None:
    """What is wrong with the form of a gradient, if anything."""
    if grad.shape != (dim,):
        return f"shape {tuple(grad.shape)} instead of ({dim},)"
    if grad.dtype != dtype:
        return f"dtype {grad.dtype} instead of {dtype}"
    return None


def unusable(grad: Tensor, dim: int, dtype: torch.dtype) -> str | None:
    """What is wrong with a gradient, if anything: its form, or what is in it."""
    return malformed(grad, dim, dtype) or (None if _is_finite(grad) else "not finite")


def _is_finite(grad: Tensor) -> bool:
    # A sum is one pass without memory of its own; it can overflow where the entries do not, so ask again then.
    return math.isfinite(grad.sum().item()) or bool(torch.isfinite(grad).all())


class Server:
    """Holds a rule and its state; hands out queries, takes gradients, keeps the trace and the checkpoints.

    Args:
        problem: whose loss and accuracy are recorded; workers take gradients of it.
        rule: any server rule, for one run (no hyper-parameter may have run dimensions).
        steps: updates to make.
        record_every: updates between two records of loss and accuracy; by default ten records.
        compile: the rule's update through ``torch.compile``; by default for long runs.
        folder: where checkpoints go; None for none.
        checkpoint_every: updates between two checkpoints; by default a minute passes between them.
        keep: checkpoints to keep.
        max_refusals: refused gradients in a row after which a worker gets no more work; None for never.
        max_delay: gradients later than this are dropped, and counted; None applies all.
        config: what else the trace and the checkpoints should say about the run; JSON values.
        lend: whether :meth:`exchange` may hand out a query that is part of the state, which the next exchange
            overwrites: for engines that have sent it off by then. Saves a pass over the vector.

    >>> import lategrad as lg
    >>> from lategrad.problems import Quadratic
    >>> problem = Quadratic(noise=0.0)
    >>> server = Server(problem, lg.SGD(lr=0.5), steps=3)
    >>> fast, slow = server.issue(worker=0), server.issue(worker=1)
    >>> while not server.done:  # worker 0 returns twice, then worker 1 once: two updates late
    ...     job = fast if server.version < 2 else slow
    ...     fast = server.exchange(job.worker, job.version, job.sequence, problem.gradient(job.query, torch.zeros(10)))
    >>> server.trace().delays
    tensor([0, 0, 2], dtype=torch.int32)
    """

    def __init__(
        self,
        problem: Problem,
        rule: AnyRule[Any],
        *,
        steps: int,
        record_every: int | None = None,
        compile: bool | None = None,
        folder: Path | None = None,
        checkpoint_every: int | None = None,
        keep: int = 2,
        max_refusals: int | None = 10,
        max_delay: int | None = None,
        config: dict[str, Any] | None = None,
        lend: bool = False,
    ) -> None:
        for name, count in (("steps", steps), ("keep", keep)):
            require(name, count, isinstance(count, int) and count >= 1, "an integer >= 1")
        for name, value in (("record_every", record_every), ("checkpoint_every", checkpoint_every),
                            ("max_refusals", max_refusals)):  # fmt: skip
            require(name, value, value is None or (isinstance(value, int) and value >= 1), "an integer >= 1, or None")
        self.problem, self.rule, self.steps = problem, rule, steps
        self.record_every = record_every or max(1, steps // 10)
        self.checkpoint_every, self.keep, self.max_refusals = checkpoint_every, keep, max_refusals
        self.folder = folder
        self.state = first_state(rule, problem.start())
        query = rule.query(self.state)
        require("rule", describe(rule), query.dim() == 1, "for one run: a number for every hyper-parameter")
        self.dim, self.dtype = query.shape[-1], query.dtype
        self._lends = lend and any(query is leaf for leaf in tensors(self.state))
        self.compiled = compile if compile is not None else compiling_pays(steps, self.dim)
        self._update = in_place(rule, self.state, backend=None if self.compiled else "eager")
        self.config = {
            **identify(problem), "rule": describe(rule), "steps": steps, "compiled": self.compiled,
            "backend": self._update.backend, "torch": torch.__version__, **(config or {}),
        }  # fmt: skip

        self.log = UpdateLog(None if folder is None else folder / "updates.bin")
        self.records: dict[str, list[Any]] = {"steps": [], "loss": [], "accuracy": []}
        self.refusals: Counter[str] = Counter()
        self.gate = None if max_delay is None else StalenessGate(max_delay)
        self._refused_in_a_row: Counter[int] = Counter()
        self.last_refusal: str | None = None
        self._next_sequence: Counter[int] = Counter()
        self._issued: dict[tuple[int, int], _Issued] = {}
        self._no_ticket = query[:0].clone()
        self._begin = time.monotonic()
        self._checkpointed_at = self._begin
        self.checkpointed_version = -1
        self._whole = True  # False within an update: a state that was left there must not be saved

        self._record()

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
        query = self._no_ticket.new_empty(self.dim) if out is None else out
        query.copy_(self.rule.query(self.state))
        return self._enter(worker, query)

    def _enter(self, worker: int, query: Tensor) -> Job:
        sequence = self._next_sequence[worker]
        self._next_sequence[worker] += 1
        ticket = issue_ticket(self.rule, self.state).clone() if needs_ticket(self.rule) else self._no_ticket
        self._issued[worker, sequence] = _Issued(self.version, ticket)
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
    ) -> Job | None:
        """Take a gradient in, apply or refuse it, and hand out the worker's next job as :meth:`issue` does.

        Args:
            worker: who sends it.
            version: of the query that it was taken at.
            sequence: of the job that it answers.
            grad: the gradient; read before this returns, and not kept.
            out: where to write the next query.
            checked: whether the gradient has been found :func:`usable <unusable>` already, where it was made.
        """
        with torch.no_grad():
            objection = self._objection(worker, version, sequence, grad, checked)
            if objection is not None:
                self.refuse(worker, sequence, objection)
                return self.issue(worker, out)
            if self.gate is not None and self.gate.admit(self.version - version, worker).action == "drop":
                self.forget(worker, sequence)
                return self.issue(worker, out)
            if self._lends:
                self._apply(worker, sequence, grad, None)
                query = self.rule.query(self.state)
            else:
                query = self._no_ticket.new_empty(self.dim) if out is None else out
                self._apply(worker, sequence, grad, query)
        self._refused_in_a_row.pop(worker, None)
        self._keep_records()
        return None if self.done else self._enter(worker, query)

    def _objection(self, worker: int, version: int, sequence: int, grad: Tensor, checked: bool) -> str | None:
        """Why a gradient cannot be applied, if so."""
        if version > self.version:
            return f"version {version} is from the future: the server is at {self.version}"
        issued = self._issued.get((worker, sequence))
        if issued is None:
            used = "was used before" if 0 <= sequence < self._next_sequence[worker] else "was never handed out"
            return f"sequence number {sequence} {used}"
        if version != issued.version:
            return f"version {version} instead of {issued.version}, which job {sequence} was handed out with"
        return None if checked else unusable(grad, self.dim, self.dtype)

    def _apply(self, worker: int, sequence: int, grad: Tensor, next_query: Tensor | None) -> None:
        """The one place where the state changes."""
        version, ticket = self._issued.pop((worker, sequence))
        delay = self.version - version
        self._whole = False
        self._update(grad, delay, ticket, next_query)
        self.log.append(worker, sequence, delay, self.seconds)
        self._whole = True

    def refuse(self, worker: int, sequence: int, reason: str) -> None:
        """Count and report a gradient that was not applied; its job is over."""
        self._issued.pop((worker, sequence), None)
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

    def _keep_records(self) -> None:
        if self.done or self.version % self.record_every == 0:
            self._record()
        if self.folder is not None and (self.done or self._checkpoint_is_due()):
            self.checkpoint()

    def _checkpoint_is_due(self) -> bool:
        if self.checkpoint_every is not None:
            return self.version % self.checkpoint_every == 0
        return time.monotonic() - self._checkpointed_at >= _CHECKPOINT_SECONDS

    def _record(self) -> None:
        """Evaluate the rule's output now."""
        output = self.output()
        accuracy = self.problem.accuracy(output)
        self.records["steps"].append(self.version)
        self.records["loss"].append(self.problem.loss(output).item())
        if accuracy is not None:
            self.records["accuracy"].append(accuracy.item())

    def telemetry(self) -> Telemetry:
        """How the run is doing: rates and delays of the last thousand updates."""
        delays, times = self.log.column("delay", _RECENT).double(), self.log.column("time", _RECENT)
        spent = self.seconds - float(times[0]) if len(times) else 0.0
        ordered = delays.sort().values
        accuracies = self.records["accuracy"]
        return Telemetry(
            version=self.version,
            steps=self.steps,
            seconds=self.seconds,
            updates_per_second=len(times) / spent if spent > 0 else 0.0,
            loss=self.records["loss"][-1],
            accuracy=accuracies[-1] if accuracies else None,
            delay_mean=float(delays.mean()) if len(delays) else 0.0,
            delay_p95=float(ordered[math.ceil(0.95 * len(ordered)) - 1]) if len(delays) else 0.0,
            delay_max=int(ordered[-1]) if len(delays) else 0,
            refused=sum(self.refusals.values()),
        )

    def trace(self) -> Trace:
        """What has happened so far, with a record of the present moment."""
        steps, loss, accuracy = (self.records[name] for name in ("steps", "loss", "accuracy"))
        if steps[-1] != self.version:
            self._record()
        return Trace(
            steps=torch.tensor(steps),
            loss=torch.tensor(loss, dtype=torch.float64),
            accuracy=torch.tensor(accuracy, dtype=torch.float64) if accuracy else None,
            delays=self.log.column("delay"),
            output=self.output().clone(),
            query=self.rule.query(self.state).clone(),
            config={**self.config, "seconds": self.seconds, "refusals": dict(self.refusals), "too_late": self.too_late},
            time=self.log.column("time"),
            worker=self.log.column("worker"),
            sequence=self.log.column("sequence"),
        )

    def checkpoint(self) -> bool:
        """Save all that is needed to go on; False, with a warning, if the disk would not take it."""
        assert self.folder is not None
        self._checkpointed_at = time.monotonic()
        if not self._whole:
            warnings.warn(f"no checkpoint: update {self.version + 1} was broken off half-way", stacklevel=2)
            return False
        if self.checkpointed_version == self.version:
            return True
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            save_checkpoint(self.folder, self._as_checkpoint(self.log.flush()), self.keep)
        except OSError as error:
            warnings.warn(f"checkpoint at update {self.version} failed, training goes on: {error}", stacklevel=2)
            return False
        self.checkpointed_version = self.version
        return True

    def _as_checkpoint(self, mark: LogMark) -> Checkpoint:
        state = {f"state.{i}": leaf for i, leaf in enumerate(tensors(self.state))}
        description = {
            "config": self.config,
            "log": mark._asdict(),
            "records": self.records,
            "refusals": dict(self.refusals),
            "gate": {} if self.gate is None else self.gate.summary(),
            "next_sequence": {str(worker): k for worker, k in self._next_sequence.items()},
            "seconds": self.seconds,
        }
        return Checkpoint(self.version, {"output": self.output().clone(), **state}, description)

    def restore(self) -> dict[str, Any]:
        """Go on from the newest whole checkpoint in the folder; jobs that were out then are void.

        Returns the configuration that it was made with.
        """
        assert self.folder is not None
        return newest(self.folder, self._restore)

    def _restore(self, checkpoint: Checkpoint) -> dict[str, Any]:
        assert self.folder is not None
        saved = checkpoint.description
        require_same(self.problem, saved["config"], "of the checkpoint")
        ours, theirs = self.config["rule"], saved["config"]["rule"]
        require("rule", ours, ours == theirs, f"that of the checkpoint, {theirs!r}")
        log = UpdateLog.load(self.folder / "updates.bin", LogMark(**saved["log"]))
        made = checkpoint.version
        require("steps", self.steps, self.steps >= made, f">= {made}, the updates made already")
        ours, saved_state = tensors(self.state), checkpoint.tensors.copy()
        del saved_state["output"]
        theirs = [saved_state[f"state.{i}"] for i in range(len(saved_state))]
        forms = [[(leaf.shape, leaf.dtype) for leaf in leaves] for leaves in (ours, theirs)]
        require("the form of the checkpoint's state", forms[1], forms[0] == forms[1], f"that of the rule's, {forms[0]}")
        for mine, saved_leaf in zip(ours, theirs, strict=True):
            mine.copy_(saved_leaf)
        self.log = log
        self.records = {name: list(values) for name, values in saved["records"].items()}
        self.refusals = Counter(saved["refusals"])
        if self.gate is not None:
            for worker, counts in saved.get("gate", {}).items():
                self.gate.applied[int(worker)], self.gate.dropped[int(worker)] = counts["applied"], counts["dropped"]
        self._next_sequence = Counter({int(worker): k for worker, k in saved["next_sequence"].items()})
        self._issued.clear()
        self._begin = time.monotonic() - saved["seconds"]
        config: dict[str, Any] = saved["config"]
        return config
