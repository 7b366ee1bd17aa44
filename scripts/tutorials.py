#!/usr/bin/env python3
"""Run the code of the tutorials as a reader would; renew their pictures and notebooks.

    scripts/tutorials.py run docs/tutorials/1-your-rule.md   # in an empty folder; says what disagrees with the page
    scripts/tutorials.py renew                             # all pictures and notebooks (add pages to renew some)

A page is plain Markdown. What its fenced blocks mean can be seen on the page:

- ``python`` blocks are run one after another, in one namespace and one folder, which is empty at first.
- A ``python`` block whose first line is a comment with a file's name (``# careful.py``) is written to that file.
- ``sh`` blocks are run by bash in the same folder.
- A ``text`` block right after one of these is what it prints. ``...`` stands for anything; numbers with a point may
  differ by two units of their last digit, or by 0.1 where the block says ``# within 0.1``; all else must be the same.
- A block that begins with ``# slow:`` and a reason is run by ``make test-all`` only, one with ``# by hand:`` never.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = tuple(
    ROOT / "docs" / page
    for page in (
        "tutorials/1-your-rule.md",
        "tutorials/2-train-and-replay.md",
        "tutorials/3-ray-cluster.md",
        "tutorials/4-drop-in.md",
        "which-rule.md",
        "tutorials/5-reproduce.md",
        "tutorials/6-pipeline.md",
    )
)
NOTEBOOKS = PAGES[:2]
"""The pages that have a notebook of the same name next to them."""
PICTURES = ROOT / "docs" / "figures" / "tutorials"

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_NUMBER = re.compile(r"[-+]?\d*\.\d+(?:e[-+]?\d+)?")
_UNITS = 2  # of the last digit shown: sums round differently on another processor


class PageError(AssertionError):
    """A page whose code fails, or prints something else than the page shows."""


@dataclass(frozen=True)
class Block:
    """A fenced block, with the text before it and what it is said to print."""

    language: str
    code: str
    line: int
    """Of its fence."""
    before: str
    """The page's text since the block before."""
    prints: str | None = None

    @property
    def file(self) -> str | None:
        """The file that the block is the contents of."""
        found = re.match(r"# ([\w.-]+\.\w+)\n", self.code)
        return found[1] if found else None

    @property
    def within(self) -> float:
        """By how much its numbers may differ, whatever their digits."""
        found = re.search(r"^#.*\bwithin (\d*\.\d+)", self.code, re.MULTILINE)
        return float(found[1]) if found else 0.0

    @property
    def runs(self) -> bool:
        """Whether it is code."""
        return self.language in ("python", "sh") and not self.code.startswith("# by hand:")

    @property
    def slow(self) -> bool:
        """Whether only the slow tests run it."""
        return self.code.startswith("# slow:")


def read(page: Path) -> tuple[list[Block], str]:
    """The blocks of a page, and the text after the last."""
    text = page.read_text(encoding="utf-8")
    blocks: list[Block] = []
    end = 0
    for fence in _FENCE.finditer(text):
        language, code = fence.groups()
        before, end = text[end : fence.start()], fence.end()
        if language == "text" and blocks and blocks[-1].runs and not before.strip():
            blocks[-1] = Block(**{**vars(blocks[-1]), "prints": code})
        else:
            blocks.append(Block(language, code, text.count("\n", 0, fence.start()) + 1, before))
    return blocks, text[end:]


def pictures(page: Path) -> list[str]:
    """The names of the pictures that the page shows and its code makes."""
    return re.findall(r"figures/tutorials/([\w.-]+)\)", page.read_text(encoding="utf-8"))


def agrees(printed: str, shown: str, within: float = 0.0) -> bool:
    """Whether what was printed is what a page shows; numbers may differ by ``within``.

    >>> agrees("accuracy 0.951 after 2.3 s", "accuracy 0.95 after ... s"), agrees("10 runs", "11 runs")
    (True, False)
    """
    got, expected = (re.sub(r"\s+", " ", part.strip()) for part in (printed, shown))
    expected = expected.replace("...", "\1")
    pattern = re.escape(_NUMBER.sub("\0", expected)).replace("\1", ".*").replace("\0", f"({_NUMBER.pattern})")
    matched = re.fullmatch(pattern, got)
    if matched is None:
        return False
    return all(_close(*pair, within) for pair in zip(matched.groups(), _NUMBER.findall(expected), strict=True))


def _close(printed: str, shown: str, within: float) -> bool:
    digits, _, exponent = shown.partition("e")
    unit = 10.0 ** (int(exponent or 0) - len(digits.partition(".")[2]))
    return math.isclose(float(printed), float(shown), rel_tol=0, abs_tol=max(within, (_UNITS + 0.5) * unit))


def run(page: Path, folder: Path, slow: bool = False, show: bool = False) -> None:
    """Run a page's code in a folder; a ``PageError`` says what went wrong, and where.

    Args:
        page: of this repository.
        folder: an empty one.
        slow: also run the blocks that take long.
        show: write what each block prints.
    """
    module = types.ModuleType(re.sub(r"\W", "_", page.stem))
    with _inside(folder, module):
        for block in read(page)[0]:
            if not block.runs or (block.slow and not slow):
                continue
            where = f"{page.relative_to(ROOT)}, line {block.line}"
            if block.file:
                (folder / block.file).write_text(block.code, encoding="utf-8")
                continue
            printed = _run_python(block, module, where) if block.language == "python" else _run_shell(block, where)
            if show and printed:
                print(f"-- line {block.line}\n{printed}", end="", flush=True)
            if block.prints is not None and not agrees(printed, block.prints, block.within):
                raise PageError(f"{where} prints\n{printed}\ninstead of\n{block.prints}")
    missing = [name for name in pictures(page) if not (folder / name).is_file()] if slow or not _is_slow(page) else []
    if missing:
        raise PageError(f"{page.relative_to(ROOT)} shows pictures that its code does not make: {', '.join(missing)}")


def _is_slow(page: Path) -> bool:
    return any(block.slow for block in read(page)[0])


@contextlib.contextmanager
def _inside(folder: Path, module: types.ModuleType) -> Iterator[None]:
    """The page's folder and module, as if a reader had started Python there; no picture opens a window."""
    from matplotlib import pyplot

    before, modules = Path.cwd(), set(sys.modules)
    pyplot.switch_backend("agg")
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    sys.modules[module.__name__] = module  # pickled objects find their classes there
    try:
        yield
    finally:
        os.chdir(before)
        sys.path.remove(str(folder))
        for name in set(sys.modules) - modules:
            if str(getattr(sys.modules[name], "__file__", None) or "").startswith(f"{folder}{os.sep}"):
                del sys.modules[name]
        del sys.modules[module.__name__]
        pyplot.close("all")


def _run_python(block: Block, module: types.ModuleType, where: str) -> str:
    printed = io.StringIO()
    padding = "\n" * block.line  # so that tracebacks have the page's lines
    with contextlib.redirect_stdout(printed):
        exec(compile(padding + block.code, where.partition(",")[0], "exec"), vars(module))
    return printed.getvalue()


def _run_shell(block: Block, where: str) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(["bash", "-e", "-c", block.code], env=os.environ | {"PATH": path, "MPLBACKEND": "agg"},
                          capture_output=True, text=True, stdin=subprocess.DEVNULL)  # fmt: skip
    if done.returncode:
        raise PageError(f"{where} ends with exit code {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def notebook(page: Path) -> str:
    """A page as a Jupyter notebook, without outputs."""
    blocks, rest = read(page)
    cells: list[tuple[str, str]] = []
    for block in blocks:
        fenced = f"```{block.language}\n{block.code}```"
        if not block.runs:
            cells.append(("markdown", f"{block.before.strip()}\n\n{fenced}"))
            continue
        cells.append(("markdown", block.before))
        magic = f"%%writefile {block.file}\n" if block.file else "%%bash -e\n" if block.language == "sh" else ""
        cells.append(("code", magic + block.code))
    cells.append(("markdown", rest))
    cells = [(kind, text.strip()) for kind, text in cells if text.strip()]
    return json.dumps(
        {
            "cells": [_cell(kind, text, number) for number, (kind, text) in enumerate(cells)],
            "metadata": {
                "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
                "language_info": {"name": "python"},
            },
            "nbformat": 4,
            "nbformat_minor": 5,
        },
        indent=1,
        ensure_ascii=False,
    ) + "\n"  # fmt: skip


def _cell(kind: str, text: str, number: int) -> dict[str, object]:
    code = {"execution_count": None, "outputs": []} if kind == "code" else {}
    return {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": text.splitlines(keepends=True), **code}


def renew(page: Path) -> None:
    """Run all of a page's code; put its pictures into the docs, and its notebook beside it."""
    with tempfile.TemporaryDirectory() as folder:
        run(page, Path(folder).resolve(), slow=True, show=True)
        PICTURES.mkdir(parents=True, exist_ok=True)
        for name in pictures(page):
            shutil.copy(Path(folder) / name, PICTURES / name)
    if page in NOTEBOOKS:
        page.with_suffix(".ipynb").write_text(notebook(page), encoding="utf-8")


def main() -> None:
    """The command line; see above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "renew"))
    parser.add_argument("pages", nargs="*", type=Path, help="by default all")
    parser.add_argument("--slow", action="store_true", help="also the blocks that begin with `# slow:`")
    options = parser.parse_intermixed_args()
    for page in [page.resolve() for page in options.pages] or PAGES:
        print(page.relative_to(ROOT), flush=True)
        if options.what == "renew":
            renew(page)
            continue
        with tempfile.TemporaryDirectory() as folder:
            run(page, Path(folder).resolve(), slow=options.slow, show=True)


if __name__ == "__main__":
    main()
