"""On a GPU: every rule is itself, through every backend that a GPU has. Skipped without one."""

import pytest
import torch

import lategrad as lg
from helpers.parameters import ELEMENTWISE, backends, flat
from lategrad.execution.codegen.emit import CHUNK
from lategrad.optim import FromRule, SteadyMuon
from lategrad.problems import LocalSteps, Quadratic, Synchronous
from lategrad.registry import RULES, build_rule
from lategrad.rules import _orthogonalize
from lategrad.rules.rule import apply_update, issue_ticket
from lategrad.support.runs import owned, tensors

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

SHAPES = [(3, 4), (CHUNK + 5,), (), (2, 3, 2, 2), (300, 64)]


def on_gpu(shapes, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to("cuda", dtype) for shape in shapes]


@pytest.mark.parametrize("domain", [lg.WholeSpace(), lg.Ball(2.0)], ids=["whole", "ball"])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_the_optimizer_in_loops_is_its_eager_form(name, domain):
    rule = build_rule(name, 0.5, domain)
    points = {}
    for backend, compile in (("loops", True), ("eager", False)):
        params = [torch.nn.Parameter(x) for x in on_gpu(SHAPES, 0)]
        optimizer = FromRule(params, rule, compile=compile)
        for t in range(5):
            for p, grad in zip(params, on_gpu(SHAPES, t + 1), strict=True):
                p.grad = grad
            optimizer.step(delay=t % 2)
        assert backends(optimizer) == [backend]
        points[backend] = flat(params)
        with optimizer.output():
            points[backend] = torch.stack([points[backend], flat(params)])
    torch.testing.assert_close(points["loops"], points["eager"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in RULES if name not in ELEMENTWISE])
def test_a_rule_that_looks_at_shapes_is_its_cpu_form(name, monkeypatch):
    monkeypatch.setattr(_orthogonalize, "_rational", _orthogonalize._polynomial)  # a CPU has a cheaper form
    # The first gradient's factors have a rank of 20: more rows than that have any basis, and Adam takes whole steps.
    matrix = (20, 20) if name == "rotated-adam" else (30, 20)
    points = []
    for device in ("cuda", "cpu"):
        params = [torch.nn.Parameter(x.to(device)) for x in on_gpu([matrix, (20,), matrix], 0)]
        optimizer = FromRule(params, build_rule(name, 0.05, lg.WholeSpace()), compile=False)
        for t in range(4):
            for p, grad in zip(params, on_gpu([p.shape for p in params], t + 1), strict=True):
                p.grad = grad.to(device)
            optimizer.step()
        assert backends(optimizer) == ["eager"]
        points.append(flat(params).cpu())
    torch.testing.assert_close(*points, rtol=1e-2, atol=1e-3)  # products in bf16 or TF32 round by the device


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_steady_muon_in_loops_is_its_eager_form(dtype):
    shapes = [(300, 64), (20,), (300, 64), (280, 300), (CHUNK + 5,), (300, 64)]
    points = []
    for compile in (True, False):
        params = [torch.nn.Parameter(x) for x in on_gpu(shapes, 0, dtype)]
        optimizer = SteadyMuon(params, lr=0.05, compile=compile)
        for t in range(4):
            for p, grad in zip(params, on_gpu(shapes, t + 1, dtype), strict=True):
                p.grad = grad
            optimizer.step(delay=t % 2)
        assert backends(optimizer) == ["loops" if compile else "eager"]
        points.append(flat(params).float())
    torch.testing.assert_close(*points, rtol=1e-2, atol=1e-2 if dtype == torch.bfloat16 else 1e-3)


@pytest.mark.parametrize("backend", ["loops", "compile"])
@pytest.mark.parametrize("name", ["anytime-sgd", "optimistic-anytime", "steady", "dc-asgd"])
def test_the_step_is_the_rules_update(name, backend):
    rule = build_rule(name, 0.5, lg.Ball(2.0))
    pure = rule.init(torch.zeros(CHUNK + 5, device="cuda"))
    state, ticket = owned(pure), issue_ticket(rule, pure)
    step = lg.in_place(rule, state, backend=backend)
    for t in range(4):
        (grad,) = on_gpu([(CHUNK + 5,)], t)
        pure = apply_update(rule, pure, grad, torch.tensor(t, device="cuda"), ticket)
        step(grad, t, ticket)
    assert step.backend == backend
    for got, want in zip(tensors(state), tensors(pure), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_rounded_as_torch_rounds(dtype):
    params = [torch.nn.Parameter(x) for x in on_gpu(SHAPES, 0, dtype)]
    rule = lg.Anytime(lg.OGD(0.5))
    optimizer = FromRule(params, rule, compile=True)
    for t in range(4):
        for p, grad in zip(params, on_gpu(SHAPES, t + 1, dtype), strict=True):
            p.grad = grad
        optimizer.step()
    assert backends(optimizer) == ["loops"]
    for p in params:
        assert torch.equal(p.detach(), optimizer.state[p]["x"].to(dtype))


def test_local_steps_in_recorded_waves_are_those_of_the_cpu():
    problem = LocalSteps(Quadratic(noise=0.3), local_steps=3, inner="adamw:lr=0.03")
    workers = [lg.clocks.Worker(mean=mean) for mean in (1.0, 1.7, 2.1)]
    preempted = [*workers, lg.clocks.Worker(mean=5.0, up=40.0, down=1.0)]
    delays = [lg.clocks.Cluster(preempted), lg.clocks.Cluster(workers, adapt=True), 0, 5]
    for rule in ("sgd:lr=0.05|0.2", "fed-buff:lr=0.5", "delayed-nesterov:lr=0.1"):
        cpu, gpu = (
            lg.simulate(problem, rule, delays, steps=300, seed=[0, 1], record_every=37, device=device)
            for device in ("cpu", "cuda")
        )
        torch.testing.assert_close(gpu.loss, cpu.loss, rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(gpu.output, cpu.output, rtol=1e-8, atol=1e-10)


def test_a_synchronous_round_is_that_of_the_cpu():
    problem = Synchronous(LocalSteps(Quadratic(noise=0.3), local_steps=3, inner="adamw:lr=0.03"), workers=4)
    cpu, gpu = (lg.simulate(problem, "nesterov:lr=0.1|0.3", 0, steps=40, device=device) for device in ("cpu", "cuda"))
    torch.testing.assert_close(gpu.output, cpu.output, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("compile", [False, True])
def test_long_gradients_are_shortened_and_refused_as_on_the_cpu(compile):
    """Also within the graph that a simulation is recorded as."""
    rule = lg.SGD(lr=torch.tensor([[0.5], [2.5]], dtype=torch.float64))  # one run diverges, and is held
    traces = [
        lg.simulate(lg.problems.Quadratic(noise=1.0), rule, 2, 200, seed=[0, 1], clip=3.0, max_norm_ratio=1.5,
                    device=device, compile=compile)
        for device in ("cuda", "cpu")
    ]  # fmt: skip
    assert traces[0].config["refused"] == traces[1].config["refused"]
    assert traces[0].config["refused"][0][1] > 20
    torch.testing.assert_close(traces[0].output, traces[1].output, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "loops"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sharded_parameters_on_nccl_are_trained_as_plain_ones(dtype, compile, tmp_path):
    """One rank: all collective operations run, and a checkpoint of the ranks continues."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    def build(shard, kind):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8)).to("cuda", dtype)
        model = fully_shard(model) if shard else model
        make = {
            "muon": lambda: lg.optim.SteadyMuon(model, lr=0.01, compile=shard and compile),
            "adam": lambda: lg.optim.SteadyAdam(model.parameters(), lr=0.01, compile=shard and compile),
            "simplex": lambda: FromRule(model.parameters(), lg.SGD(0.1, domain=lg.Simplex(30.0)), compile=False),
        }
        return model, make[kind]()

    def train(model, optimizer, first, last):
        for t in range(first, last):
            x = torch.randn(16, 32, generator=torch.Generator().manual_seed(t)).to("cuda", dtype)
            optimizer.zero_grad()
            model(x).float().square().mean().backward()
            optimizer.step(delay=min(t, 2))
        parts = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
        return torch.cat([p.detach().float().flatten() for p in parts])

    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        for kind in ("muon", "adam", "simplex"):
            expected = train(*build(False, kind), 0, 20)
            saved = build(True, kind)
            train(*saved, 0, 10)
            folder = str(tmp_path / kind)
            dcp.save(dict(zip(("model", "optimizer"), get_state_dict(*saved), strict=True)), checkpoint_id=folder)
            loaded = build(True, kind)
            state = dict(zip(("model", "optimizer"), get_state_dict(*loaded), strict=True))
            dcp.load(state, checkpoint_id=folder)
            set_state_dict(*loaded, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
            tolerance = 1e-5 if dtype == torch.float32 else 2e-2
            for result in (train(*saved, 10, 20), train(*loaded, 10, 20)):
                assert (result - expected).norm() <= tolerance * expected.norm(), kind
    finally:
        dist.destroy_process_group()
