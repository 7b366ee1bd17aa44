"""PyTorch Lightning with a rule that averages: the output is validated, saved and left in the module.

An MLP learns scikit-learn's digits with a delay of 20 updates, once with ``OutputCallback`` and once
without, where Lightning validates the point at which gradients are taken. Then the saved checkpoint is resumed.
Needs ``pip install 'lategrad[integrations]'``.
"""

import argparse
import logging
import tempfile
import warnings
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import lategrad as lg
import lategrad.optim
from lategrad.integrations.lightning import OutputCallback


class Digits(LightningModule):
    """A small network; only the optimizer is lategrad's."""

    def __init__(self, delay):
        super().__init__()
        self.delay = delay
        self.net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def training_step(self, batch, _):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, _):
        self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self):
        return lg.optim.Delayed(lg.optim.SteadyAdam(self.parameters(), lr=0.01), self.delay)


def loaders():
    X, y = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(X / 16, dtype=torch.float32), torch.tensor(y))
    train, test = random_split(data, [1437, 360], torch.Generator().manual_seed(0))
    return DataLoader(train, 32), DataLoader(test, 360)


def fit(callbacks, epochs, folder, delay, checkpoint=None):
    torch.manual_seed(0)
    model = Digits(delay)
    trainer = Trainer(max_epochs=epochs, callbacks=callbacks, default_root_dir=folder, accelerator="cpu", logger=False,
                      enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=1.0)  # fmt: skip
    trainer.fit(model, *loaders(), ckpt_path=checkpoint, weights_only=True)
    return model, trainer.callback_metrics["accuracy"].item()


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--delay", type=int, default=20)
    options = parser.parse_args(argv)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
        whole, output = fit([OutputCallback(), checkpoints], options.epochs, folder, options.delay)
        print(f"validation accuracy of the output (with the callback):   {output:.3f}")
        _, query = fit([], options.epochs, folder, options.delay)
        print(f"validation accuracy of the query (without the callback): {query:.3f}")
        half = Path(folder) / f"epoch={options.epochs // 2 - 1}.ckpt"
        resumed, _ = fit([OutputCallback()], options.epochs, folder, options.delay, checkpoint=half)
        same = all(torch.equal(p, q) for p, q in zip(whole.parameters(), resumed.parameters(), strict=True))
        print(f"resumed from {half.name}: {'the same weights, bit for bit' if same else 'different weights'}")
    return output, query, same


if __name__ == "__main__":
    main()
