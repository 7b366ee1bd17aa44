"""Mathematics by a MathJax that lies beside the pages: no page asks the network for anything."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

_PARTS = ("tex-chtml.js", "output/chtml/fonts/woff-v2")


def mathjax_folder() -> Path:
    """Where the package sphinx-mathjax-offline keeps MathJax 3."""
    spec = find_spec("sphinx-mathjax-offline")
    if spec is None or spec.origin is None:
        raise ExtensionError("the package sphinx-mathjax-offline is missing: pip install 'lategrad[docs]'")
    return Path(spec.origin).parent / "static" / "mathjax"


def copy_mathjax(app: Sphinx) -> None:
    """Put the parts that a page loads into the site; the package has twenty times as much."""
    if app.builder.format != "html":
        return
    source, target = mathjax_folder(), Path(app.outdir) / "_static" / "mathjax"
    for part in _PARTS:
        target.joinpath(part).parent.mkdir(parents=True, exist_ok=True)
        if (source / part).is_dir():
            shutil.copytree(source / part, target / part, dirs_exist_ok=True)
        else:
            shutil.copy(source / part, target / part)


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.setup_extension("sphinx.ext.mathjax")
    app.config["mathjax_path"] = "mathjax/tex-chtml.js"
    app.config["mathjax3_config"] = {"options": {"enableMenu": False}}
    app.connect("builder-inited", copy_mathjax)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
