"""What pytest leaves out."""

from importlib.util import find_spec

# Modules for libraries that are not installed cannot be imported, so their doctests cannot be collected.
collect_ignore = [
    f"src/lategrad/integrations/{name}.py" for name in ("lightning", "transformers") if not find_spec(name)
]
