"""Paths for child processes of tests."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]


def python_path(test_file: str) -> str:
    """A ``PYTHONPATH`` under which a child process can import a test module and its helpers."""
    return os.pathsep.join([str(Path(test_file).parent), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
