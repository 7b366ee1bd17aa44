"""Parameters that are sharded over ranks (FSDP2, HSDP) or copied (DDP): the same numbers as in one process."""

import pytest
import torch
from helpers import sharded
from helpers.ranks import Ranks

import lategrad as lg
from lategrad.registry import RULES

torch.manual_seed(1)
POINT = torch.randn(sharded.SIZE)
SETS = {
    "whole": lg.WholeSpace(),
    "ball": lg.Ball(2.0),
    "ball-center": lg.Ball(2.0, center=POINT),
    "box": lg.Box(-0.3, 0.5),
    "box-tensors": lg.Box(POINT - 0.2, POINT + 0.3),
    "simplex": lg.Simplex(3.0),
    "l1": lg.L1Ball(4.0),
    "half-space": lg.HalfSpace(POINT, -1.0),
    "product": lg.Product((lg.Ball(1.0), 7), (lg.Simplex(), 20), (lg.L1Ball(2.0), 30), (lg.Box(0.0, 1.0), 14)),
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    pool = Ranks(tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.close()


def distance(results, expected):
    """The largest relative distance between what the ranks have and what one process has."""
    return max(float((result - expected).norm() / expected.norm()) for result in results)


@pytest.mark.parametrize("name", SETS)
def test_every_set_gives_the_same_numbers_on_two_ranks(ranks, name):
    args = "AnytimeSGD-0.5", SETS[name]
    expected = sharded.train(None, *args)
    assert distance(ranks.run(2, sharded.train, *args), expected) < 1e-5
    if name != "whole":
        free = sharded.train(None, "AnytimeSGD-0.5", lg.WholeSpace())
        assert distance([free], expected) > 0.1  # the set matters here


@pytest.mark.parametrize("name", [*sharded.DROP_INS, *RULES])
def test_every_optimizer_gives_the_same_numbers_on_two_ranks(ranks, name):
    args = name, lg.Ball(2.0)
    assert distance(ranks.run(2, sharded.train, *args), sharded.train(None, *args)) < 1e-5
