"""The job table and the supervisor: which jobs are given up, and which workers are started, released and replaced."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import lategrad as lg
from lategrad.problems import Quadratic
from lategrad.serve import Server, Settings
from lategrad.serve.engines.engine import Ended, Report
from lategrad.serve.jobs import FOREVER, Activity, ForeignMessageError, Location
from lategrad.serve.supervisor import Supervisor, TrainingError

HERE = Location(1, "here")
ONE = torch.ones(4, dtype=torch.float64)


@pytest.fixture
def server():
    return Server(Quadratic(dim=4), lg.SGD(lr=0.1), Settings(steps=10, compile=False))


def test_each_message_is_answered_with_the_next_job(server):
    first = server.join(7, 0, HERE)
    second = server.deliver(7, first.version, first.sequence, ONE)
    assert (second.version, second.sequence) == (1, 1)
    with pytest.warns(UserWarning, match="out of memory"):
        third = server.fail(7, second.sequence, "out of memory")
    assert (third.version, third.sequence) == (1, 2)
    assert server.jobs.activities()[7].delivered == 1
    assert server.jobs.activities()[7].location == HERE


def test_a_member_that_is_released_hands_back_what_it_has_and_gets_no_more(server):
    jobs = [server.join(7, 0, HERE) for _ in range(2)]
    server.jobs.release(7)
    assert server.deliver(7, jobs[0].version, jobs[0].sequence, ONE) is None
    assert server.jobs.has_jobs(7)
    assert server.deliver(7, jobs[1].version, jobs[1].sequence, ONE) is None
    assert not server.jobs.has_jobs(7)
    assert server.version == 2


def test_a_member_that_is_released_before_it_joins_gets_nothing(server):
    server.jobs.release(7)
    assert server.join(7, 0, HERE) is None
    assert server.jobs.is_leaving(7)


def test_the_jobs_of_a_dead_member_are_given_up_at_once_or_after_a_while(server):
    given_up, awaited = server.join(7, 0, HERE), server.join(8, 1, HERE)
    server.jobs.remove(7)
    server.jobs.remove(8, wait=FOREVER)
    assert server.jobs.expected() == {8}
    with pytest.warns(UserWarning, match="job 0 was given up when its process ended"):
        assert server.deliver(7, given_up.version, given_up.sequence, ONE) is None
    assert server.deliver(8, awaited.version, awaited.sequence, ONE) is None
    assert server.version == 1


def test_a_member_that_has_lost_its_job_gets_another_and_the_first_is_canceled(server):
    """As when the server's reply was lost on its way."""
    lost = server.join(7, 0, HERE)
    server.jobs.cancel(7)
    again = server.join(7, 0, HERE)
    with pytest.raises(ForeignMessageError, match="answers job 0, which worker 0 does not hold"):
        server.deliver(7, lost.version, lost.sequence, ONE)
    server.deliver(7, again.version, again.sequence, ONE)
    assert server.version == 1


def test_a_message_that_answers_no_job_of_its_sender_changes_nothing(server):
    mine, other = server.join(7, 0, HERE), server.join(8, 1, HERE)
    following = server.deliver(7, mine.version, mine.sequence, ONE)
    before = server.state.x.clone()
    for message in [
        (7, mine.version, mine.sequence),  # repeated
        (7, following.version + 3, following.sequence),
        (7, following.version, 99),
        (8, following.version, following.sequence),  # another worker's
        (9, other.version, other.sequence),  # of a process that has not joined
    ]:
        with pytest.raises(ForeignMessageError):
            server.deliver(*message, ONE)
        with pytest.raises(ForeignMessageError):
            server.fail(message[0], -1, "out of memory")
    assert torch.equal(server.state.x, before)
    assert server.refusals == {}
    assert server.deliver(7, following.version, following.sequence, ONE) is not None
    assert server.deliver(8, other.version, other.sequence, ONE) is not None
    assert server.version == 3


def test_jobs_that_are_canceled_are_answered_with_new_ones_and_their_gradients_unused(server):
    before = server.join(7, 0, HERE)
    server.jobs.cancel_all()
    after = server.deliver(7, before.version, before.sequence, ONE)
    assert server.version == 0
    assert after.sequence == 1
    server.deliver(7, after.version, after.sequence, ONE)
    assert server.version == 1


def test_nothing_is_applied_after_the_last_update(server):
    jobs = [server.join(member, member, HERE) for member in range(11)]
    for job in jobs:
        server.deliver(job.worker, job.version, job.sequence, ONE)
    assert server.version == 10


# ---- The supervisor, with an engine that only takes note


class _Ledger:
    """An engine without workers: what it is told is written down."""

    start_deadline = 100.0
    version = 0

    def __init__(self):
        self.running, self.told, self.places, self.joined = {}, [], 1000, set()

    def start(self, member, worker):
        self.running[member] = worker

    def location(self, member):
        return HERE if member in self.joined else None

    def release(self, member):
        self.told.append(("release", self.running[member]))

    def kill(self, member):
        self.told.append(("kill", self.running[member]))
        return True

    def room(self):
        return self.places


def _report(engine, silent=0.0, version=0, joined=None, dropped=(), delivered=0):
    members = engine.running if joined is None else joined
    return Report(version, False, {m: Activity(silent, delivered, HERE) for m in members}, frozenset(dropped), "why")


@pytest.fixture
def engine():
    return _Ledger()


def _supervisor(engine, fewest=2, most=2):
    return Supervisor(engine, fewest, most, 10.0, Counter())


def test_as_many_run_as_there_is_room_for_between_fewest_and_most(engine):
    supervisor = _supervisor(engine, 2, 4)
    for places, expected in ((1, 2), (3, 3), (100, 4)):
        engine.places = places
        supervisor.check(_report(engine), 0.0)
        assert sorted(engine.running.values()) == list(range(expected))
    engine.places = 1
    supervisor.check(_report(engine), 0.0)
    assert engine.told == [("release", 2), ("release", 3)]
    supervisor.check(_report(engine), 0.0)
    assert len(engine.told) == 2  # they are told once
    assert list(supervisor.workers) == [0, 1]


def test_those_that_run_stay_when_the_machine_of_others_is_lost(engine):
    engine.places = 4
    supervisor = _supervisor(engine, 1, 4)
    supervisor.check(_report(engine), 0.0)
    for member in (0, 1):
        with pytest.warns(UserWarning, match=f"worker {member} died"):
            supervisor.handle_end(Ended(member, "its machine is gone"), 0.0)
    engine.places = 2
    supervisor.check(_report(engine, joined=(2, 3)), 10.0)
    assert engine.told == []
    assert list(supervisor.workers) == [2, 3]
    assert len(engine.running) == 4  # and no other is started
    engine.places = 3
    supervisor.check(_report(engine, joined=(2, 3)), 10.0)
    assert list(engine.running.values()) == [0, 1, 2, 3, 0]


def test_a_worker_is_known_from_the_moment_it_joins_until_it_has_ended(engine):
    supervisor = _supervisor(engine)
    supervisor.check(_report(engine, joined=()), 0.0)
    assert supervisor.workers == {}
    engine.joined.add(1)  # between two looks at the workers
    assert supervisor.workers == {1: HERE}
    supervisor.check(_report(engine, joined=(1,)), 0.0)
    engine.joined.clear()  # as while the server is away
    assert supervisor.workers == {1: HERE}
    supervisor.handle_end(Ended(1, None), 0.0)
    assert supervisor.workers == {}


def test_a_worker_that_never_joined_is_not_waited_for_when_fewer_are_wanted(engine):
    supervisor = _supervisor(engine)
    supervisor.check(_report(engine), 0.0)
    supervisor.set_workers(1)
    supervisor.check(_report(engine, joined=()), 0.0)
    assert engine.told == [("kill", 1)]


def test_the_silent_are_replaced_once_and_killed_until_they_are_gone(engine):
    supervisor = _supervisor(engine, 1, 1)
    supervisor.check(_report(engine), 0.0)
    with pytest.warns(UserWarning, match="worker 0 did not respond for 10 s \\(after update 5\\) and is restarted"):
        supervisor.check(_report(engine, silent=11.0, version=5), 0.0)
    supervisor.check(_report(engine, silent=11.0, version=5, joined=(0,)), 0.0)
    assert engine.told == [("kill", 0), ("kill", 0)]
    assert engine.running == {0: 0, 1: 0}
    supervisor.handle_end(Ended(0, "killed"), 0.0)  # that was meant: nothing is said
    assert supervisor.replaced == {"worker 0": 1}


def test_who_dies_without_a_gradient_is_replaced_later_and_later(engine):
    supervisor = _supervisor(engine, 1, 1)
    now, pauses = 0.0, []
    for death in range(4):
        supervisor.check(_report(engine, joined=()), now)
        begin = now
        with pytest.warns(UserWarning, match="worker 0 died after update 0"):
            supervisor.handle_end(Ended(death, "exit code 1"), now)
        while len(engine.running) == death + 1:
            now += 0.1
            supervisor.check(_report(engine, joined=()), now)
        pauses.append(now - begin)
    assert pauses == pytest.approx([0.2, 0.4, 0.8, 1.6], abs=0.11)
    with (
        pytest.warns(UserWarning, match="died"),
        pytest.raises(TrainingError, match="5 workers in a row died before their first gradient, .* exit code 1"),
    ):
        supervisor.handle_end(Ended(4, "exit code 1"), now)


def test_progress_of_the_others_keeps_a_run_going(engine):
    supervisor = _supervisor(engine, 1, 1)
    now = 0.0
    for death in range(20):
        now += 10
        supervisor.check(_report(engine, version=death, joined=()), now)
        with pytest.warns(UserWarning, match="died"):
            supervisor.handle_end(Ended(death, "exit code 1"), now)
    assert supervisor.replaced == {"worker 0": 20}


def test_a_worker_that_was_dropped_is_not_started_again(engine):
    supervisor = _supervisor(engine)
    supervisor.check(_report(engine), 0.0)
    supervisor.handle_end(Ended(1, None), 0.0)  # it got no more work
    supervisor.check(_report(engine, dropped=(1,)), 10.0)
    assert list(engine.running.values()) == [0, 1]
    with pytest.raises(TrainingError, match="all workers were dropped; the last refusal: why"):
        supervisor.check(_report(engine, dropped=(0, 1)), 10.0)
