"""The site: Sphinx, because the docstrings are its language already; everything it needs lies on this machine.

``make docs`` builds it with every warning an error. The extensions of our own are in ``_ext``: the reference of all
public names with the measured cost of each rule, and mathematics without a network.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

from public_names import FOREIGN

import lategrad

project = "lategrad"
author = "the authors of lategrad"
version = release = lategrad.__version__
copyright = "2026, the authors of lategrad; Apache-2.0"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_design",
    "sphinx_copybutton",
    "offline_mathjax",
    "reference",
]
exclude_patterns = ["_ext", "_static", "figures"]
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(torch|numpy|np|sklearn|matplotlib|lightning|transformers|ray|os|pathlib)\..*")]
nitpick_ignore = [("py:obj", "lategrad.rules.rule.State")]  # a type variable

myst_enable_extensions = ["colon_fence", "dollarmath", "deflist"]
myst_heading_anchors = 3

toc_object_entries = False  # a page lists its names itself, and a build takes two thirds of the time
autodoc_member_order = "bysource"
autodoc_mock_imports = list(FOREIGN)
autodoc_typehints = "signature"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
copybutton_exclude = ".linenos, .gp, .go"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

html_theme = "furo"
html_title = f"lategrad {release}"
html_static_path = ["_static"]
html_favicon = "_static/favicon.svg"
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#8a3a12", "color-brand-content": "#8a3a12"},
    "dark_css_variables": {"color-brand-primary": "#f0a070", "color-brand-content": "#f0a070"},
}
