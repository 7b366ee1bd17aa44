"""The desk and the supervisor: whose jobs are given up, and who is started, let go and replaced."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import lategrad as lg
from lategrad.problems import Quadratic
from lategrad.serve import Server, Settings
from lategrad.serve.desk import FOR_EVER, Activity, Desk, ForeignMessageError, Location
from lategrad.serve.engines.engine import Ended, Report
from lategrad.serve.supervisor import Supervisor, TrainingError

HERE = Location(1, "here")
ONE = torch.ones(4, dtype=torch.float64)


@pytest.fixture
def desk():
    return Desk(Server(Quadratic(dim=4), lg.SGD(lr=0.1), Settings(steps=10, compile=False)))


def test_each_message_is_answered_with_the_next_job(desk):
    first = desk.join(7, 0, HERE)
    second = desk.deliver(7, 0, first.version, first.sequence, ONE)
    assert (second.version, second.sequence) == (1, 1)
    with pytest.warns(UserWarning, match="out of memory"):
        third = desk.fail(7, 0, second.sequence, "out of memory")
    assert (third.version, third.sequence) == (1, 2)
    assert desk.activities()[7].delivered == 1
    assert desk.activities()[7].location == HERE


def test_a_member_that_is_let_go_hands_back_what_it_has_and_gets_no_more(desk):
    jobs = [desk.join(7, 0, HERE) for _ in range(2)]
    desk.let_go(7)
    assert desk.deliver(7, 0, jobs[0].version, jobs[0].sequence, ONE) is None
    assert desk.has_jobs(7)
    assert desk.deliver(7, 0, jobs[1].version, jobs[1].sequence, ONE) is None
    assert not desk.has_jobs(7)
    assert desk.server.version == 2


def test_a_member_that_is_let_go_before_it_joins_gets_nothing(desk):
    desk.let_go(7)
    assert desk.join(7, 0, HERE) is None
    assert desk.is_leaving(7)


def test_the_jobs_of_a_dead_member_are_given_up_at_once_or_after_a_while(desk):
    given_up, awaited = desk.join(7, 0, HERE), desk.join(8, 1, HERE)
    desk.bury(7, 0)
    desk.bury(8, 1, wait=FOR_EVER)
    assert desk.expected() == {8}
    with pytest.warns(UserWarning, match="was used before"):
        assert desk.deliver(7, 0, given_up.version, given_up.sequence, ONE) is None
    assert desk.deliver(8, 1, awaited.version, awaited.sequence, ONE) is None
    assert desk.server.version == 1


def test_a_member_that_has_lost_its_job_gets_another_and_the_first_is_void(desk):
    """As when the server's reply was lost on its way."""
    lost = desk.join(7, 0, HERE)
    desk.void_jobs(7, 0)
    again = desk.join(7, 0, HERE)
    with pytest.raises(ForeignMessageError, match="answers job 0, which the worker does not have"):
        desk.deliver(7, 0, lost.version, lost.sequence, ONE)
    desk.deliver(7, 0, again.version, again.sequence, ONE)
    assert desk.server.version == 1


def test_a_message_that_answers_no_job_of_its_sender_changes_nothing(desk):
    mine, other = desk.join(7, 0, HERE), desk.join(8, 1, HERE)
    following = desk.deliver(7, 0, mine.version, mine.sequence, ONE)
    before = desk.server.state.x.clone()
    for message in [
        (7, 0, mine.version, mine.sequence),  # repeated
        (7, 0, following.version + 3, following.sequence),
        (7, 0, following.version, 99),
        (7, 1, other.version, other.sequence),  # another worker's
    ]:
        with pytest.raises(ForeignMessageError):
            desk.deliver(*message, ONE)
        with pytest.raises(ForeignMessageError):
            desk.fail(message[0], message[1], -1, "out of memory")
    assert torch.equal(desk.server.state.x, before)
    assert desk.server.refusals == {}
    assert desk.deliver(7, 0, following.version, following.sequence, ONE) is not None
    assert desk.deliver(8, 1, other.version, other.sequence, ONE) is not None
    assert desk.server.version == 3


def test_jobs_that_are_voided_are_answered_with_new_ones_and_their_gradients_unused(desk):
    before = desk.join(7, 0, HERE)
    desk.void_all_jobs()
    after = desk.deliver(7, 0, before.version, before.sequence, ONE)
    assert desk.server.version == 0
    assert after.sequence == 1
    desk.deliver(7, 0, after.version, after.sequence, ONE)
    assert desk.server.version == 1


def test_nothing_is_applied_after_the_last_update(desk):
    jobs = [desk.join(member, member, HERE) for member in range(11)]
    for job in jobs:
        desk.deliver(job.worker, job.worker, job.version, job.sequence, ONE)
    assert desk.server.version == 10


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

    def let_go(self, member):
        self.told.append(("let go", self.running[member]))

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
    assert engine.told == [("let go", 2), ("let go", 3)]
    supervisor.check(_report(engine), 0.0)
    assert len(engine.told) == 2  # they are told once
    assert list(supervisor.workers) == [0, 1]


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
