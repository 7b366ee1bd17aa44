"""The job table: which worker process holds which job, and which of the results are still wanted.

Several processes may serve under one worker number, one after another; each of them is a *member*, with a number of its
own. A job is entered when it is handed out and leaves the table when it is answered, so that no result is used twice.
A message that answers no job of its sender is an error of the sender, which is not trusted with another job.
"""

import math
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

FOREVER = math.inf  # how long to wait for the result of a hung thread, which cannot be killed and may return


class ForeignMessageError(ValueError):
    """A message answers no job of the member that sent it; nothing was changed, and the member must be stopped."""


class Location(NamedTuple):
    """Where a worker or a server runs."""

    pid: int | None  # its process, if it has one of its own
    node: str


class Activity(NamedTuple):
    """What a member has been doing."""

    silent: float  # seconds since its last message was answered
    delivered: int  # gradients received from it
    location: Location


@dataclass(slots=True)
class OpenJob:
    """A job whose result has not arrived."""

    version: int  # the number of updates behind its query
    ticket: Tensor
    query: Tensor | None = None  # a copy, where drift is measured
    wanted: bool = True  # False once it is canceled: its result is discarded, and the worker gets a new job


@dataclass(slots=True)
class Member:
    """A worker process that has joined, and the jobs it holds by their sequence numbers."""

    number: int
    worker: int
    location: Location
    last_answer: float
    jobs: dict[int, OpenJob] = field(default_factory=dict)
    delivered: int = 0
    expires: float | None = None  # None while it runs; once it is removed, when its jobs are given up

    def take(self, sequence: int, version: int | None = None) -> OpenJob | None:
        """Take the job that a message answers out of the table; None if it was given up because the member is gone."""
        if (job := self.jobs.get(sequence)) is None:
            if self.expires is not None:
                return None
            raise ForeignMessageError(f"it answers job {sequence}, which worker {self.worker} does not hold")
        if version is not None and job.wanted and job.version != version:
            raise ForeignMessageError(f"it is for version {version}, job {sequence} was issued with {job.version}")
        return self.jobs.pop(sequence)


class JobTable:
    """Tracks which worker holds which job.

    >>> from torch import zeros
    >>> table = JobTable()
    >>> member = table.join(7, worker=0, location=Location(None, "here"))
    >>> sequence = table.issue(member, version=3, ticket=zeros(0))
    >>> member.take(sequence, version=3).version, table.has_jobs(7)
    (3, False)
    >>> member.take(sequence, version=3)
    Traceback (most recent call last):
    lategrad.serve.jobs.ForeignMessageError: it answers job 0, which worker 0 does not hold
    """

    def __init__(self) -> None:
        self.next_sequence: Counter[int] = Counter()  # number of each worker's next job, and of the sample it uses
        self._members: dict[int, Member] = {}
        self._leaving: set[int] = set()

    def join(self, number: int, worker: int, location: Location) -> Member:
        """Enter a member, or find it again if it has joined before."""
        if not self.has_joined(number):
            self._members[number] = Member(number, worker, location, time.monotonic())
        return self._members[number]

    def member(self, number: int) -> Member:
        """The sender of a message, whether it still runs or not."""
        if number not in self._members:
            raise ForeignMessageError(f"it is from member {number}, which has not joined")
        return self._members[number]

    def issue(self, member: Member, version: int, ticket: Tensor, query: Tensor | None = None) -> int:
        """Enter the next job of a member; returns its sequence number."""
        sequence = self.next_sequence[member.worker]
        self.next_sequence[member.worker] += 1
        member.jobs[sequence] = OpenJob(version, ticket, query)
        return sequence

    def answer(self, member: Member) -> bool:
        """Note that a message is answered; returns whether the member may get a job, being neither leaving nor gone."""
        member.last_answer = time.monotonic()
        return member.expires is None and member.number not in self._leaving

    def release(self, number: int) -> None:
        """Issue no more jobs to a member, which may not have joined yet; the results of those it holds are used."""
        self._leaving.add(number)

    def remove(self, number: int, wait: float = 0.0) -> None:
        """A member is gone; results that it sent before are used if they arrive within ``wait`` seconds."""
        self._leaving.discard(number)
        if self.has_joined(number):
            self._members[number].expires = time.monotonic() + wait
        self._expire()

    def _expire(self) -> None:
        now = time.monotonic()
        for member in self._members.values():
            if member.expires is not None and member.expires <= now:
                member.jobs.clear()

    def cancel(self, number: int) -> None:
        """A member has lost its jobs and will ask for new ones."""
        if number in self._members:
            self._members[number].jobs.clear()

    def cancel_all(self) -> None:
        """Want none of the results that are to come; each is answered with a new job."""
        for member in self._members.values():
            if member.expires is not None:
                member.jobs.clear()
            for job in member.jobs.values():
                job.wanted = False

    def has_joined(self, number: int) -> bool:
        return number in self._members and self._members[number].expires is None

    def is_leaving(self, number: int) -> bool:
        """Whether a member was released, or there is no more work for it."""
        return number in self._leaving

    def has_jobs(self, number: int) -> bool:
        return number in self._members and bool(self._members[number].jobs)

    def location(self, number: int) -> Location | None:
        """Where a member runs; None before it has joined and after it was removed."""
        return self._members[number].location if self.has_joined(number) else None

    def expected(self) -> set[int]:
        """The members that a result may come from."""
        return {number for number, member in self._members.items() if member.expires is None or member.jobs}

    def activities(self, now: float | None = None) -> dict[int, Activity]:
        """Of all members that run."""
        self._expire()
        at = time.monotonic() if now is None else now
        return {number: Activity(at - member.last_answer, member.delivered, member.location)
                for number, member in self._members.items() if member.expires is None}  # fmt: skip
