"""The models that are trained through delay: an MLP, a small CNN and a character GPT."""

import math
import threading
from functools import lru_cache

import torch
from torch import Tensor, nn

from lategrad.problems import LanguageProblem, ModuleProblem
from reproduction.study import dataset
from reproduction.text import load_shakespeare

MODELS = {"mlp": "MLP 784-64-10, Fashion-MNIST", "cnn": "CNN, Fashion-MNIST", "gpt": "character GPT, Shakespeare",
          "gpt-34m": "GPT, Python sources", "gpt-34m-long": "GPT, Python sources",
          "gpt-63m": "GPT, Python sources", "gpt-2m": "character GPT, Shakespeare",
          "gpt-1m": "character GPT in a plain loop, Shakespeare"}  # fmt: skip
"""By their names on the command line: the model and its data."""
_DRAWING = threading.Lock()
_shakespeare = lru_cache(maxsize=1)(load_shakespeare)


def model_title(model: str, layers: int, width: int) -> str:
    return MODELS[model] + (f", {layers} layers of width {width}" if model.startswith("gpt") else "")


def build_problem(
    model: str, batch: int, *, evaluate: int, micro_batch: int = 2048, layers: int = 0, width: int = 0
) -> ModuleProblem:
    """A model with its data, always with the same initial parameters.

    Args:
        model: one of ``MODELS``.
        batch: rows or windows of a minibatch.
        evaluate: rows or windows that the training loss is the mean over.
        micro_batch: rows of a large minibatch that are computed at once.
        layers, width: of the GPT.
    """
    if model == "gpt":
        text = _shakespeare()
        gpt = GPT(len(text.vocabulary), layers=layers, width=width)
        return LanguageProblem(gpt, text, batch=batch, evaluate=evaluate, micro_batch=micro_batch)
    with _DRAWING, torch.random.fork_rng(devices=[]):  # layers draw from the one generator that all threads share
        torch.default_generator.manual_seed(0)
        module = {"mlp": mlp, "cnn": cnn}[model]()
    data = dataset("fashion-mnist", "standardise-globally")
    return ModuleProblem(module, data, batch=batch, evaluate=evaluate, micro_batch=micro_batch)


def mlp(side: int = 28, width: int = 64) -> nn.Module:
    """784-64-10 with ReLU; torch's own initial values."""
    return nn.Sequential(nn.Linear(side * side, width), nn.ReLU(), nn.Linear(width, 10))


def cnn(side: int = 28) -> nn.Module:
    """Two convolutions of 3x3 (8 channels, stride 3; 16 channels, stride 2) and a linear layer; torch's own initial
    values. That of ``examples/delayed_training.py``."""
    first = 3 if side > 8 else 1
    small = ((side - 3) // first + 1 - 3) // 2 + 1
    convolutions = nn.Conv2d(1, 8, 3, stride=first), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU()
    linear = nn.Linear(16 * small * small, 10)
    return nn.Sequential(nn.Unflatten(1, (1, side, side)), *convolutions, nn.Flatten(), linear)


class Block(nn.Module):
    """Attention and a hidden layer, each added to what came in."""

    def __init__(self, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.attention_writes = nn.Linear(width, width, bias=False)
        self.before_hidden = nn.LayerNorm(width)
        self.hidden = nn.Linear(width, 4 * width, bias=False)
        self.hidden_writes = nn.Linear(4 * width, width, bias=False)
        future = torch.full((context, context), -torch.inf).triu(1)
        self.register_buffer("future", future, persistent=False)
        self.future: Tensor

    def forward(self, h: Tensor) -> Tensor:
        h = h + self.attention(self.before_attention(h))
        out: Tensor = h + self.hidden_writes(nn.functional.gelu(self.hidden(self.before_hidden(h))))
        return out

    def attention(self, h: Tensor) -> Tensor:
        parts = (self.query, self.key, self.value)
        q, k, v = (part(h).unflatten(-1, (self.heads, -1)).transpose(-2, -3) for part in parts)
        out: Tensor = self.attention_writes(self.mix(q, k, v).transpose(-2, -3).flatten(-2))
        return out

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places = q.shape[-2]
        affinity = q @ k.mT / math.sqrt(q.shape[-1]) + self.future[:places, :places]
        return affinity.softmax(-1) @ v


class GPT(nn.Module):
    """A transformer that reads characters and scores the next one.

    Pre-norm: ``h + attention(norm(h))``, then ``h + mlp(norm(h))`` with a hidden layer four times as wide and GELU;
    a last norm before the scores. Positions are learned. No biases but those of the norms; the output layer is a
    matrix of its own, not tied to the embedding; no dropout. Initial values: normal, with standard deviation 0.02 for
    embeddings and ``1/sqrt(inputs)`` for matrices, those that write to the residual stream divided by
    ``sqrt(2 layers)``, and zero for the output layer, so that the first loss is the logarithm of the vocabulary.

    It is written for many parameter vectors at once: attention is matrix products, which ``torch.func.vmap`` turns into
    batched ones, and characters are looked up by a product with their indicators, whose gradient needs no scattered
    additions.

    Args:
        vocabulary: how many characters there are.
        context: the longest window.
        layers, width, heads: its size; the width is a multiple of the heads.
        seed: of the initial values.

    >>> model = GPT(vocabulary=84)
    >>> sum(p.numel() for p in model.parameters())
    113792
    >>> model(torch.zeros(3, 64, dtype=torch.int64)).shape
    torch.Size([3, 64, 84])
    """

    block = Block

    def __init__(
        self, vocabulary: int, context: int = 64, layers: int = 2, width: int = 64, heads: int = 4, seed: int = 0
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width must be a multiple of heads = {heads}, got {width}")
        generator = torch.Generator().manual_seed(seed)
        self.characters = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(self.block(width, heads, context) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, vocabulary, bias=False)
        with torch.no_grad():
            for name, p in self.named_parameters():
                if p.dim() == 2:
                    std = 0.02 if "characters" in name or "positions" in name else 1 / math.sqrt(p.shape[1])
                    p.normal_(std=std, generator=generator)
                    if "writes" in name:
                        p.div_(math.sqrt(2 * layers))
            self.scores.weight.zero_()

    def forward(self, tokens: Tensor) -> Tensor:
        vocabulary = len(self.characters.weight)
        indicators = tokens.unsqueeze(-1) == torch.arange(vocabulary, device=tokens.device)
        h = indicators.to(self.characters.weight.dtype) @ self.characters.weight
        h = self.blocks(h + self.positions.weight[: tokens.shape[-1]])
        scores: Tensor = self.scores(self.norm(h))
        return scores
