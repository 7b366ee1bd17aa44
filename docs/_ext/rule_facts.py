"""What a rule's docstring says under its headings, and whether one of them is missing."""

from __future__ import annotations

import re

HEADINGS = ("Must know", "Guarantee", "Reference")
"""Paragraphs that every rule's docstring has; ``Reference`` may be in the plural."""

_HEAD = re.compile(rf"^({'|'.join(HEADINGS)})s?: ", flags=re.MULTILINE)


def facts(docstring: str) -> dict[str, str]:
    """The paragraph under each heading, as one line.

    >>> facts("A rule.\\n\\nMust know: nothing\\nat all.\\n\\nReferences: A, 1; B, 2.")
    {'Must know': 'nothing at all.', 'Reference': 'A, 1; B, 2.'}
    """
    found = {}
    for paragraph in docstring.split("\n\n"):
        head = _HEAD.match(paragraph.strip())
        if head:
            found[head[1]] = " ".join(paragraph.strip()[head.end() :].split())
    return found


def missing(docstring: str) -> list[str]:
    """The headings that a docstring lacks, and ``update`` where it has no mathematics.

    >>> missing("A rule :math:`x = x - g`.\\n\\nMust know: nothing.")
    ['Guarantee', 'Reference']
    """
    given = facts(docstring)
    return [heading for heading in HEADINGS if heading not in given] + (["update"] * ("math:" not in docstring))


def emphasise(lines: list[str]) -> None:
    """Set the headings apart, where the docstring is shown."""
    for i, line in enumerate(lines):
        lines[i] = _HEAD.sub(r"**\1.** ", line)
