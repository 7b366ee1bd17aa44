"""Worker processes import the main script: a call that is not behind ``if __name__ == "__main__":`` would run there."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import FrameType

_REMEDY = """worker processes import it, and would start the run again. Put the call into a function, and at the end:

if __name__ == "__main__":
    main()

(or use engine="threads")"""


def require_main_guard() -> None:
    """Raise a ``RuntimeError`` if workers cannot import the main script, or an unguarded line of it starts the run."""
    main = sys.modules["__main__"]
    file, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    package = spec is not None and spec.name.endswith("__main__")  # python -m package: workers do not import it
    if file == "<stdin>":
        raise RuntimeError("the script comes from standard input, where worker processes cannot import it from: "
                           'save it as a file, or use engine="threads"')  # fmt: skip
    frame = _frame_of(vars(main))
    if file is None or package or frame is None or not Path(file).is_file():
        return
    try:
        script = ast.parse(Path(file).read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return  # not the source of what runs
    if not is_guarded(script, frame.f_lineno):
        raise RuntimeError(f"line {frame.f_lineno} of {Path(file).name} starts worker processes: {_REMEDY}")


def _frame_of(names: dict[str, object]) -> FrameType | None:
    """The frame of the main script itself, if it is what is running in this thread."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and not (frame.f_code.co_name == "<module>" and frame.f_globals is names):
        frame = frame.f_back
    return frame


def is_guarded(script: ast.Module, line: int) -> bool:
    """Whether the statement that a line of a script belongs to asks for ``__name__``.

    >>> script = ast.parse("train()\\nif __name__ == '__main__':\\n    train()")
    >>> is_guarded(script, 1), is_guarded(script, 3)
    (False, True)
    """
    statement = next((one for one in script.body if one.lineno <= line <= (one.end_lineno or one.lineno)), None)
    return statement is None or any(_asks_for_name(node) for node in ast.walk(statement) if isinstance(node, ast.If))


def _asks_for_name(node: ast.If) -> bool:
    return any(isinstance(part, ast.Name) and part.id == "__name__" for part in ast.walk(node.test))
