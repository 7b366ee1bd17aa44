"""Every option of a run is written down once: in Python, on the command line and in checkpoints it is the same."""

from __future__ import annotations

import dataclasses
import inspect
import json

import pytest
import torch
import typer.main

import lategrad as lg
from lategrad.cli import main as cli
from lategrad.cli.train_options import pauses
from lategrad.problems import Quadratic
from lategrad.serve import Settings

NAMES = [field.name for field in dataclasses.fields(Settings)]


def _options_of(command):
    return {p.name: p for p in typer.main.get_command(cli.app).commands[command].params}


def test_the_signature_of_train_is_that_of_the_settings():
    parameters = inspect.signature(lg.train).parameters
    assert list(parameters) == ["problem", "rule", *NAMES]
    assert parameters["steps"].default is inspect.Parameter.empty
    assert parameters["deadline"].default == Settings(steps=1).deadline


def test_every_option_is_documented():
    for name in NAMES:
        assert f"\n        {name}: " in lg.train.__doc__, name


def test_every_option_is_one_of_the_command_line():
    train, resume = _options_of("train"), _options_of("resume")
    assert set(NAMES) - set(train) == {"notes", "on_record"}
    assert set(NAMES) - set(resume) == {"notes", "on_record", "seed", "data_shards", "out", "compression"}
    assert str(train["workers"].default) == str(Settings(steps=1).workers)
    assert train["keep"].default == Settings(steps=1).keep
    assert all(resume[name].default is None for name in NAMES if name in resume)


def test_an_unknown_option_is_refused_by_name():
    with pytest.raises(TypeError, match="worker_count"):
        lg.train(Quadratic(), lg.SGD(lr=0.1), steps=1, worker_count=3)
    with pytest.raises(TypeError, match="steps"):
        lg.train(Quadratic(), lg.SGD(lr=0.1))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"steps": 0}, "steps must be an integer >= 1"),
        ({"steps": True}, "steps must be an integer >= 1"),
        ({"keep": 0}, "keep must be an integer >= 1"),
        ({"threads": 1.5}, "threads must be an integer >= 1"),
        ({"record_every": 0}, "record_every must be an integer >= 1, or None"),
        ({"prefetch": -1}, "prefetch must be in 0..100"),
        ({"prefetch": 1, "engine": "ray"}, "prefetch must be 0 with engine='ray'"),
        ({"engine": "ray", "server_device": "cuda"}, "server_device must be 'cpu' with engine='ray'"),
        ({"server_device": "tpu9"}, "server_device must be 'cpu' or 'cuda'"),
        ({"device": "abacus"}, "device must be 'cpu' or 'cuda'"),
        ({"deadline": 0.0}, "deadline must be a finite number > 0"),
        ({"seed": -1}, "seed must be an integer >= 0"),
    ],
)
def test_a_bad_option_is_named_with_its_value_and_what_is_valid(bad, message):
    with pytest.raises(ValueError, match=message):
        Settings(**{"steps": 1, **bad})


def test_settings_survive_a_checkpoint():
    slow = {0: "constant:5", 2: "uniform:1,2"}
    settings = Settings(steps=7, workers=3, slow=slow, device=torch.device("cpu"), out="here", notes={"a": [1]})
    again = Settings(**json.loads(json.dumps(settings.saved())), out="there")
    assert dataclasses.replace(again, out="here", slow=slow) == settings
    assert repr(again.slowness()) == repr(settings.slowness())


def test_pauses_are_for_everyone_or_for_some():
    assert pauses(["constant:5"]) == "constant:5"
    assert pauses(["0=constant:5", "2=uniform:1,2"]) == {0: "constant:5", 2: "uniform:1,2"}
    with pytest.raises(ValueError, match="one law for all workers, or WORKER=LAW"):
        pauses(["constant:5", "1=constant:5"])
