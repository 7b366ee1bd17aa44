"""Texts, language models as problems, and what the simulator records of them."""

import dataclasses
import math

import pytest
import torch
from torch import nn

import lategrad as lg
from lategrad.problems import Dataset, LanguageProblem, ModuleProblem, Text, load, load_text
from lategrad.rules.blocks import Blocks
from reproduction.deep.models import GPT, cnn, mlp
from reproduction.text import load_shakespeare, shakespeare_file


@pytest.fixture
def files(tmp_path):
    first, second = tmp_path / "a.txt", tmp_path / "b.txt"
    first.write_text("abcdefghij" * 40, encoding="utf-8")
    second.write_text("0123456789é" * 20, encoding="utf-8")
    return first, second


def small_gpt(text, **options):
    return GPT(len(text.vocabulary), context=16, layers=1, width=8, heads=2, **options)


def small_problem(text, **options):
    return LanguageProblem(small_gpt(text), text, **({"context": 16, "batch": 6, "evaluate": 5} | options))


def test_the_end_of_every_file_is_held_out_and_nothing_is_lost(files):
    text = load_text(files, held_out=0.25)
    assert text.vocabulary == "0123456789abcdefghijé"
    assert text.decode(text.train) == "abcdefghij" * 30 + "0123456789é" * 15
    assert text.decode(text.held_out) == "abcdefghij" * 10 + "0123456789é" * 5
    assert text.name == "a.txt, b.txt"


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("nowhere.txt", FileNotFoundError, "there is no file 'nowhere.txt'"),
        ([], ValueError, "path must be at least one file"),
    ],
)
def test_a_missing_file_is_named(path, error, message):
    with pytest.raises(error, match=message):
        load_text(path)


def test_a_share_that_is_not_one_is_refused(files):
    with pytest.raises(ValueError, match=r"held_out must be a number in \(0, 1\), got 1.0"):
        load_text(files, held_out=1.0)
    with pytest.raises(ValueError, match="held_out must be"):
        Text.of_strings("song", ["la la"], held_out=0.0)


def test_a_file_that_is_not_text_is_named(tmp_path):
    (tmp_path / "image.txt").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(ValueError, match="image.txt is not text in UTF-8"):
        load_text(tmp_path / "image.txt")


def test_shakespeare_must_be_the_pinned_one(tmp_path, monkeypatch):
    monkeypatch.delenv("LATEGRAD_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="run `make data`"):
        load_shakespeare()
    path = shakespeare_file()
    path.parent.mkdir(parents=True)
    path.write_text("To be, or not to be")
    with pytest.raises(ValueError, match="does not have SHA-256"):
        load_shakespeare()


def test_samples_are_places_and_windows_are_cut_when_needed(files):
    problem = small_problem(load_text(files[0]))
    samples = problem.samples(seed=3, first=0, count=40)
    assert samples.shape == (40, 6)
    assert torch.equal(problem.samples(seed=3, first=17, count=5), samples[17:22])
    assert samples.max() <= len(problem.text.train) - 17
    inputs, targets = problem.splits.train.rows(samples[0])
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    for place, row in zip(samples[0].tolist(), inputs, strict=True):
        assert torch.equal(row, problem.text.train[place : place + 16])


def test_gradients_equal_those_of_plain_autograd(files):
    problem = small_problem(load_text(files))
    x = problem.start() + 0.1 * torch.randn(2, 3, problem.dim, generator=torch.Generator().manual_seed(0))
    samples = torch.stack([problem.samples(seed, 0, 1)[0] for seed in (0, 1)])
    batched = problem.gradient(x, samples)
    for stream in range(2):
        for run in range(3):
            module = problem.module_at(x[stream, run])
            inputs, targets = problem.splits.train.rows(samples[stream])
            nn.functional.cross_entropy(module(inputs).flatten(0, 1), targets.flatten()).backward()
            alone = torch.cat([p.grad.flatten() for p in module.parameters()])
            torch.testing.assert_close(batched[stream, run], alone, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("micro_batch", [1, 4, 6, 100])
def test_a_minibatch_in_pieces_has_the_same_gradient(files, micro_batch):
    text = load_text(files)
    whole, cut = small_problem(text), small_problem(text, micro_batch=micro_batch)
    x, sample = whole.start().expand(2, -1), whole.samples(0, 0, 1)[0]
    torch.testing.assert_close(cut.gradient(x, sample), whole.gradient(x, sample), rtol=1e-4, atol=1e-6)


def test_a_gpt_cannot_see_what_comes_next(files):
    model = small_gpt(load_text(files))
    nn.init.normal_(model.scores.weight, generator=torch.Generator().manual_seed(0))
    tokens = torch.randint(20, (1, 16), generator=torch.Generator().manual_seed(1))
    changed = tokens.clone()
    changed[0, 9] = 20
    same = (model(tokens) == model(changed)).all(-1)[0]
    assert same[:9].all()
    assert not same[9:].any()


def test_the_first_loss_is_the_logarithm_of_the_vocabulary(files):
    text = load_text(files)
    problem = small_problem(text)
    for loss in (problem.loss, problem.test_loss):
        assert loss(problem.start()).item() == pytest.approx(math.log(len(text.vocabulary)), rel=1e-6)


def test_losses_are_means_over_windows_that_do_not_overlap(files):
    text = load_text(files[0])
    problem = small_problem(text, evaluate=1000)
    x = problem.start() + 0.3 * torch.randn(problem.dim, generator=torch.Generator().manual_seed(0))
    module = problem.module_at(x)
    for tokens, loss in ((text.train, problem.loss), (text.held_out, problem.test_loss)):
        count = (len(tokens) - 1) // 16
        inputs, targets = tokens[: 16 * count].view(-1, 16), tokens[1 : 16 * count + 1].view(-1, 16)
        want = nn.functional.cross_entropy(module(inputs).flatten(0, 1), targets.flatten())
        assert loss(x).item() == pytest.approx(want.item(), rel=1e-5)


def test_the_simulator_records_the_held_out_loss_and_files_keep_it(files, tmp_path):
    problem = small_problem(load_text(files))
    trace = lg.simulate(problem, lg.SGD(0.1), [0, 3], 40, seed=[0, 1], record_every=20)
    assert trace.test_loss.shape == trace.loss.shape == (3, 2, 2)
    assert trace.test_loss[-1, 1, 0].item() == pytest.approx(problem.test_loss(trace.output[1, 0]).item(), rel=1e-5)
    assert (trace.test_loss[-1] < trace.test_loss[0]).all()
    again = lg.Trace.load(trace.save(tmp_path / "trace.safetensors"))
    assert torch.equal(again.test_loss, trace.test_loss)
    assert next(again.rows())["test_loss"] == trace.test_loss[0, 0, 0].item()
    single = lg.simulate(problem, lg.SGD(0.5), 3, 5)
    assert single.test_loss.shape == (6,)


@dataclasses.dataclass(frozen=True, eq=False)
class WantsBlocks(lg.SGD):
    """SGD that looks at what its host fills in."""

    blocks: Blocks | None = None

    def update(self, state, grad, delay):
        assert self.blocks is not None
        assert self.blocks.size == grad.shape[-1]
        return super().update(state, grad, delay)


def test_the_simulator_fills_in_the_blocks_of_a_module():
    problem = ModuleProblem(mlp(side=8, width=4), load("digits"))
    assert [block.kind for block in problem.blocks.parts] == ["matrix", "other", "matrix", "other"]
    trace = lg.simulate(problem, WantsBlocks(0.1), 2, 5)
    assert trace.config["rule"]["blocks"]["parts"][0]["shape"] == [4, 64]
    with pytest.raises(AssertionError):
        lg.simulate(lg.problems.Quadratic(), WantsBlocks(0.1), 2, 5)


def test_targets_may_have_any_shape():
    """Two classes for each row, as a module gives two rows of scores."""
    digits = load("digits")
    y_train, y_test = (torch.stack([y, 9 - y], dim=-1) for y in (digits.y_train, digits.y_test))
    data = Dataset("twice", digits.x_train, y_train, digits.x_test, y_test, 10)
    problem = ModuleProblem(nn.Sequential(nn.Linear(64, 20), nn.Unflatten(-1, (2, 10))), data)
    trace = lg.simulate(problem, lg.SGD(0.3), 0, 300)
    assert trace.accuracy[-1] > 0.8


def test_the_cnn_is_that_of_the_example():
    for side in (8, 28):
        assert cnn(side)(torch.zeros(2, side * side)).shape == (2, 10)
