"""The worked examples of docs/tolerance.md, in small."""

import importlib.util
import sys
from pathlib import Path

import pytest


@pytest.fixture
def example():
    def load(name):
        path = Path(__file__).parents[2] / "examples" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module

    return load


def test_dropping_loses_the_data_of_a_slow_worker_and_waiting_learns_it(example, tmp_path, capsys):
    outcomes = example("slow_worker").main(["--updates", "400", "--out", str(tmp_path)])
    for rule in ("SGD", "Steady"):
        dropped, waited = outcomes[rule, "drop > 10"], outcomes[rule, "wait, <= 10"]
        assert dropped.rare == 0.0
        assert dropped.gate.dropped[3] > 5
        assert waited.rare > 0.5
        assert waited.recorder.summary().max == 10
        assert outcomes[rule, "weigh > 10"].gate.applied[3] == outcomes[rule, "apply all"].gate.applied[3] > 5
    assert "warning: worker 3 is starved" in capsys.readouterr().out
    assert (tmp_path / "slow_worker.png").stat().st_size > 5_000


def test_actors_are_as_far_behind_the_learner_as_they_are_said_to_be(example, tmp_path, capsys):
    results = example("delayed_actors").main(["--quick", "--out", str(tmp_path)])
    assert set(results) == {(name, kind) for name in ("Adam", "SteadyAdam") for kind in ("plain", "weighted")}
    for name in ("Adam", "SteadyAdam"):  # at delay 0 the weights are all one
        assert results[name, "plain"][0].tolist() == pytest.approx(results[name, "weighted"][0].tolist(), abs=1e-3)
    assert "36  ########" in capsys.readouterr().out  # of 40 updates the first four have shorter delays
    assert (tmp_path / "delayed_actors.png").stat().st_size > 5_000


@pytest.mark.slow
def test_a_pipeline_of_eight_stages_is_less_late_than_the_same_delay_everywhere(example, tmp_path):
    results = example("pipeline_tolerance").main(["--quick", "--out", str(tmp_path)])
    assert results["stages"].profile == "stages:8"
    for optimizer in ("own", "steady-muon"):
        stages, everywhere = results["stages"], results["everywhere"]
        assert stages.values(optimizer, 0) == pytest.approx(everywhere.values(optimizer, 0), abs=1e-5)
        assert stages.values(optimizer, 7) != pytest.approx(everywhere.values(optimizer, 7), abs=1e-5)
    assert (tmp_path / "stages.html").stat().st_size > 10_000
