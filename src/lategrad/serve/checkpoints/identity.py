"""Identifies a problem, so that a run is resumed and replayed with the same one."""

import hashlib
import warnings
from typing import Any

from lategrad.problems.problem import Problem
from lategrad.support.runs import checksum
from lategrad.support.validation import require


def identify(problem: Problem) -> dict[str, str]:
    """The problem's repr, and checksums of its fingerprint, if it has one, and of its start."""
    contents = getattr(problem, "fingerprint", lambda: "")()
    has_repr = type(problem).__repr__ is not object.__repr__  # which would give its address in memory
    name = repr(problem) if has_repr else type(problem).__qualname__
    return {"problem": name, "contents": hashlib.sha256(contents.encode()).hexdigest(),
            "start": checksum(problem.start())}  # fmt: skip


def require_same(problem: Problem, saved: dict[str, Any], where: str, *, same_start: bool) -> None:
    """Require the problem of a saved configuration; a replay needs its start too, which is random for a network."""
    now = identify(problem)
    require("problem", now["problem"], now["problem"] == saved["problem"], f"the one {where}, {saved['problem']}")
    if now["contents"] != saved["contents"]:
        raise ValueError(f"problem must be the one {where}: {saved['problem']} has other data or another preprocessing")
    if same_start and now["start"] != saved.get("start", now["start"]):
        raise ValueError(f"problem must be the one {where}: {saved['problem']} started from other parameters")
    if not hasattr(problem, "fingerprint"):
        warnings.warn(f"{saved['problem']} has no fingerprint(): that its data are those {where} could not be checked",
                      stacklevel=3)  # fmt: skip
