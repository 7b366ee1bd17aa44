"""Linear models trained from late gradients, as scikit-learn estimators.

``fit`` is one call of :func:`lategrad.simulate` on :class:`~lategrad.problems.SoftmaxRegression` or
:class:`~lategrad.problems.LeastSquares` (or, with ``workers``, of :func:`lategrad.train`), and ``partial_fit`` is
some passes through :class:`~lategrad.optim.Delayed`: this module only speaks scikit-learn's language.
"""

from __future__ import annotations

from abc import ABCMeta, abstractmethod
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import scipy.sparse
import torch
from scipy.special import log_softmax
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state, compute_class_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor

from lategrad.delays import DelayModel
from lategrad.optim import Delayed, FromRule
from lategrad.problems import Dataset, LeastSquares, SoftmaxRegression
from lategrad.problems.linear import LinearModel
from lategrad.registry import RuleSpec, read_rule
from lategrad.rules.rule import AnyRule
from lategrad.serve import train
from lategrad.sets import ConvexSet
from lategrad.simulator import simulate
from lategrad.support.validation import require

__all__ = ["LateClassifier", "LateRegressor"]

Array = npt.NDArray[Any]
Self = TypeVar("Self", bound="_LateEstimator")

_SCALE = 10.0
"""What ``lr=None`` stands for, in units that make it independent of the scale of features and targets."""

_DISTANCES = ("adaptive-revision", "async-adagrad", "steady", "steady-coordinate")
"""Rules whose lr is a distance to travel and not a step, as the diameter of others is."""


class _LateEstimator(BaseEstimator, metaclass=ABCMeta):  # type: ignore[misc]
    """What the two estimators share."""

    def __init__(
        self,
        rule: str | AnyRule[Any] = "steady",
        *,
        lr: float | None = None,
        domain: str | ConvexSet | None = None,
        delays: int | str | DelayModel = 0,
        workers: int | None = None,
        engine: str = "threads",
        steps: int = 2000,
        batch: int = 32,
        l2: float = 1e-4,
        random_state: int | np.random.RandomState | None = None,
        device: str = "cpu",
    ) -> None:
        self.rule = rule
        self.lr = lr
        self.domain = domain
        self.delays = delays
        self.workers = workers
        self.engine = engine
        self.steps = steps
        self.batch = batch
        self.l2 = l2
        self.random_state = random_state
        self.device = device

    # ---- What a kind of estimator says about itself

    @abstractmethod
    def _problem(self, X: Array, y: Array, weights: Tensor | None) -> LinearModel:
        """The objective on these rows, with targets as :meth:`_targets` gave them."""

    @abstractmethod
    def _targets(self, y: Array, classes: Any = None, *, first: bool) -> Array:
        """Checked targets; on the first call it also learns what there is to learn from them."""

    @abstractmethod
    def _set_weights(self, weights: Array) -> None:
        """Keep ``coef_`` and ``intercept_``, from a row of features and bias for each output."""

    # ---- scikit-learn's contract

    def fit(self: Self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train from the start, for ``steps`` updates.

        Args:
            X: rows of features, dense or sparse; scale them, as for any gradient method.
            y: a target for each row.
            sample_weight: of the rows in the mean loss; a weight of 2 is a row that is there twice.
        """
        X, y = self._validated(X, y, reset=True)
        targets = self._targets(y, first=True)
        weights = self._row_weights(X, y, sample_weight)
        if weights is not None:
            require("sample_weight times class_weight", weights, weights.sum() > 0, "positive for some row")
            weights = weights * (len(weights) / weights.sum())
        problem, seed = self._problem(X, targets, weights), self._seed()
        rule = self._rule(problem)
        if self.workers is None:
            trace = simulate(problem, rule, self.delays, self.steps, seed=seed, device=self.device, progress=False)
        else:
            require("delays", self.delays, self.delays == 0, "0 with workers: their delays are real")
            how: dict[str, Any] = {"workers": self.workers, "engine": self.engine, "device": self.device}
            trace = train(problem, rule, steps=self.steps, seed=seed, progress=False, **how)
        self.trace_ = trace
        self.n_iter_ = int(trace.steps[-1])
        self._online: Delayed | None = None
        self._set_vector(trace.output, problem)
        return self

    def _partial_fit(self: Self, X: Any, y: Any, classes: Any, sample_weight: Any) -> Self:
        first = not hasattr(self, "coef_")
        if first and classes is None and isinstance(self, ClassifierMixin):
            raise ValueError("classes must be given at the first call of partial_fit")
        X, y = self._validated(X, y, reset=first)
        targets = self._targets(y, classes, first=first)
        problem = self._problem(X, targets, self._row_weights(X, y, sample_weight))
        if getattr(self, "_online", None) is None:
            start = torch.zeros(problem.dim, dtype=problem.train.dtype) if first else self._vector()
            inner = FromRule([torch.nn.Parameter(start)], self._rule(problem))
            require("steps", self.steps, isinstance(self.steps, int) and self.steps >= 1, "an integer >= 1")
            self._online = Delayed(inner, self.delays, delay_cap=self.steps, seed=self._seed())
            self.n_iter_ = 0
        online = self._online
        assert online is not None
        (x,) = online.param_groups[0]["params"]
        for rows in torch.arange(X.shape[0]).split(self.batch):
            x.grad = problem.gradient(x.detach(), rows).to(x.dtype)
            online.step()
        online.zero_grad()
        self.n_iter_ = online.updates
        with online.output():
            self._set_vector(x.detach(), problem)
        return self

    # ---- Pieces

    def _validated(self, X: Any, y: Any, *, reset: bool) -> tuple[Array, Array]:
        kinds: dict[str, Any] = {"dtype": [np.float64, np.float32], "accept_sparse": "csr"}
        X, y = validate_data(self, X, y, reset=reset, **kinds, **self._checks_of_y)
        return X, y

    def _row_weights(self, X: Array, y: Array, sample_weight: Any) -> Tensor | None:
        """A weight for each row; None where all are 1."""
        if sample_weight is None:
            return None
        return torch.tensor(_check_sample_weight(sample_weight, X, dtype=X.dtype, ensure_non_negative=True))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    _checks_of_y: dict[str, Any] = {}  # noqa: RUF012

    def _seed(self) -> int:
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    def _rule(self, problem: LinearModel) -> AnyRule[Any]:
        if not isinstance(self.rule, str):
            given = self.lr is None and self.domain is None
            require("lr and domain", (self.lr, self.domain), given, "None with a rule that is not a name: it has them")
            return self.rule
        spec = read_rule(self.rule)
        number = spec.entry.parameter
        if self.lr is not None:
            require("lr", self.lr, number not in spec.given, f"None: the rule {self.rule!r} has its {number}")
        if number not in spec.given:
            spec = spec.with_option(number, self._number(problem, spec) if self.lr is None else self.lr)
        require("rule", self.rule, not spec.swept, "one rule, not a sweep")
        return spec.build(self.domain)

    def _number(self, problem: LinearModel, spec: RuleSpec) -> float:
        """What ``lr=None`` stands for."""
        parameter = spec.entry.parameter
        require("lr", None, parameter in ("lr", "diameter", "strong_convexity"), f"a number for rule {self.rule!r}")
        if parameter == "strong_convexity":
            return problem.strong_convexity
        if parameter == "lr" and spec.name not in _DISTANCES:
            return _SCALE / problem.smoothness
        _, gradient = problem.value_and_gradient(problem.start())
        return _SCALE * float(gradient.norm()) / problem.smoothness  # the optimum is at least a tenth of it away

    def _dataset(self, X: Array, y: Array, classes: int | None) -> Dataset:
        x, targets = _as_tensor(X), torch.tensor(y)
        return Dataset(type(self).__name__, x, targets, x, targets, classes)

    def _options(self, X: Array, weights: Tensor | None) -> dict[str, Any]:
        dtype = torch.float32 if X.dtype == np.float32 else torch.float64
        # A batch of all rows is the whole gradient, whatever their order; a larger one would be a random part more.
        batch = min(self.batch, X.shape[0]) if isinstance(self.batch, int) else self.batch
        return {"batch": batch, "sampling": "epochs", "l2": self.l2, "dtype": dtype, "weights": weights}

    def _set_vector(self, x: Tensor, problem: LinearModel) -> None:
        self._weights = x.reshape(problem.outputs, -1).numpy().copy()
        self._set_weights(self._weights)

    def _vector(self) -> Tensor:
        return torch.tensor(self._weights).flatten()

    def _scores(self, X: Any) -> Array:
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, dtype=[np.float64, np.float32], accept_sparse="csr")
        scores: Array = X @ self.coef_.T + self.intercept_
        return scores


def _as_tensor(X: Any) -> Tensor:
    if not scipy.sparse.issparse(X):
        return torch.tensor(X)
    coordinates = X.tocoo()
    indices = torch.tensor(np.stack(coordinates.coords).astype(np.int64))
    return torch.sparse_coo_tensor(indices, torch.tensor(coordinates.data), X.shape, check_invariants=True)


class LateClassifier(ClassifierMixin, _LateEstimator):  # type: ignore[misc]
    """Softmax regression trained from late gradients.

    >>> from sklearn.datasets import load_digits
    >>> X, y = load_digits(return_X_y=True)
    >>> model = LateClassifier(delays="uniform:0,20", domain="ball:8", random_state=0).fit(X[:1200] / 16, y[:1200])
    >>> model.score(X[1200:] / 16, y[1200:]) > 0.9
    True

    Args:
        rule: a name from ``lategrad list``, with options or not, ``"steady:c=20"``; or a rule.
        lr: the rule's one number. None stands for 10 / L where it is a step, with the smoothness L of the
            objective; for 10 times the length of the first gradient / L where it is a distance (``steady``, rules
            with a diameter); and for the strong convexity itself.
        domain: the set that the weights stay in, as ``"ball:5"`` or a set; None for no constraint.
        delays: of the gradients: updates, a text such as ``"lognormal:4,0.8"``, or a delay model.
        workers: train with so many asynchronous workers instead of simulating ``delays``.
        engine: how the workers run, "threads" or "processes".
        steps: updates that ``fit`` makes.
        batch: rows for each gradient.
        l2: factor of the penalty l2/2 times the squared norm of all weights, intercepts included.
        class_weight: a weight for the rows of each class, as a dict, or "balanced" for weights against their numbers.
        random_state: of the order of the rows and of the delays.
        device: "cpu" or "cuda", for ``fit``.

    Attributes:
        classes_: the labels.
        coef_: the model: a row for each class, or one row for the second of two.
        intercept_: a number for each row of ``coef_``.
        n_features_in_: as everywhere in scikit-learn.
        feature_names_in_: as everywhere in scikit-learn.
        n_iter_: updates made.
        trace_: after ``fit``, what happened: ``trace_.loss``, ``trace_.delays``, ``trace_.plot(path)``.
    """

    classes_: Array

    def __init__(
        self,
        rule: str | AnyRule[Any] = "steady",
        *,
        lr: float | None = None,
        domain: str | ConvexSet | None = None,
        delays: int | str | DelayModel = 0,
        workers: int | None = None,
        engine: str = "threads",
        steps: int = 2000,
        batch: int = 32,
        l2: float = 1e-4,
        class_weight: dict[Any, float] | str | None = None,
        random_state: int | np.random.RandomState | None = None,
        device: str = "cpu",
    ) -> None:
        super().__init__(rule, lr=lr, domain=domain, delays=delays, workers=workers, engine=engine, steps=steps,
                         batch=batch, l2=l2, random_state=random_state, device=device)  # fmt: skip
        self.class_weight = class_weight

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> LateClassifier:
        """One pass over these rows in their order, ``batch`` at a time, going on from the calls before.

        With delays the last gradients are on their way when it returns, and arrive in the next call. ``lr``
        is fixed at the first call. After ``fit`` it starts from the fitted weights, with a fresh rule.

        Args:
            X: rows of features.
            y: their labels.
            classes: all labels that will ever come; needed at the first call.
            sample_weight: a factor on the gradient of each row.
        """
        if self.class_weight == "balanced":
            raise ValueError("class_weight must be a dict or None for partial_fit, which sees too few rows to balance; "
                             "got 'balanced'")  # fmt: skip
        return self._partial_fit(X, y, classes, sample_weight)

    def decision_function(self, X: Any) -> Array:
        """A score for each class; with two classes, of the second against the first."""
        scores = self._scores(X)
        return scores.ravel() if scores.shape[1] == 1 else scores

    def predict(self, X: Any) -> Array:
        """The label with the largest score."""
        best = self._class_scores(X).argmax(1)
        labels: Array = self.classes_[best]
        return labels

    def predict_proba(self, X: Any) -> Array:
        """The probability of each class, in the order of ``classes_``."""
        return np.exp(self.predict_log_proba(X))

    def predict_log_proba(self, X: Any) -> Array:
        """Its logarithm."""
        logarithms: Array = log_softmax(self._class_scores(X), axis=1)
        return logarithms

    def _class_scores(self, X: Any) -> Array:
        scores = self._scores(X)
        return np.hstack([np.zeros_like(scores), scores]) if scores.shape[1] == 1 else scores

    def _targets(self, y: Array, classes: Any = None, *, first: bool) -> Array:
        check_classification_targets(y)
        if first:
            self.classes_ = np.unique(y if classes is None else classes)
        if len(self.classes_) < 2:
            raise ValueError(f"LateClassifier needs at least 2 classes, got 1 class: {self.classes_[0]!r}")
        if classes is not None and not np.array_equal(self.classes_, np.unique(classes)):
            raise ValueError(f"classes must be the same as in the first call, {self.classes_}, got {classes!r}")
        unknown = np.setdiff1d(y, self.classes_)
        require("y", unknown, not len(unknown), f"one of the classes {self.classes_}")
        return np.searchsorted(self.classes_, y)

    def _row_weights(self, X: Array, y: Array, sample_weight: Any) -> Tensor | None:
        weights = super()._row_weights(X, y, sample_weight)
        if self.class_weight is None:
            return weights
        given = None if weights is None else weights.numpy()
        of_classes = compute_class_weight(self.class_weight, classes=self.classes_, y=y, sample_weight=given)
        of_rows = torch.tensor(of_classes[np.searchsorted(self.classes_, y)])
        return of_rows if weights is None else of_rows * weights

    def _problem(self, X: Array, y: Array, weights: Tensor | None) -> LinearModel:
        return SoftmaxRegression(self._dataset(X, y, len(self.classes_)), **self._options(X, weights))

    def _set_weights(self, weights: Array) -> None:
        if len(weights) == 2:
            weights = weights[1:] - weights[:1]
        self.coef_, self.intercept_ = weights[:, :-1].copy(), weights[:, -1].copy()


class LateRegressor(RegressorMixin, _LateEstimator):  # type: ignore[misc]
    """Least squares (ridge regression, with ``l2``) trained from late gradients.

    >>> from sklearn.datasets import load_diabetes
    >>> from sklearn.preprocessing import scale
    >>> X, y = load_diabetes(return_X_y=True)
    >>> model = LateRegressor(delays=10, random_state=0).fit(scale(X), y)
    >>> model.score(scale(X), y) > 0.5  # 0.52 is the best linear model's
    True

    Arguments and attributes are those of :class:`LateClassifier`, without classes.
    """

    _checks_of_y = {"y_numeric": True}  # noqa: RUF012

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> LateRegressor:
        """One pass over these rows in their order, ``batch`` at a time, going on from the calls before.

        With delays the last gradients are on their way when it returns, and arrive in the next call. ``lr``
        is fixed at the first call. After ``fit`` it starts from the fitted weights, with a fresh rule.
        ``sample_weight`` is a factor on the gradient of each row.
        """
        return self._partial_fit(X, y, None, sample_weight)

    def predict(self, X: Any) -> Array:
        """A number for each row."""
        return self._scores(X)

    def _targets(self, y: Array, classes: Any = None, *, first: bool) -> Array:
        return y

    def _problem(self, X: Array, y: Array, weights: Tensor | None) -> LinearModel:
        return LeastSquares(self._dataset(X, y, None), **self._options(X, weights))

    def _set_weights(self, weights: Array) -> None:
        self.coef_, self.intercept_ = weights[0, :-1].copy(), float(weights[0, -1])
