"""The tutorials do what they say: their code is run from the first block to the last, their notebooks are theirs."""

import importlib.util
import json
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _script():
    spec = importlib.util.spec_from_file_location("tutorials", ROOT / "scripts" / "tutorials.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["tutorials"] = module  # dataclasses look for their module there
    spec.loader.exec_module(module)
    return module


tutorials = _script()


def _name(page):
    return page.stem


LONG_STARTS = ("2-train-and-replay", "3-ray-cluster", "4-drop-in")  # of processes, Ray and compilers


@pytest.mark.parametrize("page", [pytest.param(page, marks=pytest.mark.slow if page.stem in LONG_STARTS else ())
                                  for page in tutorials.PAGES], ids=_name)  # fmt: skip
def test_a_page_runs_as_written(page, tmp_path):
    tutorials.run(page, tmp_path)


LONG = [page for page in tutorials.PAGES if any(block.slow for block in tutorials.read(page)[0])]


@pytest.mark.slow
@pytest.mark.parametrize("page", LONG, ids=_name)
def test_the_long_parts_of_a_page_run_as_written(page, tmp_path):
    needed = {"3-ray-cluster": {"ray"}, "4-drop-in": {"lightning", "transformers"}}.get(page.stem, set())
    missing = sorted(name for name in needed if find_spec(name) is None)
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: pip install 'lategrad[ray,integrations]'")
    tutorials.run(page, tmp_path, slow=True)


@pytest.mark.parametrize("page", tutorials.NOTEBOOKS, ids=_name)
def test_a_notebook_is_the_page(page):
    saved = page.with_suffix(".ipynb").read_text(encoding="utf-8")
    assert saved == tutorials.notebook(page), f"renew it: scripts/tutorials.py renew {page.relative_to(ROOT)}"
    cells = json.loads(saved)["cells"]
    run = [block for block in tutorials.read(page)[0] if block.runs]
    assert sum(cell["cell_type"] == "code" for cell in cells) == len(run)


@pytest.mark.slow
@pytest.mark.parametrize("page", tutorials.NOTEBOOKS, ids=_name)
def test_a_notebook_runs(page, tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient", reason="pip install nbclient ipykernel")
    pytest.importorskip("ipykernel", reason="pip install nbclient ipykernel")
    import nbformat

    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    notebook = nbformat.read(page.with_suffix(".ipynb"), as_version=4)
    nbformat.validate(notebook)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    for name in tutorials.pictures(page):
        assert (tmp_path / name).is_file()
    printed = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    for block in tutorials.read(page)[0]:
        if block.prints is not None:
            last = block.prints.strip().splitlines()[-1]
            assert any(tutorials.agrees(line, last, block.within) for line in printed.splitlines()), last


def test_pages_link_to_what_is_there():
    pages = [*tutorials.PAGES, *(ROOT / "docs" / "tutorials").glob("*.md"), ROOT / "docs" / "gallery.md"]
    for page in pages:
        for target in re.findall(r"\]\((?!http)([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_picture_is_in_the_docs_and_shown_by_its_page():
    shown = [name for page in tutorials.PAGES for name in tutorials.pictures(page)]
    assert sorted(shown) == sorted(path.name for path in tutorials.PICTURES.iterdir())
    assert len(set(shown)) >= len(tutorials.PAGES)


# ---- The runner itself: a page that is wrong must not pass


def _page(tmp_path, monkeypatch, text):
    monkeypatch.setattr(tutorials, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(text, encoding="utf-8")
    folder = tmp_path / "folder"
    folder.mkdir()
    return page, folder


@pytest.mark.parametrize(
    ("printed", "shown", "within", "agree"),
    [
        ("accuracy 0.951", "accuracy 0.95", 0.0, True),
        ("accuracy 0.98", "accuracy 0.95", 0.0, False),
        ("accuracy 0.98", "accuracy 0.95", 0.05, True),
        ("accuracy -0.95", "accuracy 0.95", 0.0, False),
        ("10 runs", "11 runs", 0.5, False),
        ("3 runs in 2.5 s", "3 runs in ... s", 0.0, True),
        ("3 runs in 2.5 s", "4 runs in ... s", 0.0, False),
        ("nan", "0.95", 0.1, False),
        ("1.5e-03", "1.6e-03", 0.0, True),
        ("1.5e-02", "1.5e-03", 0.0, False),
        ("a\n  b", "a b", 0.0, True),
        ("(1, 2) [a+b]", "(1, 2) [a+b]", 0.0, True),
    ],
)
def test_what_is_printed_is_compared_with_what_is_shown(printed, shown, within, agree):
    assert tutorials.agrees(printed, shown, within) is agree


@pytest.mark.parametrize(
    "text",
    [
        "```python\nprint(1)\n```\n\n```text\n2\n```\n",
        "```sh\necho 1\n```\n\n```text\n2\n```\n",
        "```sh\nfalse\n```\n",
        "```sh\nfalse\ntrue\n```\n",
        "![a picture](figures/tutorials/never.png)\n",
    ],
    ids=["python", "shell", "exit code", "first of two commands", "picture"],
)
def test_a_wrong_page_fails(text, tmp_path, monkeypatch):
    page, folder = _page(tmp_path, monkeypatch, text)
    with pytest.raises(tutorials.PageError, match="page.md"):
        tutorials.run(page, folder)


def test_an_error_in_a_block_has_the_line_of_the_page(tmp_path, monkeypatch):
    page, folder = _page(tmp_path, monkeypatch, "# Title\n\n```python\nx = 1\nx / 0\n```\n")
    with pytest.raises(ZeroDivisionError) as caught:
        tutorials.run(page, folder)
    assert caught.traceback[-1].lineno + 1 == 5


def test_blocks_share_names_files_and_a_folder_and_marks_are_heeded(tmp_path, monkeypatch):
    text = (
        "```python\n# own.py\nvalue = 41\n```\n"
        "```python\nfrom own import value\nvalue += 1\n```\n"
        "```python\nprint(value)\n```\n\n```text\n42\n```\n"
        "```sh\npython -c 'import own; print(own.value)'\n```\n\n```text\n41\n```\n"
        "```sh\n# by hand: breaks\nfalse\n```\n"
        "```sh\n# slow: takes long\ntouch slow\n```\n"
    )
    page, folder = _page(tmp_path, monkeypatch, text)
    before = Path.cwd()
    tutorials.run(page, folder)
    assert Path.cwd() == before
    assert "own" not in sys.modules
    assert not (folder / "slow").exists()
    tutorials.run(page, folder, slow=True)
    assert (folder / "slow").exists()
