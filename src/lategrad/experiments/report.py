"""The report: one HTML page that carries its figures, and beside it every number and figure as a file.

The page loads nothing: styles and figures are in it, it has no scripts, and a content security policy forbids
the browser to fetch anything. It can be mailed, archived, printed, or read on a phone.
"""

from __future__ import annotations

import io
import os
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from lategrad.experiments.results import Section, Verdict
from lategrad.support.files import replacing
from lategrad.support.validation import require
from lategrad.trace import write_csv

_PAPER = "Learning Under Delayed Feedback: Implicitly Adapting to Gradient Delays"
_AUTHORS = "Aviv, Hakimi, Schuster, Levy, ICML 2021"
_STEM = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


def write_report(sections: Sequence[Section], out: str | os.PathLike[str], about: dict[str, Any]) -> Path:
    """Write ``report.html``, and beside it a CSV file for each section and an SVG and a PNG for each figure.

    Tables are in the page; the CSV files hold the numbers that they were made from.

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
    page = out / "report.html"
    with replacing(page) as part:
        part.write_text(_page(sections, drawings, about), encoding="utf-8")
    return page


def _check(sections: Sequence[Section]) -> None:
    require("sections", list(sections), len(sections) > 0, "at least one section")
    names: set[str] = set()
    stems: set[str] = set()
    for section in sections:
        _check_stem("the name of a section", section.name, names)
        for stem in section.figures:
            _check_stem(f"the stem of a figure of section {section.name!r}", stem, stems)
        for stem in section.captions:
            require(f"a caption of section {section.name!r}", stem, stem in section.figures,
                    f"for one of its figures ({', '.join(section.figures) or 'it has none'})")  # fmt: skip
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


def _page(sections: Sequence[Section], drawings: dict[str, str], about: dict[str, Any]) -> str:
    body = "\n".join(_section(section, drawings) for section in sections)
    contents = "\n".join(f'<li><a href="#section-{s.name}">{_marked(s.title)}</a></li>' for s in sections)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Reproduction: {escape(_PAPER)}</title>
<link rel="icon" href="data:,">
<style>{_CSS}</style>
</head>
<body>
<main>
<header>
<p class="kicker">Reproduction report</p>
<h1>{escape(_PAPER)}</h1>
<p class="authors">{escape(_AUTHORS)}</p>
</header>
{_summary(sections)}
<nav aria-label="Experiments">
<h2>Experiments</h2>
<ol>
{contents}
</ol>
</nav>
{_about(about)}
{body}
</main>
</body>
</html>
"""


def _summary(sections: Sequence[Section]) -> str:
    """The count of verdicts in a paragraph, and all verdicts in a table."""
    verdicts = [(section, index, verdict) for section in sections for index, verdict in enumerate(section.verdicts)]
    if not verdicts:
        return '<p class="summary">No claim was judged. The experiments and all their numbers are below.</p>'
    count = sum(verdict.reproduced for _, _, verdict in verdicts)
    claims = "claim" if len(verdicts) == 1 else "claims"
    rows = "\n".join(_verdict_row(*entry) for entry in verdicts)
    heads = "".join(f'<th role="columnheader" scope="col">{head}</th>' for head in _HEADS)
    return f"""<p class="summary"><strong>{count} of {len(verdicts)} {claims} reproduced.</strong>
Each claim of the paper is held against the numbers of this run by a stated criterion. How the
numbers came about is told experiment by experiment below; all of them are in files beside this page.</p>
<section aria-labelledby="verdicts">
<h2 id="verdicts">Verdicts</h2>
<table class="stacks" role="table">
<thead role="rowgroup"><tr role="row">{heads}</tr></thead>
<tbody role="rowgroup">
{rows}
</tbody>
</table>
</section>"""


_HEADS = ("Claim", "Criterion", "Measured", "Reproduced")


def _verdict_row(section: Section, index: int, verdict: Verdict) -> str:
    # The roles are those of the elements: browsers forget them where a narrow page lays the rows out as blocks.
    link = f'<a href="#verdict-{section.name}-{index + 1}">{_marked(verdict.claim)}</a>'
    badge = f'<span class="badge {_word(verdict)}">{_word(verdict)}</span>'
    texts = (link, _marked(verdict.criterion), _marked(verdict.measured), badge)
    cells = "".join(f'<td role="cell" data-head="{h}"><div>{t}</div></td>' for h, t in zip(_HEADS, texts, strict=True))
    return f'<tr role="row">{cells}</tr>'


def _word(verdict: Verdict) -> str:
    return "yes" if verdict.reproduced else "no"


def _about(about: dict[str, Any]) -> str:
    if not about:
        return ""
    rows = {key.replace("_", " "): _shown(value) for key, value in about.items()}
    return (
        f'<section class="about" aria-labelledby="about">\n<h2 id="about">What was run</h2>\n{_pairs(rows)}\n</section>'
    )


def _section(section: Section, drawings: dict[str, str]) -> str:
    parts = [f'<h2 id="title-{section.name}">{_marked(section.title)}</h2>']
    parts += [f"<p>{_marked(paragraph)}</p>" for paragraph in section.text]
    for stem in section.figures:
        caption = section.captions.get(stem, "")
        files = f'<span class="files"><a href="{stem}.svg">SVG</a> <a href="{stem}.png">PNG</a></span>'
        caption = f"<figcaption>{_marked(caption)} {files}</figcaption>"
        parts.append(f'<figure id="figure-{stem}">\n{drawings[stem]}\n{caption}\n</figure>')
    parts += [_table(caption, rows) for caption, rows in section.tables.items()]
    parts += [_verdict(section, index, verdict) for index, verdict in enumerate(section.verdicts)]
    if section.rows:
        rows, columns = len(section.rows), len(section.rows[0])
        size = f"{rows:,} row{'s' * (rows != 1)}, {columns} column{'s' * (columns != 1)}"
        name = f"{section.name}.csv"
        parts.append(f'<p class="data">Every number: <a href="{name}" download>{name}</a> ({size})</p>')
    if section.config:
        table = _pairs(dict(_flat(section.config)))
        parts.append(f"<details>\n<summary>Configuration</summary>\n{table}\n</details>")
    body = "\n".join(parts)
    return (
        f'<section class="experiment" id="section-{section.name}" aria-labelledby="title-{section.name}">\n'
        f"{body}\n</section>"
    )


def _table(caption: str, rows: Sequence[dict[str, str]]) -> str:
    """A table with a row of heads; the first column names its row. Where it is too wide it scrolls on its own."""
    heads = "".join(f'<th scope="col">{_marked(head)}</th>' for head in rows[0])
    lines = []
    for name, *cells in (list(row.values()) for row in rows):
        shown = "".join(f"<td>{_marked(cell)}</td>" for cell in cells)
        lines.append(f'<tr><th scope="row">{_marked(name)}</th>{shown}</tr>')
    body = "\n".join(lines)
    return (
        f'<div class="wide" role="region" aria-label="{escape(caption)}" tabindex="0">\n<table class="numbers">\n'
        f"<caption>{_marked(caption)}</caption>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n{body}\n</tbody>\n"
        "</table>\n</div>"
    )


def _verdict(section: Section, index: int, verdict: Verdict) -> str:
    words = "Reproduced" if verdict.reproduced else "Not reproduced"
    return f"""<div class="verdict {_word(verdict)}" id="verdict-{section.name}-{index + 1}">
<p><span class="badge {_word(verdict)}">{words}</span> {_marked(verdict.claim)}</p>
<dl>
<div><dt>Criterion</dt><dd>{_marked(verdict.criterion)}</dd></div>
<div><dt>Measured</dt><dd>{_marked(verdict.measured)}</dd></div>
</dl>
</div>"""


def _pairs(rows: dict[str, str]) -> str:
    names = {name: re.sub(r"([._/]|\b(?=\[))", r"\1<wbr>", escape(name)) for name in rows}
    lines = "\n".join(f'<tr><th scope="row">{names[k]}</th><td>{escape(v)}</td></tr>' for k, v in rows.items())
    return f'<table class="pairs">\n<tbody>\n{lines}\n</tbody>\n</table>'


def _marked(text: str) -> str:
    """The text in HTML, with what stands between backticks as code.

    >>> _marked("`lr` < 1 & more")
    '<code>lr</code> &lt; 1 &amp; more'
    """
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Nested dictionaries and lists as lines of name and value, the innermost ones in a line each.

    >>> dict(_flat({"rule": {"type": "Anytime", "learner": {"type": "OGD", "lr": 0.1}}, "seeds": [0, 1]}))
    {'rule.type': 'Anytime', 'rule.learner': 'type OGD, lr 0.1', 'seeds': '0, 1'}
    >>> dict(_flat({"sets": [{"type": "Ball", "radius": 2}, None]}))
    {'sets[0]': 'type Ball, radius 2', 'sets[1]': 'none'}
    """
    inner: dict[str, Any] = {}
    if isinstance(value, dict):
        inner = {f"{name}.{key}" if name else str(key): item for key, item in value.items()}
    elif isinstance(value, list | tuple):
        inner = {f"{name}[{index}]": item for index, item in enumerate(value)}
    if name and not any(isinstance(item, dict | list | tuple) for item in inner.values()):
        yield name, _shown(value)
    else:
        for key, item in inner.items():
            yield from _flat(item, key)


def _shown(value: Any) -> str:
    """A plain value as a reader would write it.

    >>> _shown({"python": "3.12", "torch": None}), _shown([1e-3, 10 ** 0.5, 25000]), _shown(True), _shown([])
    ('python 3.12, torch none', '0.001, 3.16227766, 25000', 'yes', 'none')
    """
    if isinstance(value, dict) and value:
        return ", ".join(f"{key} {_shown(item)}" for key, item in value.items())
    if isinstance(value, list | tuple | range) and value:
        return ", ".join(map(_shown, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.10g}"
    return "none" if value is None or value in ("", [], (), {}) else str(value)


# Sizes in rem, colours as variables: the dark page and the printed one only change those.
_CSS = """
:root {
  color-scheme: light dark;
  --page: #fdfdfc; --ink: #1f2328; --soft: #5b626b; --line: #dcdedf; --panel: #f4f5f4; --link: #1f5a96;
  --yes: #17693f; --yes-panel: #e6f3eb; --no: #a32b22; --no-panel: #faeae8;
  --serif: Charter, "Bitstream Charter", "Iowan Old Style", "Palatino Linotype", Georgia, "DejaVu Serif", serif;
  --sans: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, "DejaVu Sans", sans-serif;
  --mono: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #16181b; --ink: #e3e4e2; --soft: #a0a6ad; --line: #363a3f; --panel: #1f2226; --link: #8ab8ea;
    --yes: #74cf9b; --yes-panel: #1b3226; --no: #f3998f; --no-panel: #3d2321;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 1.0625rem/1.6 var(--serif); overflow-wrap: break-word;
}
main { max-width: 60rem; margin: 0 auto; padding: 3.5rem 1.5rem 5rem; }
h1, h2 { line-height: 1.25; font-weight: 600; text-wrap: balance; }
h1 { font-size: 2.1rem; margin: 0 0 .5rem; max-width: 46rem; }
h2 { font-size: 1.4rem; margin: 0 0 .9rem; max-width: 46rem; }
p { margin: 0 0 1rem; max-width: 42rem; }
a { color: var(--link); text-decoration-thickness: .06em; text-underline-offset: .18em; }
code { font-family: var(--mono); font-size: .88em; overflow-wrap: anywhere; }
.kicker { font: 600 .8rem/1.4 var(--sans); letter-spacing: .08em; text-transform: uppercase; color: var(--soft); }
.authors { color: var(--soft); margin-bottom: 2rem; }
.summary { font-size: 1.15rem; }
section, nav { margin-top: 2.75rem; }
nav ol { margin: 0; padding-left: 1.4rem; }
nav li { margin: .2rem 0; }
.experiment { margin-top: 3.5rem; padding-top: 2.5rem; border-top: 1px solid var(--line); }

table { border-collapse: collapse; width: 100%; font: .9rem/1.5 var(--sans); }
th, td { text-align: left; vertical-align: top; padding: .55rem 1.1rem .55rem 0; border-bottom: 1px solid var(--line); }
th:last-child, td:last-child { padding-right: 0; }
th { font-weight: 600; color: var(--soft); }
thead th { border-bottom: 2px solid var(--line); }
td { overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
.stacks td:nth-child(1) { width: 36%; }
.stacks td:nth-child(2), .stacks td:nth-child(3) { width: 27%; }
.stacks td:nth-child(4) { width: 10%; }
.wide { margin: 1.5rem 0; overflow-x: auto; }
.numbers { font-size: .82rem; }
.numbers caption { text-align: left; padding-bottom: .4rem; color: var(--soft); }
.numbers th, .numbers td { padding: .25rem .7rem .25rem 0; white-space: nowrap; }
.pairs { width: auto; max-width: 100%; }
.pairs th { font-weight: 400; width: 1%; min-width: 8rem; max-width: 16rem; overflow-wrap: anywhere; }
.pairs th, .pairs td { padding-top: .3rem; padding-bottom: .3rem; }

.badge {
  display: inline-block; padding: .05em .6em; border: 1px solid currentColor; border-radius: 1em;
  font: 600 .8rem/1.5 var(--sans); white-space: nowrap;
}
.badge.yes { color: var(--yes); background: var(--yes-panel); }
.badge.no { color: var(--no); background: var(--no-panel); }
.verdict {
  margin: 1rem 0; padding: .8rem 1.1rem; max-width: 46rem; background: var(--panel);
  border-left: .25rem solid var(--line); border-radius: 0 .3rem .3rem 0; scroll-margin-top: 1rem;
}
.verdict.yes { border-color: var(--yes); }
.verdict.no { border-color: var(--no); }
.verdict p { margin: 0 0 .4rem; }
.verdict .badge { margin-right: .4rem; }
.verdict dl { margin: 0; font: .9rem/1.5 var(--sans); }
.verdict dl div { display: flex; gap: .8rem; }
dt { flex: 0 0 5rem; color: var(--soft); }
dd { margin: 0; min-width: 0; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }

figure { margin: 1.75rem 0; }
.drawing {
  max-width: calc(1.2 * var(--width)); padding: .5rem;
  background: #fff; border: 1px solid var(--line); border-radius: .3rem;
}
figure svg {
  display: block; width: 100%; height: auto; background: #fff;
  stroke-linejoin: round; stroke-linecap: butt;
}
figcaption { margin-top: .6rem; max-width: 46rem; font: .9rem/1.5 var(--sans); color: var(--soft); }
.files { white-space: nowrap; }
.files a + a { margin-left: .35rem; }
.data { font: .9rem/1.5 var(--sans); }
details { margin-top: 1rem; font-family: var(--sans); font-size: .9rem; }
summary { cursor: pointer; color: var(--soft); padding: .3rem 0; width: fit-content; }
details .pairs { margin: .3rem 0 1rem; font-size: .85rem; }
details .pairs th { min-width: 14rem; }

@media screen and (max-width: 44rem) {
  body { font-size: 1rem; }
  main { padding: 2rem 1rem 3rem; }
  h1 { font-size: 1.6rem; }
  h2 { font-size: 1.25rem; }
  .summary { font-size: 1.05rem; }
  .drawing { padding: .2rem; }
  .stacks, .stacks tbody, .stacks tr, .stacks td { display: block; width: auto !important; }
  .stacks thead { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
  .stacks tr { padding: .7rem 0; border-bottom: 1px solid var(--line); }
  .stacks td { display: flex; gap: .8rem; padding: .15rem 0; border: 0; }
  .stacks td::before { content: attr(data-head); flex: 0 0 5.5rem; color: var(--soft); }
  .stacks td div { min-width: 0; }
  .pairs th { min-width: 5.5rem; max-width: 9rem; padding-right: .8rem; }
  details .pairs th { min-width: 8rem; }
}

@page { margin: 18mm 16mm; }
@media print {
  :root {
    color-scheme: light;
    --page: #fff; --ink: #000; --soft: #444; --line: #bbb; --panel: #fff; --link: #000;
    --yes: #17693f; --yes-panel: #fff; --no: #a32b22; --no-panel: #fff;
  }
  body { font-size: 10.5pt; line-height: 1.45; }
  main { max-width: none; padding: 0; }
  p, h1, h2, figcaption, .verdict { max-width: none; }
  h1 { font-size: 18pt; }
  h2 { font-size: 14pt; break-after: avoid; }
  table, .verdict dl, figcaption, .data, details .pairs { font-size: 9pt; }
  .numbers { font-size: 6.5pt; }
  .wide { overflow: visible; }
  section, nav { margin-top: 1.5rem; }
  .experiment { margin-top: 2rem; padding-top: 1.2rem; }
  p { orphans: 3; widows: 3; }
  figure, tr, .verdict, nav, .about { break-inside: avoid; }
  .summary { font-size: 11.5pt; }
  .pairs th, .pairs td { padding-top: .2rem; padding-bottom: .2rem; }
  .drawing { border: 0; padding: 0; max-width: calc(.8 * var(--width)); }
  figure svg { max-height: 20cm; }
  a { text-decoration: none; }
  .files { display: none; }
  details::details-content { content-visibility: visible; block-size: auto; }
}
"""
