"""Hugging Face's Trainer with a rule that averages: the output is evaluated, saved and left in the model.

A small GPT-2 learns the characters of a text (by default this repository's licence) with a delay of 8 updates.
 The last checkpoint is then compared with the output, and training is resumed from the first one.
Needs ``pip install 'lategrad[integrations]'``.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import lategrad as lg
import lategrad.optim
from lategrad.integrations.transformers import OutputCallback

LICENCE = Path(__file__).parents[1] / "LICENSE"
CONTEXT = 32


def windows(path):
    text = path.read_text()
    letters = sorted(set(text))
    codes = torch.tensor([letters.index(letter) for letter in text])
    rows = codes[: len(codes) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    data = [{"input_ids": row, "labels": row} for row in rows]
    return data[32:], data[:32], len(letters)


def fit(text, folder, steps, delay, resume=None):
    train, held_out, letters = windows(text)
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": CONTEXT, "vocab_size": letters}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    optimizer = lg.optim.Delayed(lg.optim.SteadyAdam(model.parameters(), lr=0.01, weight_decay=0.1), delay)
    arguments = TrainingArguments(
        output_dir=folder, max_steps=steps, per_device_train_batch_size=16, save_steps=steps // 2, max_grad_norm=1.0,
        lr_scheduler_type="cosine", warmup_steps=steps // 10, report_to="none", disable_tqdm=True, use_cpu=True,
        logging_strategy="no",
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=train, eval_dataset=held_out, optimizers=(optimizer, None),
                      callbacks=[OutputCallback()])  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return trainer, optimizer


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, default=LICENCE)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--delay", type=int, default=8)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        trainer, optimizer = fit(options.text, folder, options.steps, options.delay)
        loss = trainer.evaluate()["eval_loss"]
        print(f"held-out loss of the output: {loss:.3f}")
        saved = GPT2LMHeadModel.from_pretrained(f"{folder}/checkpoint-{options.steps}")
        pairs = zip(saved.parameters(), trainer.model.parameters(), strict=True)
        shipped = all(torch.equal(p, q) for p, q in pairs)
        print(f"the last checkpoint holds {'the output' if shipped else 'something else'}")
        first = f"{folder}/checkpoint-{options.steps // 2}"
        again, _ = fit(options.text, f"{folder}/again", options.steps, options.delay, resume=first)
        pairs = zip(trainer.model.parameters(), again.model.parameters(), strict=True)
        same = all(torch.equal(p, q) for p, q in pairs)
        print(f"resumed from the first: {'the same weights, bit for bit' if same else 'different weights'}")
        optimizer.train()  # to see what would have been evaluated without eval()
        with torch.no_grad():
            batch = {name: torch.stack([row[name] for row in trainer.eval_dataset]) for name in ("input_ids", "labels")}
            query = trainer.model.eval()(**batch).loss.item()
        print(f"held-out loss of the query:  {query:.3f}")
    return loss, query, shipped, same


if __name__ == "__main__":
    main()
