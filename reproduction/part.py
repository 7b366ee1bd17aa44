"""What a part of the reproduction is: the work to be done, and the section of the report that is made of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from reproduction.jobs import Job
from reproduction.results import Section


@dataclass(frozen=True)
class Run:
    """One reproduction: how much is computed, where its files go, and on what."""

    scale: str
    """quick, paper or full."""
    out: Path
    device: str = "cpu"
    models: tuple[str, ...] = ()
    """Limit deep models, with local steps or without, to these, unless empty."""
    rules: tuple[str, ...] = ()
    """Limit the rules that train them."""


@dataclass(frozen=True)
class Part:
    """One experiment by its name on the command line."""

    name: str
    jobs: Callable[[Run], list[Job]]
    """Work that may be shared with other parts: jobs with the same label are done once."""
    section: Callable[[Run], Section]
    """Read what the jobs left."""
    hours_on_a_cpu: bool = False
    """At any scale but quick: then it is not run without a GPU, unless it is asked for by name."""
    only_by_name: bool = False
    """Whether ``all`` leaves it out."""
