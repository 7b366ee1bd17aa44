"""The algorithms as plain Python: lists of floats, one run, line by line. Slow, and easy to check.

`grads` is the sequence of gradients in the order in which they arrive; how late they are is hidden in them.
`delays` has the delay of each, for the rules that use it or that need the state at its query.
Every function returns the points before each update and one after the last.
"""

import math

from lategrad.support.seeds import Stream, derived_seed


def add(u, v, scale=1.0):
    return [a + scale * b for a, b in zip(u, v, strict=True)]


def sub(u, v):
    return add(u, v, -1.0)


def length(v):
    return math.sqrt(math.fsum(a * a for a in v))


def dot(u, v):
    return math.fsum(a * b for a, b in zip(u, v, strict=True))


def identity(v):
    return list(v)


def ball(radius):
    def project(v):
        return [a * min(1.0, radius / length(v)) for a in v] if length(v) > 0 else list(v)

    return project


def weighted_average(weights, points):
    total = math.fsum(weights)
    return [math.fsum(a * p[j] for a, p in zip(weights, points, strict=True)) / total for j in range(len(points[0]))]


def ogd_plays(w1, grads, weights, *, lr, project, schedule="sqrt"):
    """w_{t+1} = P(w_t - eta_t alpha_t g_t) with eta_t alpha_t = lr / sqrt(t)."""
    w = [project(w1)]
    for t, (g, alpha) in enumerate(zip(grads, weights, strict=True), start=1):
        eta = (lr / math.sqrt(t) if schedule == "sqrt" else lr) / alpha
        w.append(project(add(w[-1], g, -eta * alpha)))
    return w


def ftrl_plays(w1, grads, weights, *, lr, project):
    """w_{t+1} = P(w_1 - eta_t sum_i alpha_i g_i) with eta_t = lr / sqrt(sum_i alpha_i^2)."""
    start = project(w1)
    w, total, squares = [start], [0.0] * len(w1), 0.0
    for g, alpha in zip(grads, weights, strict=True):
        total = add(total, g, alpha)
        squares += alpha**2
        w.append(project(add(start, total, -lr / math.sqrt(squares))))
    return w


def adagrad_norm_plays(w1, grads, weights, *, diameter, project):
    """w_{t+1} = P(w_t - eta_t alpha_t g_t) with eta_t = D / sqrt(2 sum_i alpha_i^2 |g_i|^2)."""
    w, squares = [project(w1)], 0.0
    for g, alpha in zip(grads, weights, strict=True):
        squares += alpha**2 * length(g) ** 2
        eta = diameter / math.sqrt(2 * squares) if squares > 0 else 0.0
        w.append(project(add(w[-1], g, -eta * alpha)))
    return w


def adagrad_plays(w1, grads, weights, *, diameter, project):
    """Coordinate j moves by D alpha_t g_{t,j} / sqrt(2 sum_i alpha_i^2 g_{i,j}^2)."""
    w, squares = [project(w1)], [0.0] * len(w1)
    for g, alpha in zip(grads, weights, strict=True):
        squares = [s + (alpha * a) ** 2 for s, a in zip(squares, g, strict=True)]
        move = [diameter * alpha * a / math.sqrt(2 * s) if s > 0 else 0.0 for s, a in zip(squares, g, strict=True)]
        w.append(project(sub(w[-1], move)))
    return w


def optimistic_ogd_plays(w1, grads, weights, *, diameter, project):
    """w_t = P(y_{t-1} - eta_t alpha_t M_t), y_t = P(y_{t-1} - eta_t alpha_t g_t); M_t = g_{t-1}, M_1 = 0.

    `weights` has one more entry than `grads`: the weight of the round that is played last.
    """
    y, hint, squares, w = project(w1), [0.0] * len(w1), 0.0, []
    for t in range(len(grads) + 1):
        eta = diameter / math.sqrt(1 + squares)
        w.append(project(add(y, hint, -eta * weights[t])))
        if t < len(grads):
            y = project(add(y, grads[t], -eta * weights[t]))
            squares += weights[t] ** 2 * length(sub(grads[t], hint)) ** 2
            hint = grads[t]
    return w


def optimistic_ftrl_plays(w1, grads, weights, *, diameter, project):
    """w_t = P(w_1 - eta_t (sum_{i<t} alpha_i g_i + alpha_t M_t)) with the same eta_t and hints."""
    start, hint, squares, total, w = project(w1), [0.0] * len(w1), 0.0, [0.0] * len(w1), []
    for t in range(len(grads) + 1):
        eta = diameter / math.sqrt(1 + squares)
        w.append(project(add(start, add(total, hint, weights[t]), -eta)))
        if t < len(grads):
            total = add(total, grads[t], weights[t])
            squares += weights[t] ** 2 * length(sub(grads[t], hint)) ** 2
            hint = grads[t]
    return w


def anytime_queries(plays, weights):
    """Algorithms 1 and 2: x_t is the weighted average of w_1 .. w_t."""
    return [weighted_average(weights[: t + 1], plays[: t + 1]) for t in range(len(plays))]


def strongly_convex(x0, grads, *, strong_convexity, project):
    """Algorithms 3 and 4; returns the queries x_1 .. x_{T+1} and the outputs after 0 .. T updates."""
    y, hint, queries = project(x0), [0.0] * len(x0), []
    outputs = [y]
    for t in range(1, len(grads) + 2):
        alpha, total = t**2, sum(i**2 for i in range(1, t + 1))
        eta = 8 / (strong_convexity * total)
        queries.append(project(add(y, hint, -eta * alpha)))
        if t <= len(grads):
            y = project(add(y, grads[t - 1], -eta * alpha))
            hint = grads[t - 1]
            outputs.append(weighted_average([i**2 for i in range(1, t + 1)], queries))
    return queries, outputs


def sgd(x0, grads, *, lr, project, average):
    """x_{t+1} = P(x_t - lr g_t); returns the queries and the outputs after 0 .. T updates."""
    queries = [project(x0)]
    outputs = [queries[0]]
    for t, g in enumerate(grads, start=1):
        queries.append(project(add(queries[-1], g, -lr)))
        weights = [1] * t if average == "uniform" else list(range(1, t + 1))
        outputs.append(queries[-1] if average == "none" else weighted_average(weights, queries[:t]))
    return queries, outputs


def adaptive_revision(x0, grads, delays, *, lr, project, average):
    """McMahan & Streeter's algorithm, one coordinate after the other; gbar is kept for every query."""
    d = range(len(x0))
    queries, gbar = [project(x0)], [[0.0] * len(x0)]
    z, z_max = [1.0] * len(x0), [1.0] * len(x0)
    for t, (g, tau) in enumerate(zip(grads, delays, strict=True), start=1):
        g_bck = sub(gbar[-1], gbar[t - 1 - tau])
        eta_old = [lr / math.sqrt(z_max[j]) for j in d]
        z = [z[j] + g[j] ** 2 + 2 * g[j] * g_bck[j] for j in d]
        z_max = [max(z[j], z_max[j]) for j in d]
        eta = [lr / math.sqrt(z_max[j]) for j in d]
        queries.append(project([queries[-1][j] - eta[j] * g[j] + (eta_old[j] - eta[j]) * g_bck[j] for j in d]))
        gbar.append(add(gbar[-1], g))
    return queries, averages(queries, average)


def async_adagrad(x0, grads, delays, *, lr, project, average):
    """z += g^2; x = P(x - lr g / sqrt(z)), z = 1 at the start."""
    queries, z = [project(x0)], [1.0] * len(x0)
    for g in grads:
        z = [a + b * b for a, b in zip(z, g, strict=True)]
        queries.append(project([x - lr * b / math.sqrt(a) for x, a, b in zip(queries[-1], z, g, strict=True)]))
    return queries, averages(queries, average)


def averages(queries, average):
    """The outputs of a rule with the given average, after 0 .. T updates."""
    if average == "none":
        return queries
    weights = [1 if average == "uniform" else t for t in range(1, len(queries) + 1)]
    return [queries[0]] + [weighted_average(weights[:t], queries[:t]) for t in range(1, len(queries))]


def ada_delay(x0, grads, delays, *, diameter, smoothness, project):
    """x_j -= g_j / (L + c_j/R sqrt(t + tau)) with c_j^2 the mean of s/(s + tau_s) g_{s,j}^2; the average of x_2 .."""
    x = [project(x0)]
    for t, (g, tau) in enumerate(zip(grads, delays, strict=True), start=1):
        seen = list(enumerate(zip(grads[:t], delays[:t], strict=True), start=1))
        c = [math.sqrt(math.fsum(i / (i + late) * old[j] ** 2 for i, (old, late) in seen) / t) for j in range(len(x0))]
        step = [1 / (smoothness + a / diameter * math.sqrt(t + tau)) for a in c]
        x.append(project([a - b * e for a, b, e in zip(x[-1], g, step, strict=True)]))
    return x, [x[0]] + [weighted_average([1] * t, x[1 : t + 1]) for t in range(1, len(x))]


def dc_asgd(x0, grads, delays, *, lr, lam, project, adaptive=False):
    """x -= lr (g + lam g g (x - x_old)); adaptive: lam / sqrt(MS + 1e-7) with MS = .95 MS + .05 g g."""
    x, ms = [project(x0)], [0.0] * len(x0)
    for t, (g, tau) in enumerate(zip(grads, delays, strict=True), start=1):
        ms = [0.95 * m + 0.05 * a * a for m, a in zip(ms, g, strict=True)]
        lams = [lam / math.sqrt(m + 1e-7) if adaptive else lam for m in ms]
        moved = sub(x[-1], x[t - 1 - tau])
        x.append(project(add(x[-1], [a + b * a * a * m for a, b, m in zip(g, lams, moved, strict=True)], -lr)))
    return x, x


def staleness_aware(x0, grads, delays, *, lr, project):
    x = [project(x0)]
    for g, tau in zip(grads, delays, strict=True):
        x.append(project(add(x[-1], g, -lr / max(1, tau))))
    return x, x


def delay_adaptive(x0, grads, delays, *, lr, workers, project):
    x = [project(x0)]
    for t, (g, tau) in enumerate(zip(grads, delays, strict=True), start=1):
        M = 1 + sum(delays[:t]) / t if workers is None else workers
        x.append(project(add(x[-1], g, -lr * M / max(M, tau))))
    return x, x


def ringmaster(x0, grads, delays, *, lr, threshold, project):
    """k counts the changes of x; the k of every query is kept."""
    x, k = [project(x0)], [0]
    for t, (g, tau) in enumerate(zip(grads, delays, strict=True), start=1):
        if k[-1] - k[t - 1 - tau] < threshold:
            x.append(project(add(x[-1], g, -lr)))
            k.append(k[-1] + 1)
        else:
            x.append(x[-1])
            k.append(k[-1])
    return x, x


def rennala(x0, grads, delays, *, lr, batch, project):
    """k counts the changes of x: a query with the same k was the current x."""
    x, k, bag = [project(x0)], [0], []
    for t, (g, tau) in enumerate(zip(grads, delays, strict=True), start=1):
        if k[t - 1 - tau] == k[-1]:
            bag.append(g)
        if len(bag) == batch:
            x.append(project(add(x[-1], weighted_average([1] * batch, bag), -lr)))
            k.append(k[-1] + 1)
            bag = []
        else:
            x.append(x[-1])
            k.append(k[-1])
    return x, x


def clipped(x0, grads, delays, *, lr, clip, project):
    x = [project(x0)]
    for g in grads:
        x.append(project(add(x[-1], g, -lr * min(1.0, clip / length(g)))))
    return x, x


def schedule_free(x0, grads, delays, *, lr, b, project):
    """y = (1-b) z + b x; z -= lr g; x += (z - x)/t: x is the uniform average of z_2, z_3, ..."""
    z = [project(x0)]
    x, y = [z[0]], [z[0]]
    for t, g in enumerate(grads, start=1):
        z.append(project(add(z[-1], g, -lr)))
        x.append(weighted_average([1] * t, z[1:]))
        y.append(weighted_average([1 - b, b], [z[-1], x[-1]]))
    return y, x


def unixgrad(x0, grads, delays, *, diameter, project):
    """Round r: M at (r y + sum i x_i)/(1 + .. + r), x_r; g at the average of x_1 .. x_r, y. Two updates a round."""
    y, x, squares = project(x0), [], 0.0
    queries, outputs = [y], [y]
    for r in range(1, len(grads) // 2 + 1):
        M, g = grads[2 * r - 2], grads[2 * r - 1]
        eta = 2 * diameter / math.sqrt(1 + squares)
        x.append(project(add(y, M, -eta * r)))
        mean = weighted_average(list(range(1, r + 1)), x)
        queries.append(mean)
        y = project(add(y, g, -eta * r))
        squares += r**2 * length(sub(g, M)) ** 2
        queries.append(weighted_average(list(range(1, r + 2)), [*x, y]))
        outputs += [mean, mean]
    return queries, outputs


def steady(x0, grads, delays, *, lr, c, project, diameter=math.inf, per_coordinate=False):
    """S += t^2 |g|^2; w = P(w - lr_t s/sqrt(S) g), s = t - tau; query (1-b) w + b x, 1-b = min(1, c/sqrt(t)).

    lr_t = min(lr, min(2 lr, D/10) sqrt(t)/(1 + tau)).
    """
    w, S, d = [project(x0)], [0.0] * len(x0), len(x0)
    for t, (g, tau) in enumerate(zip(grads, delays, strict=True), start=1):
        s = t - tau
        step = min(lr, min(2 * lr, diameter / 10) * math.sqrt(t) / (1 + tau))
        if per_coordinate:
            S = [a + t**2 * b**2 for a, b in zip(S, g, strict=True)]
            scale = step / math.sqrt(d) * s**2 / t
            w.append(project([p - scale / math.sqrt(a) * b for p, a, b in zip(w[-1], S, g, strict=True)]))
        else:
            S = [a + t**2 * length(g) ** 2 for a in S]
            w.append(project(add(w[-1], g, -step * s / math.sqrt(S[0]))))
    x = anytime_queries(w, list(range(1, len(w) + 1)))
    share = [min(1.0, c / math.sqrt(t)) for t in range(1, len(w) + 1)]
    return [weighted_average([e, 1 - e], pair) for e, *pair in zip(share, w, x, strict=True)], x


def steady_short(x0, grads, delays, *, lr, c, project, diameter=math.inf):
    """First round: w = P(x1 - r sum i g_i), r = min(lr, min(30 lr, D/2)/sqrt(t))/sqrt(S), as a recursion; then
    w = P(w - lr_t t/sqrt(S) g); the average begins after the first gradient from elsewhere, and is w before."""

    def first_step(t):
        return min(lr, min(30 * lr, diameter / 2) / math.sqrt(t))

    start = project(x0)
    w, S, averaged, weights = [start], 0.0, [], []
    queries, outputs = [start], [start]
    for t, (g, tau) in enumerate(zip(grads, delays, strict=True), start=1):
        before, S = S, S + t**2 * length(g) ** 2
        if not averaged and tau == t - 1:
            kept = first_step(t) / first_step(t - 1) * math.sqrt(before / S) if t > 1 else 0.0
            base = add(start, add(w[-1], start, -1.0), kept)
            w.append(project(add(base, g, -first_step(t) * t / math.sqrt(S))))
            queries.append(w[-1])
            outputs.append(w[-1])
            continue
        share = max(math.sqrt(t) / (1 + tau), 3 / math.sqrt(t))
        step = min(lr, min(2 * lr, diameter / 10) * share)
        w.append(project(add(w[-1], g, -step * t / math.sqrt(S))))
        averaged.append(w[-1])
        weights.append(t + 1)
        x = weighted_average(weights, averaged)
        theta = min(1.0, c / math.sqrt(t + 1))
        queries.append(weighted_average([theta, 1 - theta], [w[-1], x]))
        outputs.append(x)
    return queries, outputs


# ---- rules for deep models


def online_to_nonconvex(x0, grads, delays, *, lr, D, K, seed, project):
    """Dual averaging on the ball of radius D, restarted every K rounds, chooses steps; s_n by Lehmer's generator."""
    x, state, clip = project(x0), derived_seed(seed, Stream.STEPS) % (2**31 - 2) + 1, ball(D)
    queries, outputs, since = [], [x], []
    for n in range(len(grads) + 1):
        if n % K == 0:
            since, total = [], [0.0] * len(x)
        delta = sub(project(add(x, clip([-lr * a for a in total]))), x)
        queries.append(add(x, delta, state / (2**31 - 1)))
        since.append(queries[-1])
        if n < len(grads):
            x, total, state = add(x, delta), add(total, grads[n]), 48271 * state % (2**31 - 1)
            outputs.append(weighted_average([1.0] * len(since), since))
    return queries, outputs


def sgd_momentum(x0, grads, delays, *, lr, gamma, project):
    x, v = [project(x0)], [0.0] * len(x0)
    for g in grads:
        v = add(g, v, gamma)
        x.append(project(add(x[-1], v, -lr)))
    return x, x


def adam_moments(grads, beta1, beta2):
    """After each gradient: m, v, and 1 - beta^t for both."""
    m, v = [0.0] * len(grads[0]), [0.0] * len(grads[0])
    for t, g in enumerate(grads, start=1):
        m = [beta1 * a + (1 - beta1) * b for a, b in zip(m, g, strict=True)]
        v = [beta2 * a + (1 - beta2) * b * b for a, b in zip(v, g, strict=True)]
        yield m, v, 1 - beta1**t, 1 - beta2**t


def adam_directions(grads, beta1=0.9, beta2=0.999, eps=1e-8):
    return [
        [(a / c1) / (math.sqrt(b / c2) + eps) for a, b in zip(m, v, strict=True)]
        for m, v, c1, c2 in adam_moments(grads, beta1, beta2)
    ]


def adamw(x0, grads, delays, *, lr, project, decay=0.01, average=False):
    x = [project(x0)]
    for d in adam_directions(grads):
        x.append(project(add(add(x[-1], x[-1], -lr * decay), d, -lr)))
    means = [x[0]] + [weighted_average(list(range(1, t + 1)), x[:t]) for t in range(1, len(x))]
    return x, means if average else x


def nadam(x0, grads, delays, *, lr, project, beta1=0.99, beta2=0.999, decay=0.01):
    x, product = [project(x0)], 1.0
    for t, (g, (m, v, _, c2)) in enumerate(zip(grads, adam_moments(grads, beta1, beta2), strict=True), start=1):
        mu, mu_next = (beta1 * (1 - 0.5 * 0.96 ** (0.004 * s)) for s in (t, t + 1))
        product *= mu
        step = [
            ((1 - mu) * a / (1 - product) + mu_next * b / (1 - product * mu_next)) / (math.sqrt(c / c2) + 1e-8)
            for a, b, c in zip(g, m, v, strict=True)
        ]
        x.append(project(add(add(x[-1], x[-1], -lr * decay), step, -lr)))
    return x, x


def schedule_free_adamw(x0, grads, delays, *, lr, project, b=0.9, decay=0.0):
    z = [project(x0)]
    x, y = [z[0]], [z[0]]
    for t, (g, (_, v, _, c2)) in enumerate(zip(grads, adam_moments(grads, 0.0, 0.999), strict=True), start=1):
        step = [a / (math.sqrt(c / c2) + 1e-8) + decay * p for a, c, p in zip(g, v, y[-1], strict=True)]
        z.append(project(add(z[-1], step, -lr)))
        x.append(weighted_average([1] * t, z[1:]))
        y.append(weighted_average([1 - b, b], [z[-1], x[-1]]))
    return y, x


def product(a, b):
    return [
        [math.fsum(p * q for p, q in zip(row, column, strict=True)) for column in zip(*b, strict=True)] for row in a
    ]


def orthogonal_factor(a):
    """Of a matrix of two rows: x (C + sum of b / (x^2 + c)) of its singular values, which are over |a a'|^(1/2)."""
    gram = product(a, list(zip(*a, strict=True)))
    size = math.sqrt(length([value for row in gram for value in row]))
    weights = [[0.9619399092429526, 0.0], [0.0, 0.9619399092429526]]
    for c, b in ((1.8960818006343127e-05, 0.009218828468513678), (0.0091860596284537, 0.1852775182968315)):
        (p, q), (_, r) = [[value / size**2 for value in row] for row in gram]
        p, r = p + c, r + c
        inverse = [[r, -q], [-q, p]]
        weights = [add(row, [value / (p * r - q * q) for value in other], b)
                   for row, other in zip(weights, inverse, strict=True)]  # fmt: skip
    return product(weights, [[value / size for value in row] for row in a])


def muon(x0, grads, delays, *, lr, project, mu=0.95, prediction=False):
    x, m = [project(x0)], [0.0] * len(x0)
    queries = [x[0]]
    for g, adam, tau in zip(grads, adam_directions(grads), delays, strict=True):
        m = add([mu * a for a in m], g, 1 - mu)
        n = add([mu * a for a in m], g, 1 - mu)
        square = orthogonal_factor([n[:2], n[2:4]])  # in the first four entries; the rest is Adam's
        step = [0.2 * math.sqrt(2) * value for row in square for value in row] + adam[4:]
        decayed = [p * (1 - lr * (0.1 if j < 4 else 0.01)) for j, p in enumerate(x[-1])]
        x.append(project(add(decayed, step, -lr)))
        queries.append(project(add(x[-1], step, -lr * tau)))
    return queries if prediction else x, x


def transposed(a):
    return [list(column) for column in zip(*a, strict=True)]


def rotated_adam(x0, grads, delays, *, lr, project, period=10):
    """A square matrix in the first four entries, whose bases are renewed in every tenth update; the rest is Adam's."""

    def turned(left, vector, right):
        (a, b), (c, d) = product(product(left, [vector[:2], vector[2:4]]), right)
        return [a, b, c, d, *vector[4:]]

    def orthonormal(a):
        (p, _), (r, _) = a
        size = math.hypot(p, r)
        return [[p / size, -r / size], [r / size, p / size]]

    x, m, v = [project(x0)], [0.0] * len(x0), [0.0] * len(x0)
    L, R, left, right = [[[0.0, 0.0], [0.0, 0.0]]] * 2 + [[[1.0, 0.0], [0.0, 1.0]]] * 2
    for t, g in enumerate(grads, start=1):
        m = [0.9 * a + 0.1 * b for a, b in zip(m, g, strict=True)]
        v = [0.999 * a + 0.001 * b**2 for a, b in zip(v, turned(transposed(left), g, right), strict=True)]
        step = [(a / (1 - 0.9**t)) / (math.sqrt(b / (1 - 0.999**t)) + 1e-8)
                for a, b in zip(turned(transposed(left), m, right), v, strict=True)]  # fmt: skip
        x.append(project(add(add(x[-1], x[-1], -lr * 0.01), turned(left, step, transposed(right)), -lr)))
        G = [g[:2], g[2:4]]
        L = [weighted_average([0.999, 0.001], rows) for rows in zip(L, product(G, transposed(G)), strict=True)]
        R = [weighted_average([0.999, 0.001], rows) for rows in zip(R, product(transposed(G), G), strict=True)]
        if t % period == 0:
            left, right = orthonormal(product(L, left)), orthonormal(product(R, right))
    return x, x


def ringmaster_muon(x0, grads, delays, *, lr, threshold, project, mu=0.95):
    """On a square matrix, in the first four entries, sqrt(max(1, r/c)) = 1 times the orthogonal factor of N; else N."""
    x, k, m = [project(x0)], [0], [0.0] * len(x0)
    for t, (g, tau) in enumerate(zip(grads, delays, strict=True)):
        if k[-1] - k[t - tau] < threshold:
            m = [mu * a + (1 - mu) * b for a, b in zip(m, g, strict=True)]
            n = [mu * a + (1 - mu) * b for a, b in zip(m, g, strict=True)]
            square = orthogonal_factor([n[:2], n[2:4]])
            x.append(project(add(x[-1], [*square[0], *square[1], *n[4:]], -lr)))
            k.append(k[-1] + 1)
        else:
            x.append(x[-1])
            k.append(k[-1])
    return x, x


def gap_aware(x0, grads, delays, *, lr, gamma, project, Gamma=0.999, eps=1e-8):
    """C = lr (sqrt(mean square of v_0 .. v_{t-1}, weights Gamma^(t-i)) + eps), v_0 = 0; g / (1 + |x - x_old| / C)."""
    x, v = [project(x0)], [[0.0] * len(x0)]
    for t, (g, tau) in enumerate(zip(grads, delays, strict=True)):
        moved = sub(x[-1], x[t - tau])
        mean_squares = weighted_average([Gamma ** (t - i) for i in range(t + 1)], [[a * a for a in one] for one in v])
        penalties = [1 + abs(a) / (lr * (math.sqrt(s) + eps)) for a, s in zip(moved, mean_squares, strict=True)]
        v.append([gamma * a + b / p for a, b, p in zip(v[-1], g, penalties, strict=True)])
        x.append(project(add(x[-1], v[-1], -lr)))
    return x, x


def pipemare(x0, grads, delays, *, lr, annealing, project):
    x = [project(x0)]
    for t, (d, tau) in enumerate(zip(adam_directions(grads), delays, strict=True), start=1):
        step = lr / max(1, tau) ** (1 - min(t / annealing, 1))
        x.append(project(add(add(x[-1], x[-1], -step * 0.01), d, -step)))
    return x, x


def weight_prediction(x0, grads, delays, *, lr, project):
    x = [project(x0)]
    queries = [x[0]]
    for d, tau in zip(adam_directions(grads), delays, strict=True):
        x.append(project(add(add(x[-1], x[-1], -lr * 0.01), d, -lr)))
        queries.append(project(add(x[-1], d, -lr * tau)))
    return queries, x


# ---- outer rules


def nesterov(x0, grads, delays, *, lr, gamma, project):
    x, v = [project(x0)], [0.0] * len(x0)
    for g in grads:
        v = add(g, v, gamma)
        x.append(project(add(add(x[-1], g, -lr), v, -lr * gamma)))
    return x, x


def delayed_nesterov(x0, grads, delays, *, lr, gamma, n, c, project):
    """Liu et al., Algorithm 3: every n-th arrival m = gamma m + (mean of the last n); g/n every time."""
    x, m = [project(x0)], [0.0] * len(x0)
    for t, g in enumerate(grads):
        share = c
        if (t + 1) % n == 0:
            m = add(weighted_average([1] * n, grads[t + 1 - n : t + 1]), m, gamma)
            share = 1 - c * n + c
        x.append(project(add(add(x[-1], m, -lr * share * gamma), g, -lr / n)))
    return x, x


def momentum_look_ahead(x0, grads, delays, *, lr, gamma, project, ahead=False):
    x, m = [project(x0)], [0.0] * len(x0)
    queries = [x[0]]
    for g in grads:
        m = weighted_average([gamma, 1 - gamma], [m, g])
        x.append(project(add(x[-1], add(g, m, gamma), -lr)))
        queries.append(project(add(x[-1], m, -lr * gamma)) if ahead else x[-1])
    return queries, x


def fed_buff(x0, grads, delays, *, lr, size, project, discount=True):
    """k[t] is the number of changes of x before update t + 1, so that the staleness is k[t] - k[t - tau]."""
    x, k, bag = [project(x0)], [0], []
    for t, (g, tau) in enumerate(zip(grads, delays, strict=True)):
        scale = (1 + k[t] - k[t - tau]) ** -0.5 if discount else 1.0
        bag.append([scale * a for a in g])
        full = len(bag) == size
        x.append(project(add(x[-1], weighted_average([1] * size, bag), -lr)) if full else x[-1])
        k.append(k[-1] + full)
        bag = [] if full else bag
    return x, x


def fed_async(x0, grads, delays, *, alpha, weight, project):
    x = [project(x0)]
    for t, (g, tau) in enumerate(zip(grads, delays, strict=True)):
        share = alpha * weight(tau)
        x.append(project(weighted_average([1 - share, share], [x[-1], sub(x[t - tau], g)])))
    return x, x


def steady_mixing(x0, grads, delays, *, mixing, project):
    """The mean of the delays is that of all, then of about the last 32."""
    x, v, mean = [project(x0)], [0.0] * len(x0), 0.0
    queries = [x[0]]
    for t, (g, tau) in enumerate(zip(grads, delays, strict=True), start=1):
        mean += (tau - mean) / min(t, 32)
        share = 2 * mixing / (2 + tau)
        model = sub(queries[t - 1 - tau], g)
        v = weighted_average([mean / 2, 1], [v, [share * a for a in sub(model, x[-1])]])
        x.append(project(add(x[-1], v)))
        queries.append(project(add(x[-1], v, 0.9 * mean)))
    return queries, x
