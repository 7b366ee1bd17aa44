"""The baselines for deep models against their packages, and facts about them that need no transcription."""

import pytest
import torch
from torch import nn

import lategrad as lg
from helpers.checks import check_with_expected_warnings
from lategrad import baselines
from lategrad.registry import build_rule
from lategrad.rules import Block, Blocks, apply_update, issue_ticket
from lategrad.rules._orthogonalize import orthogonalise

schedulefree = pytest.importorskip("schedulefree")

SHAPES = [(7, 5), (7,), (3, 7), (3,)]
BLOCKS = Blocks.of_tensors([torch.zeros(shape) for shape in SHAPES])
SMALL = Blocks((Block("weight", (2, 2), "matrix"), Block("bias", (2,), "other")))
STEPS = 60


def start():
    return torch.randn(BLOCKS.size, generator=torch.Generator().manual_seed(0))


def gradient(x, t):
    """Of a quadratic, with noise."""
    noise = torch.randn(len(x), generator=torch.Generator().manual_seed(t))
    return torch.linspace(0.1, 2, len(x)) * x + 0.3 * noise


def by_rule(rule):
    state = rule.init(start())
    for t in range(STEPS):
        grad = gradient(rule.query(state), t)
        state = apply_update(rule, state, grad, torch.tensor(0), issue_ticket(rule, state))
    return rule.query(state), rule.output(state)


def by_optimizer(*optimizers_of):
    """Query and output after as many steps of optimizers, each over the tensors that its condition picks."""
    params = [nn.Parameter(part.clone()) for part in BLOCKS.split(start())]
    optimizers = [make([p for p in params if picks(p)]) for make, picks in optimizers_of]
    for t in range(STEPS):
        grads = BLOCKS.split(gradient(BLOCKS.join([p.detach() for p in params]), t))
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    query = BLOCKS.join([p.detach().clone() for p in params])
    for optimizer in optimizers:
        if hasattr(optimizer, "eval"):
            optimizer.eval()
    return query, BLOCKS.join([p.detach() for p in params])


def everything(p):
    return True


def schedule_free(make, **options):
    def build(params):
        optimizer = make(params, lr=0.02, **options)
        optimizer.train()
        return optimizer

    return build


PACKAGES = {
    "sgd-momentum": (
        baselines.SGDMomentum(0.02),
        [(lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9), everything)],
    ),
    "adamw": (baselines.AdamW(0.02), [(lambda params: torch.optim.AdamW(params, lr=0.02), everything)]),
    "nadam": (
        baselines.NAdam(0.02),
        [
            (
                lambda params: torch.optim.NAdam(
                    params, lr=0.02, betas=(0.99, 0.999), weight_decay=0.01, decoupled_weight_decay=True
                ),
                everything,
            )
        ],
    ),
    "schedule-free": (baselines.ScheduleFree(0.02), [(schedule_free(schedulefree.SGDScheduleFree), everything)]),
    "schedule-free-adamw": (
        baselines.ScheduleFreeAdamW(0.02, weight_decay=0.1),
        [(schedule_free(schedulefree.AdamWScheduleFree, weight_decay=0.1), everything)],
    ),
    "muon": (
        baselines.Muon(0.02, blocks=BLOCKS),
        [
            (lambda params: torch.optim.Muon(params, lr=0.02, adjust_lr_fn="match_rms_adamw"), lambda p: p.dim() == 2),
            (lambda params: torch.optim.AdamW(params, lr=0.02), lambda p: p.dim() != 2),
        ],
    ),
}


@pytest.mark.parametrize("name", PACKAGES)
def test_without_delay_it_is_the_optimizer_of_its_package(name, monkeypatch):
    if name == "muon":  # torch's own iteration is the same in bfloat16: good to two digits, and not for every CPU
        monkeypatch.setattr("torch.optim._muon._zeropower_via_newtonschulz", lambda grad, *_: orthogonalise(grad))
    rule, optimizers = PACKAGES[name]
    for got, want in zip(by_rule(rule), by_optimizer(*optimizers), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


ALL = {
    "sgd-momentum": baselines.SGDMomentum(0.1),
    "adamw": baselines.AdamW(0.1),
    "adamw-averaged": baselines.AdamW(0.1, average="linear"),
    "nadam": baselines.NAdam(0.1),
    "schedule-free-adamw": baselines.ScheduleFreeAdamW(0.1),
    "muon": baselines.Muon(0.1, blocks=SMALL),
    "muon-averaged": baselines.Muon(0.1, average="linear", blocks=SMALL),
    "muon-without-blocks": baselines.Muon(0.1),
    "muon-prediction": baselines.Muon(0.1, prediction=True, blocks=SMALL),
    "rotated-adam": baselines.RotatedAdam(0.1, period=2, blocks=SMALL),
    "rotated-adam-without-blocks": baselines.RotatedAdam(0.1),
    "gap-aware": baselines.GapAware(0.1),
    "pipemare": baselines.PipeMare(0.1, annealing=4),
    "weight-prediction": baselines.WeightPrediction(0.1),
    "ringmaster-muon": baselines.RingmasterMuon(0.1, blocks=SMALL),
}


@pytest.mark.parametrize("name", ALL)
def test_it_passes_all_checks(name):
    check_with_expected_warnings(ALL[name], compile=name in ("muon", "weight-prediction", "rotated-adam"))


def first_move(make, shapes, grad):
    """What one update subtracts from every tensor, of two runs."""
    blocks = Blocks.of_tensors([torch.zeros(shape) for shape in shapes])
    rule = make(blocks)
    state = rule.init(torch.zeros(2, blocks.size))
    ticket = issue_ticket(rule, state)
    return blocks.split(-rule.output(apply_update(rule, state, grad, torch.tensor(0), ticket)))


MATRIX_RULES = {
    "muon": (lambda blocks: baselines.Muon(1.0, momentum=0.0, weight_decay=0.0, blocks=blocks), "0.2 sqrt(max)"),
    "ringmaster-muon": (lambda blocks: baselines.RingmasterMuon(1.0, momentum=0.0, blocks=blocks), "sqrt(ratio)"),
}


@pytest.mark.parametrize("name", MATRIX_RULES)
def test_matrices_of_one_shape_are_taken_together_and_stay_apart(name):
    """Each moves as it would alone: along its orthogonal factor, singular values about 1, times a factor."""
    make, factor = MATRIX_RULES[name]
    shapes = [(3, 4), (5,), (3, 4), (2, 3, 2, 1), (8, 3), (3, 4)]
    parts = [torch.randn(2, *shape, generator=torch.Generator().manual_seed(i)) for i, shape in enumerate(shapes)]
    moves = first_move(make, shapes, torch.cat([part.flatten(1) for part in parts], -1))
    for shape, part, move in zip(shapes, parts, moves, strict=True):
        torch.testing.assert_close(move, first_move(make, [shape], part.flatten(1))[0])
        if len(shape) > 1:
            rows, columns = shape[0], part[0].numel() // shape[0]
            scale = 0.2 * max(rows, columns) ** 0.5 if factor == "0.2 sqrt(max)" else max(1, rows / columns) ** 0.5
            u, _, vh = torch.linalg.svd(part.reshape(2, rows, columns), full_matrices=False)
            turned = u.mT @ move.reshape(2, rows, columns) @ vh.mT / scale
            assert (turned - torch.eye(turned.shape[-1])).abs().max() < 0.35


def test_without_blocks_muon_is_adamw():
    for got, want in zip(by_rule(baselines.Muon(0.02)), by_rule(baselines.AdamW(0.02)), strict=True):
        assert torch.equal(got, want)


def rotated_states(rule, grads):
    states = [rule.init(torch.zeros_like(grads[0]))]
    for grad in grads:
        states.append(rule.update(states[-1], grad, torch.tensor(0)))
    return states


def test_rotated_adam_ends_in_the_eigenvectors_of_its_factors():
    """Orthogonal iteration: Q' L Q becomes diagonal, in descending order, and Q stays orthogonal."""
    blocks = Blocks.of_tensors([torch.zeros(4, 3)])
    law = torch.randn(12, 12, generator=torch.Generator().manual_seed(1)).double()
    grads = torch.randn(1000, 12, generator=torch.Generator().manual_seed(0)).double() @ law
    *_, state = rotated_states(baselines.RotatedAdam(1e-3, blocks=blocks), grads)
    for factor, basis, side in zip(state.factors, state.bases, (4, 3), strict=True):
        factor, basis = factor.view(side, side), basis.view(side, side)
        torch.testing.assert_close(basis.mT @ basis, torch.eye(side).double())
        inside = basis.mT @ factor @ basis / factor.trace()
        assert (inside - inside.diagonal().diag()).abs().max() < 0.02
        assert (inside.diagonal().diff() < 0).all()
        values = torch.linalg.eigvalsh(factor / factor.trace())
        torch.testing.assert_close(inside.diagonal().flip(0), values, atol=0.01, rtol=0)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_every_basis_is_renewed_once_in_a_period_and_not_before(count):
    blocks = Blocks.of_tensors([torch.zeros(3, 2)] * count)
    grads = torch.randn(9, 2, 6 * count, generator=torch.Generator().manual_seed(0))  # two runs
    states = rotated_states(baselines.RotatedAdam(1e-3, period=3, blocks=blocks), grads)
    for t in range(1, 10):
        before, after = (states[at].bases[0].view(2, count, 3, 3) for at in (t - 1, t))
        changed = (before != after).flatten(2).any(-1)
        assert changed.tolist() == [[t % 3 == k % 3 for k in range(count)]] * 2


def test_rotated_adam_in_its_first_coordinates_is_adamw_and_matrices_stay_apart():
    torch.testing.assert_close(by_rule(baselines.RotatedAdam(0.02, period=10**6, blocks=BLOCKS)),
                               by_rule(baselines.AdamW(0.02)))  # fmt: skip
    shapes = [(3, 4), (2,), (3, 4), (2, 3, 2, 1)]
    both = Blocks.of_tensors([torch.zeros(shape) for shape in shapes])
    grads = torch.randn(30, both.size, generator=torch.Generator().manual_seed(0))
    together = both.split(rotated_states(baselines.RotatedAdam(0.1, period=1, blocks=both), grads)[-1].x)
    for i, shape in enumerate(shapes):
        own = Blocks.of_tensors([torch.zeros(shape)])
        alone = torch.stack([both.split(grad)[i].flatten() for grad in grads])
        state = rotated_states(baselines.RotatedAdam(0.1, period=1, blocks=own), alone)[-1]
        torch.testing.assert_close(together[i], state.x.view(shape), rtol=1e-3, atol=1e-4)


def test_gap_aware_divides_by_one_more_than_the_gap_in_usual_updates():
    """Constant gradients without momentum: C tends to lr |v|, so that a gap of n updates divides by about n + 1."""
    rule = baselines.GapAware(0.1, momentum=0.0, decay=0.9)
    state = rule.init(torch.zeros(2).double())
    for _ in range(200):
        state = rule.update(state, torch.tensor([1.0, -3.0]).double(), torch.tensor(0), rule.ticket(state))
    before = rule.output(state)
    far = before + torch.tensor([0.3, 0.3]).double()  # three updates of the first coordinate, one of the second
    state = rule.update(state, torch.tensor([1.0, -3.0]).double(), torch.tensor(7), far)
    torch.testing.assert_close(before - rule.output(state), torch.tensor([0.1 / 4, -0.3 / 2]).double())


def test_gap_aware_and_pipemare_without_delay_are_their_base():
    sgd = by_rule(baselines.SGDMomentum(0.02))
    torch.testing.assert_close(by_rule(baselines.GapAware(0.02)), sgd)
    torch.testing.assert_close(by_rule(baselines.PipeMare(0.02)), by_rule(baselines.AdamW(0.02)))
    torch.testing.assert_close(by_rule(baselines.WeightPrediction(0.02))[1], by_rule(baselines.AdamW(0.02))[1])


@pytest.mark.parametrize(
    "rule",
    [
        baselines.WeightPrediction(0.1, weight_decay=0.0),
        baselines.Muon(0.1, weight_decay=0.0, other_decay=0.0, prediction=True, blocks=SMALL),
    ],
    ids=["adam", "muon"],
)
def test_weights_are_predicted_where_they_will_be_when_the_direction_stays(rule):
    states = [rule.init(torch.zeros(6).double())]
    for _ in range(20):
        states.append(rule.update(states[-1], torch.tensor([1.0, -2, 0.5, 3, -1, 2]).double(), torch.tensor(5)))
    torch.testing.assert_close(rule.query(states[10]), rule.output(states[15]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: baselines.SGDMomentum(0.1, momentum=1.0), r"momentum must be a number in \[0, 1\), got 1.0"),
        (lambda: baselines.AdamW(0.1, beta2=-0.1), r"beta2 must be a number in \[0, 1\)"),
        (lambda: baselines.AdamW(0.1, average="mean"), "average must be one of"),
        (lambda: baselines.NAdam(0.1, eps=0.0), "eps must be a finite number > 0"),
        (lambda: baselines.ScheduleFreeAdamW(-0.1), "lr must be"),
        (lambda: baselines.Muon(0.1, weight_decay=-1.0), "weight_decay must be"),
        (lambda: baselines.PipeMare(0.1, annealing=0), "annealing must be a finite number > 0"),
        (lambda: baselines.RingmasterMuon(0.1, threshold=0), "threshold must be a finite number >= 1"),
    ],
)
def test_bad_hyper_parameters_are_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_a_batch_of_learning_rates_is_one_rule():
    """As in the benchmark: learning rates along a dimension of runs, blocks filled in by the problem."""
    problem = lg.problems.ModuleProblem(nn.Linear(64, 10), lg.problems.load("digits"), batch=16)
    for name in ("muon", "adamw", "gap-aware"):
        lr = torch.tensor([[1e-3], [1e-2]], dtype=torch.float64)
        together = lg.simulate(problem, build_rule(name, lr, lg.WholeSpace()), [0, 4], 40)
        alone = lg.simulate(problem, build_rule(name, 1e-2, lg.WholeSpace()), 4, 40)
        assert together.output[1, 1].dtype == torch.float32
        torch.testing.assert_close(together.output[1, 1], alone.output, rtol=1e-3, atol=1e-4)
