"""Hugging Face's Trainer: save the output of a rule, train from its query.

.. code-block:: python

    trainer = transformers.Trainer(..., optimizers=(optimizer, None), callbacks=[OutputCallback()])

The Trainer calls ``optimizer.train()`` before a training step and ``optimizer.eval()`` before an evaluation by itself;
what it lacks is the same before it saves.
"""

from __future__ import annotations

from typing import Any

from lategrad.integrations.modes import show_output

try:
    import accelerate as _accelerate  # noqa: F401  # the Trainer needs it, and says so only when it is made
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise ImportError(
        "lategrad.integrations.transformers needs transformers and accelerate: pip install 'lategrad[integrations]' "
        "or pip install transformers accelerate"
    ) from error

__all__ = ["OutputCallback"]


class OutputCallback(TrainerCallback):  # type: ignore[misc]
    """What the Trainer saves, and what it leaves in the model at the end, is the output.

    The query is in the optimizer's part of a checkpoint, so that ``trainer.train(resume_from_checkpoint=...)`` goes on
    exactly where it was. Give it after callbacks of your own that ask for a checkpoint (``control.should_save``). A
    ``model.save_pretrained`` of your own in the midst of training belongs into ``with optimizer.output():``.

    Optimizers that are not ours, and those whose output is the query, are left alone.
    """

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """The output, where a checkpoint follows, or the end, at which the best model may be loaded."""
        if control.should_save or control.should_training_stop:
            show_output([kwargs["optimizer"]])

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.on_step_end(args, state, control, **kwargs)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        show_output([kwargs["optimizer"]])
