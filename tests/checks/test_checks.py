"""Everything registered passes the shipped checks, and broken parts do not."""

import math
import warnings
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch

import lategrad as lg
from helpers import transcriptions as plain
from lategrad.checks import check_learner, check_rule, check_set, machine
from lategrad.problems import Quadratic
from lategrad.registry import LEARNERS, RULES, build_rule, parse_set
from lategrad.rules import first_query
from lategrad.support.options import options_of
from lategrad.support.runs import per_run

DOMAINS = {"whole": lg.WholeSpace(), "ball": lg.Ball(1.0), "simplex": lg.Simplex()}
SETS = {
    "whole": parse_set("whole"),
    "ball": parse_set("ball:2"),
    "ball-off-centre": lg.Ball(0.5, center=torch.arange(6).float()),
    "box": parse_set("box:-1,0.5"),
    "simplex": parse_set("simplex"),
    "l1": parse_set("l1:2"),
    "half-space": lg.HalfSpace(torch.arange(6) + 1.0, 0.5),
    "product": lg.Product((lg.Simplex(), 2), (lg.Ball(1.0), 4)),
}


COMPILED = ("anytime-sgd", "optimistic-anytime", "strongly-convex", "steady", "adaptive-revision", "steady-muon")
"""One of each kind; the others go through the compilers in `make test-all`."""


@pytest.mark.parametrize("name", SETS)
def test_sets(name):
    check_set(SETS[name], compile=name in ("ball-off-centre", "simplex", "product"))


@pytest.mark.parametrize("domain", DOMAINS)
@pytest.mark.parametrize("name", LEARNERS)
def test_learners(name, domain):
    compile = (name, domain) == ("ogd", "ball")  # the others are compiled inside their anytime rules
    check_learner(LEARNERS[name].make(**{LEARNERS[name].parameter: 0.7, "domain": DOMAINS[domain]}), compile=compile)


def check_quietly(rule, **options):
    """Warnings name only options that take one number for all runs, and rules without their blocks."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        check_rule(rule, **options)
    single = [name for name, option in options_of(type(rule)).items() if float in option.types and not option.sweeps]
    for message in (str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)):
        expected = "without blocks" in message or any(f"cannot be swept over {name}:" in message for name in single)
        assert expected, message


@pytest.mark.parametrize("domain", DOMAINS)
@pytest.mark.parametrize("name", RULES)
def test_rules(name, domain):
    check_quietly(build_rule(name, 0.7, DOMAINS[domain]), compile=domain == "ball" and name in COMPILED)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in RULES if name not in COMPILED])
def test_rules_compiled(name):
    check_quietly(build_rule(name, 0.7, DOMAINS["ball"]), compile=True)


def test_rule_with_interpolation():
    check_rule(lg.Anytime(lg.OGD(0.7, lg.Ball(1.0)), power=2, interpolation=0.9))


def test_reference_is_compared():
    def queries(x0, grads):
        return plain.sgd(x0, grads, lr=0.1, project=plain.identity, average="none")[0]

    check_rule(lg.SGD(0.1), reference=queries, compile=False)
    with pytest.raises(AssertionError, match="first queries differ from the reference"):
        check_rule(lg.SGD(0.2), reference=queries, compile=False)

    def plays(w1, grads):
        return plain.ogd_plays(w1, grads, [1, 2, 3, 4, 5], lr=0.1, project=plain.identity)

    check_learner(lg.OGD(0.1), reference=plays, compile=False)
    with pytest.raises(AssertionError, match="first plays differ from the reference"):
        check_learner(lg.FTRL(0.1), reference=plays, compile=False)


def test_undelayed_is_compared():
    check_rule(lg.SGD(0.1), undelayed=lg.SGD(0.1), compile=False)
    with pytest.raises(AssertionError, match="zero delay is not the undelayed rule"):
        check_rule(lg.SGD(0.1), undelayed=lg.SGD(0.2), compile=False)


class State(NamedTuple):
    x: torch.Tensor
    count: torch.Tensor


@dataclass(frozen=True, eq=False)
class Good:
    """A correct rule, for the broken ones below to depart from in one line."""

    domain: lg.Ball = lg.Ball(1.0)

    def init(self, x0):
        return State(self.domain.project(x0).clone(), torch.zeros(*x0.shape[:-1], 1))

    def query(self, state):
        return state.x

    output = query

    def update(self, state, grad, delay):
        return State(self.domain.project(state.x - 0.1 * grad), state.count + 1)


class ChangesState(Good):
    def update(self, state, grad, delay):
        state.x.sub_(0.1 * grad)
        return State(self.domain.project(state.x), state.count + 1)


class Random(Good):
    def update(self, state, grad, delay):
        return State(self.domain.project(state.x - torch.rand(()) * grad), state.count + 1)


class MixesRuns(Good):
    def update(self, state, grad, delay):
        return State(self.domain.project(state.x - 0.1 * grad / grad.norm()), state.count + 1)


class LeavesDomain(Good):
    def update(self, state, grad, delay):
        return State(state.x - 10 * grad, state.count + 1)


class KeepsGradient(Good):
    def init(self, x0):
        return State(self.domain.project(x0).clone(), x0.clone())

    def update(self, state, grad, delay):
        return State(self.domain.project(state.x - 0.1 * grad), grad)


class ChangesDtype(Good):
    def update(self, state, grad, delay):
        return State(self.domain.project(state.x - 0.1 * grad), state.count.double() + 1)


class StartsElsewhere(Good):
    def init(self, x0):
        return State(0.5 * self.domain.project(x0), torch.zeros(*x0.shape[:-1], 1))


class ForgetsProjectionOfStart(Good):
    def init(self, x0):
        return State(x0.clone(), torch.zeros(*x0.shape[:-1], 1))


@dataclass(frozen=True, eq=False)
class ToldTheLongest(Good):
    """Is told the delay of each block, and uses the longest one for all."""

    delay_blocks: lg.Blocks | None = None

    def update(self, state, grad, delay):
        late = torch.atleast_1d(torch.as_tensor(delay, dtype=grad.dtype)).amax(-1, keepdim=True)
        return State(self.domain.project(state.x - 0.1 / (1 + late) * grad), state.count + 1)


class ToldTheSum(ToldTheLongest):
    def update(self, state, grad, delay):
        return super().update(state, grad, torch.atleast_1d(torch.as_tensor(delay)).sum(-1, keepdim=True))


def test_a_rule_that_mixes_the_delays_of_its_blocks_is_caught():
    check_rule(ToldTheLongest(), compile=False)  # a projection mixes blocks anyway
    thirds = lg.Blocks.of_tensors([torch.zeros(2)] * 3)
    check_rule(lg.SteadyAdam(delay_blocks=thirds), compile=False)
    with pytest.raises(AssertionError, match="a block depends on the delay of another one"):
        check_rule(ToldTheLongest(lg.WholeSpace()), compile=False)
    with pytest.raises(AssertionError, match="equal delays of all blocks are not one delay"):
        check_rule(ToldTheSum(), compile=False)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (ChangesState, "changes the state it was given|two outputs"),
        (Random, "two outputs"),
        (MixesRuns, "alone differs"),
        (LeavesDomain, "leaves its domain"),
        (KeepsGradient, "shares memory with the gradient"),
        (ChangesDtype, "changes its dtypes"),
        (StartsElsewhere, "not the projected start"),
        (ForgetsProjectionOfStart, "leaves its domain"),
    ],
)
def test_broken_rules_are_caught(broken, message):
    check_rule(Good(), compile=False)
    with pytest.raises(AssertionError, match=message):
        check_rule(broken(), compile=False)


class Branches(Good):
    def update(self, state, grad, delay):
        return state if delay > 3 else super().update(state, grad, delay)


class CountsForAllRuns(Good):
    def init(self, x0):
        return State(self.domain.project(x0).clone(), torch.zeros(1))


class Grows(Good):
    def update(self, state, grad, delay):
        return State(super().update(state, grad, delay).x, torch.cat([state.count, state.count], dim=-1))


def test_a_branch_and_other_shapes_are_told_in_our_words():
    problem, branch = Quadratic(), r"the update of Branches branches on a tensor, as `if delay > 3` does, .*torch.where"
    with pytest.raises(ValueError, match=branch):
        check_rule(Branches(), compile=False)
    with pytest.raises(ValueError, match=branch):
        lg.simulate(problem, Branches(), [0, 5], 10, compile=False)
    with pytest.raises(AssertionError, match=r"count of the state has shape \(1,\) for 3 runs; .* a number \(\*runs"):
        check_rule(CountsForAllRuns(), compile=False)
    shapes = r"the update of Grows must keep the shapes of its state: .* had \[\(10,\), \(1,\)\], and then .*\(2,\)\]"
    with pytest.raises(ValueError, match=shapes):
        lg.train(problem, Grows(), steps=3, workers=1, engine="threads", compile=False)


class Shrinks(Good):
    def update(self, state, grad, delay):
        return State(super().update(state, grad, delay).x.mean(-1, keepdim=True), state.count)


class GrowsAll(Good):
    def update(self, state, grad, delay):
        return State(torch.cat([state.x, state.x], dim=-1), state.count)


class ReturnsATuple(Good):
    def update(self, state, grad, delay):
        return tuple(super().update(state, grad, delay))


@pytest.mark.parametrize("broken", [Shrinks, GrowsAll])
def test_a_state_that_a_copy_would_broadcast_or_torch_would_refuse_is_told_so_everywhere(broken):
    with pytest.raises(AssertionError, match=rf"{broken.__name__}: the state changes its dtypes or shapes: \['x', "):
        check_rule(broken(), compile=False)
    keeps = f"the update of {broken.__name__} must keep the shapes of its state"
    with pytest.raises(ValueError, match=keeps):
        lg.simulate(Quadratic(), broken(), 0, 10, compile=False)
    with pytest.raises(ValueError, match=keeps):
        lg.train(Quadratic(), broken(), steps=3, workers=1, engine="threads", compile=False)
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = lg.optim.FromRule([parameter], broken(), compile=False)
    parameter.square().sum().backward()
    with pytest.raises(ValueError, match=keeps):
        optimizer.step()


def test_a_state_of_another_structure_and_a_branch_are_told_before_anything_is_compiled():
    with pytest.raises(AssertionError, match=r"rule ReturnsATuple: the state changes its structure from \('State"):
        check_rule(ReturnsATuple(), compile=False)
    with pytest.raises(ValueError, match="the update of Branches branches on a tensor"):
        check_rule(Branches())


class LongQuery(Good):
    def query(self, state):
        return torch.cat([state.x, state.x], dim=-1)


def test_a_query_that_is_not_as_long_as_the_start_is_refused_by_every_host():
    message = r"the query of LongQuery must have shape \(.*10,?\), got \(.*20,?\)"
    with pytest.raises(ValueError, match=message):
        lg.simulate(Quadratic(), LongQuery(), 0, 10)
    with pytest.raises(ValueError, match=message):
        lg.train(Quadratic(), LongQuery(), steps=3, workers=1, engine="threads")
    with pytest.raises(ValueError, match=message):
        lg.optim.FromRule([torch.nn.Parameter(torch.ones(10))], LongQuery())


@dataclass(frozen=True, eq=False)
class KeepsADict(Good):
    """A dict and a list are as good as a tuple, in whatever order update makes them."""

    def init(self, x0):
        return {"x": first_query(self, x0), "more": [per_run(x0, 0)]}

    def query(self, state):
        return state["x"]

    output = query

    def update(self, state, grad, delay):
        return {"more": [state["more"][0] + 1], "x": self.domain.project(state["x"] - 0.1 * grad)}


def test_states_may_be_dicts_and_lists_and_learn_everywhere():
    check_rule(KeepsADict())
    problem = Quadratic(noise=0.0)
    simulated = lg.simulate(problem, KeepsADict(), 2, 200)
    assert simulated.loss[-1] < 0.1 * simulated.loss[0]
    trained = lg.train(problem, KeepsADict(), steps=200, workers=2, engine="threads")
    assert trained.loss[-1] < 0.1 * trained.loss[0]
    parameter = torch.nn.Parameter(problem.start().float())
    optimizer = lg.optim.FromRule([parameter], KeepsADict())
    for _ in range(200):
        parameter.grad = problem.gradient(parameter.detach().double(), torch.zeros(10)).float()
        optimizer.step()
    assert problem.loss(parameter.detach()) < 0.1 * simulated.loss[0]


class CountsInPython(Good):
    def init(self, x0):
        return State(first_query(self, x0), 0)


class KeepsASet(Good):
    def init(self, x0):
        return {"x": first_query(self, x0), "seen": {1, 2}}


class ReturnsTheStart(Good):
    def init(self, x0):
        return State(x0, torch.zeros(*x0.shape[:-1], 1))


class ChangesItsDict(KeepsADict):
    def update(self, state, grad, delay):
        return super().update(state, grad, delay) | {"grad": grad.clone()}


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (
            CountsInPython,
            "state of CountsInPython must be made of tensors, .* state.count is the int 0; keep",
        ),
        (KeepsASet, r"state.seen is the set \{1, 2\}"),
        (ReturnsTheStart, "init returns x0 itself, or a view of it"),
        (ChangesItsDict, "the state changes its structure"),
    ],
)
def test_states_that_hosts_cannot_keep_are_caught(broken, message):
    with pytest.raises(AssertionError, match=message):
        check_rule(broken(lg.WholeSpace()), compile=False)


@pytest.mark.parametrize("broken", [CountsInPython, KeepsASet])
def test_every_host_refuses_what_it_cannot_keep(broken):
    problem, message = Quadratic(), f"the state of {broken.__name__} must be made of tensors"
    with pytest.raises(ValueError, match=message):
        lg.simulate(problem, broken(), 0, 10)
    with pytest.raises(ValueError, match=message):
        lg.train(problem, broken(), steps=10, engine="threads")
    with pytest.raises(ValueError, match=message):
        lg.optim.FromRule([torch.nn.Parameter(torch.zeros(3))], broken())


@dataclass(frozen=True, eq=False)
class OneValue(Good):
    """Computes with its lr as Python does."""

    lr: float | torch.Tensor = 0.1

    def update(self, state, grad, delay):
        return State(self.domain.project(state.x - math.sqrt(self.lr) * grad), state.count + 1)


@dataclass(frozen=True, eq=False)
class OneNumber(OneValue):
    lr: float = 0.1


@dataclass(frozen=True, eq=False)
class MixesValues(OneValue):
    def update(self, state, grad, delay):
        return State(self.domain.project(state.x - torch.as_tensor(self.lr).mean() * grad), state.count + 1)


@dataclass(frozen=True, eq=False)
class OneRow(OneValue):
    def init(self, x0):
        return State(self.domain.project(x0.flatten(0, -2).mean(0).clone()), torch.zeros(1))


def test_a_rule_that_cannot_be_swept_is_told_so():
    for broken in (OneValue, MixesValues):
        with pytest.raises(AssertionError, match=f"{broken.__name__} cannot be swept over lr: .* compute with torch"):
            check_rule(broken(), compile=False)
    with pytest.warns(UserWarning, match="OneNumber cannot be swept over lr"):
        check_rule(OneNumber(), compile=False)
    with pytest.raises(
        ValueError, match=r"the query of OneRow must have shape .*, got .*: begin its init with first_query"
    ):
        lg.simulate(Quadratic(), OneRow(lr=torch.tensor([[0.1], [0.2]])), 0, 10)


class GoodTicket(Good):
    """A correct rule with a ticket, that steps towards the point where the query was."""

    def ticket(self, state):
        return state.x

    def update(self, state, grad, delay, ticket):
        return State(self.domain.project(state.x + 0.1 * (ticket - state.x) - 0.1 * grad), state.count + 1)


class KeepsTicket(GoodTicket):
    def init(self, x0):
        return State(self.domain.project(x0).clone(), self.domain.project(x0).clone())

    def update(self, state, grad, delay, ticket):
        return State(self.domain.project(state.x - 0.1 * grad), ticket)


class ChangesTicket(GoodTicket):
    def update(self, state, grad, delay, ticket):
        updated = super().update(state, grad, delay, ticket)
        ticket.add_(1)
        return updated


class GrowingTicket(GoodTicket):
    def ticket(self, state):
        return torch.cat([state.x] * (1 + int(state.count.max() > 2)), dim=-1)

    def update(self, state, grad, delay, ticket):
        return super().update(state, grad, delay, ticket[..., : grad.shape[-1]])


class TicketForAllRuns(GoodTicket):
    def ticket(self, state):
        return torch.zeros(1)


class TicketChangesState(GoodTicket):
    def ticket(self, state):
        return state.count.add_(1).expand_as(state.x)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (KeepsTicket, "shares memory with the ticket"),
        (ChangesTicket, "changes the ticket it was given|two outputs"),
        (GrowingTicket, "the ticket changes its dtype or shape"),
        (TicketForAllRuns, r"a ticket has shape \(1,\)"),
        (TicketChangesState, "issuing a ticket changes the state|two outputs"),
    ],
)
def test_broken_tickets_are_caught(broken, message):
    check_rule(GoodTicket(), compile=False)
    with pytest.raises(AssertionError, match=message):
        check_rule(broken(), compile=False)


class NoDomain:
    """A rule with all methods, and no set."""

    def init(self, x0):
        return State(x0.clone(), torch.zeros(*x0.shape[:-1], 1))

    query, output = Good.query, Good.output

    def update(self, state, grad, delay):
        return State(state.x - 0.1 * grad, state.count + 1)


HOSTS = {
    "check_rule": check_rule,
    "simulate": lambda rule: lg.simulate(Quadratic(), rule, 0, 10),
    "FromRule": lambda rule: lg.optim.FromRule([torch.nn.Parameter(torch.zeros(2))], rule),
}


@pytest.mark.parametrize("host", HOSTS)
def test_a_rule_without_a_domain_is_told_what_to_add(host):
    with pytest.raises(ValueError, match=r"got NoDomain, which has no domain: .* domain = lategrad.WholeSpace\(\)"):
        HOSTS[host](NoDomain())


class AllSpace(NoDomain):
    domain = lg.WholeSpace()


def test_it_then_passes_with_what_it_was_told():
    check_rule(AllSpace(), compile=False)


def test_what_cannot_be_pickled_is_told_so():
    class Local(AllSpace):
        pass

    class LocalBall(lg.Ball):
        pass

    message = "cannot be pickled, which worker processes require: .* define its class at the top of a module"
    with pytest.raises(AssertionError, match=f"rule Local: {message}"):
        check_rule(Local(), compile=False)
    with pytest.raises(AssertionError, match=f"set LocalBall: {message}"):
        check_set(LocalBall(1.0), compile=False)


def test_what_is_no_learner_is_told_so():
    with pytest.raises(ValueError, match="learner must be an online learner, with predict, got 'SGD'"):
        check_learner(lg.SGD(0.1))


class PlaysTheStart(lg.OGD):
    def init(self, w1):
        return super().init(w1)._replace(w=w1)


def test_a_learner_whose_state_shares_memory_with_the_start_is_found():
    with pytest.raises(AssertionError, match="learner: init returns x0 itself, or a view of it"):
        check_learner(PlaysTheStart(0.1), compile=False)


class TooShort(lg.Ball):
    def project(self, x):
        return 0.9 * super().project(x)


class NotNearest(lg.Box):
    def project(self, x):
        return torch.where(self.contains(x), x, torch.zeros_like(x))


class NotFiniteAtZero(lg.Ball):
    def project(self, x):
        return x / x.norm(dim=-1, keepdim=True).clamp_min(0) * x.norm(dim=-1, keepdim=True).clamp_max(1.0)


class TooSmallDiameter(lg.Ball):
    def diameter_in(self, dim):
        return 1.9 * self.radius


class TooSmallSupport(lg.Ball):
    def support(self, direction):
        return 0.9 * super().support(direction)


class TooLargeSupport(lg.Simplex):
    def support(self, direction):
        return super().support(direction) + 0.02 * direction.double().norm(dim=-1, keepdim=True)


class NoSupport(lg.Ball):
    @property
    def support(self):
        raise AttributeError


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (TooSmallDiameter(1.0), "further apart than"),
        (TooSmallSupport(1.0), "support is too small"),
        (TooLargeSupport(), "support is larger than any point"),
        (NoSupport(1.0), "has no support"),
        (TooShort(1.0), "variational|moved|twice"),
        (NotNearest(-1.0, 1.0), "variational"),
        (NotFiniteAtZero(1.0), "not finite"),
    ],
)
def test_broken_sets_are_caught(broken, message):
    with pytest.raises(AssertionError, match=message):
        check_set(broken, compile=False)


class CannotBeTraced(Good):
    def update(self, state, grad, delay):
        if state.count.sum() > 100:
            return state
        return super().update(state, grad, delay)


class NeedsATensor(Good):
    def update(self, state, grad, delay):
        step = 0.1 if isinstance(delay, torch.Tensor) else 0.2
        return State(self.domain.project(state.x - step * grad), state.count + 1)


@pytest.mark.parametrize(
    ("broken", "message"), [(CannotBeTraced, "torch.compile"), (NeedsATensor, "a delay that is an int")]
)
def test_rules_that_hosts_cannot_run_are_caught(broken, message):
    with pytest.raises(AssertionError, match=message):
        check_rule(broken())


def test_every_backend_of_this_machine_is_tried(monkeypatch):
    tried = []
    original = machine.in_place
    monkeypatch.setattr(
        machine, "in_place", lambda *args, backend: tried.append(backend) or original(*args, backend=backend)
    )
    check_rule(Good())
    assert set(tried) == {"eager", "compile", "loops"}
    check_rule(lg.SGD(0.1, lg.Simplex()))  # sorting has no form as loops, which is no fault of the rule


def test_runs_must_be_plain_numbers():
    with pytest.raises(ValueError, match="plain numbers as hyper-parameters"):
        check_rule(lg.SGD(torch.tensor([[0.1], [0.2]])), compile=False)
