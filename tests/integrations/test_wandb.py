"""Runs that are logged to Weights & Biases, by its own library, offline."""

import json
import struct
import sys

import pytest

import lategrad as lg
from lategrad.problems import Quadratic

RULE = lg.SGD(lr=0.1)
HOW = {"workers": 1, "engine": "threads", "compile": False}


def test_without_the_library_the_error_names_the_command_that_installs_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"log='wandb' needs another package: pip install 'lategrad\[wandb\]'"):
        lg.train(Quadratic(), RULE, steps=10, out=tmp_path, log="wandb", **HOW)


def chunks(contents, block=32768, header=7):
    """The records in a ``.wandb`` file: LevelDB's log format after a header of seven bytes."""
    position, whole = header, b""
    while position + header <= len(contents):
        if block - position % block < header:
            position += block - position % block  # the rest of a block is too short for a header
            continue
        _, length, kind = struct.unpack_from("<IHB", contents, position)
        whole += contents[position + header : position + header + length]
        position += header + length
        if kind in (1, 4):  # a whole record, or its last part
            yield whole
            whole = b""


def logged(folder):
    """The id of an offline run, and its points."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.glob("*.wandb")
    records = [Record.FromString(chunk) for chunk in chunks(path.read_bytes())]
    (run_id,) = {r.run.run_id for r in records if r.WhichOneof("record_type") == "run"}
    points = [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in r.history.item}
              for r in records if r.WhichOneof("record_type") == "history"]  # fmt: skip
    return run_id, points


@pytest.mark.slow
def test_a_run_and_its_resumption_are_parts_of_one_offline_run(monkeypatch, tmp_path):
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    trace = lg.train(Quadratic(), RULE, steps=200, out=tmp_path, log="tensorboard,wandb", **HOW)
    lg.resume(tmp_path, Quadratic(), RULE, steps=300)
    assert list((tmp_path / "tensorboard").iterdir())
    parts = sorted((tmp_path / "wandb").glob("offline-run-*"))
    (first_id, first), (second_id, second) = map(logged, parts)
    assert first_id == second_id == (tmp_path / "wandb-id").read_text()
    assert first[-1]["_step"] == 200
    assert first[-1]["loss"] == pytest.approx(trace.loss[-1].item())
    assert sum(first[-1]["delays/values"]) > 0
    assert first[-1]["workers/alive"] == 1
    assert second[-1]["_step"] == 300
