"""Without delay, asynchronous training must equal synchronous training: the first update of two that differs."""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from lategrad.support.validation import require_count, require_number

Watch = Callable[[Any], Any]
Training = Callable[[Watch], Any] | Callable[[], Iterable[Any]]


class _StopTrainingError(BaseException):
    """Ends a watched training; not an ``Exception``, so that the training's own handlers do not catch it."""


def check_synchronous(
    train_a: Training, train_b: Training, *, updates: int = 50, tolerance: float = 0.0, seed: int = 0
) -> int:
    """Require that two trainings make the same updates; an ``AssertionError`` names the first one that differs.

    For tests: the asynchronous loop with a delay of 0 against the synchronous one. Each training is a function, either

    - of no argument, that yields after each update what is compared: a module, a tensor, a number, or a list
      or mapping of those;
    - or of one argument ``watch``, which calls ``optimizer = watch(optimizer)`` once and trains; then the parameters
      after each ``step`` are compared.

    Args:
        train_a: the reference.
        train_b: the training that should equal it.
        updates: how many are compared; a longer training is stopped there. If one training makes fewer, both must.
        tolerance: largest difference of an entry, relative to the largest entry of its tensor; 0 requires equal bits.
        seed: of torch's generator, before each of the two.

    Returns the number of updates compared.

    >>> def train(watch, batches=5):
    ...     x = nn.Parameter(torch.ones(2))
    ...     optimizer = watch(torch.optim.SGD([x], lr=0.1))
    ...     for batch in range(batches):
    ...         optimizer.zero_grad()
    ...         (batch * x).square().sum().backward()
    ...         optimizer.step()
    >>> check_synchronous(train, train)
    5
    >>> import lategrad as lg
    >>> check_synchronous(train, lambda watch: train(lambda optimizer: lg.optim.Delayed(watch(optimizer), 1)))
    Traceback (most recent call last):
    ...
    AssertionError: update 3 is the first that differs: tensor 0 by 0.16 (relative: 1), 2 of its 2 entries
    """
    require_count("updates", updates, low=1)
    require_number("tolerance", tolerance, low=0)
    histories = _states(train_a, updates, seed), _states(train_b, updates, seed)
    for number, (a, b) in enumerate(zip(*histories, strict=False), start=1):
        if problem := _difference(a, b, tolerance):
            raise AssertionError(f"update {number} is the first that differs: {problem}")
    made_a, made_b = map(len, histories)
    if made_a != made_b:
        raise AssertionError(f"the first {min(made_a, made_b)} updates are the same, but the trainings make {made_a} "
                             f"and {made_b} updates")  # fmt: skip
    if not made_a:
        raise AssertionError("neither training made an update: yield after each one, or call watch(optimizer)")
    return made_a


def _states(train: Training, updates: int, seed: int) -> list[dict[str, Tensor]]:
    """Copies of the compared state after each of the first updates."""
    torch.manual_seed(seed)
    if all(p.default is not p.empty for p in inspect.signature(train).parameters.values()):
        return [_copy(state) for state in islice(cast(Callable[[], Iterable[Any]], train)(), updates)]
    states: list[dict[str, Tensor]] = []

    def watch(optimizer: Any) -> Any:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"watch takes a torch.optim.Optimizer, got {type(optimizer).__name__}")

        def after_step(stepped: Optimizer, *_: Any) -> None:
            states.append(_copy([p for group in stepped.param_groups for p in group["params"]]))
            if len(states) >= updates:
                raise _StopTrainingError

        optimizer.register_step_post_hook(after_step)
        return optimizer

    try:
        result = cast(Callable[[Watch], Any], train)(watch)
        if isinstance(result, Iterator):  # a generator has not run yet
            for _ in result:
                pass
    except _StopTrainingError:
        pass
    return states


def _copy(state: Any) -> dict[str, Tensor]:
    if isinstance(state, nn.Module):
        return {name: p.detach().clone() for name, p in state.named_parameters()}
    if isinstance(state, Tensor):
        return {"": state.detach().clone()}
    if isinstance(state, int | float):
        return {"": torch.tensor(float(state), dtype=torch.float64)}
    if isinstance(state, Mapping | list | tuple):
        parts = state.items() if isinstance(state, Mapping) else enumerate(state)
        return {f"{part}.{name}".rstrip("."): tensor for part, value in parts for name, tensor in _copy(value).items()}
    raise TypeError(f"a training must yield modules, tensors, numbers, or lists or mappings of them, got {state!r}")


def _difference(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float) -> str | None:
    """A message about the first tensor that differs by more than the tolerance."""
    if a.keys() != b.keys():
        return f"{', '.join(a)} on one side, {', '.join(b)} on the other"
    for name, x in a.items():
        y, label = b[name], f"tensor {name}" if name else "it"
        if x.shape != y.shape or x.dtype != y.dtype:
            return f"{label} is {x.dtype} of shape {tuple(x.shape)}, and {y.dtype} of shape {tuple(y.shape)}"
        if torch.equal(x, y):
            continue
        apart = (x.double() - y.double()).abs()
        apart = torch.where(torch.isnan(x) & torch.isnan(y) | (x == y), 0.0, apart)
        largest, size = apart.max().item(), max(x.abs().max().item(), y.abs().max().item())
        relative = largest / size if size > 0 else math.inf
        if not (largest == 0 or relative <= tolerance):
            entries = f"{int((~(apart == 0)).sum())} of its {x.numel()} entries"
            return f"{label} by {largest:.3g} (relative: {relative:.3g}), {entries}"
    return None
