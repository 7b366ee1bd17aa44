"""Optimizers of ours and of others pass the checks that they should pass; broken ones are found, and told why."""

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import lategrad as lg
from lategrad.checks import check_optimizer

QUICK = ("accumulated", "resumed", "order", "none", "weight decay", "shapes", "bfloat16")
SLOW = ("compiled", "sharded")


def delayed(params):
    return lg.optim.Delayed(lg.optim.SteadyAdam(params, lr=0.01), 1)


OURS = {
    "AnytimeSGD": partial(lg.optim.AnytimeSGD, lr=0.1),
    "AnytimeSGD in a ball": partial(lg.optim.AnytimeSGD, lr=0.1, domain=lg.Ball(100.0)),
    "OptimisticAnytime": partial(lg.optim.OptimisticAnytime, diameter=1.0),
    "StronglyConvexSGD": partial(lg.optim.StronglyConvexSGD, strong_convexity=10.0),
    "SteadyAdam": partial(lg.optim.SteadyAdam, lr=0.01),
    "SteadyMuon": partial(lg.optim.SteadyMuon, lr=0.01),
    "Steady": partial(lg.optim.FromRule, rule="steady:lr=1"),
    "Muon as a rule": partial(lg.optim.FromRule, rule=lg.baselines.Muon(0.01)),
    "Delayed": delayed,
}
OTHERS = {
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "SGD with momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=0.01),
    "Muon": partial(torch.optim.Muon, lr=0.01),
}
NOT_MET = {"SteadyAdam": {"none"}, "Delayed": {"none"}, "Muon as a rule": {"none"}}
"""Parameters without a gradient count as zeros in the mean by which SteadyAdam clips, and they are decayed."""


def failures(factory, **options):
    """The checks that fail, with what they say."""
    try:
        check_optimizer(factory, **options)
    except AssertionError as error:
        return dict(line.split(": ", 1) for line in str(error).splitlines())
    return {}


@pytest.mark.parametrize("name", OURS)
def test_ours_pass_but_for_what_the_documentation_names(name):
    assert set(failures(OURS[name], skip=SLOW)) == NOT_MET.get(name, set())


@pytest.mark.parametrize("name", OTHERS)
def test_those_of_torch_pass_but_lose_small_steps_in_bfloat16(name):
    assert set(failures(OTHERS[name], skip=SLOW)) <= {"bfloat16"}


@pytest.mark.parametrize("name", ["SGDScheduleFree", "AdamWScheduleFree", "RAdamScheduleFree"])
def test_schedule_free_ones_pass_but_lose_small_steps_in_bfloat16(name):
    schedulefree = pytest.importorskip("schedulefree")
    assert set(failures(partial(getattr(schedulefree, name), lr=0.01), skip=SLOW)) <= {"bfloat16"}


def test_it_says_what_is_refused_and_what_was_left_out():
    results = check_optimizer(OTHERS["Muon"], skip=SLOW)
    assert results["shapes"] == "passed, but refuses (), (2, 3, 4), (2, 3, 2, 2), (0,)"
    assert results["bfloat16"] == "skipped: it multiplies matrices, which not every CPU can in bfloat16"
    assert results["compiled"] == results["sharded"] == "skipped: as asked"
    assert check_optimizer(OURS["SteadyMuon"], skip=SLOW)["shapes"] == "passed, but refuses (1, 4), (4, 1), (2, 3, 4)"


class Broken(torch.optim.Optimizer):
    """Gradient descent with one fault."""

    def __init__(self, params, fault):
        super().__init__(params, {"lr": 0.1, "weight_decay": 0.01, "rate": 1.0})
        self.fault, self.memory, self.calls = fault, {}, 0

    @torch.no_grad()
    def step(self):
        self.calls += 1
        for number, group in enumerate(self.param_groups):
            group["rate"] = math.sqrt(group["rate"] + 1.5) if self.fault == "compiled" else 1.0
            for p in group["params"]:
                if p.grad is None and self.fault != "none":
                    continue
                self.update(p, group, number)

    def update(self, p, group, number):
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        if self.fault == "accumulated":  # the gradient's own memory is taken for the momentum
            grad = self.state[p]["momentum"] = self.state[p].get("momentum", grad).mul_(0.9).add_(grad)
        if self.fault == "resumed":  # the momentum is not in the state
            grad = self.memory[p] = 0.9 * self.memory.get(p, 0) + grad
        if self.fault == "shapes":  # undefined for one entry
            grad = grad / (grad.std() + 1e-3) if grad.numel() else grad
        if self.fault == "sharded":  # the norm of this rank's part
            grad = grad / (grad.to_local() if isinstance(grad, DTensor) else grad).norm().clamp_min(1e-9)
        decay = self.defaults["weight_decay"] if self.fault == "weight decay" else group["weight_decay"]
        lr = group["lr"] / (1 + number) if self.fault == "order" else group["lr"] * group["rate"]
        p.mul_(1 - lr * decay).sub_(lr * grad)


FAULTS = {
    "accumulated": "accumulating gradients trains another model than one large batch does \\(the parameter of shape "
    "\\(4, 3\\) differs by .* of how far it moves\\)",
    "resumed": "a run that continues from a checkpoint becomes another run",
    "order": "listing parameters or groups in another order trains another model",
    "none": "a part of the model that is not used .* \\(a step without any gradient moves the parameters\\)",
    "weight decay": "biases and norms cannot be exempted from weight decay \\(a parameter with a gradient of zero",
    "shapes": "a scalar, a row or an empty parameter stops or spoils training \\(\\(\\) beside \\(\\) is not trained",
    "bfloat16": "small steps are rounded away, and training stalls \\(100% of the way of 64 steps is missing\\)",
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.filterwarnings("ignore:std\\(\\). degrees of freedom is <= 0:UserWarning")
def test_each_fault_is_found_by_its_check(fault):
    found = failures(partial(Broken, fault=fault), skip=SLOW)
    assert set(found) == {fault, "bfloat16"}  # no one of them has a master copy
    with pytest.raises(AssertionError, match=f"(?m)^{fault}: {FAULTS[fault]}"):
        check_optimizer(partial(Broken, fault=fault), skip=SLOW)


def test_an_optimizer_that_raises_is_reported_not_hidden():
    found = failures(partial(Broken, fault="crash"), skip=[*SLOW, "bfloat16"])
    assert found == {}

    class Raises(Broken):
        def update(self, p, group, number):
            raise KeyError("momentum")

    found = failures(partial(Raises, fault=""), skip=SLOW)
    assert found["resumed"].endswith("becomes another run (KeyError: 'momentum')")


def test_bad_arguments():
    with pytest.raises(ValueError, match="skip must be names of checks: accumulated, .*, sharded, got \\['shared'\\]"):
        check_optimizer(OTHERS["SGD"], skip=["shared"])
    with pytest.raises(ValueError, match="tolerance must be a finite number > 0, got 0"):
        check_optimizer(OTHERS["SGD"], tolerance=0)
    with pytest.raises(AssertionError, match="factory: cannot be pickled"):
        check_optimizer(lambda params: torch.optim.SGD(params, lr=0.1))
    with pytest.raises(TypeError, match="factory must return a torch.optim.Optimizer, got Linear"):
        check_optimizer(lambda params: nn.Linear(1, 1), skip=SLOW)


@pytest.mark.slow
def test_sharded_training_with_adamw_equals_one_process():
    assert check_optimizer(OTHERS["AdamW"], skip=[*QUICK, "compiled"])["sharded"] == "passed"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SGD", "SGD with momentum"])
def test_sharded_training_with_sgd_equals_one_process(name):
    assert failures(OTHERS[name], skip=[*QUICK, "compiled"]) == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in OURS if name != "Delayed"])
def test_sharded_training_with_ours_equals_one_process(name):
    pytest.importorskip("lategrad.execution.dtensors", reason="optimizers that take DTensors")
    assert failures(OURS[name], skip=[*QUICK, "compiled"]) == {}


@pytest.mark.slow
def test_muon_of_torch_differs_by_the_rounding_of_bfloat16_alone():
    """It orthogonalises in bfloat16, in another order when it is sharded or compiled."""
    assert set(failures(OTHERS["Muon"], skip=QUICK)) <= {"compiled", "sharded"}
    assert failures(OTHERS["Muon"], skip=QUICK, tolerance=0.05) == {}


@pytest.mark.slow
def test_a_norm_of_each_rank_alone_is_found():
    found = failures(partial(Broken, fault="sharded"), skip=[*QUICK, "compiled"])
    assert "trains another model than one process does (the parameter of shape (7, 6) differs by" in found["sharded"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*OURS, "SGD", "AdamW"])
def test_compiled_steps_equal_eager_ones(name):
    assert failures((OURS | OTHERS)[name], skip=[*QUICK, "sharded"]) == {}


@pytest.mark.slow
def test_a_number_that_changes_at_every_step_is_compiled_again():
    found = failures(partial(Broken, fault="compiled"), skip=[*QUICK, "sharded"])
    assert "is compiled anew at every step" in found["compiled"]
