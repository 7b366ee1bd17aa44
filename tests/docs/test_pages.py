"""Pages that people can read: short, each with its audience, guides apart from results, links that lead somewhere."""

import re
import tarfile
from pathlib import Path

import pytest

from lategrad.trace import Trace

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = sorted(path for path in DOCS.rglob("*.md") if not path.is_relative_to(DOCS / "reference"))
INCLUDES = {DOCS / "changelog.md"}
"""Pages that consist of another file."""


def name(page):
    return page.relative_to(DOCS).as_posix() if page.is_relative_to(DOCS) else page.name


def prose(text):
    """The words of a page, without its code, tables, comments and directives."""
    text = re.sub(r"^( *)```.*?\n\1``` *$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    return " ".join(line for line in text.splitlines() if not re.match(r"\||:::| {4}\S", line)).split()


def test_prose_is_what_is_not_code_or_a_table():
    code = "```python\ncode = 1\n```\n\n    more code\n"
    table = "| a | table |\n|---|---|\n"
    text = f"# A title\n\nSome words.\n\n{code}\n{table}\n:::{{card}}\nIn a card.\n:::\n<!-- a\ncomment -->\n"
    assert " ".join(prose(text)) == "# A title Some words. In a card."


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_page_has_at_most_1500_words_of_prose(page):
    words = len(prose(page.read_text(encoding="utf-8")))
    assert words <= 1500, f"{name(page)} has {words} words: split it"


def test_the_readme_has_at_most_800_words():
    assert len(README.read_text(encoding="utf-8").split()) <= 800


@pytest.mark.parametrize("page", [page for page in PAGES if page not in INCLUDES], ids=name)
def test_a_page_has_one_title_and_says_whom_it_is_for(page):
    text = page.read_text(encoding="utf-8")
    without_code = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    assert len(re.findall(r"^# ", without_code, flags=re.MULTILINE)) == 1
    if page.name != "index.md" or page.parent != DOCS:
        opening = text.split("\n\n")[1]
        assert re.match(r"\*?For (people|readers|newcomers|everyone)", opening), (
            f"{name(page)} opens with: {opening[:60]}"
        )


def test_the_first_page_has_four_doors_and_each_leads_to_a_page():
    doors = re.findall(r"grid-item-card\} (.*)\n:link: (.*)\n", (DOCS / "index.md").read_text(encoding="utf-8"))
    assert [title for title, _ in doors] == [
        "I have a PyTorch loop",
        "I have a model and several machines",
        "I have a paper to reproduce",
        "I have a rule of my own",
    ]
    for _, page in doors:
        assert (DOCS / f"{page}.md").exists()


def test_tutorials_are_numbered_without_gaps_and_their_titles_have_their_numbers():
    pages = sorted((DOCS / "tutorials").glob("[0-9]*.md"))
    assert [page.name.split("-")[0] for page in pages] == [str(number) for number in range(1, len(pages) + 1)]
    for page in pages:
        assert page.read_text(encoding="utf-8").startswith(f"# {page.name[0]}. ")


def test_marked_tables_are_on_pages_of_results():
    for page in PAGES:
        if "<!-- table " in page.read_text(encoding="utf-8"):
            assert page.parent.name == "results", f"{name(page)} is a guide and has a table of measurements"


def anchors(page):
    """The places of a page that links can lead to."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_tables_of_large_models_have_the_losses_of_the_finished_runs(tmp_path):
    with tarfile.open(DOCS / "results" / "large-runs.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    for page, runs, count in (("deep-large", "gpt-34m*", 26), ("yardstick", "gpt-63m-1500-*-0.003162-0*", 10)):
        text = (DOCS / "results" / f"{page}.md").read_text(encoding="utf-8")
        paths = list((tmp_path / "traces").glob(f"deep-{runs}"))
        assert len(paths) == count
        for path in paths:
            assert f"{Trace.load(path).recorded()['test_loss'][-1].item():.3f}" in text, path.name


@pytest.mark.parametrize("page", [README, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *PAGES], ids=name)
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text(encoding="utf-8")):
        file = page.parent / target if target else page
        if (DOCS / "reference") in file.parents:
            continue  # made at build; the site's strict build checks those
        assert file.exists(), f"{name(page)} links to {target}"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{name(page)} links to {target}#{anchor}"


def test_files_that_the_architecture_names_exist():
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    paths = set(re.findall(r"(?<![\w/.])(?:[a-z_]+/)+[a-z_]*(?:\.py|\.cpp)?|(?<![\w/.])[a-z_]+\.py", text))
    package = ROOT / "src" / "lategrad"
    inside = ("", "simulator", "serve", "serve/engines/ray", "execution", "execution/codegen", "optim", "pipeline")
    folders = [ROOT, *(package / folder for folder in inside)]
    assert len(paths) > 30
    assert [path for path in sorted(paths) if not any((folder / path).exists() for folder in folders)] == []
