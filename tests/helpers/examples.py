"""The scripts in examples/ as modules."""

import importlib.util
import sys
from pathlib import Path


def example(name):
    path = Path(__file__).parent.parent.parent / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
