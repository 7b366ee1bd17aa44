"""Parameters that are sharded over ranks (FSDP2, HSDP) or copied (DDP): the same numbers as in one process."""

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lategrad as lg
from helpers import sharded
from helpers.parameters import ELEMENTWISE
from helpers.rank_pool import RankPool
from lategrad.registry import RULES

ROOT = Path(__file__).parents[2]
POINT = torch.randn(sharded.SIZE, generator=torch.Generator().manual_seed(1))
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
    pool = RankPool(tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.close()


def distance(results, expected):
    """The largest relative distance between what the ranks have and what one process has."""
    return max(float((result - expected).norm() / expected.norm()) for result in results)


LOOPS = {"compile": True}
SETS_IN_LOOPS = ["whole", "ball", "ball-center", "box", "box-tensors", "half-space"]
STEPS = pytest.mark.parametrize("count", [6, pytest.param(50, marks=pytest.mark.slow)])


@STEPS
@pytest.mark.parametrize("name", SETS)
def test_every_set_gives_the_same_numbers_on_two_ranks(ranks, name, count):
    args = "AnytimeSGD-0.5", SETS[name], count
    expected = sharded.train(None, *args)
    assert distance(ranks.run(2, sharded.train, *args), expected) < 1e-5
    if name != "whole":
        free = sharded.train(None, "AnytimeSGD-0.5", lg.WholeSpace(), count)
        assert distance([free], expected) > 0.1  # the set matters here


def test_the_drift_is_that_of_the_whole_vector(ranks):
    args = "AnytimeSGD-0.5", lg.Ball(2.0), 8
    expected = sharded.train_measured(None, *args)
    assert ranks.run(2, sharded.train_measured, *args) == [pytest.approx(expected, rel=1e-5)] * 2
    assert expected > 0


@STEPS
@pytest.mark.parametrize("name", sharded.DROP_INS)
def test_every_optimizer_gives_the_same_numbers_on_two_ranks(ranks, name, count):
    args = name, lg.Ball(2.0), count
    assert distance(ranks.run(2, sharded.train, *args), sharded.train(None, *args)) < 1e-5


@STEPS
def test_every_rule_gives_the_same_numbers_on_two_ranks(ranks, count):
    names = [name for name in RULES if name != "rotated-adam"]  # which is refused
    results = ranks.run(2, sharded.train_all, names, lg.Ball(2.0), count)
    for name, expected in sharded.train_all(None, names, lg.Ball(2.0), count).items():
        assert distance([result[name] for result in results], expected) < 1e-5, name


@pytest.mark.parametrize(
    ("mesh", "name", "domain", "options"),
    [
        (3, "SteadyMuon", "whole", {}),
        (3, "OptimisticAnytime", "product", {}),
        (3, "AnytimeSGD-0.5", "simplex", {}),
        (3, "AnytimeSGD-0.5", "ball", {"per_parameter": True, "maximize": True}),
        ("2x2", "SteadyMuon", "whole", {}),
        ("2x2", "OptimisticAnytime", "l1", {}),
        (1, "SteadyAdam", "whole", {}),
    ],
)
def test_three_ranks_and_replicated_shards_give_the_same_numbers(ranks, mesh, name, domain, options):
    args = name, SETS[domain], 6, options
    assert distance(ranks.run(mesh, sharded.train, *args), sharded.train(None, *args)) < 1e-5


@pytest.mark.parametrize(
    ("name", "form", "options"),
    [("SteadyMuon", "bfloat16", {}), ("AnytimeSGD-0.5", "bfloat16", {}), ("SteadyMuon", "replicated", {}),
     ("AnytimeSGD-0.5", "replicated", {"compile": True})],
)  # fmt: skip
def test_bfloat16_shards_and_replicated_parameters_give_the_same_numbers(ranks, name, form, options):
    args = name, lg.Ball(2.0), 6, options, None, form
    assert distance(ranks.run(2, sharded.train, *args), sharded.train(None, *args)) < 1e-5


@pytest.mark.parametrize(
    ("mesh", "name", "wrapper"),
    [(2, "AnytimeSGD", "ddp"), (2, "SteadyMuon", "ddp"), (2, "SteadyAdam", "fsdp"), (3, "SteadyMuon", "fsdp"),
     ("2x2", "AnytimeSGD-0.5", "fsdp")],
)  # fmt: skip
def test_training_with_tied_frozen_and_unused_weights_gives_the_same_numbers(ranks, mesh, name, wrapper):
    expected = sharded.train_tied(None, name, wrapper)
    assert distance(ranks.run(mesh, sharded.train_tied, name, wrapper), expected) < 1e-5


@pytest.mark.parametrize("name", ["SteadyMuon", "adaptive-revision", "ringmaster"])
def test_late_gradients_give_the_same_numbers(ranks, name):
    """Tickets of vectors and of numbers wait with the gradients."""
    args = name, lg.Ball(2.0), 12, {}, "uniform:0,4"
    assert distance(ranks.run(2, sharded.train, *args), sharded.train(None, *args)) < 1e-5


@pytest.mark.parametrize("name", ["SteadyMuon", "SteadyAdam", "weight-prediction"])
def test_a_delay_for_each_parameter_gives_the_same_numbers(ranks, name):
    args = name, 8, [5, 4, 3, 3, 1, 0, 0]
    assert distance(ranks.run(2, sharded.train_with_delays, *args), sharded.train_with_delays(None, *args)) < 1e-5


def test_ranks_must_agree_about_the_delay_of_each_parameter(ranks):
    for said in ranks.run(2, sharded.delays_of_ranks, "SteadyMuon"):
        assert "delay must be the same on every rank, got 'values from 0 to 1'" in said


# ---- In loops


@pytest.mark.parametrize("name", SETS_IN_LOOPS)
def test_loops_with_every_set_that_has_them_give_the_numbers_of_one_process(ranks, name):
    args = "AnytimeSGD-0.5", SETS[name], 50, LOOPS
    assert distance(ranks.run(2, sharded.train, *args), sharded.train(None, *args)) < 1e-5


@pytest.mark.parametrize("name", sharded.DROP_INS)
def test_loops_of_every_optimizer_give_the_numbers_of_one_process(ranks, name):
    args = name, lg.Ball(2.0), 50, LOOPS
    assert distance(ranks.run(2, sharded.train, *args), sharded.train(None, *args)) < 1e-5


def test_loops_of_every_rule_that_has_them_give_the_numbers_of_one_process(ranks):
    args = ELEMENTWISE, lg.Ball(2.0), 50, LOOPS
    results = ranks.run(2, sharded.train_all, *args)
    for name, expected in sharded.train_all(None, *args).items():
        assert distance([result[name] for result in results], expected) < 1e-5, name


@pytest.mark.parametrize(
    ("mesh", "name", "options", "delays", "form"),
    [
        (3, "SteadyMuon", {}, None, "sharded"),
        (3, "SteadyAdam", {}, None, "sharded"),
        (3, "OptimisticAnytime", {"maximize": True}, None, "sharded"),
        ("2x2", "SteadyMuon", {}, None, "sharded"),
        ("2x2", "OptimisticAnytime", {}, None, "sharded"),
        (1, "SteadyAdam", {}, None, "sharded"),
        (2, "SteadyMuon", {}, None, "bfloat16"),
        (2, "SteadyAdam", {}, None, "bfloat16"),
        (2, "AnytimeSGD-0.5", {}, None, "bfloat16"),
        (2, "SteadyMuon", {}, "uniform:0,4", "sharded"),
        (2, "adaptive-revision", {}, "uniform:0,4", "sharded"),
        (2, "ringmaster", {}, "uniform:0,4", "sharded"),
    ],
)
def test_loops_on_every_kind_of_shards_give_the_numbers_of_one_process(ranks, mesh, name, options, delays, form):
    args = name, lg.Ball(2.0), 20, {**options, **LOOPS}, delays, form
    assert distance(ranks.run(mesh, sharded.train, *args), sharded.train(None, *args)) < 1e-5


@pytest.mark.parametrize(("mesh", "name"), [(2, "SteadyAdam"), (3, "SteadyMuon"), ("2x2", "AnytimeSGD-0.5")])
def test_loops_with_tied_frozen_and_unused_weights_give_the_numbers_of_one_process(ranks, mesh, name):
    args = name, "fsdp", 6, True
    assert distance(ranks.run(mesh, sharded.train_tied, *args), sharded.train_tied(None, *args)) < 1e-5


@pytest.mark.parametrize(
    ("name", "options"),
    [("SteadyAdam", {}), ("SteadyMuon", {}), ("OptimisticAnytime", {}), ("OptimisticAnytime", {"per_parameter": True})],
)
def test_a_rank_without_entries_takes_part_in_every_sum(ranks, name, options):
    expected = sharded.train_a_few_entries(None, name, {**options, "compile": False})
    assert distance(ranks.run(3, sharded.train_a_few_entries, name, {**options, **LOOPS}), expected) < 1e-5


def test_matrices_in_many_batches_give_the_same_numbers(ranks):
    args = "SteadyMuon", lg.WholeSpace(), 20, LOOPS
    assert distance(ranks.run(2, sharded.train_in_small_batches, *args), sharded.train(None, *args)) < 1e-5


def test_every_rank_has_about_the_same_work_in_every_batch(ranks):
    by_rank = ranks.run(2, sharded.orthogonalised_by_batch)
    assert by_rank[0] == by_rank[1]
    assert len(by_rank[0]) > 3
    assert sorted(size for batch in by_rank[0] for own in batch for size in own) == sorted([24, 81, 24, 81, 25] * 3)
    for one, other in by_rank[0][:-1]:  # the last has what is left
        assert 0.9 < sum(one) / sum(other) < 1.1


def test_all_ranks_run_eagerly_if_one_has_no_compiler(ranks):
    expected = sharded.train(None, "SteadyAdam", lg.Ball(2.0), 5)[0]
    results = ranks.run(3, sharded.train_without_a_compiler, "SteadyAdam", 5)
    for rank, (said, ran, told, result) in enumerate(results):
        reason = f"SteadyAdam has no loops: {'no compiler works here' if rank == 2 else 'another rank has none'}"
        assert said == f"UnsupportedError: {reason}"
        assert ran == ["eager"]
        assert told == [f"running eagerly: {reason}"]
        assert distance([result], expected) < 1e-5


@pytest.mark.parametrize(("name", "domain"), [("AnytimeSGD", "ball"), ("AnytimeSGD", "simplex"), ("muon", "whole")])
def test_large_shards_run_in_loops_where_there_are_any(ranks, name, domain):
    for ran, told in ranks.run(2, sharded.train_with_the_default, name, SETS[domain]):
        assert ran == ["loops" if domain == "ball" else "eager"]
        assert len(told) == (domain == "simplex")  # which has no form as loops, unlike what the rule says


@pytest.mark.parametrize("name", ["SteadyAdam", "SteadyMuon"])
def test_a_step_takes_little_memory_besides_the_state(ranks, name):
    for first, later in ranks.run(2, sharded.temporaries, name, True):
        assert max(first, later) <= 0.35


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_a_step_takes_little_memory_besides_the_state_on_a_gpt_2_of_124_million_parameters(ranks, count):
    for first, later in ranks.run(count, sharded.temporaries, "SteadyMuon", True, 768, 2**20):
        print(f"{count} ranks: {first:.2f} of a shard in the first step, {later:.2f} later")  # pytest -s shows it
        assert max(first, later) <= 0.35


# ---- Checkpoints


@pytest.mark.parametrize("name", ["SteadyAdam", "SteadyMuon"])
@pytest.mark.parametrize("loops_first", [True, False], ids=["from loops", "from eager"])
def test_a_checkpoint_of_loops_continues_eagerly_and_the_reverse(ranks, tmp_path, name, loops_first):
    saved = ranks.run(2, sharded.save, name, str(tmp_path), 6, loops_first)[0]
    results = ranks.run(3, sharded.resume, name, str(tmp_path), 6, 12, not loops_first)
    assert distance([loaded for loaded, _ in results], saved) == 0
    straight = sharded.train(None, name, lg.Ball(2.0), 12)[0]
    assert distance([end for _, end in results], straight) < 1e-5


@pytest.mark.parametrize("name", ["AnytimeSGD-0.5", "StronglyConvexSGD", "SteadyMuon"])
def test_a_checkpoint_of_two_ranks_continues_on_any_number(ranks, tmp_path, name):
    saved = ranks.run(2, sharded.save, name, str(tmp_path), 6)[0]
    straight = sharded.train(None, name, lg.Ball(2.0), 12)[0]
    for mesh in (1, 2, 3, None):
        args = name, str(tmp_path), 6, 12
        results = [sharded.resume(None, *args)] if mesh is None else ranks.run(mesh, sharded.resume, *args)
        assert distance([loaded for loaded, _ in results], saved) == 0, mesh
        assert distance([end for _, end in results], straight) < 1e-6, mesh


def test_pending_gradients_continue_on_another_number_of_ranks(ranks, tmp_path):
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    assert ranks.run(2, sharded.save_delayed, "adaptive-revision", str(tmp_path / "dcp"), 6) == [3, 3]
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "whole.pt")
    results = ranks.run(3, sharded.resume_delayed, "adaptive-revision", str(tmp_path / "whole.pt"), 6, 12)
    assert distance(results, sharded.train(None, "adaptive-revision", lg.Ball(2.0), 12, {}, 3)[0]) < 1e-6


def test_a_checkpoint_without_the_query_is_refused(ranks, tmp_path):
    for said in ranks.run(2, sharded.save_in_eval_mode, "SteadyMuon", str(tmp_path)):
        assert "save it in train mode" in said


def test_a_state_that_was_saved_in_eval_mode_continues(ranks):
    for straight, resumed, error in ranks.run(2, sharded.state_in_eval_mode, "SteadyMuon"):
        assert distance([resumed], straight) == 0
        assert "load the model before the optimizer" in error


# ---- What is refused


def test_parameters_that_cannot_be_trained_are_refused_before_the_first_step(ranks):
    expected = {
        "two sharded dimensions": "tensor parallelism, several sharded dimensions",
        "mixed": "got 1 DTensors and 1 plain parameters in one group",
        "meshes": r"needs one mesh .*\(2,\).*replicate=1, shard=2.*make a group for each",
        "placements": r"the same placements .*Shard\(dim=0\).*Replicate\(\)",
        "columns": r"placements \(Shard\(dim=1\),\) are not supported: Shard\(0\) on one dimension",
        "partial": "partial sums are not",
        "FSDP1 True": "use fully_shard",
        "FSDP1 False": "use fully_shard",
        "by stage": "plain tensors, with delays by stage",
        "compile": "Anytime has no loops: aten.amax.default of a vector",
        "torch.compile": "compile: sharded parameters run in loops or eagerly",
        "rotated basis": "aten.cat.default with these arguments is not defined on a vector that is sharded",
    }
    for rank, said in enumerate(ranks.run("all", sharded.refused_parameters)):
        assert set(said) == (set(expected) if rank < 2 else {"two sharded dimensions"})
        for case, text in said.items():
            assert re.search(f"^(ValueError|UnsupportedError|NotShardedError): .*{expected[case]}", text), (case, text)


@pytest.mark.parametrize("way", list(sharded.WAYS)[:8])
def test_a_reduction_is_over_all_ranks(ranks, way):
    error, expected = sharded.reduce_in(None, way)
    assert error == "no error"
    for error, result in ranks.run(2, sharded.reduce_in, way):
        assert error == "no error"
        assert distance([result], expected) < 1e-5


@pytest.mark.parametrize("way", list(sharded.WAYS)[8:])
def test_a_rule_that_cannot_run_on_shards_raises_before_the_first_step(ranks, way):
    """It never computes with the entries of one rank."""
    assert sharded.reduce_in(None, way)[0] == "no error"
    before = sharded.whole(sharded.holder(None).parameters())
    for error, result in ranks.run(2, sharded.reduce_in, way):
        assert re.search("not defined on a vector that is sharded|out of bounds|cannot be called on meta", error), error
        assert torch.equal(result, before)


def test_an_optimizer_that_was_built_before_fully_shard_is_told(ranks):
    for (said,) in ranks.run(2, sharded.built_before_sharding):
        assert "build the optimizer after fully_shard(model)" in said


def test_ranks_that_disagree_are_told(ranks):
    expected = sharded.train(None, "SteadyMuon-0", lg.WholeSpace(), 5)[0]
    for delays, unchanged, result, lrs in ranks.run(2, sharded.disagree):
        assert delays == "ValueError: delay must be the same on every rank, got 'values from 0 to 1'"
        assert unchanged
        assert distance([result], expected) < 1e-5
        assert lrs == "ValueError: lr must be the same on every rank, got 'values from 0.05 to 1.05'"


def test_a_state_of_another_optimizer_is_refused_and_changes_nothing(ranks):
    expected = sharded.train(None, "AnytimeSGD", lg.Ball(2.0), 6)[0]
    for said, result in ranks.run(3, sharded.load_another):
        expected_text = "not of AnytimeSGD|of another rule|saved state is .* its parameter"
        assert all(re.search(expected_text, text) for text in said), said
        assert distance([result], expected) < 1e-5


def test_every_matrix_has_one_owner_and_all_ranks_work(ranks):
    shapes = sharded.count_orthogonalised(None)
    by_rank = ranks.run(3, sharded.count_orthogonalised)
    assert sorted(shape for own in by_rank for shape in own) == sorted(shapes)
    assert all(by_rank)


# ---- The example


@pytest.mark.slow
def test_the_example_trains_and_continues_on_another_number_of_ranks(ranks, tmp_path):
    first = ranks.run(2, sharded.run_example, "--updates", "30", "--save", str(tmp_path))
    then = ranks.run(3, sharded.run_example, "--updates", "30", "--resume", str(tmp_path))
    assert len(set(first)) == len(set(then)) == 1  # all ranks ship the same
    assert then[0] < 0.9 * first[0] < 0.9 * math.log(15)  # about what guessing one of the letters costs


@pytest.mark.slow
def test_the_example_runs_under_torchrun(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone",
               "examples/fsdp_training.py", "--updates", "20", "--save", str(tmp_path / "saved")]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "loss of the output on 2 ranks" in done.stdout
    assert (tmp_path / "saved" / ".metadata").exists()
