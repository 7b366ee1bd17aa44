"""The Lightning callback against Lightning itself, on a model of a few weights."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lategrad as lg
import lategrad.optim
from helpers.examples import example

lightning = pytest.importorskip("lightning", reason="lightning is not installed: pip install 'lategrad[integrations]'")
from lightning.pytorch import LightningModule, Trainer  # noqa: E402
from lightning.pytorch.callbacks import Callback, ModelCheckpoint  # noqa: E402

from lategrad.integrations.lightning import OutputCallback  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]


def data(rows=48):
    x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(1, keepdim=True).tanh())


def loader(rows=48):
    return DataLoader(data(rows), batch_size=8)


class Model(LightningModule):
    """Tells what weights each stage saw."""

    def __init__(self, build=None):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.build = build or (lambda params: lg.optim.FromRule(params, lg.Steady(lr=1.0, c=1.0)))
        self.seen = []

    def loss(self, batch):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch, _):
        return self.loss(batch)

    def validation_step(self, batch, _):
        self.saw("validation")
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch, _):  # noqa: PT019
        self.saw("test")

    def predict_step(self, batch, _):
        self.saw("predict")
        return self.net(batch[0])

    def saw(self, stage):
        self.seen.append((stage, weights(self)))

    def configure_optimizers(self):
        optimizer = self.build(self.parameters())
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def saved_weights(path):
    saved = torch.load(path, weights_only=True)
    return torch.cat([v.flatten() for v in saved["state_dict"].values()]), saved


def trainer(folder, *callbacks, steps, **options):
    kwargs = {"max_steps": steps, "accelerator": "cpu", "logger": False, "enable_progress_bar": False,
              "enable_model_summary": False, "default_root_dir": folder, "num_sanity_val_steps": 1}  # fmt: skip
    kwargs |= {"enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in callbacks)}
    return Trainer(callbacks=[OutputCallback(), *callbacks], **(kwargs | options))


def by_hand(build, steps, batches_in_one=1, clip=None):
    """The same training in ten lines of PyTorch; the model, its optimizer, and the query and output at each step."""
    model = Model()
    optimizer = build(model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    queries, outputs, batches = [weights(model)], [weights(model)], iter(())
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(batches_in_one):
            batch = next(batches, None)
            if batch is None:
                batches = iter(loader())
                batch = next(batches)
            (model.loss(batch) / batches_in_one).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        scheduler.step()
        queries.append(weights(model))
        with optimizer.output():
            outputs.append(weights(model))
    return queries, outputs


def steady(params):
    return lg.optim.FromRule(params, lg.Steady(lr=1.0, c=1.0))


BUILD = {
    "steady": steady,
    "steady-adam": lambda params: lg.optim.FromRule(params, lg.SteadyAdam(lr=0.05)),
    "delayed": lambda params: lg.optim.Delayed(steady(params), 2),
    "output-is-query": lambda params: lg.optim.AnytimeSGD(params, lr=0.5),
    "torch": lambda params: torch.optim.SGD(params, lr=0.1),
}


@pytest.mark.parametrize("name", ["steady", "steady-adam", "delayed"])
def test_stages_and_checkpoints_see_the_output_and_training_the_query(name, tmp_path):
    queries, outputs = by_hand(BUILD[name], 12)
    assert not torch.equal(queries[-1], outputs[-1])
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1, filename="{step}")
    light = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1, filename="w{step}", save_weights_only=True)
    model = Model(BUILD[name])
    fitting = trainer(tmp_path, checkpoint, light, steps=12, val_check_interval=3)
    fitting.fit(model, loader(), loader(8))
    checks = [w for stage, w in model.seen if stage == "validation"]
    assert len(checks) == 5  # one before training
    for step, w in zip((0, 3, 6, 9, 12), checks, strict=True):
        assert torch.equal(w, outputs[step])
    for step in (4, 8, 12):
        for name in ("", "w"):
            assert torch.equal(saved_weights(tmp_path / f"{name}step={step}.ckpt")[0], outputs[step])
    assert torch.equal(weights(model), outputs[12])  # what is left after fit
    fitting.test(model, loader(8), verbose=False)
    fitting.predict(model, loader(8))
    assert all(torch.equal(w, outputs[12]) for stage, w in model.seen if stage in ("test", "predict"))
    fitting.save_checkpoint(tmp_path / "after.ckpt")
    assert torch.equal(saved_weights(tmp_path / "after.ckpt")[0], outputs[12])


@pytest.mark.parametrize("name", BUILD)
def test_resuming_is_exact(name, tmp_path):
    """Two epochs, and two more from the checkpoint of the second; without the callback, torch's SGD is as exact."""
    whole = Model(BUILD[name])
    trainer(tmp_path, steps=24).fit(whole, loader(), loader(8))
    half = Model(BUILD[name])
    last = ModelCheckpoint(tmp_path, save_last=True)
    trainer(tmp_path, last, steps=12).fit(half, loader(), loader(8))
    rest = Model(BUILD[name])
    trainer(tmp_path, steps=24).fit(rest, loader(), loader(8), ckpt_path=last.last_model_path, weights_only=True)
    assert torch.equal(weights(whole), weights(rest))
    assert not torch.equal(weights(whole), weights(half))


def test_clipping_and_accumulation_are_those_of_a_plain_loop(tmp_path):
    _, outputs = by_hand(steady, 9, batches_in_one=2, clip=0.05)
    model = Model(steady)
    trainer(tmp_path, steps=9, accumulate_grad_batches=2, gradient_clip_val=0.05).fit(model, loader())
    torch.testing.assert_close(weights(model), outputs[-1])
    assert not torch.allclose(weights(model), by_hand(steady, 9, batches_in_one=2)[1][-1])


def test_an_interrupted_fit_leaves_the_output(tmp_path):
    class Stop(Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 5:
                raise ZeroDivisionError

    model = Model(steady)
    with pytest.raises(ZeroDivisionError):
        trainer(tmp_path, Stop(), steps=12).fit(model, loader())
    assert torch.equal(weights(model), by_hand(steady, 5)[1][-1])


def test_several_optimizers_by_hand(tmp_path):
    class Two(Model):
        automatic_optimization = False

        def configure_optimizers(self):
            first, _, last = self.net
            return steady(first.parameters()), torch.optim.SGD(last.parameters(), lr=0.1)

        def training_step(self, batch, _):
            optimizers = self.optimizers()
            for optimizer in optimizers:
                optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            for optimizer in optimizers:
                optimizer.step()

    def fit(steps, **options):
        model = Two()
        model.automatic_optimization = False
        fitting = trainer(tmp_path, steps=2 * steps)  # Lightning counts steps of either
        fitting.fit(model, loader(), loader(8), **options)
        return model, fitting

    half, fitting = fit(6)
    fitting.save_checkpoint(tmp_path / "two.ckpt")
    assert torch.equal(half.seen[-1][1], weights(half))
    whole, _ = fit(12)
    rest, _ = fit(12, ckpt_path=tmp_path / "two.ckpt", weights_only=True)
    assert torch.equal(weights(whole), weights(rest))


def test_the_example(capsys):
    output, query, same = example("lightning_training").main(["--epochs", "4", "--delay", "10"])
    assert output > 0.7
    assert abs(output - query) < 0.2
    assert same
    assert "bit for bit" in capsys.readouterr().out
