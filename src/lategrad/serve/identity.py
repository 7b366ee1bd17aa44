"""What a problem is known by, so that a run is resumed and replayed with the one it was made with."""

from __future__ import annotations

import hashlib
from typing import Any

from lategrad.problems.problem import Problem
from lategrad.support.validation import require


def identify(problem: Problem) -> dict[str, str]:
    """What a problem says it is, and a checksum of what is in it, where it has one."""
    contents = getattr(problem, "fingerprint", lambda: "")()
    silent = type(problem).__repr__ is object.__repr__  # it would give its address in memory
    name = type(problem).__qualname__ if silent else repr(problem)
    return {"problem": name, "contents": hashlib.sha256(contents.encode()).hexdigest()}


def require_same(problem: Problem, saved: dict[str, Any], where: str) -> None:
    """Require the problem that a configuration was made with."""
    now = identify(problem)
    require("problem", now["problem"], now["problem"] == saved["problem"], f"the one {where}, {saved['problem']}")
    if now["contents"] != saved["contents"]:
        raise ValueError(f"problem must be the one {where}: {saved['problem']} had other data or another preprocessing")
