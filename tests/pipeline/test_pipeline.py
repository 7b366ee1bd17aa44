"""A real pipeline does what the simulator does, and what its options say."""

import pipeline_cases as cases
import pytest
import torch
from torch.func import functional_call

import lategrad as lg

STEPS = 14


def values(ended):
    assert [one.error for one in ended] == [None] * len(ended)
    return [one.value for one in ended]


def profile(model, stages, **options):
    """The delays of :func:`by_stage` for the stages that :func:`cut` makes."""
    patterns, first = {}, 0
    for k, stage in enumerate(lg.pipeline.cut(model, stages)):
        patterns |= {
            f"{i}.*": stages - 1 - k for i in range(first, first + len(stage)) if len([*model[i].parameters()])
        }
        first += len(stage)
    return lg.delays.by_stage(model, patterns, **options)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_a_real_pipeline_is_the_simulated_one(ranks, stages):
    names = list(cases.RULES)
    of_ranks = values(
        ranks("pipeline_cases.train_each", stages, runs={n: {"steps": STEPS, "optimizer": n} for n in names})
    )
    model = cases.layers()
    problem, delays = cases.classification(model), profile(model, stages)
    assert sorted(set(delays.delays)) == list(range(stages))
    for name in names:
        real, rule = of_ranks[0][name]["trace"], cases.RULES[name]
        simulated = lg.simulate(problem, rule, delays, STEPS)
        torch.testing.assert_close(real.output, simulated.output, rtol=0, atol=1e-10)
        torch.testing.assert_close(real.query, simulated.query, rtol=0, atol=1e-10)
        assert not torch.allclose(real.output, lg.simulate(problem, rule, 0, STEPS).output, rtol=0, atol=1e-6)
        assert real.delays.tolist() == simulated.delays.tolist()
        assert real.config["pipeline"]["delays"] == list(delays.delays)
        for k, of_rank in enumerate(of_ranks):
            assert of_rank[name]["delays"] == [min(t, stages - 1 - k) for t in range(STEPS)]


def test_steady_adam_has_a_norm_for_each_stage_which_groups_have_in_one_process(ranks):
    """The simulator takes it over all stages: near, but not the same."""
    of_ranks = values(ranks("pipeline_cases.train", 3, steps=STEPS, optimizer="steady-adam"))
    model = cases.layers()
    problem, groups = cases.classification(model), [{"params": s.parameters()} for s in lg.pipeline.cut(model, 3)]
    optimizer = lg.optim.Delayed(lg.optim.SteadyAdam(groups, lr=0.02), profile(model, 3))
    for inputs, targets in lg.pipeline.batches(problem, count=STEPS):
        optimizer.zero_grad()
        problem.loss_of_batch(model(inputs), targets).backward()
        optimizer.step()
    query = torch.cat([p.detach().flatten() for p in model.parameters()])
    torch.testing.assert_close(of_ranks[0]["trace"].query, query, rtol=0, atol=1e-10)
    replayed = lg.replay(of_ranks[0]["trace"], cases.classification(cases.layers()), lg.SteadyAdam(lr=0.02))
    assert 1e-6 < (replayed.query - query).norm() < 0.2 * (query - problem.start()).norm()


def test_a_pipeline_that_was_drained_replays_with_the_delay_of_each_stage(ranks):
    drained = values(ranks("pipeline_cases.train", 3, steps=STEPS, optimizer="steady-muon", drain_at=(5, 6)))
    replayed = lg.replay(drained[0]["trace"], cases.classification(cases.layers()), cases.RULES["steady-muon"])
    torch.testing.assert_close(replayed.query, drained[0]["trace"].query, rtol=0, atol=1e-10)
    torch.testing.assert_close(replayed.output, drained[0]["trace"].output, rtol=0, atol=1e-10)


def test_the_trace_replays_with_its_drains_and_shows_another_rule_on_the_same_delays(ranks, tmp_path):
    drained = values(ranks("pipeline_cases.train", 3, steps=STEPS, optimizer="anytime", drain_at=(5, 6)))
    trace = drained[0]["trace"]
    assert trace.delays.tolist() == [0, 1, 2, 2, 2, 0, 0, 1, 2, 2, 2, 2, 2, 2]
    assert trace.complete
    assert drained[1]["trace"] is None
    problem = cases.classification(cases.layers())
    saved = lg.Trace.load(trace.save(tmp_path / "trace"))
    replayed = lg.replay(saved, problem, cases.RULES["anytime"])
    torch.testing.assert_close(replayed.output, trace.output, rtol=0, atol=1e-10)
    other = lg.replay(saved, problem, "sgd:lr=0.1")
    assert other.delays.tolist() == trace.delays.tolist()
    losses = torch.stack(drained[-1]["losses"])
    torch.testing.assert_close(trace.loss, losses)
    with torch.no_grad():
        problem.module[0].weight.zero_()
    with pytest.raises(ValueError, match="started from other parameters"):
        lg.replay(saved, problem, "sgd:lr=0.1")


@pytest.mark.parametrize("stashing", [True, False])
def test_with_and_without_stashing_it_is_what_delayed_models(ranks, stashing):
    of_ranks = values(ranks("pipeline_cases.train", 3, steps=STEPS, optimizer="adamw", stashing=stashing))
    model = cases.layers()
    problem = cases.classification(model)
    optimizer = lg.optim.Delayed(cases.make_optimizer("adamw", model), profile(model, 3, stashing=stashing))
    for inputs, targets in lg.pipeline.batches(problem, count=STEPS):
        optimizer.zero_grad()
        problem.loss_of_batch(model(inputs.requires_grad_()), targets).backward()
        optimizer.step()
    modelled = torch.cat([p.detach().flatten() for p in model.parameters()])
    torch.testing.assert_close(of_ranks[0]["trace"].output, modelled, rtol=0, atol=1e-10)
    # A copy of the weights for each microbatch in flight; at the last stage none is needed.
    assert [of_rank["stash"] for of_rank in of_ranks] == ([3, 2, 0] if stashing else [0, 0, 0])


def transcription(stages, steps, name, microbatches, update_every):
    """Versions, gradients and updates in plain words; one process."""
    model = cases.layers()
    problem, parts = cases.classification(model), lg.pipeline.cut(model, stages)
    optimizers = [cases.make_optimizer(name, part) for part in parts]
    versions = [[{n: p.detach().clone() for n, p in part.named_parameters()}] for part in parts]
    pieces = [piece for inputs, targets in lg.pipeline.batches(problem, count=steps)
              for piece in zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True)]  # fmt: skip
    told = [[] for _ in parts]
    for first in range(0, len(pieces), update_every):
        update, longest = first // update_every, [0] * stages
        for m in range(first, first + update_every):
            seen = [max(0, m - (stages - 1 - k)) // update_every for k in range(stages)]
            h, leaves = pieces[m][0], []
            for k, part in enumerate(parts):
                leaves.append({n: w.clone().requires_grad_() for n, w in versions[k][seen[k]].items()})
                h = functional_call(part, leaves[-1], (h,))
                longest[k] = max(longest[k], update - seen[k])
            (problem.loss_of_batch(h, pieces[m][1]) / update_every).backward()
            for part, weights in zip(parts, leaves, strict=True):
                for n, p in part.named_parameters():
                    p.grad = weights[n].grad if p.grad is None else p.grad + weights[n].grad
        for k, (part, optimizer) in enumerate(zip(parts, optimizers, strict=True)):
            optimizer.step(delay=longest[k])
            optimizer.zero_grad()
            told[k].append(longest[k])
            versions[k].append({n: p.detach().clone() for n, p in part.named_parameters()})
    return torch.cat([p.detach().flatten() for p in model.parameters()]), told


@pytest.mark.parametrize(("microbatches", "update_every"), [(1, 1), (4, 1), (4, 2)])
def test_every_optimizer_is_told_the_delay_of_its_own_stage(ranks, microbatches, update_every):
    options = {"microbatches": microbatches, "update_every": update_every}
    of_ranks = values(ranks("pipeline_cases.train", 3, steps=6, optimizer="steady-muon", **options))
    query, told = transcription(3, 6, "steady-muon", **options)
    torch.testing.assert_close(of_ranks[0]["trace"].query, query, rtol=0, atol=1e-10)
    assert [of_rank["delays"] for of_rank in of_ranks] == told
    assert max(told[0]) == (1 if update_every == 2 else 2)
    if microbatches > 1:
        with pytest.raises(ValueError, match="one microbatch for each sample"):
            lg.replay(of_ranks[0]["trace"], cases.classification(cases.layers()), "sgd:lr=1")


def test_stages_of_torch_can_be_used(ranks):
    of_ranks = values(ranks("pipeline_cases.from_torch", 2, steps=5))
    problem = cases.classification(cases.layers())
    simulated = lg.simulate(problem, cases.RULES["sgd"], profile(problem.module, 2), 5)
    for way in ("by hand", "traced"):
        torch.testing.assert_close(of_ranks[0][way]["trace"].output, simulated.output, rtol=0, atol=1e-10)


def test_a_stage_that_computes_activations_again_uses_the_weights_of_the_forward_pass(ranks):
    of_ranks = values(ranks("pipeline_cases.recomputed", 3, steps=8))
    problem = cases.classification(cases.layers())
    simulated = lg.simulate(problem, cases.RULES["sgd"], profile(problem.module, 3), 8)
    torch.testing.assert_close(of_ranks[0]["trace"].output, simulated.output, rtol=0, atol=1e-10)


def test_stages_may_pass_on_several_tensors_and_have_frozen_parameters(ranks):
    of_ranks = values(ranks("pipeline_cases.tuples", 3, steps=5))
    problem = cases.classification(cases.layers())
    simulated = lg.simulate(problem, cases.RULES["sgd"], profile(problem.module, 3), 5)
    torch.testing.assert_close(of_ranks[0]["trace"].output, simulated.output, rtol=0, atol=1e-10)


def test_evaluation_shows_what_ships_drained_and_training_continues(ranks):
    first, last = values(ranks("pipeline_cases.evaluate", 2, steps=5))
    assert first["loss"] is None
    assert first["in flight"] == last["in flight"] == 0
    assert last["loss"].item() == pytest.approx(first["expected"], abs=1e-12)
    assert last["scores"].shape == (100, cases.CLASSES)
    for one in (first, last):
        assert one["modes"] == [False] + [True] * (len(one["modes"]) - 1)
        assert one["inside"][0].startswith("trace() inside output()")
        assert "step() inside output()" in one["inside"][1]


def test_targets_may_be_several_tensors_in_training_and_in_evaluation(ranks):
    trained, evaluated = values(ranks("pipeline_cases.several_targets", 2))[1]
    assert trained.item() == pytest.approx(evaluated.item(), abs=1e-12)


def test_a_checkpoint_with_a_scheduler_is_not_loaded_without_one_and_the_other_way_round(ranks, tmp_path):
    for errors in values(ranks("pipeline_cases.other_scheduler", 2, folder=str(tmp_path))):
        assert len(errors) == 4
        for ours in errors[1::2]:
            assert "scheduler must be given where the saved pipeline had one, and only there" in ours
        for of_torch in errors[::2]:
            assert "Missing key in checkpoint state_dict: pipe.stage" in of_torch


@pytest.mark.parametrize("optimizer", ["adamw", "steady-muon"])
def test_a_resumed_run_continues_as_if_nothing_had_happened(ranks, tmp_path, optimizer):
    of_ranks = values(ranks("pipeline_cases.checkpoint", 2, steps=5, optimizer=optimizer, folder=str(tmp_path)))
    straight = of_ranks[0]["straight"]
    for resumed in of_ranks[0]["resumed"]:
        assert torch.equal(resumed.query, straight.query)
        assert torch.equal(resumed.output, straight.output)
        assert resumed.delays.tolist() == straight.delays.tolist() == [0, 1, 1, 1, 1] * 2
        torch.testing.assert_close(resumed.loss, straight.loss)


@pytest.mark.parametrize("optimizer", ["adamw", "steady-muon"])
def test_a_state_of_before_the_first_update_starts_anew(ranks, optimizer):
    first, second = values(ranks("pipeline_cases.back_to_the_start", 2, optimizer=optimizer))[0]
    assert torch.equal(first.query, second.query)
    assert torch.equal(first.output, second.output)


def test_a_pipeline_needs_torch_distributed():
    with pytest.raises(RuntimeError, match="start the script with torchrun"):
        lg.pipeline.Pipeline([torch.nn.Linear(2, 2)], torch.nn.functional.mse_loss, torch.optim.SGD)


def test_cut_keeps_a_layer_that_occurs_twice():
    activation = torch.nn.Tanh()
    parts = [torch.nn.Linear(3, 3), activation, torch.nn.Linear(3, 3), activation]
    stages = lg.pipeline.cut(torch.nn.Sequential(*parts), 2)
    assert [part for stage in stages for part in stage] == parts


def test_cut_leaves_layers_whole_and_says_what_it_cannot_cut():
    model = cases.layers()
    stages = lg.pipeline.cut(model, 4)
    assert [len(stage) for stage in stages] == [2, 2, 2, 1]
    assert [p for stage in stages for p in stage.parameters()] == list(model.parameters())
    with pytest.raises(ValueError, match="stages must be <= 4"):
        lg.pipeline.cut(model, 5)
    with pytest.raises(ValueError, match="an nn.Sequential"):
        lg.pipeline.cut(model[0], 1)
