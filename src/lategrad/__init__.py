"""Train from late gradients: server rules that adapt to unknown, changing delays."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lategrad._public import *  # noqa: F403
    from lategrad._public import __all__ as __all__

__version__ = "0.2.0"
_LATER = ("optim", "pipeline")  # they bring torch's compiler along, which takes another second


def __getattr__(name: str) -> Any:
    """Import the public names when one is first used: torch takes a second, which ``lategrad --help`` does not need."""
    if name in _LATER:
        return import_module(f"lategrad.{name}")
    if name == "__all__" or not name.startswith("__"):
        public = vars(import_module("lategrad._public"))
        names = public.get("__all__", [])  # none while they are being imported
        globals().update({"__all__": names, **{each: public[each] for each in names if each not in _LATER}})
        if name in globals():
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__getattr__("__all__")]
