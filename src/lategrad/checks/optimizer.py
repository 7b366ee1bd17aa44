"""Checks for any ``torch.optim.Optimizer``: what users rely on, and lose without notice where it does not hold."""

import io
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.optim.optimizer import Optimizer
from torch.utils.flop_counter import FlopCounterMode

from lategrad.checks.comparing import assert_true, gradients, pickled_copy
from lategrad.support.torch_private import missing_compiler
from lategrad.support.validation import require, require_number

_STEPS, _RANKS = 6, 2
_ODD_SHAPES = ((), (1, 4), (4, 1), (2, 3, 4), (2, 3, 2, 2), (0,), (0, 3))
_SMALL_STEPS = 64  # in bfloat16, each about 1/8 of the distance between neighbouring numbers


class _SkippedError(Exception):
    """Why a check cannot run here."""


def check_optimizer(
    factory: Callable[[Any], Optimizer], *, skip: Iterable[str] = (), tolerance: float = 1e-3, device: str = "cpu",
    seed: int = 0,
) -> dict[str, str]:  # fmt: skip
    """Run all checks on a torch optimizer, of this library or of another.

    - accumulated: a batch's gradient that is accumulated in two parts trains like one of the whole batch;
    - resumed: saving, loading with ``weights_only=True`` and training on equals training straight on;
    - order: the order of groups, and of the parameters in them, does not matter;
    - none: a parameter without a gradient stays where it is, and the others train as if it were not there;
    - weight decay: a group with ``weight_decay=0`` is not decayed, whatever the other groups have;
    - shapes: scalars, single rows and columns, three and four dimensions and no entries are trained, or refused with a
      ``ValueError`` when the optimizer is built;
    - bfloat16: steps that are small against the parameters add up as in float32;
    - compiled: ``torch.compile(optimizer.step)`` equals ``optimizer.step``;
    - sharded: two ranks with FSDP2 (gloo, on the CPU) train what one process trains.

    Compared are the parameters after some steps, and also in eval mode where the optimizer has one.

    Args:
        factory: makes the optimizer from parameters or groups of them, with a usual learning rate. For "sharded" it is
            pickled, as ``functools.partial(torch.optim.SGD, lr=0.1)`` can be, and scripts need a main guard.
        skip: names of checks to leave out; "compiled" and "sharded" take seconds.
        tolerance: largest difference, relative to how far the parameters move.
        device: of the parameters, except for "sharded".
        seed: of the random starts and gradients.

    Returns "passed", perhaps with a remark, or "skipped" and why for each check. An ``AssertionError`` has a line for
    each check that fails, with what users lose.

    >>> from functools import partial
    >>> check_optimizer(partial(torch.optim.SGD, lr=0.1), skip=["sharded", "compiled"])
    Traceback (most recent call last):
    ...
    AssertionError: bfloat16: small steps are rounded away, and training stalls (100% of the way of 64 steps is missing)
    """
    skip = set(skip)
    require("factory", factory, callable(factory), "a function that makes the optimizer from parameters")
    require("skip", sorted(skip), skip <= set(_CHECKS), f"names of checks: {', '.join(_CHECKS)}")
    require_number("tolerance", tolerance, low=0, strict=True)
    if "sharded" not in skip:
        pickled_copy(factory, "factory")
    trial, results, failures = _Trial(factory, tolerance, device, seed), dict.fromkeys(skip, "skipped: as asked"), []
    trial.takes((4, 3))  # or raises
    for name, (check, lost) in _CHECKS.items():
        try:
            results.setdefault(name, "" if name in skip else f"passed{check(trial) or ''}")
        except _SkippedError as reason:
            results[name] = f"skipped: {reason}"
        except Exception as error:  # whatever the optimizer raises where it should work is what the check has found
            text = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
            of_rank = re.findall(r"^[\w.]+(?:Error|Exception): .*", text, re.MULTILINE)  # after its traceback
            failures.append(f"{name}: {lost} ({of_rank[-1] if of_rank else text[:200].splitlines()[0]})")
    if failures:
        raise AssertionError("\n".join(failures))
    return {name: results[name] for name in _CHECKS}


@dataclass(frozen=True)
class _Trial:
    """An optimizer under test, and trainings with gradients that depend on the seed alone."""

    factory: Callable[[Any], Optimizer]
    tolerance: float
    device: str
    seed: int

    def build(self, params: Any) -> Any:
        optimizer: Any = self.factory(params)
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"factory must return a torch.optim.Optimizer, got {type(optimizer).__name__}")
        if hasattr(optimizer, "train"):  # of optimizers with two modes
            optimizer.train()
        return optimizer

    def takes(self, shape: tuple[int, ...]) -> bool:
        try:
            self.build([self.tensor(shape, 0)])
        except ValueError:
            return False
        return True

    def tensor(self, shape: Sequence[int], seed: int) -> nn.Parameter:
        return nn.Parameter(gradients(1, tuple(shape), self.seed + seed, torch.float32)[0].to(self.device))

    def params(self) -> list[nn.Parameter]:
        """Matrices, and a vector where the optimizer takes it."""
        shapes = [(4, 3), (3, 5), (4, 6), *([(5,)] if self.takes((5,)) else [])]
        return [self.tensor(shape, i) for i, shape in enumerate(shapes)]

    def grad(self, p: Tensor, i: int, t: int) -> Tensor:
        return self.tensor(p.shape, 100 * (t + 1) + i).detach().to(p.dtype)

    def train(
        self, optimizer: Any, params: Sequence[nn.Parameter], steps: Iterable[int] = range(_STEPS), *,
        without: Sequence[int] = (), step: Callable[[], Any] | None = None,
    ) -> list[Tensor]:  # fmt: skip
        """Train, without gradients for the parameters at some places; returns :func:`_values`."""
        for t in steps:
            for i, p in enumerate(params):
                p.grad = None if i in without else self.grad(p, i, t)
            (step or optimizer.step)()
        return _values(optimizer, params)

    def check_equals_straight(self, actual: Sequence[Tensor]) -> None:
        params = self.params()
        self.compare(actual, self.train(self.build(params), params), self.params())

    def compare(self, actual: Sequence[Tensor], expected: Sequence[Tensor], start: Sequence[Tensor]) -> None:
        for a, e, s in zip(actual, expected, [*start] * (len(expected) // len(start)), strict=True):
            moved, what = (e - s).abs().max(), f"the parameter of shape {tuple(s.shape)}"
            assert_true(0 < moved < float("inf"), f"{what} moves by {moved.item():.2g}: choose another learning rate")
            apart = ((a - e).abs().max() / (moved + 1e-6 / self.tolerance * s.abs().max())).item()
            assert_true(apart <= self.tolerance, f"{what} differs by {apart:.2g} of how far it moves")


def _values(optimizer: Any, params: Sequence[Tensor]) -> list[Tensor]:
    """The parameters as they are trained, and as they are shipped where the optimizer has modes."""
    values = [p.detach().clone() for p in params]
    if hasattr(optimizer, "eval") and hasattr(optimizer, "train"):
        optimizer.eval()
        values += [p.detach().clone() for p in params]
        optimizer.train()
    return values


def _accumulated(trial: _Trial) -> None:
    params = trial.params()
    optimizer = trial.build(params)
    for t in range(_STEPS):
        optimizer.zero_grad(set_to_none=False)  # into the same memory
        for i, p in [*enumerate(params)] * 2:
            (p * trial.grad(p, i, t) / 2).sum().backward()
        optimizer.step()
    trial.check_equals_straight(_values(optimizer, params))


def _resumed(trial: _Trial) -> None:
    first, second = trial.params(), trial.params()
    optimizer, file = trial.build(first), io.BytesIO()
    trial.train(optimizer, first, range(3))
    torch.save([[p.detach() for p in first], optimizer.state_dict()], file)
    file.seek(0)
    values, state = torch.load(file, weights_only=True)
    for p, value in zip(second, values, strict=True):
        p.data.copy_(value)
    resumed = trial.build(second)
    resumed.load_state_dict(state)
    trial.check_equals_straight(trial.train(resumed, second, range(3, _STEPS)))


def _order(trial: _Trial) -> None:
    a, b = trial.params(), trial.params()
    actual = trial.train(trial.build([{"params": b[:1:-1]}, {"params": b[1::-1]}]), b)
    trial.compare(actual, trial.train(trial.build([{"params": a[:2]}, {"params": a[2:]}]), a), trial.params())


def _none(trial: _Trial) -> None:
    start, idle, params, fewer = trial.params(), trial.params(), trial.params(), trial.params()[:-1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it may say that nothing is updated
        trial.train(trial.build(idle), idle, without=range(len(idle)))
    assert_true(all(map(torch.equal, idle, start)), "a step without any gradient moves the parameters")
    optimizer, last = trial.build(params), len(fewer)
    actual = trial.train(optimizer, params, without=[last])
    assert_true(torch.equal(params[last], start[last]), "a parameter without a gradient moves")
    late = trial.train(optimizer, params)[last]
    trained = bool(torch.isfinite(late).all()) and not torch.equal(late, start[last])
    assert_true(trained, "a parameter whose gradients begin late is not trained")
    del actual[last :: len(params)]
    trial.compare(actual, trial.train(trial.build(fewer), fewer), start[:-1])


def _weight_decay(trial: _Trial) -> None:
    if "weight_decay" not in trial.build(trial.params()).param_groups[0]:
        raise _SkippedError("it has no weight_decay")
    ends = []
    for decay in (0.1, 0.0):
        a, b = trial.params()[:2]
        optimizer = trial.build([{"params": [a], "weight_decay": 0.0}, {"params": [b], "weight_decay": decay}])
        for _ in range(_STEPS):
            a.grad, b.grad = torch.zeros_like(a), torch.ones_like(b)
            optimizer.step()
        assert_true((a - trial.params()[0]).abs() <= 1e-6, "a parameter with a gradient of zero moves")
        ends.append(b)
    assert_true(not torch.equal(*ends), "the weight_decay of another group has no effect")


def _shapes(trial: _Trial) -> str:
    refused = [shape for shape in _ODD_SHAPES if not trial.takes(shape)]
    for shape in (shape for shape in _ODD_SHAPES if shape not in refused):
        params = [trial.tensor((4, 3), 0), trial.tensor(shape, 1)]
        for i, value in enumerate(trial.train(trial.build(params), params)):
            trained = value.numel() == 0 or not torch.equal(value, trial.tensor(value.shape, i % 2))
            assert_true(trained & torch.isfinite(value).all(), f"{tuple(value.shape)} beside {shape} is not trained")
    return f", but refuses {', '.join(map(str, refused))}" if refused else ""


def _bfloat16(trial: _Trial) -> None:
    probe = trial.params()
    with FlopCounterMode(display=False) as counter:
        trial.train(trial.build(probe), probe, [0])
    if counter.get_total_flops() and trial.device == "cpu":
        raise _SkippedError("it multiplies matrices, which not every CPU can in bfloat16")

    def way(start: float, dtype: torch.dtype) -> Tensor:
        params = [nn.Parameter(torch.full_like(p, start, dtype=dtype)) for p in trial.params()]
        trial.train(trial.build(params), params, [0] * _SMALL_STEPS)
        return torch.cat([p.detach().float().flatten() - start for p in params])

    unit = way(0.0, torch.float32).abs().mean().item() * 8 / _SMALL_STEPS
    start = torch.tensor(unit * 2**7 * 1.5).bfloat16().item()
    wide, narrow = way(start, torch.float32), way(start, torch.bfloat16)
    missing = 1 - ((narrow * wide).sum() / wide.square().sum()).item()
    assert_true(abs(missing) <= 0.3, f"{missing:.0%} of the way of {_SMALL_STEPS} steps is missing")


def _compiled(trial: _Trial) -> None:
    if reason := missing_compiler(torch.device(trial.device).type, "compile"):
        raise _SkippedError(reason)
    params = trial.params()
    optimizer = trial.build(params)
    torch.compiler.reset()
    step = torch.compile(optimizer.step)
    trial.train(optimizer, params, range(4), step=step)  # compiles, and again for the state that the first steps make
    with torch.compiler.set_stance("fail_on_recompile"):
        actual = trial.train(optimizer, params, range(4, _STEPS), step=step)
    trial.check_equals_straight(actual)


def _sharded(trial: _Trial) -> None:
    if not (dist.is_available() and dist.is_gloo_available()):
        raise _SkippedError("torch.distributed with gloo is not available here")
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (folder, trial), nprocs=_RANKS)
        actual = torch.load(f"{folder}/values.pt", weights_only=True)
    start, expected = _train_network(trial, lambda model: None)
    trial.compare(actual, expected, start)


def _train_network(trial: _Trial, shard: Callable[[nn.Sequential], None]) -> tuple[list[Tensor], list[Tensor]]:
    """First and last values; rows do not divide evenly between the ranks, and a PReLU has a parameter of one entry."""
    bias = trial.takes((5,))
    model = nn.Sequential(nn.Linear(6, 7, bias=bias), nn.PReLU() if bias else nn.Tanh(), nn.Linear(7, 5, bias=bias))
    for i, p in enumerate(model.parameters()):
        p.data.copy_(0.3 * trial.tensor(p.shape, i))
    start = [p.detach().clone() for p in model.parameters()]
    shard(model)
    params = list(model.parameters())
    optimizer = trial.build(params)
    for inputs in gradients(_STEPS, (8, 6), trial.seed, torch.float32):
        optimizer.zero_grad()
        (model(inputs) - inputs[:, :5]).square().mean().backward()
        optimizer.step()
    return start, _values(optimizer, params)


def _rank(rank: int, folder: str, trial: _Trial) -> None:
    from torch.distributed.fsdp import fully_shard

    store, patience = f"file://{folder}/store", timedelta(minutes=5)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=_RANKS, timeout=patience)
    mesh = dist.device_mesh.init_device_mesh("cpu", (_RANKS,))

    def shard(model: nn.Sequential) -> None:
        for part in [*model, model]:
            fully_shard(part, mesh=mesh)

    values: list[Any] = _train_network(trial, shard)[1]
    whole = [value.full_tensor() for value in values]
    if rank == 0:
        torch.save(whole, f"{folder}/values.pt")
    dist.barrier()
    os._exit(0)  # not by the interpreter's end, at which threads of torch abort the process now and then


_CHECKS: dict[str, tuple[Callable[[_Trial], str | None], str]] = {
    "accumulated": (_accumulated, "accumulating gradients trains another model than one large batch does"),
    "resumed": (_resumed, "a run that continues from a checkpoint becomes another run"),
    "order": (_order, "listing parameters or groups in another order trains another model"),
    "none": (_none, "a part of the model that is not used stops or changes the training of the rest"),
    "weight decay": (_weight_decay, "biases and norms cannot be exempted from weight decay"),
    "shapes": (_shapes, "a scalar, a row or an empty parameter stops or spoils training"),
    "bfloat16": (_bfloat16, "small steps are rounded away, and training stalls"),
    "compiled": (_compiled, "a compiled loop fails, is compiled anew at every step, or trains another model"),
    "sharded": (_sharded, "training with FSDP2 fails, or trains another model than one process does"),
}
