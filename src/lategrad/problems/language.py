"""Language models: a module that predicts the next character of a text, as a function of one flat vector."""

from __future__ import annotations

import dataclasses
import hashlib

import torch
from torch import Tensor, nn

from lategrad.problems.data import Dataset
from lategrad.problems.minibatches import Minibatches
from lategrad.problems.module import ModuleProblem
from lategrad.problems.text import Text
from lategrad.support.validation import require


class Windows:
    """Windows of a text by the places where they begin; targets are the next characters."""

    on_device = True

    def __init__(self, tokens: Tensor, context: int) -> None:
        self.tokens, self.context = tokens, context
        self._window = torch.arange(context + 1, device=tokens.device)

    def __len__(self) -> int:
        return len(self.tokens) - self.context

    def rows(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """By indexing."""
        windows = self.tokens[numbers.unsqueeze(-1) + self._window]
        return windows[..., :-1], windows[..., 1:]

    def fingerprint(self) -> bytes:
        """Of the text."""
        return hashlib.sha256(self.tokens.cpu().numpy().tobytes()).hexdigest().encode()

    def to(self, device: torch.device | str) -> Windows:
        """A copy on the device, unless it is there."""
        return Windows(self.tokens.to(device), self.context)


class LanguageProblem(ModuleProblem):
    """Predict every next character in windows of a text; cross-entropy per character, in nats.

    A sample holds the places at which the windows of a minibatch begin, so that nothing but the text itself is kept.
    Losses and the accuracy are means over fixed windows that do not overlap, evenly spaced over the whole part: the
    training loss over ``evaluate`` windows of the training part, test loss and accuracy over as many of the held-out
    part (or all there are). All characters of a window count, those with little context, too.

    Args:
        module: from characters ``(rows, context)`` to scores ``(rows, context, vocabulary)``, the scores at a place
            made from the characters up to it.
        text: see :func:`lategrad.problems.load_text`.
        context: characters in a window.
        batch: windows in a minibatch.
        evaluate: windows that losses are taken over.
        sampling: "iid", any window with equal chances; or "epochs", every window once in an order drawn anew.
        micro_batch: see :class:`ModuleProblem`.

    >>> import tempfile, pathlib
    >>> from lategrad.problems import load_text
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder) / "song.txt"
    ...     _ = file.write_text("tra la la " * 100)
    ...     text = load_text(file)
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
        self,
        module: nn.Module,
        text: Text,
        *,
        context: int = 64,
        batch: int = 16,
        evaluate: int = 1024,
        sampling: str = "iid",
        micro_batch: int | None = None,
    ) -> None:
        for name, value in (("context", context), ("evaluate", evaluate)):
            require(name, value, isinstance(value, int) and value >= 1, "an integer >= 1")
        for part in ("train", "held_out"):
            length = len(getattr(text, part))
            require(f"the number of characters in {part} of {text.name!r}", length, length > context,
                    f"more than context = {context}")  # fmt: skip
        x_train, y_train = _spaced_windows(text.train, context, evaluate)
        x_test, y_test = _spaced_windows(text.held_out, context, evaluate)
        data = Dataset(text.name, x_train, y_train, x_test, y_test, len(text.vocabulary))
        super().__init__(module, data, batch=batch, sampling=sampling, micro_batch=micro_batch)
        self.text = text
        self.context = context
        self.parts = dataclasses.replace(self.parts, train=Windows(text.train, context), labels=None)
        self.minibatches = Minibatches(len(text.train) - context, batch, sampling)
        self.evaluation_rows = max(1, self.evaluation_rows // context)

    def samples_of_shard(self, seed: int, first: int, count: int, shard: int, shards: int) -> Tensor:
        """The windows that begin in one of so many stretches of the text: neighbours share most of their text."""
        begin, end = (number * self.minibatches.rows // shards for number in (shard, shard + 1))
        return self.minibatches.draw_from(range(begin, end), seed, first, count)

    def fingerprint(self) -> str:
        """That of the module and of the whole text, not of the evaluated windows alone."""
        contents = hashlib.sha256(self.text.train.numpy().tobytes() + self.text.held_out.numpy().tobytes())
        return f"{super().fingerprint()} {contents.hexdigest()}"

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, context={self.context})"


def _spaced_windows(tokens: Tensor, context: int, count: int) -> tuple[Tensor, Tensor]:
    """At most ``count`` windows and their next characters: none overlap, and they are spread over the whole."""
    places = (len(tokens) - 1) // context
    chosen = torch.linspace(0, places - 1, min(count, places), dtype=torch.float64).round().long()
    windows = tokens[chosen.unsqueeze(-1) * context + torch.arange(context + 1)]
    return windows[:, :-1], windows[:, 1:]
