"""Language models: text files as characters, and a module that predicts the next one."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lategrad.problems.data import Dataset
from lategrad.problems.minibatches import Minibatches
from lategrad.problems.module import ModuleProblem
from lategrad.support.runs import checksum
from lategrad.support.validation import Range, require, require_count

PathLike = str | os.PathLike[str]


class Text(NamedTuple):
    """Characters as integers: a part to train on, and a part that is held out."""

    name: str
    train: Tensor  #: int64 ``(n,)``: indices into the vocabulary.
    held_out: Tensor
    vocabulary: str  #: All characters of the text, sorted.

    @staticmethod
    def of_strings(name: str, strings: Sequence[str], held_out: float = 0.1) -> "Text":
        """A text of several strings; the last tenth (by default) of *every* one is held out."""
        Range(0, 1, "()")("held_out", held_out)
        vocabulary = "".join(sorted(set().union(*strings)))
        codes = np.frombuffer(vocabulary.encode("utf-32-le"), np.uint32)
        train, rest = [], []
        for string in strings:
            characters = np.frombuffer(string.encode("utf-32-le"), np.uint32)
            tokens = torch.from_numpy(np.searchsorted(codes, characters))
            cut = len(string) - round(held_out * len(string))
            train.append(tokens[:cut])
            rest.append(tokens[cut:])
        return Text(name, torch.cat(train), torch.cat(rest), vocabulary)

    def decode(self, tokens: Tensor) -> str:
        """The characters of token indices."""
        return "".join(self.vocabulary[token] for token in tokens.flatten().tolist())


def load_text(path: PathLike | Sequence[PathLike], held_out: float = 0.1) -> Text:
    """Load text files, character by character.

    Args:
        path: a file in UTF-8, or several.
        held_out: the share of *every* file, at its end, that is held out, so that all files are in both parts.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder) / "song.txt"
    ...     _ = file.write_text("tra la la " * 10)
    ...     text = load_text(file)
    >>> text.vocabulary, len(text.train), len(text.held_out), text.decode(text.train[:9])
    (' alrt', 90, 10, 'tra la la')
    """
    paths = [Path(one).expanduser() for one in ([path] if isinstance(path, str | os.PathLike) else path)]
    require("path", path, len(paths) > 0, "at least one file")
    return Text.of_strings(", ".join(one.name for one in paths), [_read(one) for one in paths], held_out)


def _read(path: Path) -> str:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r}: check the path")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8: save it as such") from error
    require(f"the number of characters in {path}", len(text), len(text) > 1, "at least 2")
    return text


class Windows:
    """Windows of a text by the places where they begin; targets are the next characters."""

    on_device = True

    def __init__(self, tokens: Tensor, context: int) -> None:
        self.tokens, self.context = tokens, context
        self._offsets = torch.arange(context + 1, device=tokens.device)

    def __len__(self) -> int:
        return len(self.tokens) - self.context

    def rows(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        windows = self.tokens[numbers.unsqueeze(-1) + self._offsets]
        return windows[..., :-1], windows[..., 1:]

    def fingerprint(self) -> bytes:
        return checksum(self.tokens).encode()

    def to(self, device: torch.device | str) -> "Windows":
        return Windows(self.tokens.to(device), self.context)


class LanguageProblem(ModuleProblem):
    """Predict every next character in windows of a text; cross-entropy per character, in nats.

    A sample holds the places at which the windows of a minibatch begin, so that only the text itself is stored. Losses
    and the accuracy are means over fixed windows that do not overlap, evenly spaced over the whole part: the training
    loss over ``evaluate`` windows of the training part, test loss and accuracy over as many of the held-out part (or
    all there are). All characters of a window count, including those with little context.

    Args:
        module: from characters ``(rows, context)`` to scores ``(rows, context, vocabulary)``, the scores at a place
            made from the characters up to it.
        text: see :func:`lategrad.problems.load_text`.
        context: characters in a window.
        batch: windows in a minibatch.
        evaluate: windows that losses are taken over.
        sampling: "iid", any window with equal chances; or "epochs", every window once in an order drawn anew.
        micro_batch: see :class:`ModuleProblem`.

    >>> text = Text.of_strings("song", ["tra la la " * 100])
    >>> _ = torch.manual_seed(0)
    >>> table = nn.Embedding(5, 5)  # scores of the next character, given one
    >>> problem = LanguageProblem(table, text, context=8, batch=4)
    >>> x = problem.start()
    >>> for sample in problem.samples(seed=0, first=0, count=200):
    ...     x = x - 3 * problem.gradient(x, sample)
    >>> bool(problem.test_loss(x) < 0.5 < 1.5 < problem.test_loss(problem.start()))
    True
    """

    name = "language"

    def __init__(
        self, module: nn.Module, text: Text, *, context: int = 64, batch: int = 16, evaluate: int = 1024,
        sampling: str = "iid", micro_batch: int | None = None,
    ) -> None:  # fmt: skip
        for name, value in (("context", context), ("evaluate", evaluate)):
            require_count(name, value, low=1)
        for part in ("train", "held_out"):
            length = len(getattr(text, part))
            require(f"the number of characters in {part} of {text.name!r}", length, length > context,
                    f"more than context = {context}")  # fmt: skip
        train, test = (spaced_windows(tokens, context, evaluate) for tokens in (text.train, text.held_out))
        data = Dataset(text.name, *train, *test, len(text.vocabulary))
        super().__init__(module, data, batch=batch, sampling=sampling, micro_batch=micro_batch)
        self.text, self.context = text, context
        self.splits = dataclasses.replace(self.splits, train=Windows(text.train, context), labels=None)
        self.minibatches = Minibatches(len(text.train) - context, batch, sampling)
        self.evaluation_rows = max(1, self.evaluation_rows // context)

    def samples_of_shard(self, seed: int, first: int, count: int, shard: int, shards: int) -> Tensor:
        """The windows that begin in one stretch of the text out of ``shards``: neighbours share most of their text."""
        begin, end = (number * self.minibatches.rows // shards for number in (shard, shard + 1))
        return self._with_seeds(self.minibatches.draw_from(range(begin, end), seed, first, count), seed, first)

    def fingerprint(self) -> str:
        """That of the module and of the whole text, not of the evaluated windows alone."""
        return f"{super().fingerprint()} {checksum((self.text.train, self.text.held_out))}"

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, context={self.context})"


def spaced_windows(tokens: Tensor, context: int, count: int) -> tuple[Tensor, Tensor]:
    """At most ``count`` windows and their next characters: none overlap, and they are spread over the whole."""
    places = (len(tokens) - 1) // context
    chosen = torch.linspace(0, places - 1, min(count, places), dtype=torch.float64).round().long()
    return Windows(tokens, context).rows(chosen * context)
