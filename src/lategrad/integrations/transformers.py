"""Hugging Face's Trainer: save the output of a rule, train from its query.

.. code-block:: python

    trainer = transformers.Trainer(..., optimizers=(optimizer, None), callbacks=[OutputCallback()])

The Trainer calls ``optimizer.train()`` before a training step and ``optimizer.eval()`` before an evaluation by itself,
but not before it saves.
"""

from typing import Any

from lategrad.integrations.modes import show_output

try:
    import accelerate as _accelerate  # noqa: F401  # the Trainer needs it, and says so only when it is made
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise ImportError("lategrad.integrations.transformers needs transformers and accelerate: pip install "
                      "'lategrad[integrations]' or pip install transformers accelerate") from error  # fmt: skip

__all__ = ["OutputCallback"]


class OutputCallback(TrainerCallback):  # type: ignore[misc]
    """Save the output, and leave it in the model at the end.

    The query is in the optimizer part of a checkpoint, so that ``trainer.train(resume_from_checkpoint=...)`` continues
    exactly. Put this callback after your own callbacks that request a checkpoint (``control.should_save``). Your own
    calls of ``model.save_pretrained`` during training belong in ``with optimizer.output():``.

    Other optimizers, and those whose output is the query, are not changed.
    """

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Show the output before a checkpoint, or before the end, where the best model may be loaded."""
        if control.should_save or control.should_training_stop:
            show_output([kwargs["optimizer"]])

    on_epoch_end = on_step_end

    def on_train_end(self, *_: Any, **kwargs: Any) -> None:
        show_output([kwargs["optimizer"]])
