"""The paper's algorithms as plain Python: lists of floats, one run, line by line. Slow, and easy to check.

`grads` is the sequence of gradients in the order in which they arrive; how late they are is hidden in them.
Every function returns the points before each update and one after the last.
"""

import math


def add(u, v, scale=1.0):
    return [a + scale * b for a, b in zip(u, v, strict=True)]


def sub(u, v):
    return add(u, v, -1.0)


def length(v):
    return math.sqrt(math.fsum(a * a for a in v))


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
