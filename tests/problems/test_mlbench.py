"""Letters and satellite images: found, verified, read without R, and clear words where something is missing."""

import builtins

import pytest
import torch

from benchmarks import mlbench


def stored(name):
    try:
        return mlbench.find(name)
    except FileNotFoundError:
        pytest.skip("needs scripts/fetch_mlbench.sh")


@pytest.fixture
def nothing_stored(monkeypatch, tmp_path):
    monkeypatch.setenv("LATEGRAD_DATA", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(mlbench, "DEBIAN_FOLDER", tmp_path / "debian")


@pytest.mark.parametrize(
    ("name", "train", "test", "classes"),
    [("letters", (16_000, 16), (4_000, 16), 26), ("satellite", (4_435, 36), (2_000, 36), 6)],
)
def test_the_data_sets_as_tensors(name, train, test, classes):
    stored(name)
    pytest.importorskip("rdata")
    data = mlbench.load(name, "standardise")
    assert data.x_train.shape == train
    assert data.x_test.shape == test
    assert data.classes == classes == len(data.class_names)
    shares = torch.bincount(data.y_train) / len(data.y_train), torch.bincount(data.y_test) / len(data.y_test)
    torch.testing.assert_close(*shares, atol=1e-3, rtol=0.05)  # split within each class
    torch.testing.assert_close(data.x_train.std(0, correction=0), torch.ones(train[1]))
    assert torch.equal(data.x_train, mlbench.load(name, "standardise").x_train)  # always the same way


def test_a_missing_file_says_what_to_run(nothing_stored):
    with pytest.raises(FileNotFoundError, match=r"LetterRecognition.rda.*run scripts/fetch_mlbench.sh"):
        mlbench.load("letters")


def test_a_damaged_file_is_refused(nothing_stored, tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "Satellite.rda").write_bytes(b"not R")
    with pytest.raises(ValueError, match=r"Satellite.rda does not have SHA-256"):
        mlbench.load("satellite")


def test_a_missing_reader_says_what_to_install(monkeypatch):
    stored("letters")
    real = builtins.__import__

    def without_rdata(name, *rest):
        if name == "rdata":
            raise ModuleNotFoundError("No module named 'rdata'")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_rdata)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lategrad\[mlbench\]'"):
        mlbench.load("letters")
