"""The integrations without their libraries."""

import importlib
import sys

import pytest


@pytest.mark.parametrize(
    ("name", "library", "message"),
    [
        ("lightning", "lightning.pytorch", "needs lightning: pip install 'lategrad\\[integrations\\]'"),
        ("transformers", "transformers", "needs transformers and accelerate: pip install 'lategrad\\[integrations\\]'"),
    ],
)
def test_a_missing_library_is_named_with_what_to_install(name, library, message, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, f"lategrad.integrations.{name}", raising=False)
    with pytest.raises(ImportError, match=message):
        importlib.import_module(f"lategrad.integrations.{name}")


def test_nothing_else_imports_them():
    import lategrad.integrations.modes

    assert lategrad.integrations.modes.with_output([]) == []
