"""PyTorch Lightning: evaluate and save the output of a rule, train from its query.

.. code-block:: python

    trainer = lightning.Trainer(callbacks=[lategrad.integrations.lightning.OutputCallback()])

A ``LightningModule`` that returns one of :mod:`lategrad.optim` from ``configure_optimizers`` needs nothing else.
"""

from __future__ import annotations

from typing import Any

from lategrad.integrations.modes import show_output, show_query, showing_output

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.trainer.states import TrainerFn
except ImportError as error:
    raise ImportError(
        "lategrad.integrations.lightning needs lightning: pip install 'lategrad[integrations]' or pip install lightning"
    ) from error

__all__ = ["OutputCallback"]


class OutputCallback(Callback):  # type: ignore[misc]
    """Whatever looks at the weights sees the output; only training steps see the query.

    - Validation, test and prediction loops run on the output.
    - Every checkpoint, from ``ModelCheckpoint`` or ``trainer.save_checkpoint``, with the weights alone or with all, has
      the output as its weights. The query is in its optimizer state, so that ``trainer.fit(ckpt_path=...)`` goes on
      exactly where it was.
    - After ``fit`` the module holds the output, also when it was interrupted.

    Optimizers that are not ours, and those whose output is the query, are left alone.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """From here on, checkpoints are made in eval mode.

        Callbacks are told of checkpoints only after the weights have been collected, and of those without an
        optimizer not at all; so the method that makes them is wrapped.
        """
        if stage != TrainerFn.FITTING:
            return
        trainer.__dict__.pop("save_checkpoint", None)  # from a fit that failed
        save = trainer.save_checkpoint

        def save_output(*args: Any, **kwargs: Any) -> None:
            with showing_output(trainer.optimizers):
                save(*args, **kwargs)

        trainer.save_checkpoint = save_output

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """The trainer's own method again: from here on the modes stay as they are."""
        trainer.__dict__.pop("save_checkpoint", None)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The query, where an optimizer has been through a fit before."""
        show_query(trainer.optimizers)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        show_output(trainer.optimizers)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            show_query(trainer.optimizers)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        show_output(trainer.optimizers)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        show_output(trainer.optimizers)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        show_output(trainer.optimizers)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        show_output(trainer.optimizers)
