"""PyTorch Lightning: evaluate and save the output of a rule, train from its query.

.. code-block:: python

    trainer = lightning.Trainer(callbacks=[lategrad.integrations.lightning.OutputCallback()])

A ``LightningModule`` that returns one of :mod:`lategrad.optim` from ``configure_optimizers`` needs nothing else.
"""

from typing import Any

from lategrad.integrations.modes import show_output, show_query, showing_output

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.trainer.states import TrainerFn
except ImportError as error:
    raise ImportError("lategrad.integrations.lightning needs lightning: pip install 'lategrad[integrations]' or "
                      "pip install lightning") from error  # fmt: skip

__all__ = ["OutputCallback"]


class OutputCallback(Callback):  # type: ignore[misc]
    """Evaluate and save the output; only training steps use the query.

    - Validation, test and prediction loops run on the output.
    - Every checkpoint, from ``ModelCheckpoint`` or ``trainer.save_checkpoint``, weights only or complete, has the
      output as its weights. The query is in its optimizer state, so that ``trainer.fit(ckpt_path=...)`` continues
      exactly.
    - After ``fit`` the module holds the output, also after an interruption.

    Other optimizers, and those whose output is the query, are not changed.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Make checkpoints in eval mode.

        Lightning calls callbacks only after the weights of a checkpoint have been collected, and not at all for
        checkpoints without optimizers; so the method that makes them is wrapped.
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
        trainer.__dict__.pop("save_checkpoint", None)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        show_query(trainer.optimizers)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        show_output(trainer.optimizers)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            show_query(trainer.optimizers)

    on_test_start = on_predict_start = on_train_end = on_validation_start

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        show_output(trainer.optimizers)
