#!/usr/bin/env python3
"""Put the figures, tables and verdicts of a reproduction into the docs.

    python -m reproduction all --out out
    scripts/renew_docs.py out [SECTION ...]

Figures are copied to docs/figures. In every page what stands between ``<!-- table SECTION: CAPTION -->`` and
``<!-- end -->`` is replaced by that table of the report, if it is in ``out``; in docs/results/reproduction.md also
``<!-- run -->`` by what was run, ``<!-- findings -->`` by what the report opens with, ``<!-- verdicts -->`` by all
verdicts. With sections, such as fig1 horizon, only their tables and figures are replaced: pages that show another scale
stay as they are.
"""

import csv
import json
import re
import shutil
import sys
from html import unescape
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
FIGURES = {
    "fig1": "fig1-accuracy-against-delay",
    "fig2": "fig2-accuracy-against-lr",
    "fig3": "fig3-excess-loss",
    "fig4": "fig4-heavy-tails",
    "horizon": "accuracy-lost-against-updates",
    "baselines-digits": "baselines-digits",
    "baselines-fashion-mnist": "baselines-fashion-mnist",
    "deep-mlp": "deep-mlp",
    "deep-cnn": "deep-cnn",
    "deep-gpt": "deep-gpt",
    "deep-gpt-34m": "deep-gpt-34m",
    "deep-gpt-34m-long": "deep-gpt-34m-long",
    "deep-gpt-63m": "deep-gpt-63m",
    "deep-gpt-2m": "deep-gpt-2m",
    "deep-gpt-1m": "deep-gpt-1m",
    "local-gpt-20": "local-gpt-20",
    "local-real-cnn-20": "local-real-cnn-20",
    "local-gpt-100": "local-gpt-100",
    "local-cnn-20": "local-cnn-20",
    "local-cnn-100": "local-cnn-100",
}


def read(path):
    """The rows of a CSV file."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def markdown(rows):
    """Dictionaries with the same keys as a table."""
    heads = list(rows[0])
    lines = [heads, ["---"] * len(heads), *([cell(row, head) for head in heads] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(row, head):
    """Our own rules are bold."""
    text = row[head].replace("|", "\\|")
    return f"**{text}**" if "(ours)" in row.get("rule", "") and text and head != "lr" else text


def what_was_run(page):
    """The command, the device and the seconds, from the page."""
    cells = dict(re.findall(r'<th scope="row">([a-z]+)</th><td>(.*?)</td>', page))
    return f"`{unescape(cells['command'])}`, {unescape(cells['device'])}, {cells['seconds']} s, torch {cells['torch']}."


def renew_tables(out, sections):
    """Put the report's tables where pages ask for them; say which are not there."""
    tables = json.loads((out / "tables.json").read_text(encoding="utf-8"))
    for page in sorted(DOCS.glob("results/*.md")):

        def replacement(place, page=page):
            found = tables.get(place[2], {}).get(place[3])
            if sections and place[2] not in sections:
                return place[0]
            if found is None:
                print(f"{page.name}: no table {place[2]}: {place[3]} in {out}; left as it is")
                return place[0]
            return f"{place[1]}{markdown(found)}\n{place[4]}"

        text = page.read_text(encoding="utf-8")
        text = re.sub(r"(<!-- table ([\w-]+): (.*?) -->\n).*?(<!-- end -->)", replacement, text, flags=re.DOTALL)
        page.write_text(text, encoding="utf-8")


def main(out, sections):
    """Copy what a reproduction left in ``out``; only some sections of it, if there are any."""
    renew_tables(out, sections)
    for stem, name in FIGURES.items():
        if (out / f"{stem}.svg").exists() and (not sections or stem.split("-")[0] in sections):
            shutil.copy(out / f"{stem}.svg", DOCS / "figures" / f"{name}.svg")
    if not (out / "fig1.csv").exists():
        return
    page = (out / "report.html").read_text(encoding="utf-8")
    summary = page.partition('<ul class="summary">')[2].partition("</ul>")[0]
    findings = [unescape(re.sub("<.*?>", "", found)) for found in re.findall(r"<li>(.*?)</li>", summary, re.DOTALL)]
    parts = {"run": what_was_run(page), "findings": "\n".join(f"- {finding}" for finding in findings)}
    verdicts = [
        {key: row[key] for key in ("claim", "source", "measured", "holds")} for row in read(out / "verdicts.csv")
    ]
    parts["verdicts"] = markdown(verdicts)
    page = DOCS / "results" / "reproduction.md"
    text = page.read_text(encoding="utf-8")
    for name, part in parts.items():
        text, count = re.subn(f"(<!-- {name} -->\n).*?(<!-- end -->)", lambda m, p=part: f"{m[1]}{p}\n{m[2]}", text,
                              flags=re.DOTALL)  # fmt: skip
        if count != 1:
            sys.exit(f"{page} must have one place <!-- {name} --> ... <!-- end -->, found {count}")
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), sys.argv[2:])
