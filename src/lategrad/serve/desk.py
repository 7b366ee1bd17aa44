"""Where workers' messages come in: each becomes an update or a refusal, and is answered with the worker's next job.

One worker after another may serve under the same number; each of them is a *member*, with a number of its own. The
desk knows which jobs every member has, so that the jobs of a dead one can be given up, and so that a message that
answers no job of its sender is told from one that does: whoever sends it is not to be trusted with a job any more. It
is where the server is, in every engine; the supervisor may be elsewhere.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from lategrad.serve.messages import PLAIN, Job, Made
from lategrad.serve.server import Server

FOR_EVER = math.inf
"""How long the gradient of a thread is waited for that was taken for hung: it cannot be ended, and may come back."""


class ForeignMessageError(ValueError):
    """A message that answers no job of the member that sent it; nothing was changed, and the member is to be ended."""


class Location(NamedTuple):
    """Where a worker or a server runs."""

    pid: int | None
    """Its process, if it has one of its own."""
    node: str


class Activity(NamedTuple):
    """What a member has been doing."""

    silent: float
    """Seconds since it got its last job."""
    delivered: int
    """Gradients that came from it."""
    location: Location


@dataclass
class _Member:
    worker: int
    location: Location
    last_job: float
    jobs: dict[int, int | None] = field(default_factory=dict)
    """Sequence numbers, with the version that each was handed out at; None if its gradient is not wanted any more."""
    delivered: int = 0
    leaving: bool = False


class _Outstanding(NamedTuple):
    """A job of a member that is gone, whose gradient may still be on its way."""

    member: int
    worker: int
    sequence: int
    until: float


class Desk:
    """Takes messages of members and keeps account of their jobs."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._members: dict[int, _Member] = {}
        self._leaving_before_joined: set[int] = set()
        self._outstanding: list[_Outstanding] = []

    # ---- From workers

    def join(self, member: int, worker: int, location: Location, out: Tensor | None = None) -> Job | None:
        """A job for a member that has just started, or has lost the server for a while."""
        if member not in self._members:
            leaving = member in self._leaving_before_joined
            self._members[member] = _Member(worker, location, time.monotonic(), leaving=leaving)
        return self._assign(member, self.server.issue(worker, out))

    def deliver(
        self,
        member: int,
        worker: int,
        version: int,
        sequence: int,
        grad: Tensor,
        out: Tensor | None = None,
        *,
        checked: bool = False,
        made: Made = PLAIN,
    ) -> Job | None:
        """Take in the gradient of a job and answer with the next one; a late one of a member that is gone is used."""
        wanted = self._take_back(member, worker, sequence, version)
        job = None
        if self.server.done:
            self.server.forget(worker, sequence)
        elif wanted:
            job = self.server.exchange(worker, version, sequence, grad, out, checked=checked, made=made)
        else:
            job = self.server.issue(worker, out)
        if (known := self._members.get(member)) is not None:
            known.delivered += 1
        return self._assign(member, job)

    def fail(self, member: int, worker: int, sequence: int, reason: str, out: Tensor | None = None) -> Job | None:
        """Note that the gradient of a job will not come, and answer with the next one."""
        if self._take_back(member, worker, sequence):
            self.server.refuse(worker, sequence, reason)
        return self._assign(member, self.server.issue(worker, out))

    def _take_back(self, member: int, worker: int, sequence: int, version: int | None = None) -> bool:
        """The job that a message answers is over; whether what it brings is wanted.

        Of a member that is gone, the server itself knows which jobs are still open.
        """
        known = self._members.get(member)
        if known is None:
            return True
        if worker != known.worker:
            raise ForeignMessageError(f"it says that it is of worker {worker}, and came from worker {known.worker}")
        if sequence not in known.jobs:
            raise ForeignMessageError(f"it answers job {sequence}, which the worker does not have")
        issued = known.jobs[sequence]
        if None not in (issued, version) and issued != version:
            raise ForeignMessageError(f"it is for version {version}, job {sequence} was handed out with {issued}")
        del known.jobs[sequence]
        return issued is not None

    def _assign(self, member: int, job: Job | None) -> Job | None:
        """Enter a job as the member's; one that is leaving, or gone, gets none, nor any later."""
        known = self._members.get(member)
        if known is not None:
            known.last_job = time.monotonic()
            if job is not None and not known.leaving:
                known.jobs[job.sequence] = job.version
                return job
            known.leaving = True
        if job is not None:
            self.server.forget(job.worker, job.sequence)
        return None

    # ---- From whoever looks after the workers

    def let_go(self, member: int) -> None:
        """The gradients that a member is at are its last."""
        if member in self._members:
            self._members[member].leaving = True
        else:
            self._leaving_before_joined.add(member)

    def is_leaving(self, member: int) -> bool:
        """Whether it was let go, or there was no more work for it."""
        return member in self._leaving_before_joined or (member in self._members and self._members[member].leaving)

    def has_jobs(self, member: int) -> bool:
        """Whether gradients of it are to come."""
        return member in self._members and bool(self._members[member].jobs)

    def bury(self, member: int, worker: int, wait: float = 0.0) -> None:
        """A member is gone; gradients that it sent before are used if they arrive within so many seconds."""
        self._leaving_before_joined.discard(member)
        known = self._members.pop(member, None)
        if known is not None:
            until = time.monotonic() + wait
            self._outstanding += [_Outstanding(member, worker, sequence, until) for sequence in known.jobs]
        self._give_up()

    def void_jobs(self, member: int, worker: int) -> None:
        """A member has lost its jobs, and will ask for new ones."""
        if (known := self._members.get(member)) is not None:
            for sequence in known.jobs:
                self.server.forget(worker, sequence)
            known.jobs.clear()

    def void_all_jobs(self) -> None:
        """The server has gone back: whatever workers are at is not wanted, and each is answered with a new job."""
        for known in self._members.values():
            known.jobs = dict.fromkeys(known.jobs)
        self._outstanding.clear()

    def has_joined(self, member: int) -> bool:
        """Whether it has had a job."""
        return member in self._members

    def location(self, member: int) -> Location | None:
        """Where a member runs; None before it has joined, and when it is gone."""
        known = self._members.get(member)
        return None if known is None else known.location

    def _give_up(self) -> None:
        now = time.monotonic()
        for job in [job for job in self._outstanding if job.until <= now]:
            self._outstanding.remove(job)
            self.server.forget(job.worker, job.sequence)

    def expected(self) -> set[int]:
        """The members that a gradient may come from."""
        return self._members.keys() | {job.member for job in self._outstanding}

    def activities(self, now: float | None = None) -> dict[int, Activity]:
        """Of all members that have joined."""
        self._give_up()
        at = time.monotonic() if now is None else now
        return {number: Activity(at - member.last_job, member.delivered, member.location)
                for number, member in self._members.items()}  # fmt: skip
