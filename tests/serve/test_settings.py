"""The options of a run are the same in Python, on the command line and in checkpoints."""

from __future__ import annotations

import dataclasses
import inspect
import json
from typing import get_type_hints

import pytest
import torch

import lategrad as lg
from lategrad.cli import main as cli
from lategrad.cli.train_options import argument_help, parse_slow
from lategrad.problems import Quadratic
from lategrad.serve import Server, Settings
from lategrad.support.threads import worthwhile_threads

NAMES = [field.name for field in dataclasses.fields(Settings)]


def _options_of(command):
    return {p.name: p for p in cli.program(command).commands[command].params}


def _defaults(function):
    return {p.name: p.default for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY}


def test_train_settings_and_the_command_have_the_same_options_and_defaults():
    of_train = _defaults(lg.train)
    assert list(of_train) == NAMES
    assert of_train.pop("steps") is inspect.Parameter.empty
    assert of_train.pop("notes") is None
    settings, command = Settings(steps=1), _options_of("train")
    assert of_train == {name: getattr(settings, name) for name in of_train}
    assert set(NAMES) - set(command) == {"notes", "on_record"}
    for name in of_train.keys() & command:
        default = list(command[name].default or ()) or None if name == "slow" else command[name].default
        assert str(default) == str(of_train[name]), name


def test_resume_can_change_what_does_not_determine_the_samples():
    fixed = {"seed", "data_shards", "compression", "out"}
    changeable, command = _defaults(lg.resume), _options_of("resume")
    assert list(changeable) == [name for name in NAMES if name not in fixed]
    assert {repr(default) for default in changeable.values()} == {"<unchanged>"}
    assert set(changeable) - set(command) == {"notes", "on_record"}
    assert all(command[name].default is None for name in changeable.keys() & command)


def test_signatures_and_settings_have_the_same_types():
    types, of_train, of_resume = map(get_type_hints, (Settings, lg.train, lg.resume))
    for name in NAMES:
        if name not in ("device", "server_device", "notes"):  # which Settings converts
            assert of_train[name] == types[name], name
        if name not in ("notes", "out") and name in of_resume:
            assert of_resume[name] == of_train[name], name


def test_every_option_is_documented_once_and_the_command_shows_it():
    texts, command = argument_help(lg.train), _options_of("train")
    assert list(texts) == ["problem", "rule", *NAMES]
    for name in set(NAMES) & set(command):
        assert command[name].help.lower() == texts[name].lower()
    assert texts["keep"] == "number of checkpoints to keep."


def test_none_is_a_value_when_a_run_is_resumed(tmp_path):
    how = {"workers": 1, "engine": "threads", "out": tmp_path}
    lg.train(Quadratic(), lg.SGD(lr=0.1), steps=10, max_delay=7, stall=50.0, **how)
    trace = lg.resume(tmp_path, Quadratic(), lg.SGD(lr=0.1), steps=20, stall=None)
    assert trace.config["settings"]["stall"] is None
    assert trace.config["settings"]["max_delay"] == 7


def test_an_unknown_option_is_refused_by_name():
    with pytest.raises(TypeError, match="worker_count"):
        lg.train(Quadratic(), lg.SGD(lr=0.1), steps=1, worker_count=3)
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'steps'"):
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
        ({"server_device": "meta"}, "server_device must be 'cpu' or 'cuda', got 'meta'"),
        ({"threads": 100_000}, "threads must be <= 1024, got 100000"),
        ({"out": ""}, "out must be None or a folder: '.' is the current one, got ''"),
        ({"monitor": 3}, "monitor must be of type str, or None, got 3"),
        ({"compile": "yes"}, "compile must be of type bool, or None, got 'yes'"),
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


def test_pauses_are_for_all_workers_or_for_some():
    assert parse_slow(["constant:5"]) == "constant:5"
    assert parse_slow(["0=constant:5", "2=uniform:1,2"]) == {0: "constant:5", 2: "uniform:1,2"}
    with pytest.raises(ValueError, match="one distribution for all workers, or WORKER=DISTRIBUTION"):
        parse_slow(["constant:5", "1=constant:5"])


@pytest.mark.parametrize("num_gpus", [-1, 1.5, 0.25])
def test_workers_reserve_a_share_of_a_gpu_or_whole_ones_on_ray_alone(num_gpus):
    with pytest.raises(ValueError, match="num_gpus must be"):
        Settings(steps=1, num_gpus=num_gpus, engine="processes" if num_gpus == 0.25 else "ray")
    assert Settings(steps=1, engine="ray", device="cuda").gpus_per_worker == 1
    assert Settings(steps=1, engine="ray", device="cuda", num_gpus=0.25).gpus_per_worker == 0.25
    assert Settings(steps=1, engine="ray").gpus_per_worker == 0


def test_a_server_takes_the_threads_that_it_is_given_or_measures_them():
    server = Server(Quadratic(), lg.SGD(lr=0.1), Settings(steps=1, threads=3))
    assert server.config["threads"] == 3
    small = Server(Quadratic(), lg.SGD(lr=0.1), Settings(steps=1))
    assert small.config["threads"] == 1
    assert worthwhile_threads(2**25, most=4) in (1, 2, 4)


@pytest.mark.parametrize("engine", ["threads", "processes"])
def test_telemetry_says_with_how_many_threads_the_server_updates(engine):
    seen, before = [], torch.get_num_threads()
    trace = lg.train(
        Quadratic(), lg.SGD(lr=0.1), steps=4, workers=1, engine=engine, threads=3, record_every=1, progress=False,
        on_record=lambda telemetry, _: seen.append((telemetry.threads, torch.get_num_threads())),
    )  # fmt: skip
    assert set(seen) == {(3, 3)}
    assert trace.config["threads"] == 3
    assert torch.get_num_threads() == before
