"""The pages of the reference: one for each rule, with what it costs, and one for each module.

They are written to ``docs/reference`` before Sphinx reads it. A public class or function without a docstring, and a
rule whose docstring lacks a heading, is a warning, and so an error.
"""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from docutils import nodes
from public_names import MODULES, Name, public_names, undocumented
from rule_costs import START, Cost, cost, with_matrix
from rule_facts import emphasise, facts, missing
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.domains.python import PythonDomain
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

import lategrad as lg
from lategrad.registry import RULES
from lategrad.rules import AnyRule

_LOG = logging.getLogger(__name__)
_GENERATED = ".. Written by docs/_ext/reference.py.\n\n"

EXAMPLES: dict[str, Callable[[], AnyRule[Any]]] = {
    "CenteredClipping": lambda: lg.CenteredClipping(lr=1.0, radius=1.0),
    "Scheduled": lambda: lg.Scheduled(lg.SGD(lr=1.0)),
}
"""Rules that have no name on the command line, to be measured."""


def instances() -> dict[type, dict[str, AnyRule[Any]]]:
    """For each class of rules, what to measure: its names on the command line, or an example."""
    found: dict[type, dict[str, AnyRule[Any]]] = defaultdict(dict)
    for name, entry in RULES.items():
        rule = lg.parse_rule(f"{name}:{entry.parameter}=1")
        found[type(rule)][name] = with_matrix(rule)
    for name, make in EXAMPLES.items():
        rule = make()
        found[type(rule)][name] = with_matrix(rule)
    return found


_FOREIGN_BASES = "object, tuple, Optimizer, BaseEstimator, ClassifierMixin, RegressorMixin, Exception"
"""Classes whose members are described elsewhere."""


def heading(text: str, underline: str = "=") -> str:
    """A title."""
    return f"{text}\n{underline * len(text)}\n\n"


def autodoc(name: Name) -> str:
    """The directive that shows a name."""
    if isinstance(name.value, type):
        options = f"   :members:\n   :undoc-members:\n   :inherited-members: {_FOREIGN_BASES}\n\n"
        return f".. autoclass:: {name.target}\n{options}"
    if inspect.isroutine(name.value):
        return f".. autofunction:: {name.target}\n\n"
    return f".. autodata:: {name.target}\n   :no-value:\n\n"


def costs_of(name: Name, rules: Mapping[str, AnyRule[Any]]) -> dict[str, Cost]:
    """The cost of a rule under each of its names."""
    if not rules:
        _LOG.warning(
            "no way to measure %s: add it to lategrad.registry.RULES, or to EXAMPLES of %s", name.full, __file__
        )
    return {label: cost(rule) for label, rule in rules.items()}


def rule_page(name: Name, rules: Mapping[str, AnyRule[Any]], costs: Mapping[str, Cost], states: set[type]) -> str:
    """A rule: its docstring with its update, what it must know, its guarantee and its source; its cost; its state.

    A state that several rules share is in the site's index once: ``states`` has those of the pages before.
    """
    page = heading(name.name) + autodoc(name) + heading("Cost", "-")
    page += "Measured on float32 parameters; a float64 vector counts as two, single numbers as nothing.\n\n"
    for label, measured in costs.items():
        page += f"- {f'``{label}``' if label in RULES else 'As in the example'}: {measured.sentence()}\n"
    state = type(next(iter(rules.values())).init(START))
    if state.__module__.startswith("lategrad"):
        page += "\n" + heading("State", "-")
        page += f".. autoclass:: {state.__module__}::{state.__qualname__}\n   :members:\n"
        page += "   :no-index:\n" * (state in states)
        states.add(state)
    return page


def rules_table(names: list[Name], costs: Mapping[str, Mapping[str, Cost]]) -> str:
    """All rules in one table."""
    head = ["Rule", "Must know", "Guarantee", "Vectors", "Passes"]
    table = ".. list-table::\n   :header-rows: 1\n   :class: rules\n\n"
    rows = [head]
    for name in names:
        given = facts(inspect.cleandoc(name.value.__doc__))
        measured = list(costs[name.full].values())
        vectors = sorted({one.vectors + one.ticket for one in measured})
        passes = sorted({one.passes for one in measured if one.passes is not None})
        rows.append([f":doc:`{name.name} </reference/rules/{name.name}>`", given.get("Must know", ""),
                     given.get("Guarantee", ""), _range(vectors), _range(passes) or "not counted"])  # fmt: skip
    for row in rows:
        table += "".join(f"   {'*' if i == 0 else ' '} - {cell}\n" for i, cell in enumerate(row))
    return table + "\n"


def _range(numbers: list[Any]) -> str:
    ends = dict.fromkeys(f"{number:g}" for number in (numbers[:1] + numbers[-1:]))
    return " to ".join(ends)


def pages() -> dict[str, str]:
    """All pages by their paths in ``docs/reference``."""
    names = public_names()
    for name in names:
        for member in undocumented(name):
            _LOG.warning("%s is public and has no docstring", member)
        lacking = missing(inspect.cleandoc(name.value.__doc__ or "")) if name.is_rule else []
        if lacking:
            _LOG.warning("the docstring of the rule %s lacks: %s", name.full, ", ".join(lacking))
    rules, measurable = [name for name in names if name.is_rule], instances()
    costs = {name.full: costs_of(name, measurable[name.value]) for name in rules}
    states: set[type] = set()
    written = {
        f"rules/{name.name}.rst": rule_page(name, measurable[name.value], costs[name.full], states) for name in rules
    }
    ours, baselines = ([name for name in rules if (name.module == "lategrad.rules.baselines") == baseline]
                    for baseline in (False, True))  # fmt: skip
    index = heading("Reference") + f"Every public name of lategrad {lg.__version__}, from its docstring.\n\n"
    index += ".. toctree::\n   :maxdepth: 1\n\n   rules/index\n"
    overview = heading("All server rules") + (
        "What each rule must know besides its learning rate and constraint set, what is proved about it when gradients "
        "are late, and what it costs: the vectors of its state and of its tickets, and the passes over them for one "
        "update, all measured when this page was built (float32 parameters, no constraint). Where torch compiles the "
        "update the passes are not counted; rules that orthogonalise make matrix products besides.\n\n"
    )
    for title, group in (("The paper's rules, and ours", ours), ("Baselines", baselines)):
        overview += heading(title, "-") + rules_table(group, costs)
        overview += ".. toctree::\n   :hidden:\n\n" + "".join(f"   {name.name}\n" for name in group) + "\n"
    written["rules/index.rst"] = overview
    for module, title in MODULES.items():
        own = [name for name in names if name.page == module and not name.is_rule]
        if own:
            text = inspect.cleandoc(import_module(module).__doc__ or "")
            anchor = f".. py:module:: {module}\n\n"
            listed = ", ".join(f":py:obj:`{name.name} <{name.full}>`" for name in own)
            shown = "".join(autodoc(name) for name in own)
            written[f"{module}.rst"] = f"{heading(title)}{anchor}{_with_links(text)}\n\nNames: {listed}.\n\n{shown}"
            index += f"   {module}\n"
    written["index.rst"] = index
    return written


def write_pages(app: Sphinx) -> None:
    """Write what has changed, and remove what is no longer there."""
    folder = Path(app.srcdir) / "reference"
    written = {folder / path: _GENERATED + text for path, text in pages().items()}
    for path, text in written.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
    for path in set(folder.rglob("*.rst")) - set(written):
        path.unlink()


def _with_links(text: str) -> str:
    """Pages that a docstring names as files."""
    return re.sub(r"(?<![/\w])docs/([\w/-]+)\.md", r":doc:`/\1`", text)


def show_docstring(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Headings of rules stand out, and pages named as files are links."""
    emphasise(lines)
    lines[:] = [_with_links(line) for line in lines]


_LETTER = re.compile(r"^(\s+\w+: \w)\.$")
"""``domain: K.``, of which Napoleon and docutils would make a list that begins with the letter K."""

_SET_ASIDE: dict[str, list[str]] = {}


def before_napoleon(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """What Napoleon would misread: before a colon in an attribute's docstring a type, in a single letter a list."""
    if what in ("attribute", "data", "property"):
        _SET_ASIDE[name] = list(lines)
        lines.clear()
    lines[:] = [_LETTER.sub(r"\1\\.", line) for line in lines]


def put_back(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """After Napoleon."""
    if name in _SET_ASIDE:
        lines[:] = _SET_ASIDE.pop(name)


def skip_foreign_members(app: Sphinx, what: str, name: str, value: Any, skip: bool, options: Any) -> bool | None:
    """What scikit-learn adds to estimators is described there."""
    return True if re.fullmatch(r"set_\w+_request|get_metadata_routing", name) else None


_KINDS = {"func": {"function"}, "class": {"class", "exception"}, "meth": {"method"}, "mod": {"module"}}


def find_elsewhere(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.TextElement
) -> nodes.Element | None:
    """A name that is referred to by another of its names, such as that of the module that defines it.

    Annotations of other libraries, and of what is not public, stay without a link; a role must lead somewhere.
    """
    if node.get("refdomain") != "py":
        return None
    domain = env.domains["py"]
    assert isinstance(domain, PythonDomain)
    target = node["reftarget"]
    kinds = _KINDS.get(node["reftype"])
    known = [full for full, entry in domain.objects.items()
             if not entry.aliased and (kinds is None or entry.objtype in kinds)]  # fmt: skip
    found = [full for full in known if full.endswith(f".{target}")]
    found = found or [full for full in known if full.rpartition(".")[2] == target.rpartition(".")[2]]
    if len(found) == 1:
        entry = domain.objects[found[0]]
        uri = app.builder.get_relative_uri(node.get("refdoc", env.docname), entry.docname)
        return nodes.reference("", "", content, internal=True, refuri=f"{uri}#{entry.node_id}", reftitle=found[0])
    return content if "refexplicit" not in node else None


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("builder-inited", write_pages)
    app.connect("autodoc-process-docstring", before_napoleon, priority=400)  # Napoleon's is 500
    app.connect("autodoc-process-docstring", put_back, priority=600)
    app.connect("autodoc-process-docstring", show_docstring, priority=700)
    app.connect("autodoc-skip-member", skip_foreign_members)
    app.connect("missing-reference", find_elsewhere)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
