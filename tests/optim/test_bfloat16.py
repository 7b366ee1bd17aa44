"""bfloat16 parameters: the state keeps them in float32, so that no small step is lost."""

import pytest
import torch

from lategrad.optim import AnytimeSGD, SteadyAdam, SteadyMuon

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"))]

CASES = [pytest.param(AnytimeSGD, 5e-4, marks=pytest.mark.slow), (SteadyAdam, 5e-5), (SteadyMuon, 2e-4)]


def trained(build, dtype, device, updates=200):
    """From ones, along a constant gradient: every update is far below what bfloat16 resolves next to 1."""
    p = torch.nn.Parameter(torch.ones(300, 4, device=device, dtype=dtype))
    grad = torch.linspace(0.5, 1.5, 1200).view(300, 4).to(torch.bfloat16)
    optimizer = build([p])
    for _ in range(updates):
        p.grad = grad.to(device, dtype, copy=True)
        optimizer.step()
    return p.detach().float().cpu()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("compile", [False, True], ids=["eager", "loops"])
@pytest.mark.parametrize(("build", "lr"), CASES)
def test_small_steps_add_up_as_in_float32(build, lr, compile, device):
    want, got = (trained(lambda p: build(p, lr=lr, compile=compile), dtype, device)
                 for dtype in (torch.float32, torch.bfloat16))  # fmt: skip
    assert (want - 1).abs().max() > 0.004  # a unit in the last place of bfloat16 below 1
    torch.testing.assert_close(got, want.bfloat16().float(), rtol=0, atol=0.004)  # apart by one rounding at most


def test_torchs_sgd_loses_all_of_them():
    """What the float32 copy is for."""
    assert trained(lambda p: torch.optim.SGD(p, lr=1e-5), torch.bfloat16, "cpu").eq(1).all()
    assert not trained(lambda p: torch.optim.SGD(p, lr=1e-5), torch.float32, "cpu").eq(1).any()
