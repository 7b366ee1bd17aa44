"""What an experiment hands to the report: figures, numbers, and verdicts computed from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from matplotlib.figure import Figure


@dataclass(frozen=True)
class Verdict:
    """A claim, held against the numbers by a stated criterion."""

    claim: str
    criterion: str
    measured: str
    reproduced: bool | None
    """None where the numbers cannot tell: then there is no verdict, and ``measured`` says why."""
    quote: str = ""
    """The paper's own words, where there are such."""
    figure: str = ""
    """The stem of the figure that shows it, if one does."""


@dataclass(frozen=True)
class Section:
    """One experiment of the report."""

    name: str
    """Short and unique, such as ``fig1``: the stem of its CSV file."""
    title: str
    text: tuple[str, ...]
    """Paragraphs: what was run and how to read it."""
    figures: dict[str, Figure]
    """By the stem of their files."""
    rows: list[dict[str, Any]]
    """Every number, for the CSV; all rows have the same keys."""
    verdicts: tuple[Verdict, ...] = ()
    captions: dict[str, str] = field(default_factory=dict)
    """By the stem of the figure."""
    tables: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    """By their captions; all rows of a table have the same keys, its columns."""
    config: dict[str, Any] = field(default_factory=dict)
    """Everything that was chosen: plain JSON values."""
    finding: str = ""
    """What was found, in a sentence or two that follow from the numbers: they open the report."""
    headline: str = ""
    """The stem of the figure that stands beside the findings, if one does."""
