"""The report: one HTML page that carries its figures, and beside it every number and figure as a file.

The page loads nothing: styles and figures are in it, it has no scripts, and a content security policy forbids
the browser to fetch anything. It can be mailed, archived, printed, or read on a phone.
"""

from __future__ import annotations

import io
import json
import os
import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from lategrad.support.files import replacing
from lategrad.support.validation import require
from lategrad.trace import write_csv
from reproduction.page import outcome, page_of
from reproduction.results import Section

_STEM = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


def write_report(sections: Sequence[Section], out: str | os.PathLike[str], about: dict[str, Any]) -> Path:
    """Write ``report.html``; beside it CSV files for each section and for all verdicts, each figure as SVG and PNG.

    Tables are in the page, and all of them in ``tables.json``, by section and caption; the CSV files hold the numbers
    that they were made from.

    Everything is checked before anything is written, each file appears whole or not at all, and the page comes
    last: whoever sees it sees the files that it links to. In titles, paragraphs, captions and verdicts, text
    between backticks is set as code; all else is shown as it is.

    Args:
        sections: in the order of the page.
        out: the folder; made if missing.
        about: what was run (scale, device, versions, seeds, data, date, seconds, command line), for a table.

    Returns:
        The path of the page.
    """
    _check(sections)
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    drawings: dict[str, str] = {}
    for section in sections:
        if section.rows:
            with replacing(out / f"{section.name}.csv") as part:
                write_csv(part, section.rows)
        for stem, figure in section.figures.items():
            label = section.captions.get(stem) or section.title
            svg, png = _drawn(figure, stem, label)
            for suffix, content in (("svg", svg), ("png", png)):
                with replacing(out / f"{stem}.{suffix}") as part:
                    part.write_bytes(content)
            drawings[stem] = _inline(svg, stem, label)
    judged = [{"section": section.name, "claim": verdict.claim, "criterion": verdict.criterion,
               "measured": verdict.measured, "reproduced": outcome(verdict)}
              for section in sections for verdict in section.verdicts]  # fmt: skip
    if judged:
        with replacing(out / "verdicts.csv") as part:
            write_csv(part, judged)
    if tables := {section.name: section.tables for section in sections if section.tables}:
        with replacing(out / "tables.json") as part:
            part.write_text(json.dumps(tables, indent=1))
    page = out / "report.html"
    with replacing(page) as part:
        part.write_text(page_of(sections, drawings, about), encoding="utf-8")
    return page


def _check(sections: Sequence[Section]) -> None:
    require("sections", list(sections), len(sections) > 0, "at least one section")
    names: set[str] = {"verdicts"}
    stems: set[str] = set()
    for section in sections:
        _check_stem("the name of a section", section.name, names)
        for stem in section.figures:
            _check_stem(f"the stem of a figure of section {section.name!r}", stem, stems)
        for stem in section.captions:
            require(f"a caption of section {section.name!r}", stem, stem in section.figures,
                    f"for one of its figures ({', '.join(section.figures) or 'it has none'})")  # fmt: skip
        shown = [("the headline", section.headline), *(("the figure of a verdict", v.figure) for v in section.verdicts)]
        for what, stem in shown:
            require(f"{what} of section {section.name!r}", stem, not stem or stem in section.figures,
                    f"one of its figures ({', '.join(section.figures) or 'it has none'})")  # fmt: skip
        for caption, table in section.tables.items():
            require(f"table {caption!r} of section {section.name!r}", table,
                    len(table) > 0 and all(list(row) == list(table[0]) for row in table),
                    "rows that all have the same keys, at least one")  # fmt: skip
        for index, row in enumerate(section.rows):
            keys = list(section.rows[0])
            require(f"row {index} of section {section.name!r}", list(row), bool(row) and row.keys() == set(keys),
                    f"a row with the keys of row 0, {keys!r}" if keys else "a row with at least one key")  # fmt: skip


def _check_stem(what: str, stem: str, taken: set[str]) -> None:
    """Require a plain file name that no other has, not even in other capitals: some disks fold them."""
    require(what, stem, _STEM.fullmatch(stem) is not None, "letters, digits, '-' and '_', such as 'fig1'")
    require(what, stem, stem.lower() not in taken, "unique in the report, whatever its capitals")
    taken.add(stem.lower())


def _drawn(figure: Figure, stem: str, title: str) -> tuple[bytes, bytes]:
    """The figure as SVG and PNG: on white, letters as paths (no reader's fonts matter), the same bytes each time."""
    svg, png = io.BytesIO(), io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": stem}):
        figure.savefig(svg, format="svg", facecolor="white", metadata={"Date": None, "Title": title})
        figure.savefig(png, format="png", facecolor="white", dpi=200)
    return svg.getvalue(), png.getvalue()


def _inline(svg: bytes, stem: str, label: str) -> str:
    """An SVG file as an element of an HTML page that holds others like it.

    It scales with the page instead of having a size, keeps only the ids that are referred to, marked with the
    stem, and loses what would act outside it: namespaces, metadata, and its style sheet (see ``figure svg``).
    """
    root = ET.fromstring(svg)
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.rpartition("}")[2] in ("metadata", "style", "title"):
                parent.remove(child)
    referred: set[str] = set()

    def renamed(match: re.Match[str]) -> str:
        referred.add(match[2])
        return f"{match[1]}{stem}.{match[2]}"

    elements = list(root.iter())
    for element in elements:
        element.tag = element.tag.rpartition("}")[2]
        element.attrib = {
            key.rpartition("}")[2]: re.sub(r"(^#|url\(#)([^)]+)", renamed, value) if key != "id" else value
            for key, value in element.attrib.items()
        }
        element.tail = "\n"
    for element in elements:
        name = element.attrib.pop("id", None)
        if name in referred:
            element.set("id", f"{stem}.{name}")
    view = root.attrib["viewBox"]
    root.attrib = {"role": "img", "aria-label": label, "viewBox": view}
    # Its own width bounds it (see ``.drawing``), so that letters are about alike in all figures.
    drawing = ET.tostring(root, encoding="unicode").strip()
    return f'<div class="drawing" style="--width: {view.split()[2]}pt">{drawing}</div>'
