"""Normalised momentum under delay: every step of docs/theory-deep.md on any input, the bounds on known functions."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import lategrad as lg
from lategrad import theory
from lategrad.rules._orthogonalize import matrix_step

SEEDS, K = 16, 4
SHAPE = (K, K)
MEMORY = 10.0
FORMS = [pytest.param(False, id="plain"), pytest.param(True, id="nesterov")]
seeds = st.integers(0, 2**32 - 1)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def normal(seed, *shape):
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


class Norm:
    """A norm on matrices (..., r, c), its dual, the exact step, and L of a function whose entries are 1-smooth."""

    def __init__(self, name, primal, dual, step, L):
        self.name, self.primal, self.dual, self.step, self.L = name, primal, dual, step, L


def singular(x):
    return torch.linalg.svdvals(x)


def polar(x):
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    return -u @ v


NORMS = [
    Norm("euclidean", lambda x: x.flatten(-2).norm(dim=-1), lambda x: x.flatten(-2).norm(dim=-1),
         lambda m: -m / m.flatten(-2).norm(dim=-1)[..., None, None].clamp_min(1e-300), 1),
    Norm("sign", lambda x: x.abs().amax((-2, -1)), lambda x: x.abs().sum((-2, -1)), lambda m: -m.sign(), K * K),
    Norm("spectral", lambda x: singular(x).amax(-1), lambda x: singular(x).sum(-1), polar, K),
]  # fmt: skip
EACH_NORM = pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.name)


def cosines(x):
    """Smooth and not convex: 1 - cos of every entry."""
    return (1 - x.cos()).sum((-2, -1))


# What the proof uses of the norms


@EACH_NORM
@given(seed=seeds)
@settings(max_examples=30, deadline=None)
def test_smoothness_duality_and_the_step_of_each_norm(norm, seed):
    x, y = 2 * normal(seed, 2, *SHAPE)
    assert norm.dual(x.sin() - y.sin()) <= norm.L * norm.primal(x - y) * (1 + 1e-9)
    assert (x * y).sum().abs() <= norm.primal(x) * norm.dual(y) * (1 + 1e-9)
    assert norm.primal(norm.step(x)) <= 1 + 1e-9
    assert -(x * norm.step(x)).sum() == pytest.approx(norm.dual(x).item())


@EACH_NORM
@given(seed=seeds, rows=st.integers(1, 6), columns=st.integers(1, 6))
@settings(max_examples=30, deadline=None)
def test_rho_is_the_largest_ratio_of_the_norms(norm, seed, rows, columns):
    rho = theory.dual_ratio(norm.name, (rows, columns))
    x = normal(seed, rows, columns)
    assert norm.dual(x) <= rho * x.norm() * (1 + 1e-9)
    extreme = {"euclidean": x, "sign": x.sign(), "spectral": polar(x)}[norm.name]
    assert norm.dual(extreme) == pytest.approx(rho * extreme.norm().item())


def test_steps_of_muon_s_lengths_over_many_blocks_have_rho_a_fifth_of_the_root_of_the_size():
    shapes = [(3, 5), (8, 2), (4, 4)]
    rho = math.sqrt(sum((0.2 * max(s) ** 0.5 * theory.dual_ratio("spectral", s)) ** 2 for s in shapes))
    assert rho == pytest.approx(0.2 * math.sqrt(sum(map(math.prod, shapes))))


def test_a_norm_that_is_not_known_and_a_vector_without_rows_are_refused():
    with pytest.raises(ValueError, match="norm must be .*euclidean.*'nuclear'"):
        theory.dual_ratio("nuclear", (2, 2))
    with pytest.raises(ValueError, match=r"shape must be \(rows, columns\) for the spectral norm, got \(7,\)"):
        theory.dual_ratio("spectral", (7,))
    with pytest.raises(ValueError, match="memory must be a finite number >= 1, got 0.5"):
        theory.momentum_age(0.5)
    with pytest.raises(ValueError, match="outstanding must be"):
        bound(100, NORMS[0], outstanding=0)
    with pytest.raises(ValueError, match="outstanding must be a finite number >= 1, got 0"):
        theory.normalized_lr(100, L=1, Delta=1, memory=1, outstanding=0)
    with pytest.raises(ValueError, match="outstanding must be a finite number >= 1, got 0"):
        theory.normalized_plan(1.0, L=1, Delta=1, sigma=1, rho=1, outstanding=0)
    with pytest.raises(ValueError, match="eps must be"):
        theory.normalized_plan(0.0, L=1, Delta=1, sigma=1, rho=1, outstanding=1)


# Steps 1 to 3: descent, on any momentum


@EACH_NORM
@given(seed=seeds, share=st.floats(0.1, 1), length=st.floats(1, 3), noise=st.floats(0, 5))
@settings(max_examples=30, deadline=None)
def test_descent_on_any_momenta(norm, seed, share, length, noise):
    """Steps between the best one and a shorter one, made longer: A = share * length, B = length."""
    N, x = 20, normal(seed, *SHAPE)
    lrs = torch.rand(N, generator=generator(seed), dtype=torch.float64) + 0.01
    start, grads, errors = cosines(x), [], []
    for t in range(N):
        m = x.sin() + noise * normal(seed + t, *SHAPE)
        grads.append(norm.dual(x.sin()))
        errors.append(norm.dual(x.sin() - m))
        x = x + lrs[t] * length * share * norm.step(m)
    decrease = (start - cosines(x)).item()
    mean = ((lrs * torch.stack(grads)).sum() / lrs.sum()).item()
    A, B = length * share, length
    assert mean <= theory.normalized_descent(lrs, torch.stack(errors), decrease=decrease, L=norm.L, A=A, B=B) + 1e-9


@pytest.mark.parametrize("wrong", [False, True])
def test_descent_is_an_equality_for_a_quadratic_so_that_no_constant_could_be_smaller(wrong):
    """A step of length B that only A of it is aligned with the momentum; a vanishing momentum may point anywhere."""
    L, D, A, B = 3.0, 0.4, 0.6, 1.3
    x = torch.tensor([2.0, 0.0], dtype=torch.float64)
    u = torch.tensor([B, 0.0] if wrong else [-A, math.sqrt(B**2 - A**2)], dtype=torch.float64)
    error = L * 2 if wrong else 0.0
    decrease = L / 2 * (x.square().sum() - (x + D * u).square().sum()).item()
    bound = theory.normalized_descent(
        torch.tensor([D]).double(), torch.tensor([error]), decrease=decrease, L=L, A=A, B=B
    )
    assert bound == pytest.approx(L * 2)


# Steps 4 to 8: the weights of the momentum


def ages(N, memory, nesterov):
    """p of step 4: the weights of gradients of age 0, 1, ..., N - 1."""
    beta = 1 - 1 / memory
    p = (1 - beta) * beta ** (torch.arange(N, dtype=torch.float64) + nesterov)
    p[0] = 1 - beta ** (1 + nesterov)
    return p


def rows(N, memory, nesterov):
    """Weights of gradients i <= t in the momentum of update t, (N, N)."""
    p, age = ages(N, memory, nesterov), torch.arange(N)[:, None] - torch.arange(N)
    return torch.where(age >= 0, p[age.clamp_min(0)], 0) / p.cumsum(0)[:, None]


@pytest.mark.parametrize("memory", [1.0, 2.5, 10.0, 40.0])
def test_muon_steps_along_the_weights_of_nesterov_s_form(memory):
    """Gradient i is the i-th unit vector, the matrix is a row: its orthogonal factor is n over its length."""
    N = 50
    blocks = lg.Blocks.of_tensors([torch.zeros(1, N)], kinds=["matrix"])
    rule = lg.baselines.Muon(lr=1.0, momentum=1 - 1 / memory, weight_decay=0.0, blocks=blocks)
    unit, found = torch.eye(N, dtype=torch.float64), []
    state = rule.init(0 * unit[0])
    for g in unit:
        before, state = state.x, rule.update(state, g, torch.tensor(0))
        found.append((before - state.x) / (before - state.x).sum())
    torch.testing.assert_close(torch.stack(found), rows(N, memory, nesterov=True), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("nesterov", FORMS)
@given(memory=st.floats(1, 1000), N=st.integers(1, 3000))
@example(memory=1.0, N=1)
@example(memory=10.0, N=10)
@example(memory=1000.0, N=3000)
@settings(max_examples=40, deadline=None)
def test_noise_and_age_of_the_momentum(nesterov, memory, N):
    p = ages(N, memory, nesterov)
    noise, age = (p**2).cumsum(0).sqrt() / p.cumsum(0), (torch.arange(N) * p).cumsum(0) / p.cumsum(0)
    assert noise.mean() <= theory.momentum_noise(N, memory, nesterov) * (1 + 1e-9)
    assert (age <= theory.momentum_age(memory, nesterov) * (1 + 1e-9)).all()
    # the first update has one gradient, and no later one has less noise than all ages together
    assert noise[0] == 1
    assert noise.mean() >= theory.momentum_noise(10**15, memory, nesterov) * (1 - 1e-9)


@pytest.mark.parametrize("nesterov", FORMS)
@pytest.mark.parametrize("memory", [1.5, 10.0, 100.0])
def test_noise_and_age_are_reached_once_the_start_is_forgotten_and_not_before(memory, nesterov):
    N = int(40 * memory)
    p = ages(N, memory, nesterov)
    noise, age = (p**2).cumsum(0).sqrt() / p.cumsum(0), (torch.arange(N) * p).cumsum(0) / p.cumsum(0)
    stationary = theory.momentum_noise(10**15, memory, nesterov)
    assert noise[-1].item() == pytest.approx(stationary)
    assert age[-1].item() == pytest.approx(theory.momentum_age(memory, nesterov), rel=1e-6)
    assert noise[: int(memory)].mean() > 1.1 * stationary, "without the term of the start it would be broken"


@EACH_NORM
def test_noise_that_is_averaged_has_the_stated_dual_norm_and_rho_is_needed(norm):
    sigma, memory, N = 2.0, 10.0, 40
    weights = rows(N, memory, False)[-1]
    noise = sigma / K * normal(0, 500, N, *SHAPE)
    mean = norm.dual((weights[:, None, None] * noise).sum(1)).mean()
    stated = theory.dual_ratio(norm.name, SHAPE) * sigma * weights.norm()
    assert 0.75 * stated <= mean <= stated  # 0.75 rho is above 1 unless the norm is Euclidean


@st.composite
def arrivals(draw, N=60):
    """Delays of N updates by at most W workers, in any order: one worker returns, and is given the newest query."""
    W = draw(st.integers(1, 12))
    chosen = draw(st.lists(st.integers(0, W - 1), min_size=N, max_size=N))
    queried, delays = [1] * W, []
    for t, worker in enumerate(chosen, start=1):
        delays.append(t - queried[worker])
        queried[worker] = t + 1
    return W, torch.tensor(delays)


@pytest.mark.parametrize("nesterov", FORMS)
@given(case=arrivals(), memory=st.floats(1, 100))
@settings(max_examples=60, deadline=None)
def test_delays_of_w_outstanding_gradients_sum_to_at_most_w_less_one_each(nesterov, case, memory):
    W, delays = case
    N = len(delays)
    assert theory.largest_in_flight(delays) <= W - 1
    assert (delays.cumsum(0) <= (W - 1) * torch.arange(1, N + 1)).all()
    columns = rows(N, memory, nesterov).sum(0)
    assert (columns.diff() <= 1e-12).all()
    assert (columns * delays).sum() <= (W - 1) * N * (1 + 1e-9)


@pytest.mark.parametrize("nesterov", FORMS)
@pytest.mark.parametrize("memory", [1.0, 4.0, 12.0])
def test_drift_is_reached_by_steps_that_all_point_one_way(memory, nesterov):
    N, W = 400, 9
    weights, delays = rows(N, memory, nesterov), torch.arange(N).clamp_max(W - 1)
    drift = (weights * (torch.arange(N)[:, None] - torch.arange(N) + delays)).sum().item() / N
    bounded = theory.momentum_age(memory, nesterov) + W - 1
    assert 0.96 * bounded <= drift <= bounded


# The bounds


def bound(N, norm, outstanding, sigma=0.3, lr=None, nesterov=False, A=1.0, B=1.0):
    """Theorem B from the start of `descend`; the best learning rate if none is given."""
    known = {"L": norm.L, "Delta": float(K), "memory": MEMORY, "outstanding": outstanding, "nesterov": nesterov}
    lr = theory.normalized_lr(N, **known, A=A, B=B) if lr is None else lr
    rho = theory.dual_ratio(norm.name, SHAPE)
    return theory.normalized_momentum(N, **known, sigma=sigma, rho=rho, lr=lr, A=A, B=B)


def late(kind, W, N):
    if kind == "constant":
        return [min(t, W - 1) for t in range(N)]
    picks = torch.randint(W, (N,), generator=generator(1)).tolist()
    if kind == "one slow":
        picks = [0 if t % 200 == 199 else 1 + pick % (W - 1) for t, pick in enumerate(picks)]
    queried, delays = [0] * W, []
    for t, worker in enumerate(picks):
        delays.append(t - queried[worker])
        queried[worker] = t + 1
    return delays


def descend(norm, N, delays, lr, sigma=0.3):
    """The mean dual norm of the true gradient over N updates and SEEDS runs, from gradient I, where 1 - cos is K."""
    noise = generator(0)
    x = torch.eye(K, dtype=torch.float64).mul(math.pi / 2).expand(SEEDS, K, K)
    m, points, total = torch.zeros_like(x), [x], 0.0
    for t in range(N):
        g = points[t - delays[t]].sin()
        g = g + sigma / K * torch.randn(x.shape, generator=noise, dtype=torch.float64)
        m = m + (g - m) / MEMORY
        total += norm.dual(x.sin()).mean().item()
        x = x + lr * norm.step(m)
        points.append(x)
    return total / N


@EACH_NORM
@pytest.mark.parametrize("kind", ["constant", "random", "one slow"])
def test_theorem_b_holds_where_it_says_something(norm, kind):
    N, W = 1000, 5
    lr = theory.normalized_lr(N, L=norm.L, Delta=K, memory=MEMORY, outstanding=W)
    start = norm.dual(torch.eye(K).double()).item()
    delays = late(kind, W, N)
    assert theory.largest_in_flight(torch.tensor(delays)) == W - 1
    measured = descend(norm, N, delays, lr)
    assert measured <= bound(N, norm, W) < start, "a rule that stays at the start is above the bound"
    assert descend(norm, 10, delays, 0.0) == pytest.approx(start)


def test_a_learning_rate_that_is_too_long_for_the_delay_breaks_the_bound_without_its_drift():
    """Delay 100: the bound of no delay (W = 1) at that learning rate is false, the one of W = 101 is not."""
    N, norm, lr = 1000, NORMS[0], 0.02
    measured = descend(norm, N, late("constant", 101, N), lr, sigma=0.0)
    assert bound(N, norm, 1, sigma=0.0, lr=lr) < measured <= bound(N, norm, 101, sigma=0.0, lr=lr)


def test_noise_that_hides_the_gradient_breaks_the_bound_without_it():
    N, norm, lr = 300, NORMS[0], 0.01
    measured = descend(norm, N, late("constant", 2, N), lr, sigma=100.0)
    assert bound(N, norm, 2, sigma=0.0, lr=lr) < measured <= bound(N, norm, 2, sigma=100.0, lr=lr)


@given(sigma=st.floats(0, 5), rho=st.floats(1, 9), lr=st.floats(0.01, 1), W=st.integers(1, 9), nesterov=st.booleans())
@settings(max_examples=30, deadline=None)
def test_theorem_b_is_descent_with_the_noise_of_step_7_and_the_drift_of_step_11(sigma, rho, lr, W, nesterov):
    N, memory, L, A, B = 50, 7.5, 2.0, 0.7, 1.1
    drift = lr * B * (theory.momentum_age(memory, nesterov) + W - 1)
    error = rho * sigma * theory.momentum_noise(N, memory, nesterov) + L * drift
    known = {"L": L, "A": A, "B": B}
    composed = theory.normalized_descent(torch.full((N,), lr), torch.full((N,), error), decrease=3.0, **known)
    known |= {"Delta": 3.0, "sigma": sigma, "rho": rho, "lr": lr, "memory": memory, "outstanding": W}
    assert theory.normalized_momentum(N, **known, nesterov=nesterov) == pytest.approx(composed, rel=1e-5)


@pytest.mark.parametrize("W", [1, 8])
def test_theorem_b_holds_for_the_library_s_muon(W):
    """Matrices only, no weight decay: the theorem is about this rule, whose step is 0.2 sqrt(K) orthogonalised."""
    N, norm, sigma, noise = 1000, NORMS[2], 0.3, generator(0)
    A, B = theory.orthogonal_alignment(K), 1.16
    D = theory.normalized_lr(N, L=norm.L, Delta=K, memory=MEMORY, outstanding=W, A=A, B=B, nesterov=True)
    blocks = lg.Blocks.of_tensors([torch.zeros(SHAPE)])
    rule = lg.baselines.Muon(D / (0.2 * K**0.5), momentum=1 - 1 / MEMORY, weight_decay=0.0, blocks=blocks)
    state = rule.init(torch.eye(K).double().mul(math.pi / 2).flatten().expand(SEEDS, -1))
    queries, total = [rule.query(state)], 0.0
    for t in range(N):
        total += norm.dual(queries[-1].view(-1, *SHAPE).sin()).mean().item()
        g = queries[t - min(t, W - 1)].sin() + sigma / K * torch.randn(SEEDS, K * K, generator=noise).double()
        state = rule.update(state, g, torch.tensor(min(t, W - 1)))
        queries.append(rule.query(state))
    start = norm.dual(queries[0][0].view(SHAPE).sin()).item()
    assert total / N <= bound(N, norm, W, A=A, B=B, nesterov=True) < 0.6 * start


@pytest.mark.parametrize(("tau", "threshold"), [(10, 2), (40, 5)])
def test_theorem_b_holds_for_gradients_that_are_used_while_late_ones_are_dropped(tau, threshold):
    """Ringmaster: updates and delays are counted in used gradients, of which at most the threshold are outstanding."""
    N, norm, sigma, noise = 3000, NORMS[2], 0.3, generator(0)
    known = {"L": norm.L, "Delta": K, "memory": 20, "outstanding": threshold, "nesterov": True}
    known |= {"A": theory.orthogonal_alignment(K), "B": 1.16}
    D = theory.normalized_lr(N // (1 + tau // threshold), **known)
    rule = lg.baselines.RingmasterMuon(D, threshold=threshold, blocks=lg.Blocks.of_tensors([torch.zeros(SHAPE)]))
    state = rule.init(torch.eye(K).double().mul(math.pi / 2).flatten().expand(4, -1))
    sent, norms, delays = [], [], []
    for t in range(N):
        sent.append((rule.query(state), rule.ticket(state)))
        query, version = sent[max(0, t - tau)]
        g = query.sin() + sigma / K * torch.randn(4, K * K, generator=noise).double()
        before, state = state, rule.update(state, g, torch.tensor(min(t, tau)), version)
        if not torch.equal(before.version, state.version):
            norms.append(norm.dual(before.x.view(-1, *SHAPE).sin()).mean().item())
            delays.append(int((before.version - version)[0]))
    assert len(norms) < N
    assert theory.largest_in_flight(torch.tensor(delays)) == threshold - 1
    rho = theory.dual_ratio("spectral", SHAPE)
    bound = theory.normalized_momentum(len(norms), **known, sigma=sigma, rho=rho, lr=D)
    assert sum(norms) / len(norms) <= bound < norms[0], "a rule that stays at the start is above the bound"


@pytest.mark.parametrize(
    ("kind", "tau", "lr"),
    [("constant", 0, 0.02), ("constant", 20, 0.02), ("random", 8, 0.02), ("constant", 40, 0.5)],
)
def test_theorem_c_holds_for_steady_muon_on_matrices(kind, tau, lr):
    """At the iterate z, not at the output; the distances V are measured along the run."""
    N, runs, norm, sigma, noise = 200, 4, NORMS[2], 0.3, generator(0)
    rule = lg.SteadyMuon(lr, blocks=lg.Blocks.of_tensors([torch.zeros(SHAPE)]))
    state = rule.init(torch.eye(K).double().mul(math.pi / 2).flatten().expand(runs, -1))
    queries, used, grads, norms, distances, s = [rule.query(state)], [], [], [], [], []
    weights, mean = torch.zeros(N, dtype=torch.float64), 0.0
    lrs = torch.zeros(N, dtype=torch.float64)
    start = cosines(state.z.view(-1, *SHAPE)).mean()
    for t, delay in enumerate(late(kind, tau + 1, N)):
        mean += (delay - mean) / min(t + 1, 32)  # the memory is 10 + the mean delay: docstring of SteadyMuon
        beta = 1 - 1 / (10 + mean)
        lrs[t] = lr * (t + 1 - delay) / (t + 1) / math.sqrt(1 + max(mean, delay))
        used.append(queries[t - delay])
        unit = torch.nn.functional.one_hot(torch.tensor(t), N)
        weights = beta * weights + (1 - beta) * unit
        n = beta * weights + (1 - beta) * unit
        w = n / n.sum()
        s.append(w.norm())
        away = norm.primal((state.z - torch.stack(used)).view(-1, runs, *SHAPE))  # (t + 1, runs)
        distances.append((w[: t + 1, None] * away).sum(0).mean())
        norms.append(norm.dual(state.z.view(-1, *SHAPE).sin()).mean())
        grads.append(used[-1].sin() + sigma / K * torch.randn(runs, K * K, generator=noise).double())
        momentum = rule.momentum(state, grads[-1], torch.tensor(delay))
        torch.testing.assert_close(momentum, torch.einsum("i,ijk->jk", n[: t + 1], torch.stack(grads)))
        before, state = state.z, rule.update(state, grads[-1], torch.tensor(delay))
        torch.testing.assert_close(before - state.z, lrs[t] * matrix_step(momentum.view(-1, *SHAPE)).flatten(-2))
        queries.append(rule.query(state))
    lrs, s, V, norms = 0.2 * K**0.5 * lrs, torch.stack(s), torch.stack(distances), torch.stack(norms)
    errors = theory.dual_ratio("spectral", SHAPE) * sigma * s + norm.L * V
    known = {"decrease": (start - cosines(state.z.view(-1, *SHAPE)).mean()).item(), "L": norm.L}
    known |= {"A": theory.orthogonal_alignment(K), "B": 1.16}
    measured = ((lrs * norms).sum() / lrs.sum()).item()
    assert measured <= theory.normalized_descent(lrs, errors, **known)
    if lr == 0.5:  # queries are far from where their gradients are used: without V it would be broken
        assert measured > theory.normalized_descent(lrs, errors - norm.L * V, **known)
