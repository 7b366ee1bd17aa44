"""The report's page: what was found and the pictures that show it, a section for each experiment, all verdicts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from typing import Any

from reproduction.page_style import STYLE_SHEET
from reproduction.results import Section, Verdict

_PAPER = "Learning Under Delayed Feedback: Implicitly Adapting to Gradient Delays"
_AUTHORS = "Aviv, Hakimi, Schuster, Levy, ICML 2021"
_HEADS = ("Claim", "Criterion", "Measured", "Reproduced")
_OUTCOMES = {True: ("yes", "Reproduced"), False: ("no", "Not reproduced"), None: ("open", "Not judged")}


def page_of(sections: Sequence[Section], drawings: dict[str, str], about: dict[str, Any]) -> str:
    """The whole page; ``drawings`` are the figures as elements, by their stems."""
    body = "\n".join(_section(section, drawings) for section in sections)
    targets = {"findings": "Findings", **{f"section-{s.name}": _short(s.title) for s in sections},
               "verdicts": "All verdicts", **({"about": "What was run"} if about else {})}  # fmt: skip
    contents = "\n".join(
        f'<li><a href="#{target}" style="animation-timeline: --{target}">{_marked(title)}</a></li>'
        for target, title in targets.items()
    )
    timelines = ", ".join(f"--{target}" for target in targets)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Reproduction: {escape(_PAPER)}</title>
<link rel="icon" href="data:,">
<style>{STYLE_SHEET}</style>
</head>
<body style="timeline-scope: {timelines}">
<nav aria-label="Contents">
<ol>
{contents}
</ol>
</nav>
<main>
<header>
<p class="kicker">Reproduction report</p>
<h1>{escape(_PAPER)}</h1>
<p class="authors">{escape(_AUTHORS)}</p>
</header>
{_findings(sections, drawings)}
{body}
{_verdicts(sections)}
{_about(about)}
</main>
</body>
</html>
"""


def _timeline(target: str) -> str:
    """What lets the link to a section follow the scroll."""
    return f'style="view-timeline-name: --{target}"'


def _short(title: str) -> str:
    """What stands before the first full stop: "Figure 1" of "Figure 1. Accuracy against the delay"."""
    return title.partition(". ")[0]


def _findings(sections: Sequence[Section], drawings: dict[str, str]) -> str:
    """What was found, in a paragraph, and beside it the pictures that show it."""
    found = " ".join(_marked(section.finding) for section in sections if section.finding)
    pictures = "\n".join(_figure(s, s.headline, drawings) for s in sections if s.headline)
    paragraph = f'<p class="summary">{found}</p>\n' if found else ""
    return f"""<section id="findings" {_timeline("findings")} aria-label="Findings">
<div class="words">
{paragraph}<p>{_count(sections)}</p>
</div>
<div class="pictures">
{pictures}
</div>
</section>"""


def _count(sections: Sequence[Section]) -> str:
    """How many claims were judged, and how."""
    outcomes = [verdict.reproduced for section in sections for verdict in section.verdicts]
    if not outcomes:
        return "No claim was judged. The experiments and all their numbers are below."
    claims = "claim" if len(outcomes) == 1 else "claims"
    unclear = f" {outcomes.count(None)} could not be judged by these numbers." if None in outcomes else ""
    return (
        f"<strong>{outcomes.count(True)} of {len(outcomes)} {claims} reproduced.</strong>{unclear} Each is held "
        "against "
        'the numbers of this run by a stated criterion; <a href="#verdicts">all verdicts</a> are at the end, and every '
        "number is in files beside this page."
    )


def _verdicts(sections: Sequence[Section]) -> str:
    """All verdicts in a table."""
    rows = [_verdict_row(s, i, verdict) for s in sections for i, verdict in enumerate(s.verdicts)]
    heads = "".join(f'<th role="columnheader" scope="col">{head}</th>' for head in _HEADS)
    lines = "\n".join(rows)
    table = f"""<table class="stacks" role="table">
<thead role="rowgroup"><tr role="row">{heads}</tr></thead>
<tbody role="rowgroup">
{lines}
</tbody>
</table>"""
    files = '<p class="data">As a file: <a href="verdicts.csv">verdicts.csv</a></p>'
    nothing = "<p>No claim was judged.</p>"
    begin = f'<section class="experiment" id="verdicts" {_timeline("verdicts")} aria-label="All verdicts">'
    return f"{begin}\n<h2>All verdicts</h2>\n{table + files if rows else nothing}\n</section>"


def outcome(verdict: Verdict) -> str:
    """In a word: yes, no, or not judged."""
    return {True: "yes", False: "no", None: "not judged"}[verdict.reproduced]


def _verdict_row(section: Section, index: int, verdict: Verdict) -> str:
    # The roles are those of the elements: browsers forget them where a narrow page lays the rows out as blocks.
    link = f'<a href="#verdict-{section.name}-{index + 1}">{_marked(verdict.claim)}</a>'
    kind, _ = _OUTCOMES[verdict.reproduced]
    badge = f'<span class="badge {kind}">{outcome(verdict)}</span>'
    texts = (link, _marked(verdict.criterion), _marked(verdict.measured), badge)
    cells = "".join(f'<td role="cell" data-head="{h}"><div>{t}</div></td>' for h, t in zip(_HEADS, texts, strict=True))
    return f'<tr role="row">{cells}</tr>'


def _about(about: dict[str, Any]) -> str:
    if not about:
        return ""
    rows = {key.replace("_", " "): _shown(value) for key, value in about.items()}
    begin = f'<section class="experiment" id="about" {_timeline("about")} aria-label="What was run">'
    return f"{begin}\n<h2>What was run</h2>\n{_pairs(rows)}\n</section>"


def _section(section: Section, drawings: dict[str, str]) -> str:
    """The pictures, what they say about the paper's claims, and folded: the tables, how it was run, what was chosen."""
    parts = [f'<h2 id="title-{section.name}">{_marked(section.title)}</h2>']
    for stem in section.figures:
        if stem != section.headline:
            parts += [_figure(section, stem, drawings), *_claims(section, stem)]
    parts += _claims(section, "")
    if section.headline:
        parts += _claims(section, section.headline)
    for caption, lines in section.tables.items():
        parts.append(f"<details>\n<summary>Table: {_marked(caption)}</summary>\n{_table(caption, lines)}\n</details>")
    text = "\n".join(f"<p>{_marked(paragraph)}</p>" for paragraph in section.text)
    folded = "<details>" if section.figures else "<details open>"
    parts.append(f"{folded}\n<summary>How it was run, and how to read it</summary>\n{text}\n</details>")
    if section.config:
        table = _pairs(dict(_flat(section.config)))
        parts.append(f'<details class="config">\n<summary>Configuration</summary>\n{table}\n</details>')
    if section.rows:
        rows, columns = len(section.rows), len(section.rows[0])
        size = f"{rows:,} row{'s' * (rows != 1)}, {columns} column{'s' * (columns != 1)}"
        name = f"{section.name}.csv"
        parts.append(f'<p class="data">Every number: <a href="{name}" download>{name}</a> ({size})</p>')
    body = "\n".join(parts)
    return (
        f'<section class="experiment" id="section-{section.name}" {_timeline(f"section-{section.name}")} '
        f'aria-labelledby="title-{section.name}">\n{body}\n</section>'
    )


def _figure(section: Section, stem: str, drawings: dict[str, str]) -> str:
    data = f' <a href="{section.name}.csv">data</a>' if section.rows else ""
    files = f'<span class="files"><a href="{stem}.svg">SVG</a> <a href="{stem}.png">PNG</a>{data}</span>'
    caption = f"<figcaption>{_marked(section.captions.get(stem, ''))} {files}</figcaption>"
    return f'<figure id="figure-{stem}">\n{drawings[stem]}\n{caption}\n</figure>'


def _claims(section: Section, stem: str) -> list[str]:
    """The verdicts that one figure shows, each under the paper's words."""
    shown = [(i, verdict) for i, verdict in enumerate(section.verdicts) if verdict.figure == stem]
    parts = []
    for quote, group in groupby(shown, key=lambda entry: entry[1].quote):
        if quote:
            parts.append(f"<blockquote><p>“{_marked(quote)}”</p></blockquote>")
        parts += [_verdict(section, index, verdict) for index, verdict in group]
    return parts


def _verdict(section: Section, index: int, verdict: Verdict) -> str:
    kind, words = _OUTCOMES[verdict.reproduced]
    return f"""<div class="verdict {kind}" id="verdict-{section.name}-{index + 1}">
<p><span class="badge {kind}">{words}</span> {_marked(verdict.claim)}</p>
<dl>
<div><dt>Measured</dt><dd>{_marked(verdict.measured)}</dd></div>
<div><dt>Criterion</dt><dd>{_marked(verdict.criterion)}</dd></div>
</dl>
</div>"""


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
        f"<thead><tr>{heads}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>\n</div>"
    )


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
