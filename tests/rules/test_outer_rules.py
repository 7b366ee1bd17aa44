"""Facts about the outer rules, for the pseudo-gradients of workers that take local steps."""

import itertools

import pytest
import torch

import lategrad as lg
from helpers.checks import check_with_expected_warnings
from lategrad import baselines
from lategrad.problems import LocalSteps, Quadratic
from lategrad.rules import apply_update, issue_ticket, weigh_ticket

DIM = 5


def random_gradients(steps, seed=0):
    return torch.randn(steps, DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def iterates(rule, grads, delay=0):
    """All outputs on given gradients, each taken at the query ``delay`` updates before."""
    states = [rule.init(torch.ones(DIM, dtype=torch.float64))]
    for t, grad in enumerate(grads):
        asked = states[max(0, t - delay)]
        states.append(apply_update(rule, states[-1], grad, torch.tensor(min(t, delay)), issue_ticket(rule, asked)))
    return torch.stack([rule.output(state) for state in states])


def test_nesterov_is_the_outer_optimizer_of_diloco():
    grads = random_gradients(50)
    x = torch.nn.Parameter(torch.ones(DIM, dtype=torch.float64))
    optimizer = torch.optim.SGD([x], lr=0.7, momentum=0.9, nesterov=True)
    for grad in grads:
        x.grad = grad
        optimizer.step()
    torch.testing.assert_close(iterates(baselines.SGDMomentum(0.7, nesterov=True), grads)[-1], x.detach())


def test_delayed_nesterov_with_a_period_of_one_is_nesterov():
    grads = random_gradients(50)
    one = iterates(baselines.DelayedNesterov(0.7, period=1), grads)
    torch.testing.assert_close(one, iterates(baselines.SGDMomentum(0.7, nesterov=True), grads))


@pytest.mark.parametrize("activation", [0.0, 0.1, 0.25])
def test_a_period_of_delayed_nesterov_is_a_step_of_nesterov_with_the_mean(activation):
    """In all: N steps of g/N, and the momentum once; with c > 0 a part of it is that of the period before."""
    grads, n = random_gradients(40), 4
    means = grads.view(-1, n, DIM).mean(1)
    in_periods = iterates(baselines.DelayedNesterov(0.7, period=n, activation=activation), grads)[::n]
    if activation == 0:
        torch.testing.assert_close(in_periods, iterates(baselines.SGDMomentum(0.7, nesterov=True), means))
    velocity, x = torch.zeros(DIM).double(), torch.ones(DIM).double()
    for got, mean in zip(in_periods[1:], means, strict=True):
        before, velocity = velocity, 0.9 * velocity + mean
        early = (n - 1) * activation
        x = x - 0.7 * (mean + 0.9 * (early * before + (1 - early) * velocity))
        torch.testing.assert_close(got, x)


def test_the_momentum_of_look_ahead_is_no_longer_than_a_gradient():
    """On a constant gradient the steps tend to lr (1 + gamma), where Nesterov's tend to lr / (1 - gamma)."""
    grads = torch.ones(300, DIM).double()
    averaged = iterates(baselines.MomentumLookAhead(0.1), grads)
    summed = iterates(baselines.SGDMomentum(0.1, nesterov=True), grads)
    torch.testing.assert_close(averaged[-2] - averaged[-1], torch.full((DIM,), 0.19).double())
    torch.testing.assert_close(summed[-2] - summed[-1], torch.full((DIM,), 1.0).double())


def test_fed_buff_of_one_is_sgd_by_staleness_and_counts_changes_not_arrivals():
    grads = random_gradients(30)
    single = iterates(baselines.FedBuff(0.1, size=1), grads, delay=3)
    scale = (1 + torch.arange(30).clamp_max(3)).double() ** -0.5
    torch.testing.assert_close(single[-1], 1 - 0.1 * (scale[:, None] * grads).sum(0))
    buffered = iterates(baselines.FedBuff(0.1, size=5), grads, delay=3)  # three of five have a staleness of 1
    scale = torch.tensor([1, 1, 1, 1, 1] + 5 * [2, 2, 2, 1, 1]).double() ** -0.5
    torch.testing.assert_close(buffered[-1], 1 - 0.1 * (scale[:, None] * grads).sum(0) / 5)


def test_fed_buff_that_normalizes_is_fednova():
    """A round of it: x <- x - (sum_i p_i tau_i) sum_i p_i Delta_i / tau_i, for workers that took tau_i of H steps."""
    rounds, steps, most = random_gradients(12).view(3, 4, DIM), torch.tensor([1.0, 4.0, 10.0, 20.0]).double(), 20
    rule = baselines.FedBuff(0.7, size=4, normalize=True)
    state = rule.init(torch.ones(DIM, dtype=torch.float64))
    x = torch.ones(DIM, dtype=torch.float64)
    for moved in rounds:
        ticket = issue_ticket(rule, state)
        for i in range(4):
            state = rule.update(state, moved[i], torch.tensor(i), weigh_ticket(rule, ticket, steps[i : i + 1] / most))
        effective = sum(0.25 * tau for tau in steps.tolist())
        x = x - 0.7 * effective * sum(0.25 * moved[i] / steps[i] for i in range(4))
        torch.testing.assert_close(rule.output(state), x)


def test_fed_buff_normalizes_only_where_that_is_asked_for_and_jobs_differ():
    grads = random_gradients(20)
    whole = iterates(baselines.FedBuff(0.1, size=3, normalize=True), grads, delay=2)
    torch.testing.assert_close(whole, iterates(baselines.FedBuff(0.1, size=3), grads, delay=2))
    rule = baselines.FedBuff(0.1, size=1)
    state = rule.init(torch.ones(DIM, dtype=torch.float64))
    half = weigh_ticket(rule, issue_ticket(rule, state), torch.tensor([0.5]).double())
    torch.testing.assert_close(rule.output(rule.update(state, grads[0], 0, half)), 1 - 0.1 * grads[0])


@pytest.mark.parametrize(("normalize", "limit"), [(False, 20 / 25), (True, 1 / 2)])
def test_a_worker_that_takes_more_steps_pulls_fed_buff_to_its_own_minimum(normalize, limit):
    """Objective inconsistency: (x - 1)^2 / 2 on 20 steps of SGD against x^2 / 2 on 5; the minimum of both is 1/2."""
    rule, lr = baselines.FedBuff(100.0, size=2, normalize=normalize), 1e-4
    state = rule.init(torch.zeros(1, dtype=torch.float64))
    for _ in range(100):
        x, ticket = rule.query(state), issue_ticket(rule, state)
        for steps, minimum in ((20, 1.0), (5, 0.0)):
            moved = (1 - (1 - lr) ** steps) * (x - minimum)
            share = torch.tensor([steps / 20], dtype=torch.float64)
            state = rule.update(state, moved, 0, weigh_ticket(rule, ticket, share))
    assert rule.output(state).item() == pytest.approx(limit, abs=2e-3)


def test_simulated_workers_of_different_speed_tell_fed_buff_their_shares():
    """Scaled by their workers all three gradients are equal: only the shares 1, 1/2 and 1/4 make a difference."""
    problem = LocalSteps(Quadratic(dim=3, noise=0.0), local_steps=8, inner="sgd:lr=1e-6", scaled=True)
    cluster = lg.clocks.Cluster([lg.clocks.Worker(mean=mean) for mean in (1.0, 2.0, 4.0)], adapt=True)
    moves = {}
    for normalize in (False, True):
        rule = baselines.FedBuff(1.0, size=3, discount=False, normalize=normalize)
        with pytest.warns(UserWarning, match="is too long"):  # the first buffer is all that is looked at
            moves[normalize] = problem.start() - lg.simulate(problem, rule, cluster, steps=3).output
    shares = torch.tensor([1.0, 0.5, 0.25])
    torch.testing.assert_close(moves[True], shares.mean() * (1 / shares).mean() * moves[False], rtol=1e-3, atol=0.0)


def test_fed_async_that_takes_everything_is_the_last_workers_model():
    grads = random_gradients(10)
    x = iterates(baselines.FedAsync(1.0, staleness="constant"), grads, delay=2)
    for t in range(10):
        torch.testing.assert_close(x[t + 1], x[max(0, t - 2)] - grads[t])


def test_fed_async_on_a_set_stays_between_its_points():
    """A mean of points of a convex set is in it: the projection is only for workers' models outside."""
    models = torch.nn.functional.normalize(random_gradients(30), dim=-1)  # in the unit ball
    rule = baselines.FedAsync(0.6)
    state = rule.init(torch.zeros(DIM).double())
    for model in models:
        ticket = rule.ticket(state)
        state = rule.update(state, ticket - model, torch.tensor(0), ticket)
        assert rule.output(state).norm() <= 1 + 1e-12


@pytest.mark.parametrize("mixing", [1.0, 0.3])
def test_steady_mixing_without_delay_is_fed_async_and_adopts_the_model_of_a_lone_worker(mixing):
    grads = random_gradients(20)
    x = iterates(lg.SteadyMixing(mixing), grads)
    torch.testing.assert_close(x, iterates(baselines.FedAsync(mixing), grads))
    if mixing == 1:
        torch.testing.assert_close(x[1:], x[:-1] - grads)


@pytest.mark.parametrize("tau", [3, 15, 40])
def test_steady_mixing_is_not_held_back_by_its_delay(tau):
    """On a constant pseudo-gradient g, FedAsync moves by a g / (1 + a tau); a query that looks 0.9 tau ahead leaves a
    tenth of that."""
    grads = torch.ones(600 + 60 * (1 + tau), DIM).double()
    held_back = iterates(baselines.FedAsync(1.0, staleness="hinge", slope=0.5, grace=0.0), grads, tau)
    mixed, share = moves_of_steady_mixing(grads, tau), 2 / (2 + tau)
    expected = torch.ones(DIM).double()
    torch.testing.assert_close(mixed[-1], -share / (1 + 0.1 * share * tau) * expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(held_back[-1] - held_back[-2], -share / (1 + share * tau) * expected)


def moves_of_steady_mixing(grads, tau):
    rule, states = lg.SteadyMixing(), [lg.SteadyMixing().init(torch.zeros(DIM).double())]
    for t, grad in enumerate(grads):
        asked = states[max(0, t - tau)]
        states.append(rule.update(states[-1], grad, torch.tensor(min(t, tau)), rule.ticket(asked)))
    return torch.stack([after.x - before.x for before, after in itertools.pairwise(states)])


@pytest.mark.parametrize("tau", [1, 4, 15, 40, 80])
def test_steady_mixing_does_not_oscillate_on_quadratics(tau):
    """A job that goes the share c of the way to the optimum: the error decays for every c and constant delay."""
    share = torch.tensor([0.01, 0.03, 0.1, 0.3, 0.6, 1.0]).double()
    rule = lg.SteadyMixing()
    states = [rule.init(torch.ones(6).double())]
    for t in range(120 * (1 + tau)):
        asked = states[max(0, t - tau)]
        grad = share * rule.query(asked)
        states.append(rule.update(states[-1], grad, torch.tensor(min(t, tau)), rule.ticket(asked)))
    half = len(states) // 2
    sizes = torch.stack([state.x.abs() for state in states])
    assert (sizes[half:].amax(0) < 0.5 * sizes[:half].amax(0)).all()
    assert (sizes[-2 * (1 + tau) :].amax(0) < 0.3).all()


@pytest.mark.parametrize(
    "rule",
    [
        baselines.SGDMomentum(0.5, nesterov=True),
        baselines.DelayedNesterov(0.5, period=2, activation=0.2),
        baselines.MomentumLookAhead(0.5, ahead=True),
        baselines.FedBuff(0.5, size=2, discount=False),
        baselines.FedBuff(0.5, size=2, normalize=True),
        baselines.FedAsync(0.5, staleness="hinge", slope=0.5, grace=1.0),
        baselines.FedAsync(0.5, staleness="constant"),
    ],
    ids=repr,
)
def test_its_options_pass_all_checks(rule):
    check_with_expected_warnings(rule, compile=False)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: baselines.SGDMomentum(0.1, nesterov=1), "nesterov must be True or False, got 1"),
        (lambda: baselines.DelayedNesterov(period=0), "period must be a finite number >= 1, got 0"),
        (lambda: baselines.DelayedNesterov(period=2.5), "period must be a whole number, got 2.5"),
        (lambda: baselines.DelayedNesterov(period=4, activation=0.3), "activation must be at most 1/period, got 0.3"),
        (lambda: baselines.MomentumLookAhead(momentum=1.0), r"momentum must be a number in \[0, 1\), got 1.0"),
        (lambda: baselines.FedBuff(size=2.5), "size must be a whole number, got 2.5"),
        (lambda: baselines.FedBuff(discount="sqrt"), "discount must be True or False, got 'sqrt'"),
        (lambda: baselines.FedBuff(normalize=1), "normalize must be True or False, got 1"),
        (lambda: lg.SteadyMixing(-0.1), "mixing must be a finite number >= 0, got -0.1"),
        (lambda: baselines.FedAsync(-0.1), "mixing must be a finite number >= 0, got -0.1"),
        (lambda: baselines.FedAsync(staleness="linear"), "staleness must be one of"),
        (lambda: baselines.FedAsync(power=-1.0), "power must be a finite number >= 0, got -1.0"),
    ],
)
def test_bad_hyper_parameters_are_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()
