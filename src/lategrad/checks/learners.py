"""Checks for online learners."""

from typing import Any

import torch

from lategrad.checks.comparing import Reference, check_reference, gradients
from lategrad.checks.machine import check_first_state, check_machine
from lategrad.learners.learner import Learner, Linear
from lategrad.rules.anytime import Anytime
from lategrad.support.validation import require


def check_learner(
    learner: Learner[Any], *, dim: int = 6, seed: int = 0, reference: Reference | None = None, compile: bool = True
) -> None:
    """Run all generic checks on an online learner.

    Args:
        learner: the learner, with plain numbers as hyper-parameters.
        dim: dimension of the test vectors; must fit the learner's constraint set.
        seed: of the random starts and gradients.
        reference: a plain transcription to be equal to on the first steps, called with the start and the
            gradients as lists (weights 1, 2, 3, ...; each gradient is the hint for the next round) and
            returning the plays :math:`w_1, w_2, \\dots`, one more than there are gradients.
        compile: also compare with ``torch.compile``; takes seconds.

    >>> import lategrad as lg
    >>> check_learner(lg.OGD(lr=0.5, domain=lg.Ball(1.0)), compile=False)
    """
    missing = [member for member in ("domain", "init", "predict", "update") if not hasattr(learner, member)]
    require("learner", type(learner).__name__, not missing, f"an online learner, with {', '.join(missing)}")
    check_first_state(learner, "learner", type(learner).__name__, gradients(1, (3, dim), seed)[0])
    rule = Anytime(learner, power=0, interpolation=0.0)  # its queries are the learner's plays
    check_machine(rule, "learner", type(learner).__name__, dim, steps=6, seed=seed, compile=compile)
    if reference is not None:
        x0, grads = gradients(1, (dim,), seed + 1)[0], gradients(5, (dim,), seed)
        state = learner.init(x0)
        plays = [learner.predict(state)]
        for t, grad in enumerate(grads, start=1):
            loss = Linear(torch.tensor([float(t)], dtype=torch.float64), grad)
            state = learner.update(state, loss, hint=Linear(loss.weight + 1, grad))
            plays.append(learner.predict(state))
        check_reference(plays, x0, grads, reference, "learner: the first plays differ from the reference")
