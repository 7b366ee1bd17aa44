"""A checksum of a function and of the code it uses, so that stored runs of other code are not taken for its own."""

import hashlib
import inspect
import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from functools import partial
from modulefinder import ModuleFinder
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any


def identify_code(function: Any) -> dict[str, str]:
    """The name of a function, and a checksum of what it computes, as far as that can be seen.

    It covers the file of its module and those of the user's own modules that are imported there, also in functions,
    its code as it was loaded, and the values that it uses from its module, its closure or a ``functools.partial``.

    >>> def train(wrap, lr): ...
    >>> identify_code(partial(train, lr=0.1)) == identify_code(partial(train, lr=0.2))
    False
    """
    texts = [*_texts(function, set())]
    while isinstance(function, partial):
        function = function.func
    contents = hashlib.sha256("\0".join([*texts, *_imported_files(function)]).encode())
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return {"name": name, "source": contents.hexdigest()[:16]}


def _imported_files(function: Any) -> Iterator[str]:
    module = sys.modules.get(getattr(function, "__module__", ""))
    file = getattr(module, "__file__", None) or ""
    if _is_own(module) and file.endswith(".py"):
        finder = ModuleFinder([str(Path(file).parent), os.getcwd()], excludes=["lategrad"])
        finder.run_script(file)  # which executes nothing
        files = filter(None, (vars(found)["__file__"] for found in finder.modules.values()))
        yield from (Path(found).read_text(errors="replace") for found in files)


def _texts(part: Any, seen: set[int]) -> Iterator[str]:
    uses: list[Any] = []
    if isinstance(part, partial):
        uses = [part.func, *part.args, *part.keywords.items()]
    elif isinstance(part, ModuleType | FunctionType | type):
        module = part if isinstance(part, ModuleType) else sys.modules.get(part.__module__)
        if id(part) in seen or not _is_own(module):
            return
        seen.add(id(part))
        if isinstance(part, FunctionType):
            names, code = inspect.getclosurevars(part), part.__code__
            uses = [code.co_code, code.co_consts, part.__defaults__, part.__kwdefaults__, module,
                    *names.nonlocals.values(), *names.globals.values()]  # fmt: skip
        elif part is not module:
            uses = [module, *vars(part).values()]
        elif file := getattr(module, "__file__", None):  # a notebook has none
            yield Path(file).read_text(errors="replace")
            uses = [value for value in vars(module).values() if isinstance(value, ModuleType | FunctionType | type)]
    else:
        yield re.sub(" at 0x[0-9a-f]+", "", repr(part))  # an address differs in every process
        uses = [type(part), getattr(part, "__func__", None) or getattr(part, "__wrapped__", int)]
    for used in uses:
        yield from _texts(used, seen)


def _is_own(module: ModuleType | None) -> bool:
    """Whether it is the user's code, and not of Python, an installed package or this library."""
    file = getattr(module, "__file__", None)  # a notebook has none
    return getattr(module, "__name__", "") == "__main__" if file is None else is_own_file(file)


def is_own_file(file: str) -> bool:
    libraries = sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), str(Path(__file__).parents[1])
    library = any(Path(file).is_relative_to(folder) for folder in libraries)
    return not library and not {"site-packages", "dist-packages"} & {*Path(file).parts}
