"""Each algorithm equals its plain transcription, over hundreds of steps, with late gradients."""

import pytest
import torch

import lategrad as lg
from helpers import transcriptions as plain
from lategrad import baselines
from lategrad.learners import Linear
from lategrad.rules import Block, Blocks, apply_update, issue_ticket

STEPS, DIM = 300, 6
SQUARE = Blocks((Block("weight", (2, 2), "matrix"), Block("bias", (2,), "other")))
DOMAINS = {"whole": (lg.WholeSpace(), plain.identity), "ball": (lg.Ball(0.8), plain.ball(0.8))}

LEARNERS = {
    "ogd": (lambda d: lg.OGD(0.7, d), plain.ogd_plays, {"lr": 0.7}),
    "ogd-constant": (
        lambda d: lg.OGD(0.1, d, schedule="constant"),
        plain.ogd_plays,
        {"lr": 0.1, "schedule": "constant"},
    ),
    "ftrl": (lambda d: lg.FTRL(0.7, d), plain.ftrl_plays, {"lr": 0.7}),
    "adagrad-norm": (lambda d: lg.AdaGradNorm(1.5, d), plain.adagrad_norm_plays, {"diameter": 1.5}),
    "adagrad": (lambda d: lg.AdaGrad(1.5, d), plain.adagrad_plays, {"diameter": 1.5}),
    "optimistic-ogd": (lambda d: lg.OptimisticOGD(1.5, d), plain.optimistic_ogd_plays, {"diameter": 1.5}),
    "optimistic-ftrl": (lambda d: lg.OptimisticFTRL(1.5, d), plain.optimistic_ftrl_plays, {"diameter": 1.5}),
}

RULES = {
    "adaptive-revision": (
        lambda d: baselines.AdaptiveRevision(0.3, d),
        plain.adaptive_revision,
        {"lr": 0.3, "average": "uniform"},
    ),
    "adaptive-revision-last": (
        lambda d: baselines.AdaptiveRevision(0.3, d, average="none"),
        plain.adaptive_revision,
        {"lr": 0.3, "average": "none"},
    ),
    "async-adagrad": (
        lambda d: baselines.AsyncAdaGrad(0.3, d, average="linear"),
        plain.async_adagrad,
        {"lr": 0.3, "average": "linear"},
    ),
    "ada-delay": (
        lambda d: baselines.AdaDelay(0.5, d, smoothness=3.0),
        plain.ada_delay,
        {"diameter": 0.5, "smoothness": 3.0},
    ),
    "dc-asgd": (lambda d: baselines.DCASGD(0.01, d), plain.dc_asgd, {"lr": 0.01, "lam": 0.04}),
    "dc-asgd-a": (
        lambda d: baselines.AdaptiveDCASGD(0.01, d),
        plain.dc_asgd,
        {"lr": 0.01, "lam": 2.0, "adaptive": True},
    ),
    "staleness-aware": (lambda d: baselines.StalenessAware(0.1, d), plain.staleness_aware, {"lr": 0.1}),
    "delay-adaptive": (
        lambda d: baselines.DelayAdaptive(0.01, d, workers=15),
        plain.delay_adaptive,
        {"lr": 0.01, "workers": 15},
    ),
    "delay-adaptive-estimated": (
        lambda d: baselines.DelayAdaptive(0.01, d),
        plain.delay_adaptive,
        {"lr": 0.01, "workers": None},
    ),
    "ringmaster": (
        lambda d: baselines.Ringmaster(0.03, d, threshold=5),
        plain.ringmaster,
        {"lr": 0.03, "threshold": 5},
    ),
    "rennala": (lambda d: baselines.Rennala(0.2, d, batch=4), plain.rennala, {"lr": 0.2, "batch": 4}),
    "clipped-sgd": (lambda d: baselines.ClippedSGD(0.02, d, clip=1.5), plain.clipped, {"lr": 0.02, "clip": 1.5}),
    "schedule-free": (lambda d: baselines.ScheduleFree(0.02, d), plain.schedule_free, {"lr": 0.02, "b": 0.9}),
    "unixgrad": (lambda d: baselines.UniXGrad(0.8, d), plain.unixgrad, {"diameter": 0.8}),
    "sgd-momentum": (lambda d: baselines.SGDMomentum(0.01, d), plain.sgd_momentum, {"lr": 0.01, "gamma": 0.9}),
    "adamw": (lambda d: baselines.AdamW(0.05, d), plain.adamw, {"lr": 0.05}),
    "adamw-averaged": (
        lambda d: baselines.AdamW(0.05, d, average="linear"),
        plain.adamw,
        {"lr": 0.05, "average": True},
    ),
    "nadam": (lambda d: baselines.NAdam(0.05, d), plain.nadam, {"lr": 0.05}),
    "schedule-free-adamw": (
        lambda d: baselines.ScheduleFreeAdamW(0.05, d, weight_decay=0.1),
        plain.schedule_free_adamw,
        {"lr": 0.05, "decay": 0.1},
    ),
    "muon": (lambda d: baselines.Muon(0.05, d, blocks=SQUARE), plain.muon, {"lr": 0.05}),
    "muon-prediction": (
        lambda d: baselines.Muon(0.005, d, prediction=True, blocks=SQUARE),
        plain.muon,
        {"lr": 0.005, "prediction": True},
    ),
    "rotated-adam": (lambda d: baselines.RotatedAdam(0.05, d, blocks=SQUARE), plain.rotated_adam, {"lr": 0.05}),
    "ringmaster-muon": (
        lambda d: baselines.RingmasterMuon(0.05, d, threshold=5, blocks=SQUARE),
        plain.ringmaster_muon,
        {"lr": 0.05, "threshold": 5},
    ),
    "gap-aware": (lambda d: baselines.GapAware(0.001, d), plain.gap_aware, {"lr": 0.001, "gamma": 0.9}),
    "pipemare": (
        lambda d: baselines.PipeMare(0.05, d, annealing=200.0),
        plain.pipemare,
        {"lr": 0.05, "annealing": 200.0},
    ),
    "weight-prediction": (lambda d: baselines.WeightPrediction(0.005, d), plain.weight_prediction, {"lr": 0.005}),
    "nesterov": (lambda d: baselines.SGDMomentum(0.001, d, nesterov=True), plain.nesterov, {"lr": 0.001, "gamma": 0.9}),
    "delayed-nesterov": (
        lambda d: baselines.DelayedNesterov(0.005, d, period=5),
        plain.delayed_nesterov,
        {"lr": 0.005, "gamma": 0.9, "n": 5, "c": 0.0},
    ),
    "delayed-nesterov-in-parts": (
        lambda d: baselines.DelayedNesterov(0.005, d, momentum=0.8, period=5, activation=0.15),
        plain.delayed_nesterov,
        {"lr": 0.005, "gamma": 0.8, "n": 5, "c": 0.15},
    ),
    "momentum-look-ahead": (
        lambda d: baselines.MomentumLookAhead(0.01, d),
        plain.momentum_look_ahead,
        {"lr": 0.01, "gamma": 0.9},
    ),
    "momentum-look-ahead-ahead": (
        lambda d: baselines.MomentumLookAhead(0.01, d, ahead=True),
        plain.momentum_look_ahead,
        {"lr": 0.01, "gamma": 0.9, "ahead": True},
    ),
    "fed-buff": (lambda d: baselines.FedBuff(0.1, d, size=4), plain.fed_buff, {"lr": 0.1, "size": 4}),
    "fed-buff-undiscounted": (
        lambda d: baselines.FedBuff(0.1, d, size=4, discount=False),
        plain.fed_buff,
        {"lr": 0.1, "size": 4, "discount": False},
    ),
    "fed-async": (
        lambda d: baselines.FedAsync(0.05, d),
        plain.fed_async,
        {"alpha": 0.05, "weight": lambda tau: (1 + tau) ** -0.5},
    ),
    "fed-async-hinge": (
        lambda d: baselines.FedAsync(0.05, d, staleness="hinge", slope=0.3, grace=10.0),
        plain.fed_async,
        {"alpha": 0.05, "weight": lambda tau: 1.0 if tau <= 10 else 1 / (0.3 * (tau - 10) + 1)},
    ),
    "fed-async-constant": (
        lambda d: baselines.FedAsync(0.02, d, staleness="constant"),
        plain.fed_async,
        {"alpha": 0.02, "weight": lambda tau: 1.0},
    ),
    "online-to-nonconvex": (
        lambda d: lg.OnlineToNonconvex(0.01, radius=0.05, period=7, domain=d, seed=3),
        plain.online_to_nonconvex,
        {"lr": 0.01, "D": 0.05, "K": 7, "seed": 3},
    ),
    "steady": (lambda d: lg.Steady(0.7, d, c=4.0), plain.steady, {"lr": 0.7, "c": 4.0}),
    "steady-short": (lambda d: lg.SteadyShort(0.7, d, c=4.0), plain.steady_short, {"lr": 0.7, "c": 4.0}),
    "steady-mixing": (lambda d: lg.SteadyMixing(0.1, d), plain.steady_mixing, {"mixing": 0.1}),
    "steady-coordinate": (
        lambda d: lg.Steady(0.7, d, c=4.0, per_coordinate=True),
        plain.steady,
        {"lr": 0.7, "c": 4.0, "per_coordinate": True},
    ),
}


def late_gradients(rule, x0, delays, seed=0):
    """Run a rule on a noisy quadratic with late gradients; every past query is kept, with its ticket.

    Returns all queries, outputs and states, and the gradients in order of arrival.
    """
    noise = torch.Generator().manual_seed(seed)
    state = rule.init(x0)
    states, queries, outputs, grads = [state], [rule.query(state)], [rule.output(state)], []
    tickets = [issue_ticket(rule, state)]
    for t, tau in enumerate(delays, start=1):
        asked = t - 1 - tau
        grads.append(3 * queries[asked] - 1 + torch.randn(x0.shape, generator=noise, dtype=torch.float64))
        state = apply_update(rule, state, grads[-1], torch.tensor(tau), tickets[asked])
        states.append(state)
        tickets.append(issue_ticket(rule, state))
        queries.append(rule.query(state))
        outputs.append(rule.output(state))
    return torch.stack(queries), torch.stack(outputs), grads, states


def random_delays(steps, largest, seed=1):
    """Uniform on 0 .. largest, and at most t - 1."""
    delays = torch.randint(0, largest + 1, (steps,), generator=torch.Generator().manual_seed(seed)).tolist()
    return [min(tau, t) for t, tau in enumerate(delays)]


def start():
    return torch.linspace(-1, 2, DIM, dtype=torch.float64)


def assert_equal(got, want):
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), rtol=1e-10, atol=1e-10)


def as_lists(grads):
    return [g.tolist() for g in grads]


@pytest.mark.parametrize("domain", DOMAINS)
@pytest.mark.parametrize("name", LEARNERS)
@pytest.mark.parametrize("power", [0, 1, 2])
def test_anytime_equals_algorithms_1_and_2(name, domain, power):
    build, plays, arguments = LEARNERS[name]
    the_set, project = DOMAINS[domain]
    rule = lg.Anytime(build(the_set), power=power)
    queries, outputs, grads, _ = late_gradients(rule, start(), random_delays(STEPS, 40))
    weights = [float(t**power) for t in range(1, STEPS + 2)]
    weights_seen = weights if name.startswith("optimistic") else weights[:-1]
    w = plays(start().tolist(), as_lists(grads), weights_seen, project=project, **arguments)
    x = plain.anytime_queries(w, weights)
    assert_equal(queries, x)
    assert_equal(outputs, x)


@pytest.mark.parametrize("name", LEARNERS)
def test_learner_equals_its_transcription_under_arbitrary_weights(name):
    build, plays, arguments = LEARNERS[name]
    the_set, project = DOMAINS["ball"]
    learner = build(the_set)
    generator = torch.Generator().manual_seed(3)
    grads = torch.randn(STEPS, DIM, generator=generator, dtype=torch.float64)
    weights = (10 ** (2 * torch.rand(STEPS + 1, generator=generator, dtype=torch.float64))).tolist()
    state = learner.init(start())
    got = [learner.predict(state)]
    for t in range(STEPS):
        loss = Linear(torch.tensor([weights[t]], dtype=torch.float64), grads[t])
        hint = Linear(torch.tensor([weights[t + 1]], dtype=torch.float64), grads[t])
        state = learner.update(state, loss, hint)
        got.append(learner.predict(state))
    weights_seen = weights if name.startswith("optimistic") else weights[:-1]
    want = plays(start().tolist(), grads.tolist(), weights_seen, project=project, **arguments)
    assert_equal(torch.stack(got), want)


@pytest.mark.parametrize("domain", DOMAINS)
def test_strongly_convex_equals_algorithm_4(domain):
    the_set, project = DOMAINS[domain]
    rule = lg.StronglyConvexOGD(3.0, the_set)
    queries, outputs, grads, _ = late_gradients(rule, start(), random_delays(STEPS, 40))
    x, mean = plain.strongly_convex(start().tolist(), as_lists(grads), strong_convexity=3.0, project=project)
    assert_equal(queries, x)
    assert_equal(outputs, mean)


@pytest.mark.parametrize("average", ["none", "uniform", "linear"])
@pytest.mark.parametrize("domain", DOMAINS)
def test_sgd_equals_its_transcription(domain, average):
    the_set, project = DOMAINS[domain]
    rule = lg.SGD(0.02, the_set, average=average)
    queries, outputs, grads, _ = late_gradients(rule, start(), random_delays(STEPS, 40))
    x, out = plain.sgd(start().tolist(), as_lists(grads), lr=0.02, project=project, average=average)
    assert_equal(queries, x)
    assert_equal(outputs, out)


@pytest.mark.parametrize("domain", DOMAINS)
@pytest.mark.parametrize("name", RULES)
def test_rules_with_a_past_equal_their_transcriptions(name, domain):
    build, transcription, arguments = RULES[name]
    the_set, project = DOMAINS[domain]
    if transcription in (plain.steady, plain.steady_short):
        arguments = arguments | {"diameter": the_set.diameter}
    delays = random_delays(STEPS, 40)
    queries, outputs, grads, _ = late_gradients(build(the_set), start(), delays)
    x, out = transcription(start().tolist(), as_lists(grads), delays, project=project, **arguments)
    assert_equal(queries, x)
    assert_equal(outputs, out)
    assert (queries[-1] - queries[0]).norm() > 0.1  # the rule is alive: what it dropped was not everything


@pytest.mark.parametrize("interpolation", [0.0, 0.3, 0.9])
def test_interpolation_mixes_the_play_into_the_query_only(interpolation):
    rule = lg.Anytime(lg.OGD(0.7, lg.Ball(0.8)), interpolation=interpolation)
    queries, outputs, grads, _ = late_gradients(rule, start(), random_delays(STEPS, 40))
    weights = [float(t) for t in range(1, STEPS + 2)]
    w = plain.ogd_plays(start().tolist(), as_lists(grads), weights[:-1], lr=0.7, project=plain.ball(0.8))
    x = plain.anytime_queries(w, weights)
    assert_equal(outputs, x)
    mixed = [plain.weighted_average([1 - interpolation, interpolation], pair) for pair in zip(w, x, strict=True)]
    assert_equal(queries, mixed)


def test_interpolation_zero_with_constant_step_queries_like_sgd():
    x0, delays = start(), random_delays(STEPS, 40)
    anytime = lg.Anytime(lg.OGD(0.02, schedule="constant"), interpolation=0.0)
    queries, *_ = late_gradients(anytime, x0, delays)
    sgd_queries, *_ = late_gradients(lg.SGD(0.02), x0, delays)
    torch.testing.assert_close(queries, sgd_queries, rtol=1e-12, atol=1e-12)


def test_the_first_three_steps_of_anytime_sgd_by_hand():
    """t = 1 is the first update: steps lr, lr/sqrt(2), lr/sqrt(3); weights 1, 2, 3, 4."""
    rule = lg.Anytime(lg.OGD(lr=1.0))
    state = rule.init(torch.zeros(1, dtype=torch.float64))
    queries = []
    for grad in (1.0, -2.0, 3.0):
        queries.append(rule.query(state).item())
        state = rule.update(state, torch.tensor([grad], dtype=torch.float64), torch.tensor(0))
    w2 = -1.0
    w3 = w2 + 2 / 2**0.5
    w4 = w3 - 3 / 3**0.5
    assert queries == pytest.approx([0.0, 2 * w2 / 3, (2 * w2 + 3 * w3) / 6])
    assert rule.output(state).item() == pytest.approx((2 * w2 + 3 * w3 + 4 * w4) / 10)


def test_the_first_three_steps_of_optimistic_ogd_by_hand():
    """y_0 = w_1 and M_1 = 0, so that the first gradient moves y_1 by D."""
    rule = lg.Anytime(lg.OptimisticOGD(diameter=1.0), power=0)
    state = rule.init(torch.zeros(1, dtype=torch.float64))
    for grad in (1.0, 3.0):
        state = rule.update(state, torch.tensor([grad], dtype=torch.float64), torch.tensor(0))
    eta2, eta3 = 1 / (1 + 1) ** 0.5, 1 / (1 + 1 + 4) ** 0.5
    w2 = -1 - eta2 * 1
    w3 = (-1 - eta2 * 3) - eta3 * 3
    assert rule.output(state).item() == pytest.approx((0 + w2 + w3) / 3)


def test_the_first_three_steps_of_algorithm_4_by_hand():
    """With H = 8: steps 6t/((t+1)(2t+1)) = 1, 4/5, 9/14."""
    rule = lg.StronglyConvexOGD(strong_convexity=8.0)
    state = rule.init(torch.zeros(1, dtype=torch.float64))
    queries = []
    for grad in (1.0, -1.0):
        queries.append(rule.query(state).item())
        state = rule.update(state, torch.tensor([grad], dtype=torch.float64), torch.tensor(0))
    x2 = -1 - 4 / 5
    assert queries == pytest.approx([0.0, x2])
    assert rule.query(state).item() == pytest.approx((-1 + 4 / 5) + 9 / 14)
    assert rule.output(state).item() == pytest.approx((1 * 0.0 + 4 * x2) / 5)
