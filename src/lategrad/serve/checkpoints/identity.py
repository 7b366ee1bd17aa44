"""What a problem is known by, so that a run is resumed and replayed with the one it was made with."""

from __future__ import annotations

import hashlib
import warnings
from typing import Any

import torch

from lategrad.problems.problem import Problem
from lategrad.support.validation import require


def identify(problem: Problem) -> dict[str, str]:
    """What a problem says it is, a checksum of what is in it, where it has one, and one of where it starts."""
    contents = getattr(problem, "fingerprint", lambda: "")()
    silent = type(problem).__repr__ is object.__repr__  # it would give its address in memory
    name = type(problem).__qualname__ if silent else repr(problem)
    start = problem.start().detach().cpu().contiguous().view(torch.uint8).numpy()
    return {
        "problem": name,
        "contents": hashlib.sha256(contents.encode()).hexdigest(),
        "start": hashlib.sha256(start.tobytes()).hexdigest(),
    }


def require_same(problem: Problem, saved: dict[str, Any], where: str, *, same_start: bool) -> None:
    """Require the problem that a configuration was made with.

    A run that goes on has its parameters, and needs the data and the shapes; one that is made again needs the start
    too, which for a network is random.
    """
    now = identify(problem)
    require("problem", now["problem"], now["problem"] == saved["problem"], f"the one {where}, {saved['problem']}")
    if now["contents"] != saved["contents"]:
        raise ValueError(f"problem must be the one {where}: {saved['problem']} had other data or another preprocessing")
    if same_start and now["start"] != saved.get("start", now["start"]):
        raise ValueError(f"problem must be the one {where}: {saved['problem']} started from other parameters")
    if not hasattr(problem, "fingerprint"):
        warnings.warn(f"{saved['problem']} has no fingerprint(): that its data are those {where} could not be checked",
                      stacklevel=3)  # fmt: skip
