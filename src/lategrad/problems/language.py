"""Language models: a module that predicts the next character of a text, as a function of one flat vector."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from lategrad.problems.data import Dataset
from lategrad.problems.minibatches import Minibatches
from lategrad.problems.module import ModuleProblem
from lategrad.problems.text import Text
from lategrad.support.validation import require


class LanguageProblem(ModuleProblem):
    """Predict every next character in windows of a text; cross-entropy per character, in nats.

    A sample is the places at which the windows of a minibatch begin, so that nothing but the text itself is kept.
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
        self.tokens, self.window = text.train, torch.arange(context + 1)
        self.minibatches = Minibatches(len(text.train) - context, batch, sampling)
        self.evaluation_rows = max(1, self.evaluation_rows // context)

    def fingerprint(self) -> str:
        """That of the module and of the whole text, not of the evaluated windows alone."""
        contents = hashlib.sha256(self.text.train.numpy().tobytes() + self.text.held_out.numpy().tobytes())
        return f"{super().fingerprint()} {contents.hexdigest()}"

    def labels(self, samples: Tensor) -> Tensor | None:
        """None: a window has no class."""
        return None

    def _rows(self, sample: Tensor) -> tuple[Tensor, Tensor]:
        windows = self.tokens[sample.unsqueeze(-1) + self.window]
        return windows[..., :-1], windows[..., 1:]

    def to(self, device: torch.device | str) -> LanguageProblem:
        """A copy on the device."""
        moved = super().to(device)
        assert isinstance(moved, LanguageProblem)
        moved.tokens, moved.window = self.tokens.to(device), self.window.to(device)
        return moved

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, context={len(self.window) - 1})"


def _spaced_windows(tokens: Tensor, context: int, count: int) -> tuple[Tensor, Tensor]:
    """At most ``count`` windows and their next characters: none overlap, and they are spread over the whole."""
    places = (len(tokens) - 1) // context
    chosen = torch.linspace(0, places - 1, min(count, places), dtype=torch.float64).round().long()
    windows = tokens[chosen.unsqueeze(-1) * context + torch.arange(context + 1)]
    return windows[:, :-1], windows[:, 1:]
