"""What goes wrong in one stage ends all of them, with one line that names it, and leaves nothing behind."""

import signal

import pytest

HERE = "pipeline_cases."


def lines(ended):
    """The errors of all ranks, each of one line."""
    assert all(one.error is not None and "\n" not in one.error for one in ended), ended
    return [one.error for one in ended]


@pytest.mark.parametrize(
    ("case", "options", "message"),
    [
        ("misfit", {}, "stage 1 of 3: forward pass on float64 (8, 8): RuntimeError: mat1 and mat2"),
        ("wrong_world", {}, "the world size must be the number of stages, 2: start torchrun with --nproc-per-node 2"),
        ("wrong_options", {}, "stage 1 of 3: the options must be those of stage 0"),
        ("wrong_optimizer", {}, "of 3: optimizer must be one of all trained parameters of the stage's own module"),
        ("delayed_optimizer", {}, "optimizer must make one update from one gradient: Delayed does not"),
        ("tied", {}, "tied of stage 2 must be its own: stages cannot share parameters"),
        ("tied_by_torch", {}, "stages must be without shared parameters (tied embeddings)"),
        ("nothing_to_evaluate", {}, "stage 0 of 3: inputs must be a tensor of rows, or a tuple of them, got"),
        ("short_batch", {}, "stage 0 of 3: the activations of microbatch 2 must be as those of the first, float64 (8,"),
        ("short_batch", {"microbatches": 2}, "must be a multiple of microbatches = 2, got 7"),
        ("broken", {"wrong": "to_nan"}, "stage 1 of 3: the activation of microbatch 3 must be finite in all entries"),
        ("broken", {"wrong": "to_nan", "stage": 2}, "stage 2 of 3: the loss of microbatch 3 must be finite"),
        ("broken", {"wrong": "to_error"}, "stage 1 of 3: forward pass on float64 (8, 8): ZeroDivisionError: by the"),
        ("broken", {"wrong": "to_words"}, "stage 1 of 3: what the stage returns must be a tensor or a tuple"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_on_every_rank_that_names_the_stage(ranks, case, options, message):
    for line in lines(ranks(HERE + case, 3, **options)):
        assert line.startswith("lategrad.pipeline.links.PipelineError: stage ")
        assert message in line


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_connections_are_closed_although_all_ranks_live_on(ranks, tmp_path, stage):
    ended = ranks(HERE + "handled", 3, wrong="to_error", stage=stage, folder=str(tmp_path))
    assert [one.error for one in ended] == [None] * 3
    assert len({one.value for one in ended}) == 1
    assert f"stage {stage} of 3: forward pass on" in ended[0].value


def test_a_rank_that_closes_before_it_has_drained_is_warned_and_the_others_are_told(ranks):
    lost = "stage 0 of 3: ended with 2 microbatches in flight, whose gradients are lost: call drain() after the last"
    assert all(lost in line for line in lines(ranks(HERE + "not_drained", 3)))


def test_a_trace_needs_an_update(ranks):
    assert all("trace() must be called after step()" in line for line in lines(ranks(HERE + "trace_of_nothing", 2)))


@pytest.mark.parametrize(
    ("number", "code", "message"),
    [
        (signal.SIGKILL, -signal.SIGKILL, "stage 2: the connection was lost: its process has ended"),
        (signal.SIGINT, 1, "stage 2 of 3: KeyboardInterrupt"),
    ],
    ids=["killed", "interrupted"],
)
def test_a_rank_that_dies_ends_all_others_with_one_line_also_those_that_are_no_neighbours(ranks, number, code, message):
    first, second, dead = ranks(HERE + "broken", 3, wrong="to_death", stage=2, kill=(2, number))
    assert dead.code == code
    assert first.error == second.error
    assert first.error.startswith("lategrad.pipeline.links.PipelineError: stage ")
    assert first.error.endswith(message)


def test_a_rank_that_hangs_is_given_up_after_the_timeout(ranks):
    ended = ranks(HERE + "fewer_steps", 2, timeout=2.0, kill=(1, signal.SIGKILL))
    assert "could not receive from stage 1: nothing came or went for 2 s" in ended[0].error
