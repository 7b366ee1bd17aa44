"""Loops with accelerate: the output under a prepared optimizer, saved models, and exact resumption."""

import pytest
import torch
from torch import nn

import lategrad as lg

accelerate = pytest.importorskip(
    "accelerate", reason="accelerate is not installed: pip install 'lategrad[integrations]'"
)
from safetensors.torch import load_file  # noqa: E402

pytestmark = pytest.mark.slow

BUILD = {
    "steady-adam": lambda model: lg.optim.SteadyAdam(model, lr=0.05),
    "steady-muon": lambda model: lg.optim.SteadyMuon(model, lr=0.05),
    "delayed": lambda model: lg.optim.Delayed(lg.optim.SteadyAdam(model, lr=0.05), 2),
    "torch": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
}
ROWS = torch.randn(32, 4, 6, generator=torch.Generator().manual_seed(0))


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def make(name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
    optimizer = BUILD[name](model)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3)


def loop(accelerator, parts, batches):
    model, optimizer, schedule = parts
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()


@pytest.fixture
def accelerator():
    yield accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


@pytest.mark.parametrize("name", BUILD)
def test_a_prepared_optimizer_ships_the_output_of_a_plain_loop(name, accelerator, tmp_path):
    model, plain, schedule = make(name)
    for first in range(0, 16, 2):
        plain.zero_grad()
        for batch in ROWS[first : first + 2]:
            (model(batch).square().mean() / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        plain.step()
        schedule.step()
    parts = accelerator.prepare(*make(name))
    loop(accelerator, parts, ROWS[:16])
    query = weights(parts[0])
    torch.testing.assert_close(query, weights(model))
    with lg.optim.output_of(parts[1]), lg.optim.output_of(plain):
        torch.testing.assert_close(weights(parts[0]), weights(model))
        output = weights(parts[0])
        accelerator.save_model(parts[0], str(tmp_path))
    assert torch.equal(weights(parts[0]), query)
    assert torch.equal(output, query) == (name == "torch")
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(weights(model), output)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", BUILD)
def test_resuming_from_save_state_is_exact(name, inside, accelerator, tmp_path):
    """A state that is saved inside the context has the output in its model, and the query in its optimizer."""
    whole = accelerator.prepare(*make(name))
    loop(accelerator, whole, ROWS[:8])
    if inside:
        with lg.optim.output_of(whole[1]):
            accelerator.save_state(str(tmp_path))
    else:
        accelerator.save_state(str(tmp_path))
    loop(accelerator, whole, ROWS[8:])
    accelerator.free_memory()
    rest = accelerator.prepare(*make(name))
    accelerator.load_state(str(tmp_path))
    loop(accelerator, rest, ROWS[8:])
    assert torch.equal(weights(rest[0]), weights(whole[0]))
