"""The package that people install: one version, data with licences, a wheel that works without the checkout."""

import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import lategrad as lg
from benchmarks import mlbench

ROOT = Path(__file__).parents[2]


def test_the_version_is_one():
    text = {
        name: (ROOT / name).read_text(encoding="utf-8") for name in ("pyproject.toml", "CITATION.cff", "CHANGELOG.md")
    }
    assert re.search(r'^version = "(.*)"', text["pyproject.toml"], flags=re.MULTILINE)[1] == lg.__version__
    assert re.search(r"^version: (.*)", text["CITATION.cff"], flags=re.MULTILINE)[1] == lg.__version__
    assert f"\n## {lg.__version__}\n" in text["CHANGELOG.md"]


def test_every_data_set_that_is_fetched_has_a_licence_in_the_docs():
    rows = [line for line in (ROOT / "docs" / "data.md").read_text(encoding="utf-8").splitlines() if line[:2] == "| "]
    named = {name: row.split("|")[-2] for row in rows for name in re.findall(r"`([a-z-]+)`", row.split("|")[1])}
    assert set(named) >= {"digits", "fashion-mnist", *mlbench.FILES, "shakespeare"}
    for name, licence in named.items():
        assert re.search(r"CC BY|MIT|GPL|public domain", licence), name
    for script in (ROOT / "scripts").glob("fetch_*.sh"):
        assert any(script.name in row for row in rows), f"{script.name} is not in docs/data.md"


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """The wheel and the source distribution of this checkout."""
    out = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "build", "--quiet", "--outdir", out, ROOT], check=True)
    (wheel,), (source,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, source


@pytest.mark.slow
def test_the_wheel_has_the_library_alone_and_the_source_distribution_has_all(distributions):
    wheel, source = distributions
    in_wheel = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    files = [path for path in (ROOT / "src" / "lategrad").rglob("*.*") if "__pycache__" not in path.parts]
    assert in_wheel == {path.relative_to(ROOT / "src").as_posix() for path in files}
    with tarfile.open(source) as archive:
        in_source = {name.partition("/")[2] for name in archive.getnames()}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    assert {name for name in tracked if not name.startswith(".")} <= in_source


@pytest.mark.slow
def test_the_wheel_works_outside_the_checkout_with_its_declared_dependencies_only(distributions, tmp_path):
    wheel, _ = distributions
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

    def run(*command):
        return subprocess.run(command, cwd=tmp_path, env=clean, check=True, capture_output=True, text=True).stdout

    run(python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", wheel)
    run(python, "-m", "pip", "check")
    assert run(python, "-c", "import lategrad; print(lategrad.__file__)").startswith(str(tmp_path))
    installed = {line.split()[0].lower() for line in run(python, "-m", "pip", "list").splitlines()[2:]}
    assert not installed & {"ray", "tensorboard", "rdata", "pandas", "pytest", "sphinx"}
    run(
        python.with_name("lategrad"),
        "simulate",
        "--rule",
        "steady",
        "sgd",
        "--lr",
        "1",
        "--steps",
        "100",
        "--out",
        "out",
    )
    assert {"results.csv", "results.png", "steady.safetensors"} <= {path.name for path in (tmp_path / "out").iterdir()}
