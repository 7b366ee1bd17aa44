"""What others would run: lock-free SGD in shared memory, and Ray's documented asynchronous parameter server.

Both compute their gradients with the same :class:`~lategrad.serve.worker.Oracle` as our workers do, in workers
with one torch thread each, and both are measured alike: updates in a stretch of time after a warm-up.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.multiprocessing
from torch import Tensor

from lategrad.problems import Dataset, SoftmaxRegression, load
from lategrad.problems.data import find_fashion_mnist
from lategrad.problems.problem import Problem
from lategrad.serve.messages import Job
from lategrad.serve.worker import Oracle, Streams


class FreeGradient:
    """A linear objective over float32 vectors whose gradient is a prepared buffer: all the time is transport."""

    name = "free-gradient"
    smoothness = 0.0
    strong_convexity = 0.0

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self._slope: Tensor | None = None  # made where it is first used, so that it does not travel

    def start(self) -> Tensor:
        """Zero."""
        return torch.zeros(self.dim)

    def samples(self, seed: int, first: int, count: int) -> Tensor:
        """Nothing is random."""
        return torch.zeros(count, 1)

    def labels(self, samples: Tensor) -> None:
        """There are no classes."""
        return None

    def gradient(self, x: Tensor, sample: Tensor) -> Tensor:
        """The buffer itself, whatever the point."""
        if self._slope is None:
            self._slope = torch.full((self.dim,), 1e-3)
        return self._slope.expand(x.shape)

    def loss(self, x: Tensor) -> Tensor:
        """The slope times the sum of the entries."""
        return 1e-3 * x.sum(-1, keepdim=True, dtype=torch.float64)

    def accuracy(self, x: Tensor) -> None:
        """Meaningless here."""
        return None

    def to(self, device: torch.device | str) -> FreeGradient:
        """A copy; the buffer stays where it is."""
        return copy.copy(self)

    def __repr__(self) -> str:
        return f"FreeGradient({self.dim})"


def softmax_problem(batch: int = 64) -> SoftmaxRegression:
    """Softmax regression on Fashion-MNIST, or on noise of the same size where it is not on this machine."""
    if find_fashion_mnist() is not None:
        data = load("fashion-mnist")
    else:
        rng = torch.Generator().manual_seed(0)
        x, y = torch.rand(70_000, 784, generator=rng), torch.randint(10, (70_000,), generator=rng)
        data = Dataset("noise", x[:60_000], y[:60_000], x[60_000:], y[60_000:], 10)
    return SoftmaxRegression(data, batch=batch)


def _oracle(problem: Problem) -> Oracle:
    torch.set_num_threads(1)
    return Oracle(problem, Streams(0), {}, torch.device("cpu"))


# ---- Lock-free SGD: every worker subtracts its gradients from one shared vector


def _hogwild_worker(worker: int, problem: Problem, lr: float, x: Tensor, made: Tensor, stop: Tensor) -> None:
    oracle, k = _oracle(problem), 0
    while not stop.item():
        x.sub_(oracle.answer(Job(worker, k, 0, x)).message, alpha=lr)
        k += 1
        made[worker] = k


def _autograd_worker(worker: int, problem: SoftmaxRegression, lr: float, x: Tensor, made: Tensor, stop: Tensor) -> None:
    """The same as a PyTorch user writes it: a module in shared memory, a loss, ``backward`` and an optimizer."""
    torch.set_num_threads(1)
    model = torch.nn.Linear(problem.train.shape[-1], problem.outputs, bias=False)  # the rows end with a one
    model.weight = torch.nn.Parameter(x.view_as(model.weight))
    optimizer, k = torch.optim.SGD(model.parameters(), lr), 0
    while not stop.item():
        if k % 256 == 0:
            batches = problem.samples(worker, k, 256)
        rows = batches[k % 256]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(problem.train[rows]), problem.y_train[rows]).backward()
        optimizer.step()
        k += 1
        made[worker] = k


def hogwild_by_autograd(problem: SoftmaxRegression, **options: float) -> float:
    """Updates per second of lock-free SGD with autograd and ``torch.optim``."""
    return hogwild(problem, worker_loop=_autograd_worker, **options)


def hogwild(
    problem: Problem,
    *,
    worker_loop: Callable[..., None] = _hogwild_worker,
    lr: float = 1e-3,
    seconds: float = 5.0,
    warm_up: float = 1.0,
    workers: int = 2,
) -> float:
    """Updates per second of processes that update a shared vector without any lock."""
    x = problem.start().share_memory_()
    made, stop = torch.zeros(workers, dtype=torch.int64).share_memory_(), torch.zeros(1).share_memory_()
    context = torch.multiprocessing.get_context("forkserver")
    processes = [
        context.Process(target=worker_loop, args=(worker, problem, lr, x, made, stop), daemon=True)
        for worker in range(workers)
    ]
    for process in processes:
        process.start()
    try:
        while int(made.min()) == 0:
            time.sleep(0.01)
        time.sleep(warm_up)
        before, begin = int(made.sum()), time.perf_counter()
        time.sleep(seconds)
        return (int(made.sum()) - before) / (time.perf_counter() - begin)
    finally:
        stop.fill_(1)
        for process in processes:
            process.join()


# ---- Ray's pattern: the driver waits for any gradient, hands it to the server, and starts that worker again


@contextlib.contextmanager
def local_ray(cpus: int = 4) -> Iterator[None]:
    """A Ray of this machine's own, shut down afterwards; one that is running already is used and left alone."""
    import ray

    started = not ray.is_initialized()
    if started:
        ray.init(address="local", num_cpus=cpus, include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        yield
    finally:
        if started:
            ray.shutdown()


class _ParameterServer:
    """The weights; one call takes a gradient in and gives the new weights out."""

    def __init__(self, start: np.ndarray, lr: float) -> None:
        torch.set_num_threads(1)
        self.weights, self.lr = start.copy(), lr

    def apply_gradients(self, gradient: np.ndarray) -> np.ndarray:
        self.weights -= self.lr * gradient
        return self.weights

    def get_weights(self) -> np.ndarray:
        return self.weights


class _DataWorker:
    """Computes gradients at the weights that it is given."""

    def __init__(self, worker: int, problem: Problem) -> None:
        self.worker, self.oracle, self.k = worker, _oracle(problem), 0

    def compute_gradients(self, weights: np.ndarray) -> np.ndarray:
        job = Job(self.worker, self.k, 0, torch.from_numpy(weights))
        self.k += 1
        return self.oracle.answer(job).message.numpy()


def processor_seconds() -> float:
    """Processor time so far of this process and of all that descend from it."""
    import psutil  # Ray brings it along

    total, this = 0.0, psutil.Process()
    for process in (this, *this.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def ray_parameter_server_and_cost(
    problem: Problem, *, lr: float = 1e-3, seconds: float = 5.0, warm_up: float = 1.0, workers: int = 2
) -> tuple[float, float]:
    """Ray's asynchronous parameter-server pattern, with its driver loop.

    Returns updates per second, and the processor seconds of all processes for an update.
    """
    import ray

    with local_ray():
        shared = ray.put(problem)
        server = ray.remote(num_cpus=0)(_ParameterServer).remote(problem.start().numpy(), lr)
        actors = [ray.remote(num_cpus=1)(_DataWorker).remote(worker, shared) for worker in range(workers)]
        weights = server.get_weights.remote()
        pending = {actor.compute_gradients.remote(weights): actor for actor in actors}
        updates, begin, measuring = 0, None, False
        while True:
            (ready, *_), _ = ray.wait(list(pending))
            actor = pending.pop(ready)
            weights = server.apply_gradients.remote(ready)
            pending[actor.compute_gradients.remote(weights)] = actor
            del ready, weights
            updates += 1
            now = time.perf_counter()
            if begin is None:
                begin = now if updates >= 2 * workers else None
            elif not measuring and now - begin > warm_up:
                before = processor_seconds()
                begin, updates, measuring = time.perf_counter(), 0, True
            elif measuring and now - begin > seconds:
                spent = processor_seconds() - before
                break
        ray.get(list(pending))  # raises if the actors did nothing but fail
        rate = updates / (now - begin), spent / updates
        for actor in (*actors, server):
            ray.kill(actor)
        return rate


def ray_parameter_server(problem: Problem, **options: float) -> float:
    """Updates per second of Ray's pattern."""
    rate, _ = ray_parameter_server_and_cost(problem, **options)
    return rate


if __name__ == "__main__":
    for problem in (softmax_problem(), FreeGradient(10**6), FreeGradient(10**7)):
        print(f"{problem}: hogwild {hogwild(problem):,.0f} updates/s, ", end="", flush=True)
        print(f"Ray's pattern {ray_parameter_server(problem):,.0f} updates/s")
