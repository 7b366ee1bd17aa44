"""The documentation site: it builds without a warning, it has every public name, and its start page's programs run."""

import importlib
import os
import re
import subprocess
import sys
import threading
import zlib
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import pytest
import torch

import lategrad as lg
from helpers.browser import chromium, in_browser

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS / "_ext"))
sys.path.insert(0, str(ROOT / "scripts"))

import make_delay_picture  # noqa: E402
import public_names  # noqa: E402
import rule_costs  # noqa: E402
import rule_facts  # noqa: E402

INSTALLED = [name for name in public_names.MODULES if not name.startswith("lategrad.integrations")]


def build(docs, out, *options):
    """A strict build in a process of its own."""
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", *options, docs, out]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def documented(site):
    """The names of Python objects in the site's inventory."""
    head, _, packed = (site / "objects.inv").read_bytes().partition(b"zlib.\n")
    assert head.startswith(b"# Sphinx inventory")
    lines = zlib.decompress(packed).decode().splitlines()
    return {line.split()[0] for line in lines if line.split()[1].startswith("py:")}


@pytest.mark.slow  # `make docs` does it, too
def test_the_site_builds_without_a_warning_and_has_every_public_name(tmp_path):
    built = build(DOCS, tmp_path)
    assert built.returncode == 0, built.stderr
    assert built.stderr == ""
    names = documented(tmp_path)
    for module in INSTALLED:
        exported = importlib.import_module(module)
        for name in exported.__all__:
            if not isinstance(getattr(exported, name), ModuleType):
                assert any(full.split(".")[-1] == name for full in names), f"{module}.{name} is not in the reference"
    for page in tmp_path.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|iframe)[^>]* src=\"(https?:)?//|<link[^>]* href=\"https?://", text)
        assert not loaded, f"{page.name} loads something from the network"


FAULTS = {
    "nowhere.md": "[a page](nowhere.md)",
    "no-such-place": "[a place](#no-such-place)",
    "Nowhere": "{py:class}`Nowhere`",
    "nowhere.png": "![a picture](nowhere.png)",
}


@pytest.mark.slow
@pytest.mark.parametrize("faults", [{}, FAULTS])
def test_what_leads_nowhere_ends_the_build(tmp_path, faults):
    (tmp_path / "index.md").write_text("# Page\n\n## Here\n\n[here](#here)\n\n" + "\n\n".join(faults.values()))
    built = build(tmp_path, tmp_path / "site", "-c", DOCS, "-D", "extensions=myst_parser")
    assert (built.returncode == 0) == (not faults), built.stderr
    for fault in faults:
        assert fault in built.stderr


def test_a_public_class_or_function_without_a_docstring_is_found():
    class Bare:
        def update(self):
            return self

    class Described:
        """It is."""

        def update(self):
            return self

    def bare():
        return None

    def name(value):
        return public_names.Name("lategrad", value.__name__, value, page="lategrad")

    assert list(public_names.undocumented(name(Bare))) == ["lategrad.Bare"]
    assert list(public_names.undocumented(name(bare))) == ["lategrad.bare"]
    assert not list(public_names.undocumented(name(Described)))
    assert not list(public_names.undocumented(name(lg.Steady)))


def test_a_rule_must_say_what_it_needs_what_is_proved_and_where_it_is_from():
    assert rule_facts.missing("A rule.\n\nMust know: nothing.") == ["Guarantee", "Reference", "update"]
    assert not rule_facts.missing(lg.Anytime.__doc__)


@pytest.mark.parametrize(
    ("rule", "vectors", "ticket", "passes", "products"),
    [(lg.SGD(lr=1.0), 1, 0, 1, 0), (lg.SGD(lr=1.0, average="uniform"), 2, 0, 1, 0), (lg.Steady(), 2, 0, 2, 0),
     (lg.baselines.AdamW(lr=1.0), 3, 0, 1, 0), (lg.baselines.DCASGD(lr=1.0), 1, 1, 1, 0),
     (lg.baselines.AdaptiveRevision(lr=1.0), 8, 2, 1, 0), (lg.SteadyMuon(), 4, 0, 2, 2)],
)  # fmt: skip
def test_the_measured_cost_is_what_the_algorithm_keeps(rule, vectors, ticket, passes, products):
    """Adam keeps x, m and v; float64 sums count twice; orthogonalising is a Gram matrix and a product with it."""
    assert rule_costs.cost(rule_costs.with_matrix(rule)) == rule_costs.Cost(vectors, ticket, passes, products)


def programs():
    return re.findall(r"```python\n(.*?)```", (DOCS / "index.md").read_text(encoding="utf-8"), flags=re.DOTALL)


def test_the_start_page_has_three_programs_of_about_ten_lines():
    assert len(programs()) == 3
    for program in programs():
        assert 8 <= len([line for line in program.splitlines() if line.strip()]) <= 11


def test_the_simulation_of_the_start_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(programs()[2], names)
    assert names["trace"].accuracy.shape[1:] == (2, 3, 3)
    assert names["trace"].accuracy[-1].max() > 0.9
    assert (tmp_path / "accuracy.png").stat().st_size > 1000


def test_the_training_of_the_start_page_runs_as_a_script(tmp_path):
    (tmp_path / "script.py").write_text(programs()[1])
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    ran = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    accuracy, _ = map(float, re.findall(r"\d+\.\d+", ran.stdout)[:2])
    assert accuracy > 0.8
    assert (tmp_path / "night").is_dir()


def test_the_optimizer_of_the_start_page_learns():
    torch.manual_seed(0)
    losses = []
    watched = programs()[0].replace("    loss.backward()", "    losses.append(loss.item())\n    loss.backward()")
    exec(watched, {"losses": losses})
    assert len(losses) == 300
    assert sum(losses[-20:]) < sum(losses[:20]) / 2


def test_the_picture_of_delays_is_what_the_library_computes():
    content = make_delay_picture.from_script(make_delay_picture.FILE.read_text(encoding="utf-8"))
    assert content["delays"] == make_delay_picture.DELAYS
    for rule in content["rules"]:
        for place in (0, 6, -1):
            queries, outputs = make_delay_picture.path(rule["name"], [rule["lr"]], content["delays"][place])
            assert make_delay_picture.same(rule["queries"][place], make_delay_picture.rounded(queries))
            assert make_delay_picture.same(rule["outputs"][place], make_delay_picture.rounded(outputs))


# In a browser


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The address of the site, served."""
    folder = tmp_path_factory.mktemp("site")
    built = build(DOCS, folder)
    assert built.returncode == 0, built.stderr
    handler = partial(QuietHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        """Nobody reads it."""


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("browser")) as tab:
        yield tab


LOOKED_AT = [
    "index.html",
    "why.html",
    "theory.html",
    "results/baselines.html",
    "architecture.html",
    "glossary.html",
    "cli.html",
    "faq.html",
    "cost.html",
    "which-tool.html",
    "results/index.html",
    "reference/rules/index.html",
    "reference/rules/Steady.html",
    "reference/rules/SteadyMuon.html",
    "reference/lategrad.optim.html",
]
TYPESET = "typeof MathJax === 'undefined' || MathJax.startup.promise.then(() => true)"
MEASURE = """({
  width: document.documentElement.scrollWidth,
  broken: [...document.images].filter(image => image.complete && !image.naturalWidth).map(image => image.src),
  wrong: [...document.querySelectorAll('mjx-merror')].map(error => error.textContent),
  raw: [...document.querySelectorAll('.math')].filter(math => !math.querySelector('mjx-container')).length,
  background: getComputedStyle(document.body).backgroundColor,
})"""


@pytest.mark.slow
@in_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_pages_fit_a_screen_and_a_telephone_in_light_and_dark(site, tab, tmp_path, width, scheme):
    for page in LOOKED_AT:
        tab.open(f"{site}/{page}", width, phone=width < 500, scheme=scheme)
        tab.wait_for(TYPESET)
        seen = tab.evaluate(MEASURE)
        assert tab.complaints() == [], page
        assert all(url.startswith(site) for url in tab.requests()), page
        assert seen["width"] <= width, f"{page} scrolls sideways"
        assert seen["broken"] == seen["wrong"] == [], page
        assert seen["raw"] == 0, f"{page} has mathematics that is not set"
        level = sum(map(int, re.findall(r"\d+", seen["background"])[:3])) / 3
        assert (level < 60) == (scheme == "dark")
        image = tab.screenshot(tmp_path / f"{page.replace('/', '_')}-{width}-{scheme}.png")
        assert len(image) > 10_000


@pytest.mark.slow
@in_browser
def test_all_mathematics_of_the_reference_is_understood(site, tab):
    for path in sorted((DOCS / "reference").rglob("*.rst")):
        tab.open(f"{site}/reference/{path.relative_to(DOCS / 'reference').with_suffix('.html')}", 1280)
        tab.wait_for(TYPESET)
        seen = tab.evaluate(MEASURE)
        assert seen["wrong"] == [], path.name
        assert seen["raw"] == 0, path.name


@pytest.mark.slow
@in_browser
@pytest.mark.parametrize(("words", "page"), [("Steady", "steady"), ("SteadyMuon", "reference/rules/SteadyMuon")])
def test_the_search_finds_pages_and_rules(site, tab, words, page):
    tab.open(f"{site}/search.html?q={words}", 1280)
    tab.wait_for("document.querySelectorAll('#search-results li a').length > 0")
    tab.wait_for(f"[...document.querySelectorAll('#search-results li a')].some(a => a.href.includes('{page}'))")
    assert all(url.startswith(site) for url in tab.requests())


@pytest.mark.slow
@in_browser
def test_the_picture_of_delays_moves_with_its_sliders_and_plays(site, tab):
    content = make_delay_picture.from_script(make_delay_picture.FILE.read_text(encoding="utf-8"))
    set_slider = """(name, value) => {
      const slider = document.querySelector(`#delay-picture [name=${name}]`);
      slider.value = value; slider.dispatchEvent(new Event("input"));
      return [...document.querySelectorAll("[data-loss]")].map(cell => Number(cell.textContent));
    }"""
    tab.open(f"{site}/why.html", 1280)
    assert tab.evaluate("document.querySelector('#delay-picture').hidden") is False
    for place in (0, len(content["delays"]) - 1):
        shown = tab.evaluate(f"({set_slider})('delay', {place})")
        assert shown == pytest.approx([rule["losses"][place][-1] for rule in content["rules"]], rel=0.05)
    tab.evaluate(f"({set_slider})('time', 10)")
    points = "document.querySelector('.rule.steady .trail').getAttribute('points').split(' ').length"
    assert tab.evaluate(points) == 11
    tab.evaluate("document.querySelector('#delay-picture button').click()")
    tab.wait_for(f"{points} > 15")
