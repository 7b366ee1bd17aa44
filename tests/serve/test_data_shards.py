"""Workers that do not share the data: each draws from its own part, and replays know it."""

import pytest
import torch
from torch import nn

import lategrad as lg
from lategrad.problems import LanguageProblem, ModuleProblem, Quadratic, load, load_text
from lategrad.problems.minibatches import Minibatches
from lategrad.serve.worker import Streams

RULE = lg.SGD(lr=0.1)


class Noting(torch.utils.data.Dataset):
    """Rows of one number, which is also their target; workers that are threads leave a note of what they read."""

    def __init__(self, rows):
        self.rows, self.read = rows, set()

    def __len__(self):
        return self.rows

    def __getitem__(self, number):
        self.read.add(number)
        return torch.tensor([float(number)]), torch.tensor(float(number))


@pytest.mark.parametrize("sampling", ["iid", "epochs"])
def test_the_shards_are_disjoint_cover_all_rows_and_depend_on_the_seed(sampling):
    problem = ModuleProblem(nn.Linear(1, 1), Noting(23), batch=4, sampling=sampling)
    streams = Streams(seed=3, shards=4)
    drawn = [set(streams.draw(problem, worker, 0, 200).unique().tolist()) for worker in range(4)]
    assert sorted(row for shard in drawn for row in shard) == list(range(23))
    assert torch.equal(streams.draw(problem, 1, 7, 5), streams.draw(problem, 1, 0, 50)[7:12])
    assert set(streams.draw(problem, 5, 0, 200).unique().tolist()) == drawn[1]  # more workers than shards
    assert not torch.equal(streams.draw(problem, 5, 0, 5), streams.draw(problem, 1, 0, 5))
    assert not torch.equal(Streams(4, 4).draw(problem, 1, 0, 5), streams.draw(problem, 1, 0, 5))


def test_the_shards_of_a_text_are_stretches_of_it(tmp_path):
    (tmp_path / "song.txt").write_text("tra la la " * 100)
    problem = LanguageProblem(nn.Embedding(5, 5), load_text(tmp_path / "song.txt"), context=8, batch=4)
    drawn = [Streams(0, 3).draw(problem, worker, 0, 500) for worker in range(3)]
    assert drawn[0].max() < drawn[1].min() <= drawn[1].max() < drawn[2].min()
    assert drawn[2].max() < problem.minibatches.rows


def test_one_shard_is_all_the_data():
    batches = Minibatches(rows=10, batch=3)
    assert torch.equal(batches.draw_from(range(10), 1, 2, 3), batches.draw(1, 2, 3))


@pytest.mark.parametrize("engine", ["threads", "processes"])
def test_a_run_with_shards_resumes_and_replays(engine, tmp_path):
    torch.manual_seed(0)
    problem = ModuleProblem(nn.Linear(64, 10), load("digits"), batch=8)
    how = {"workers": 2, "engine": engine, "compile": False}
    lg.train(problem, RULE, steps=30, data_shards=2, out=tmp_path, **how)
    with pytest.raises(TypeError, match="unexpected keyword argument 'data_shards'"):
        lg.resume(tmp_path, problem, RULE, data_shards=3)
    trace = lg.resume(tmp_path, problem, RULE, steps=60)
    assert torch.equal(lg.replay(trace, problem, RULE).output, trace.output)
    whole = lg.train(problem, RULE, steps=60, **how)
    whole.config["settings"]["data_shards"] = 2
    assert not torch.equal(lg.replay(whole, problem, RULE).output, whole.output)  # the samples do differ


def test_workers_read_the_rows_of_their_shards_alone():
    data = Noting(40)
    problem = ModuleProblem(nn.Linear(1, 1), data, batch=4, evaluate=1)

    def forget(telemetry, output):  # what was read to tell the data from others
        if telemetry.record == 10:
            data.read.clear()

    with pytest.warns(UserWarning, match="data_shards=4 is more than the 1 workers: no worker draws from some"):
        lg.train(
            problem,
            lg.SGD(1e-5),
            steps=200,
            workers=1,
            engine="threads",
            data_shards=4,
            record_every=10,
            on_record=forget,
        )
    assert data.read == set(range(0, 40, 4))


@pytest.mark.parametrize(
    ("problem", "shards", "message"),
    [
        (Quadratic(), 2, "data_shards must be None, got 2: Quadratic has no samples_of_shard"),
        (ModuleProblem(nn.Linear(1, 1), Noting(3)), 4, "data_shards must be at most 3, the rows of the data set"),
        (ModuleProblem(nn.Linear(1, 1), lambda seed: [(torch.zeros(2, 1), torch.zeros(2))]), 2,
         "data_shards must be None, got 2: a stream of batches has no rows"),
        (Quadratic(), 0, "data_shards must be an integer >= 1, or None, got 0"),
    ],
)  # fmt: skip
def test_data_that_cannot_be_shared_out_is_told_so(problem, shards, message):
    with pytest.raises(ValueError, match=message):
        lg.train(problem, RULE, steps=5, workers=4, engine="threads", data_shards=shards)
