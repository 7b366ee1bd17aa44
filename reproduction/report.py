"""The report: one HTML page that carries its figures, and beside it every number and figure as a file.

The page (``report.html.j2``, ``report.css``) loads nothing: styles and figures are in it, it has no scripts, and a
content security policy forbids the browser to fetch anything. It can be mailed, archived, printed, or read on a phone.
"""

import io
import json
import os
import re
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

import matplotlib
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from matplotlib.figure import Figure

from lategrad.support.files import replacing, write_text
from lategrad.support.validation import require
from lategrad.trace import write_csv
from reproduction.style import TITLES

_STEM = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_OUTCOMES = {True: "yes", False: "no", None: "not counted"}
MOST_FINDINGS = 6


@dataclass(frozen=True)
class Verdict:
    """A claim, held against the numbers by a stated criterion."""

    claim: str
    criterion: str
    measured: str
    holds: bool | None  # None where there is no verdict (its theorem is about other runs); ``measured`` says why
    source: Literal["paper", "ours"] = "paper"  # whose claim it is
    quote: str = ""  # the paper's own words, if there are any
    figure: str = ""  # the stem of the figure that shows it, if one does

    @property
    def outcome(self) -> str:
        return _OUTCOMES[self.holds]


@dataclass(frozen=True)
class Section:
    """One part of the report."""

    name: str  # short and unique, such as ``fig1``: the stem of its CSV file
    title: str
    text: tuple[str, ...]  # paragraphs: what was run and how to read it
    figures: dict[str, Figure]  # by the stem of their files
    rows: list[dict[str, Any]]  # every number, for the CSV; all rows have the same keys
    verdicts: tuple[Verdict, ...] = ()
    captions: dict[str, str] = field(default_factory=dict)  # by the stem of the figure
    tables: dict[str, list[dict[str, str]]] = field(default_factory=dict)  # by caption; the keys of a row: the columns
    config: dict[str, Any] = field(default_factory=dict)  # everything that was chosen: plain JSON values
    finding: str = ""  # in a sentence or two that follow from the numbers; the report opens with the findings
    headline: str = ""  # the stem of the figure that stands beside the findings, if one does


def prose(name: str, **values: Any) -> tuple[tuple[str, ...], dict[str, str]]:
    """The paragraphs of ``prose/NAME.md.j2``, filled with these values, and its captions by the stem of the figure."""
    filled = _environment(autoescape=False).get_template(f"prose/{name}.md.j2").render(values)
    text, *captions = re.split(r"^# caption ", filled, flags=re.MULTILINE)
    paragraphs = tuple(filter(None, map(str.strip, text.split("\n\n"))))
    return paragraphs, {stem: caption.strip() for stem, _, caption in (part.partition("\n") for part in captions)}


def verdict(
    block: str, holds: bool | None, *, source: Literal["paper", "ours"] = "paper", figure: str = "", **values: Any
) -> Verdict:
    """A verdict in the words of a block of ``prose/verdicts.md.j2``."""
    paragraphs = _block("verdicts", block, values).split("\n\n")
    claim, criterion, measured, *quote = filter(None, map(str.strip, paragraphs))
    return Verdict(claim, criterion, measured, holds, source, "".join(quote), figure)


def finding(block: str, **values: Any) -> str:
    """A finding in the words of a block of ``prose/findings.md.j2``."""
    return _block("findings", block, values).strip()


def _block(file: str, block: str, values: dict[str, Any]) -> str:
    template = _environment(autoescape=False).get_template(f"prose/{file}.md.j2")
    return "".join(template.blocks[block](template.new_context({"TITLES": TITLES, **values})))


@lru_cache
def _environment(autoescape: bool) -> Environment:
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=autoescape,
                              undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)  # fmt: skip
    environment.filters |= {"marked": _marked, "fmt": format,
                            "json": partial(json.dumps, indent=1, ensure_ascii=False, default=str)}  # fmt: skip
    return environment


def write_report(sections: Sequence[Section], out: str | os.PathLike[str], about: dict[str, Any]) -> Path:
    """Write ``report.html``, and beside it a CSV file for each section, ``verdicts.csv``, ``tables.json`` (all tables
    by section and caption), and each figure as SVG and PNG.

    Everything is checked before anything is written, each file appears whole or not at all, and the page is written
    last: its links work whenever it is there. Text between backticks is set as code.

    Args:
        sections: in the order of the page.
        out: the folder; created if missing.
        about: what was run (scale, device, versions, seeds, data, date, seconds, command line), for a table.
    """
    _check(sections)
    out = Path(out)
    drawings: dict[str, dict[str, Any]] = {}  # each is an image of its own in the page
    for section in sections:
        if section.rows:
            write_csv(out / f"{section.name}.csv", section.rows)
        for stem, figure in section.figures.items():
            label = section.captions.get(stem) or section.title
            svg, png = _draw(figure, stem, label)
            for suffix, content in (("svg", svg), ("png", png)):
                with replacing(out / f"{stem}.{suffix}") as part:
                    part.write_bytes(content)
            drawings[stem] = {"label": label, "width": figure.get_figwidth() * 72, "svg": b64encode(svg).decode()}
    verdicts = [{"section": section.name, "source": verdict.source, "claim": verdict.claim,
                 "criterion": verdict.criterion, "measured": verdict.measured, "holds": verdict.outcome}
                for section in sections for verdict in section.verdicts]  # fmt: skip
    if verdicts:
        write_csv(out / "verdicts.csv", verdicts)
    if tables := {section.name: section.tables for section in sections if section.tables}:
        write_text(out / "tables.json", json.dumps(tables, indent=1))
    findings = [section.finding for section in sections if section.finding][:MOST_FINDINGS]
    template = _environment(autoescape=True).get_template("report.html.j2")
    html = template.render(sections=sections, drawings=drawings, about=about, findings=findings, count=_count(sections))
    return write_text(out / "report.html", html.strip() + "\n")


def _count(sections: Sequence[Section]) -> dict[str, str]:
    """How many of the paper's claims and of ours hold, of those that are counted."""
    counted = {}
    for source, name in (("paper", "The paper's claims"), ("ours", "Our claims")):
        outcomes = [verdict.holds for section in sections for verdict in section.verdicts if verdict.source == source]
        if outcomes:
            others = outcomes.count(None)
            more = f" ({others} more {'is' if others == 1 else 'are'} shown, not counted)" if others else ""
            judged = len(outcomes) - others
            counted[name] = f"{outcomes.count(True)} of {judged} hold here{more}" if judged else "none is counted here"
    return counted


def _check(sections: Sequence[Section]) -> None:
    require("sections", list(sections), len(sections) > 0, "at least one section")
    names: set[str] = {"verdicts"}
    stems: set[str] = set()
    for section in sections:
        where = f"of section {section.name!r}"
        _check_stem("the name of a section", section.name, names)
        for stem in section.figures:
            _check_stem(f"the stem of a figure {where}", stem, stems)
        named = {"a caption": [*section.captions], "the headline": [section.headline],
                 "the figure of a verdict": [verdict.figure for verdict in section.verdicts]}  # fmt: skip
        for what, own in named.items():
            for stem in filter(None, own):
                require(f"{what} {where}", stem, stem in section.figures,
                        f"one of its figures ({', '.join(section.figures) or 'it has none'})")  # fmt: skip
        tables = {f"table {caption!r}": table for caption, table in section.tables.items()}
        for what, rows in (tables | ({"rows": section.rows} if section.rows else {})).items():
            keys = [list(row) for row in rows]
            alike = len(keys) > 0 and all(own and own == keys[0] for own in keys)
            require(f"{what} {where}", keys, alike, "rows that all have the same keys, at least one")


def _check_stem(what: str, stem: str, taken: set[str]) -> None:
    """Require a plain file name that no other has, not even in other capitals: some disks fold them."""
    require(what, stem, _STEM.fullmatch(stem) is not None, "letters, digits, '-' and '_', such as 'fig1'")
    require(what, stem, stem.lower() not in taken, "unique in the report, whatever its capitals")
    taken.add(stem.lower())


def _draw(figure: Figure, stem: str, title: str) -> tuple[bytes, bytes]:
    """The figure as SVG and PNG: on white, letters as paths (no reader's fonts matter), the same bytes each time."""
    svg, png = io.BytesIO(), io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": stem}):
        figure.savefig(svg, format="svg", facecolor="white", metadata={"Date": None, "Title": title})
        figure.savefig(png, format="png", facecolor="white", dpi=200)
    return svg.getvalue(), png.getvalue()


def _marked(text: str) -> Markup:
    """The text in HTML, with what stands between backticks as code.

    >>> _marked("`lr` < 1 & more")
    Markup('<code>lr</code> &lt; 1 &amp; more')
    """
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))
