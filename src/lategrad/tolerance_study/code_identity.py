"""A checksum of a function and of the code it uses, so that stored runs of other code are not taken for its own."""

from __future__ import annotations

import hashlib
import inspect
import sys
import sysconfig
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

_PACKAGES = ("site-packages", "dist-packages")


def identify_code(function: Any) -> dict[str, str]:
    """The name of a function, and a checksum of what it computes, as far as that can be seen.

    It covers the file of its module and those of the user's own modules that are imported there, its code as it was
    loaded, and the values that it uses from its module, its closure or a ``functools.partial``.

    >>> def train(wrap, lr): ...
    >>> identify_code(partial(train, lr=0.1)) == identify_code(partial(train, lr=0.2))
    False
    """
    inner = function
    while isinstance(inner, partial):
        inner = inner.func
    texts = "\0".join(_texts(function, set()))
    return {"name": getattr(inner, "__qualname__", type(inner).__qualname__),
            "source": hashlib.sha256(texts.encode()).hexdigest()[:16]}  # fmt: skip


def _texts(part: Any, seen: set[int]) -> Iterator[str]:
    uses: list[Any] = []
    if isinstance(part, ModuleType | FunctionType | type):
        if id(part) in seen or not _is_own(part if isinstance(part, ModuleType) else sys.modules.get(part.__module__)):
            return
        seen.add(id(part))
    if isinstance(part, ModuleType):
        if file := getattr(part, "__file__", None):  # a notebook has none
            yield Path(file).read_text(errors="replace")
            uses = [value for value in vars(part).values() if isinstance(value, ModuleType | FunctionType | type)]
    elif isinstance(part, FunctionType):
        names = inspect.getclosurevars(part)
        uses = [sys.modules.get(part.__module__), part.__code__, part.__defaults__, part.__kwdefaults__,
                *names.nonlocals.values(), *names.globals.values()]  # fmt: skip
    elif isinstance(part, CodeType):
        yield f"{part.co_code.hex()} {part.co_names}"
        uses = [*part.co_consts]
    elif isinstance(part, partial):
        uses = [part.func, *part.args, *part.keywords, *part.keywords.values()]
    elif isinstance(part, type):
        uses = [sys.modules[part.__module__], *vars(part).values()]
    else:
        text = repr(part)
        yield text if " at 0x" not in text else type(part).__qualname__  # an address differs in every process
        uses = [type(part), *(getattr(part, name) for name in ("__func__", "__wrapped__") if hasattr(part, name))]
    for used in uses:
        yield from _texts(used, seen)


def _is_own(module: ModuleType | None) -> bool:
    """Whether it is the user's code, and not of Python, an installed package or this library."""
    name, file = getattr(module, "__name__", ""), getattr(module, "__file__", None)
    if name.partition(".")[0] == "lategrad" or file is None:
        return name == "__main__"
    library = any(Path(file).is_relative_to(sysconfig.get_paths()[kind]) for kind in ("stdlib", "platstdlib"))
    return not library and not set(_PACKAGES) & set(Path(file).parts)
