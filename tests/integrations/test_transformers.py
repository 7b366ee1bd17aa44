"""The Hugging Face callback against the Trainer itself, on a GPT-2 of a few thousand weights."""

import pytest
import torch
from torch import nn

import lategrad as lg
import lategrad.optim
from helpers.examples import example

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install 'lategrad[integrations]'"
)
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install 'lategrad[integrations]'")
from safetensors.torch import load_file  # noqa: E402

from lategrad.integrations.transformers import OutputCallback  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]

TOKENS = torch.randint(11, (24, 8), generator=torch.Generator().manual_seed(0))
LABELS = TOKENS.index_fill(1, torch.tensor([0]), -100)  # the first token is not predicted; the Trainer would count it
DATA = [{"input_ids": row, "labels": labels} for row, labels in zip(TOKENS, LABELS, strict=True)]


def make_model():
    torch.manual_seed(0)
    sizes = {"vocab_size": 11, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    without_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(**sizes, **without_dropout, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config)


class Trainer(transformers.Trainer):
    """Keeps the weights that every evaluation saw, and the batches of training."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen, self.batches = [], []

    def training_step(self, model, inputs, *args, **kwargs):
        self.batches.append(inputs)
        return super().training_step(model, inputs, *args, **kwargs)

    def prediction_step(self, model, *args, **kwargs):
        self.seen.append((self.state.global_step, weights(model)))
        return super().prediction_step(model, *args, **kwargs)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def saved_weights(folder):
    model = make_model()
    model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    return weights(model)


def trainer(folder, build, *, steps=8, **options):
    model = make_model()
    arguments = {"output_dir": str(folder), "max_steps": steps, "per_device_train_batch_size": 4, "report_to": "none",
                 "save_strategy": "steps", "save_steps": 2, "disable_tqdm": True, "use_cpu": True,
                 "lr_scheduler_type": "linear", "warmup_steps": 2, "max_grad_norm": 0.5, "seed": 3}  # fmt: skip
    arguments = transformers.TrainingArguments(**(arguments | options))
    optimizers = (build(model.parameters()), None)
    return Trainer(model, arguments, train_dataset=DATA, eval_dataset=DATA[:4], optimizers=optimizers,
                   callbacks=[OutputCallback()])  # fmt: skip


def steady(params):
    return lg.optim.FromRule(params, lg.Steady(lr=1.0, c=1.0))


BUILD = {
    "steady": steady,
    "steady-adam": lambda params: lg.optim.FromRule(params, lg.SteadyAdam(lr=0.05)),
    "delayed": lambda params: lg.optim.Delayed(steady(params), 2),
    "output-is-query": lambda params: lg.optim.AnytimeSGD(params, lr=0.5),
    "torch": lambda params: torch.optim.AdamW(params, lr=0.01),
}


def by_hand(build, batches, accumulation):
    """The queries and outputs of a plain loop on the same batches."""
    model = make_model()
    optimizer = build(model.parameters())
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 2, len(batches) // accumulation)
    outputs, queries = [weights(model)], [weights(model)]
    for first in range(0, len(batches), accumulation):
        optimizer.zero_grad()
        for batch in batches[first : first + accumulation]:
            (model(**batch).loss / accumulation).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        queries.append(weights(model))
        with optimizer.output():
            outputs.append(weights(model))
    return queries, outputs


@pytest.mark.parametrize(("name", "accumulation"), [("steady", 1), ("steady", 2), ("steady-adam", 1), ("delayed", 2)])
def test_evaluation_and_checkpoints_are_the_output_of_a_plain_loop(name, accumulation, tmp_path):
    """Clipping, a schedule with warm-up and accumulation included; 6 micro-batches make an epoch."""
    options = {"eval_strategy": "steps", "eval_steps": 3, "gradient_accumulation_steps": accumulation}
    training = trainer(tmp_path, BUILD[name], steps=6, **options)
    training.train()
    assert len(training.batches) == 6 * accumulation
    queries, outputs = by_hand(BUILD[name], training.batches, accumulation)
    assert not torch.allclose(queries[-1], outputs[-1])
    assert {step for step, _ in training.seen} == {3, 6}
    for step, seen in training.seen:
        torch.testing.assert_close(seen, outputs[step], rtol=1e-4, atol=1e-5)
    for step in (2, 4, 6):
        torch.testing.assert_close(saved_weights(tmp_path / f"checkpoint-{step}"), outputs[step], rtol=1e-4, atol=1e-5)
    assert torch.equal(weights(training.model), saved_weights(tmp_path / "checkpoint-6"))  # what is left at the end
    training.save_model(str(tmp_path / "final"))
    assert torch.equal(saved_weights(tmp_path / "final"), weights(training.model))


@pytest.mark.parametrize(("name", "evaluated"), [*((name, "no") for name in BUILD), ("steady", "steps")])
def test_resuming_is_exact(name, evaluated, tmp_path):
    options = {"eval_strategy": evaluated, "eval_steps": 2}
    whole = trainer(tmp_path / "whole", BUILD[name], **options)
    whole.train()
    rest = trainer(tmp_path / "rest", BUILD[name], **options)
    rest.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    assert torch.equal(weights(whole.model), weights(rest.model))
    assert not torch.equal(weights(whole.model), saved_weights(tmp_path / "whole" / "checkpoint-4"))


def test_the_best_model_at_the_end_stays(tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    options |= {"metric_for_best_model": "loss", "greater_is_better": True}  # the worst: the first checkpoint
    training = trainer(tmp_path, steady, **options)
    training.train()
    best = training.state.best_model_checkpoint
    assert not best.endswith("checkpoint-8")
    assert torch.equal(weights(training.model), saved_weights(tmp_path / best.rsplit("/", 1)[-1]))


def test_the_trainer_builds_the_optimizer_with_its_weight_decay(tmp_path):
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=3, report_to="none", use_cpu=True, weight_decay=0.1, disable_tqdm=True
    )
    training = transformers.Trainer(
        make_model(), arguments, train_dataset=DATA, callbacks=[OutputCallback()],
        optimizer_cls_and_kwargs=(lg.optim.FromRule, {"rule": lg.SteadyAdam(lr=0.05)}),
    )  # fmt: skip
    training.train()
    assert sorted(group["weight_decay"] for group in training.optimizer.param_groups) == [0.0, 0.1]


def test_the_example(capsys):
    loss, query, shipped, same = example("transformers_training").main(["--steps", "40", "--delay", "2"])
    assert loss < 4.2  # log 68 letters
    assert query < 4.2
    assert shipped
    assert same
    assert "bit for bit" in capsys.readouterr().out
