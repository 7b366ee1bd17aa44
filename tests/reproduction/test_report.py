"""The report as its reader meets it: the files, the page as markup, and the page in a real browser."""

import csv
import json
import os
import re
from base64 import b64decode
from html.parser import HTMLParser
from itertools import pairwise
from urllib.parse import unquote, urlsplit
from urllib.request import url2pathname

import numpy as np
import pytest
from matplotlib.figure import Figure

from helpers.browser import chromium, in_browser
from reproduction.report import MOST_FINDINGS, Section, Verdict, write_report

RULES = ("SGD", "Anytime-SGD", "Anytime-AdaGrad", "Staleness-aware SGD")
DELAYS = (0, 10, 100, 500, 1000)
NASTY = "<script>alert('x')</script> & \"<b>quoted</b>\""


def curves(panels, seed):
    """A figure of the kind that the experiments draw: lines with bands, log axes, mathematics, a legend outside."""
    random = np.random.default_rng(seed)
    steps = np.unique(np.geomspace(1, 25_000, 60).astype(int))
    figure = Figure(figsize=(6.4 * panels, 4.4), layout="constrained")
    for column in range(panels):
        ax = figure.add_subplot(1, panels, column + 1)
        for index, rule in enumerate(RULES):
            loss = 2.0 * steps ** (-0.5 + 0.08 * index) + 0.01 * np.exp(0.05 * random.standard_normal(len(steps)))
            (line,) = ax.plot(steps, loss, label=rule)
            ax.fill_between(steps, loss / 1.2, loss * 1.2, alpha=0.2, color=line.get_color(), linewidth=0)
        ax.set(xscale="log", yscale="log", xlabel="updates $t$", ylabel=r"excess loss $f(x_t) - f^\star$")
        ax.set_title(rf"$\tau = {100 * column}$")
        ax.grid(alpha=0.3)
    ax.legend(fontsize="small")
    return figure


def heat_map():
    figure = Figure(figsize=(5.2, 4.0), layout="constrained")
    ax = figure.add_subplot()
    image = ax.imshow(np.add.outer(np.arange(8.0), np.arange(12.0)), aspect="auto")
    ax.set(xlabel="delay", ylabel="step size")
    figure.colorbar(image, label="test accuracy")
    return figure


def fake_sections():
    rows = [{"rule": rule, "delay": delay, "seed": seed, "accuracy": 0.85 - delay / 7e3 - seed * 1e-3 / 3}
            for rule in RULES for delay in DELAYS for seed in range(3)]  # fmt: skip
    config = {
        "steps": 25_000, "seeds": list(range(10)), "rule": {"type": "Anytime", "learner": {"type": "OGD", "lr": 0.1}},
        "delays": [{"kind": "constant", "delay": delay} for delay in DELAYS], "resumed": False,
        "a_very_long_name_that_has_no_spaces_and_would_make_a_phone_scroll": "/".join(["path"] * 40),
    }  # fmt: skip
    return [
        Section(
            name="fig1", title="Accuracy against the delay, one learning rate",
            text=("Softmax regression on Fashion-MNIST. Every learning rate was tuned at no delay and then kept, "
                  "while the delay grew to 1000 updates; `python -m reproduction --only fig1` runs this alone.",
                  "Lines are means over ten seeds, bands their range."),
            figures={"fig1-accuracy": curves(1, 1), "fig1-curves": curves(2, 2)}, rows=rows,
            captions={"fig1-accuracy": "Test accuracy after 25,000 updates, by delay τ.",
                      "fig1-curves": "Excess loss over updates at no delay (left) and at a delay of 100 (right)."},
            verdicts=(Verdict("With growing delay SGD degrades and Anytime-SGD does not",
                              "accuracy lost from τ = 0 to τ = 1000: SGD > 5 points, Anytime-SGD < 1 point",
                              "SGD 14.3 ± 0.9 points, Anytime-SGD 0.4 ± 0.1 points", True,
                              quote="SGD greatly deteriorates", figure="fig1-curves"),
                      Verdict("At no delay the two are alike", "|difference| < 1 point", "1.7 points", False, "ours"),
                      Verdict("It is unclear", "a bound below 1", "a bound of 7", None, figure="fig1-curves")),
            config=config, finding="Anytime-SGD keeps its accuracy.", headline="fig1-accuracy",
        ),
        Section(
            name="table_2", title=f"Hostile text: {NASTY}", text=(NASTY, "τ ≤ √T, η ∝ 1/√t"),
            figures={"map": heat_map(), "Wide": curves(3, 3)}, rows=[{"text": NASTY, "value": float("nan")}],
            captions={"map": NASTY}, verdicts=(Verdict(NASTY, NASTY, NASTY, True),), config={NASTY: NASTY},
            tables={"numbers": [{"rule": "SGD", "worst drop": ".145"}]},
        ),
        Section(name="bare", title="Neither rows nor figures", text=("Only a paragraph.",), figures={}, rows=[]),
    ]  # fmt: skip


ABOUT = {
    "scale": "quick", "device": "cpu", "python": "3.12.1", "torch": "2.13.0", "seeds": 3,
    "data": NASTY, "seconds": 81.25, "command_line": "python -m reproduction --scale quick " + "--option " * 20,
}  # fmt: skip


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    # A folder whose name has to be quoted in an address.
    return write_report(fake_sections(), tmp_path_factory.mktemp("a report") / "made on the way", ABOUT)


class Page(HTMLParser):
    """The page's elements as (tag, attributes), its text, and whether every element is closed where it should be."""

    VOID = frozenset({"meta", "link", "br", "hr", "img", "input"})

    def __init__(self, text):
        super().__init__()
        self.elements, self.open, self.errors, self.texts = [], [], [], []
        self.feed(text.replace("<wbr>", ""))  # a place to break a long word: no element, no text
        self.close()
        self.errors += [f"<{tag}> is never closed" for tag in self.open]

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.errors.append(f"</{tag}> at {self.getpos()} closes another element")

    def handle_data(self, data):
        self.texts.append(data)

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def page(report):
    return Page(report.read_text(encoding="utf-8"))


def test_every_file_is_there_and_nothing_else(report):
    stems = ["fig1-accuracy", "fig1-curves", "map", "Wide"]
    names = {f"{stem}{suffix}" for stem in stems for suffix in (".svg", ".png")}
    assert {path.name for path in report.parent.iterdir()} == names | {
        "report.html", "fig1.csv", "table_2.csv", "tables.json", "verdicts.csv"
    }  # fmt: skip
    for stem in stems:
        assert (report.parent / f"{stem}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (report.parent / f"{stem}.svg").read_text(encoding="utf-8")


def test_the_csv_holds_the_numbers_of_the_rows(report):
    rows = list(csv.DictReader((report.parent / "fig1.csv").read_text(encoding="utf-8").splitlines()))
    wanted = fake_sections()[0].rows
    assert [list(row) for row in rows] == [list(row) for row in wanted]
    for row, want in zip(rows, wanted, strict=True):
        assert row["rule"] == want["rule"]
        assert float(row["accuracy"]) == want["accuracy"]  # to the last bit


def test_all_verdicts_are_in_a_file(report):
    rows = list(csv.DictReader((report.parent / "verdicts.csv").read_text(encoding="utf-8").splitlines()))
    assert [row["holds"] for row in rows] == ["yes", "no", "not counted", "yes"]
    assert [row["source"] for row in rows] == ["paper", "ours", "paper", "paper"]
    assert rows[1]["measured"] == "1.7 points"


def test_the_markup_is_sound(report, page):
    text = report.read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>\n<html lang=")
    assert "<?xml" not in text
    assert text.count("<!DOCTYPE") == 1
    assert page.errors == []
    assert any(meta.get("name") == "viewport" for meta in page.all("meta"))
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in page.elements:
        for value in attributes.values():
            for target in re.findall(r"^#(.+)|url\(#(.+?)\)", value or ""):
                assert "".join(target) in ids
        assert attributes.get("aria-labelledby", ids[0]) in ids


def test_the_page_refers_to_local_files_only(report, page):
    for tag, attributes in page.elements:
        for name in ("href", "src", "srcset", "xlink:href", "action", "data", "poster"):
            address = attributes.get(name) or "#"
            assert not urlsplit(address).netloc, (tag, address)
            assert urlsplit(address).scheme in ("", "data"), (tag, address)
        if tag == "a" and not attributes["href"].startswith("#"):
            assert (report.parent / attributes["href"]).is_file()
    assert page.all("script") == []
    css = report.read_text(encoding="utf-8").partition("<style>")[2].partition("</style>")[0]
    assert "@import" not in css
    assert "url(" not in css


def test_every_figure_is_drawn_in_the_page_and_named_for_those_who_cannot_see_it(report, page):
    images = page.all("img")
    captions = fake_sections()[0].captions
    assert [image["alt"] for image in images[:2]] == list(captions.values())
    assert images[3]["alt"] == fake_sections()[1].title  # has no caption
    for image, stem in zip(images, ("fig1-accuracy", "fig1-curves", "map", "Wide"), strict=True):
        head, _, drawing = image["src"].partition(",")
        assert head == "data:image/svg+xml;base64"
        assert b64decode(drawing) == (report.parent / f"{stem}.svg").read_bytes()


def test_verdicts_are_counted_and_shown(page):
    text = " ".join("".join(page.texts).split())
    assert "The paper's claims: 2 of 2 hold here (1 more is shown, not counted). Our claims: 0 of 1 hold here." in text
    assert text.count("Does not hold") == 1
    assert text.count("the paper") >= 3
    badges = [attributes["class"] for attributes in page.all("span") if "badge" in attributes.get("class", "")]
    assert (
        sorted(badges) == ["badge no"] * 2 + ["badge open"] * 2 + ["badge yes"] * 4
    )  # in the table and in its section
    assert text.count("SGD 14.3 ± 0.9 points, Anytime-SGD 0.4 ± 0.1 points") == 2


@pytest.mark.parametrize(
    ("marks", "words"), [([], "No claim was judged."), ([False], "0 of 1 hold here"), ([None], "none is counted here")]
)
def test_few_verdicts(tmp_path, marks, words):
    verdicts = tuple(Verdict("a", "b", "c", mark) for mark in marks)
    path = write_report([Section("one", "One", (), {}, [], verdicts)], tmp_path, {})
    assert words in path.read_text(encoding="utf-8")


def test_text_is_shown_not_obeyed(report, page):
    assert "<script" not in report.read_text(encoding="utf-8")
    assert page.all("b") == []
    # Title, contents, paragraph, caption, verdict twice, data of the table of what was run; JSON escapes its quotes.
    assert "".join(page.texts).count(NASTY) == 2 + 1 + 1 + 2 * 3 + 1
    assert "python -m reproduction --only fig1" in page.texts  # set apart as code


def test_the_configuration_can_be_read_back_and_what_was_run_is_a_table(page):
    texts = [text for text in page.texts if text.strip()]
    assert fake_sections()[0].config in [json.loads(text) for text in texts if text.startswith("{")]
    pairs = dict(pairwise(texts))
    assert pairs["torch"] == "2.13.0"
    assert pairs["seconds"] == "81.25"


def test_tables_have_heads_and_named_rows(page):
    heads = [attributes for attributes in page.all("th") if attributes.get("scope") in ("col", "row")]
    assert heads
    texts = [text.strip() for text in page.texts if text.strip()]
    at = texts.index("worst drop")
    assert texts[at - 2 : at + 3] == ["Table: numbers", "rule", "worst drop", "SGD", ".145"]


def test_findings_come_first_and_the_table_of_verdicts_last(report):
    """Then a section for each experiment: a picture, the paper's words, the verdict on them; each figure once."""
    text = report.read_text(encoding="utf-8")
    wanted = ("Anytime-SGD keeps its accuracy.", 'id="figure-fig1-accuracy"', 'id="section-fig1"',
              'id="figure-fig1-curves"', "“SGD greatly deteriorates”", 'id="verdict-fig1-1"', 'id="verdict-fig1-3"',
              'id="verdict-fig1-2"', 'id="section-table_2"', 'id="verdicts"', 'class="stacks"')  # fmt: skip
    places = [text.index(part) for part in wanted]
    assert places == sorted(places)
    assert all(text.count(f'id="figure-{stem}"') == 1 for stem in ("fig1-accuracy", "fig1-curves", "map", "Wide"))


def test_the_page_opens_with_a_handful_of_findings(tmp_path):
    sections = [section(name=f"s{i}", finding=f"Finding {i}.") for i in range(MOST_FINDINGS + 2)]
    text = write_report(sections, tmp_path, {}).read_text(encoding="utf-8")
    assert [f"<li>Finding {i}.</li>" in text for i in range(MOST_FINDINGS + 2)] == [True] * MOST_FINDINGS + [False] * 2


def test_every_figure_links_to_its_data(page):
    hrefs = [link["href"] for link in page.all("a")]
    assert hrefs.count("fig1.csv") == 2 + 1  # two figures, and the section's own line
    assert hrefs.count("table_2.csv") == 2 + 1


def test_the_same_sections_give_the_same_bytes_over_an_old_report(tmp_path, report):
    (tmp_path / "report.html").write_text("old")
    again = write_report(fake_sections(), tmp_path, ABOUT)
    for path in report.parent.iterdir():
        assert (again.parent / path.name).read_bytes() == path.read_bytes(), path.name


def section(**changes):
    fields = {"name": "one", "title": "One", "text": (), "figures": {}, "rows": []}
    return Section(**{**fields, **changes})


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ([], "sections must be at least one section"),
        ([section(), section(title="Two")],
         "the name of a section must be unique in the report, whatever its capitals, got 'one'"),
        ([section(), section(name="ONE")], "got 'ONE'"),
        ([section(name="../one")], "the name of a section must be letters, digits, '-' and '_'"),
        ([section(name="")], "the name of a section must be letters"),
        ([section(figures={"a": Figure()}), section(name="two", figures={"a": Figure()})],
         "the stem of a figure of section 'two' must be unique"),
        ([section(figures={"a b": Figure()})], "the stem of a figure of section 'one' must be letters"),
        ([section(figures={"a": Figure()}, captions={"b": "text"})],
         r"a caption of section 'one' must be one of its figures \(a\), got 'b'"),
        ([section(headline="b")], r"the headline of section 'one' must be one of its figures \(it has none\), got 'b'"),
        ([section(verdicts=(Verdict("a", "b", "c", True, figure="f"),))], "the figure of a verdict of section 'one'"),
        ([section(rows=[{"x": 1, "y": 2}, {"x": 1, "z": 2}])],
         r"rows of section 'one' must be rows that all have the same keys, at least one, got \[\['x', 'y'\], \['x'"),
        ([section(tables={"t": [{"x": "1"}, {"y": "1"}]})],
         "table 't' of section 'one' must be rows that all have the same keys, at least one"),
        ([section(tables={"t": []})], "table 't' of section 'one' must be rows"),
        ([section(rows=[{"x": 1}, {"x": 1, "y": 2}])], "rows of section 'one'"),
        ([section(rows=[{}])], "rows of section 'one'"),
    ],
)  # fmt: skip
def test_bad_sections_are_named_before_anything_is_written(tmp_path, sections, message):
    with pytest.raises(ValueError, match=message):
        write_report(sections, tmp_path / "out", {})
    assert not (tmp_path / "out").exists()


def test_a_report_that_fails_half_way_leaves_the_old_page(tmp_path):
    page = write_report([section()], tmp_path, {})
    before = page.read_bytes()
    broken = Figure()
    broken.add_subplot().set_title("$\\no_such_command$")
    with pytest.raises(ValueError, match="no_such_command"):
        write_report([section(title="New", figures={"a": broken})], tmp_path, {})
    assert page.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


# In a browser


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("browser")) as tab:
        yield tab


MEASURE = """(() => {
  const boxes = [...document.querySelectorAll("figure img")].map(img => {
    const box = img.getBoundingClientRect();
    return {left: box.left, right: box.right, width: box.width, height: box.height, drawn: img.naturalWidth};
  });
  const links = [...document.querySelectorAll("a")].map(a => a.href);
  return {boxes, links, viewport: innerWidth, width: document.documentElement.scrollWidth};
})()"""


MARKED = """[...document.querySelectorAll("nav a")].filter(
  link => getComputedStyle(link).backgroundColor !== "rgba(0, 0, 0, 0)").map(link => link.hash)"""
CONFIGURATION = "document.querySelector('details.config').getBoundingClientRect().height"


def local(address):
    return url2pathname(unquote(urlsplit(address).path))


@in_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 380, 320])
def test_in_a_browser(report, tab, width, scheme):
    tab.open(report, width, phone=width < 500, scheme=scheme)
    seen = tab.evaluate(MEASURE)
    assert tab.complaints() == []
    assert [one for one in tab.requests() if not one.startswith("data:")] == [report.as_uri()]
    assert seen["viewport"] == width
    assert seen["width"] <= width  # nothing sticks out: the page does not scroll sideways
    assert len(seen["boxes"]) == 4
    for box in seen["boxes"]:
        assert box["width"] > 0.7 * min(width, 500)
        assert box["height"] > 50
        assert box["drawn"] > 0
        assert box["left"] >= 0
        assert box["right"] <= width
    assert len(seen["links"]) == 6 + 1 + 4 + 3 * 4 + 3  # contents, count, verdicts, figures, CSV files
    for address in seen["links"]:
        name = urlsplit(address).fragment
        assert os.path.isfile(local(address))
        if name:
            assert tab.evaluate(f"document.getElementById({json.dumps(name)}) !== null"), name
    # The configuration opens at a click and still fits.
    assert tab.evaluate(CONFIGURATION) < 60
    tab.evaluate("document.querySelectorAll('summary').forEach(summary => summary.click())")
    assert tab.evaluate(CONFIGURATION) > 200
    assert tab.evaluate("document.documentElement.scrollWidth") <= width


@in_browser
def test_a_verdict_leads_to_its_section(report, tab):
    tab.open(report, 1280)
    tab.evaluate("document.querySelectorAll('.stacks a')[1].click()")
    tab.wait_for("document.querySelector(':target') !== null")
    place = tab.evaluate("document.querySelector(':target').getBoundingClientRect().top")
    assert 0 <= place < 800
    assert "At no delay the two are alike" in tab.evaluate("document.querySelector(':target').textContent")


@in_browser
def test_what_was_found_and_its_picture_are_on_the_first_screen(report, tab):
    tab.open(report, 1280)
    for part in (".summary", "#findings img"):
        box = tab.evaluate(f"document.querySelector('{part}').getBoundingClientRect().toJSON()")
        assert box["top"] >= 0
        assert box["bottom"] <= 800


@in_browser
@pytest.mark.parametrize("width", [390, 1280, 1500])
def test_the_contents_follow_the_scroll(report, tab, width):
    tab.open(report, width, phone=width < 500)
    tab.evaluate("document.getElementById('section-table_2').scrollIntoView()")
    assert tab.evaluate("document.querySelector('nav').getBoundingClientRect().top") == 0
    tab.wait_for(f"JSON.stringify({MARKED}) === JSON.stringify(['#section-table_2'])")  # when it has drawn again


@in_browser
def test_paper_is_white_and_shows_the_configuration(report, tab):
    tab.open(report, 720, scheme="dark")
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    tab.open(report, 720, scheme="dark", media="print")
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert tab.evaluate("getComputedStyle(document.body).color") == "rgb(0, 0, 0)"
    assert tab.evaluate(CONFIGURATION) > 200
    assert tab.evaluate("document.documentElement.scrollWidth") <= 720


@in_browser
def test_the_browser_would_notice(tmp_path, tab):
    bad = tmp_path / "bad.html"
    bad.write_text("<!DOCTYPE html><meta name='viewport' content='width=device-width, minimum-scale=1'>"
                   "<div style='width: 900px'>wide</div><img src='missing.png'><script>oops()</script>")  # fmt: skip
    tab.open(bad, 380, phone=True)
    assert tab.evaluate("document.documentElement.scrollWidth") > 380
    assert tab.requests() == [bad.as_uri(), (tmp_path / "missing.png").as_uri()]
    methods = {event["method"] for event in tab.complaints()}
    assert {"Runtime.exceptionThrown", "Network.loadingFailed"} <= methods
