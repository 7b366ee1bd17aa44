"""Linear models trained from late gradients, as scikit-learn estimators.

``fit`` is one call of :func:`lategrad.simulate` on :class:`~lategrad.problems.SoftmaxRegression` or
:class:`~lategrad.problems.LeastSquares` (or, with ``workers``, of :func:`lategrad.train`), and ``partial_fit`` is a
pass through :class:`~lategrad.optim.Delayed`: this module only adapts them to scikit-learn.
"""

from abc import ABCMeta, abstractmethod
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, TypeVar

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

_FEATURES: dict[str, Any] = {"dtype": [np.float64, np.float32], "accept_sparse": "csr"}

_SCALE = 10.0  # the default of `lr`, in units that make it independent of the scale of features and targets

# Rules whose lr is a distance to travel, not a step size, as the diameter of others is:
_DISTANCES = ("adaptive-revision", "async-adagrad", "steady", "steady-coordinate")


@dataclass(eq=False, repr=False)
class _LateEstimator(BaseEstimator, metaclass=ABCMeta):  # type: ignore[misc]
    """Base of the two estimators."""

    rule: str | AnyRule[Any] = "steady"
    _: KW_ONLY
    lr: float | None = None
    domain: str | ConvexSet | None = None
    delays: int | str | DelayModel = 0
    workers: int | None = None
    engine: str = "threads"
    steps: int = 2000
    batch: int = 32
    l2: float = 1e-4
    random_state: int | np.random.RandomState | None = None
    device: str = "cpu"

    _model: ClassVar[type[LinearModel]]
    _checks_of_y: ClassVar[dict[str, Any]] = {}

    def _targets(self, y: Array, classes: Any = None, *, first: bool) -> Array:
        """Check and encode the targets; the first call sets the classes."""
        return y

    @abstractmethod
    def _set_weights(self, weights: Array) -> None:
        """Set ``coef_`` and ``intercept_`` from a row of features and bias for each output."""

    def fit(self: Self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train from the start, for ``steps`` updates.

        Args:
            X: rows of features, dense or sparse; scale them, as for any gradient method.
            y: a target for each row.
            sample_weight: of the rows in the mean loss; a row of weight 2 counts as two rows.
        """
        X, y = validate_data(self, X, y, reset=True, **_FEATURES, **self._checks_of_y)
        targets = self._targets(y, first=True)
        if (weights := self._row_weights(X, y, sample_weight)) is not None:
            require("sample_weight times class_weight", weights, weights.sum() > 0, "positive for some row")
            weights = weights * (len(weights) / weights.sum())
        problem, seed = self._problem(X, targets, weights), self._seed()
        rule = self._rule(problem)
        if self.workers is None:
            trace = simulate(problem, rule, self.delays, self.steps, seed=seed, device=self.device, progress=False)
        else:
            require("delays", self.delays, self.delays == 0, "0 with workers: their delays are real")
            trace = train(problem, rule, steps=self.steps, workers=self.workers, engine=self.engine,
                          device=self.device, seed=seed, progress=False)  # fmt: skip
        self.trace_ = trace
        self.n_iter_ = int(trace.steps[-1])
        self._online: Delayed | None = None
        self._set_vector(trace.output, problem)
        return self

    def _partial_fit(self: Self, X: Any, y: Any, classes: Any, sample_weight: Any) -> Self:
        first = not hasattr(self, "coef_")
        if first and classes is None and isinstance(self, ClassifierMixin):
            raise ValueError("classes must be given at the first call of partial_fit")
        X, y = validate_data(self, X, y, reset=first, **_FEATURES, **self._checks_of_y)
        targets = self._targets(y, classes, first=first)
        problem = self._problem(X, targets, self._row_weights(X, y, sample_weight))
        online: Delayed | None = getattr(self, "_online", None)
        if online is None:
            start = problem.start() if first else torch.tensor(self._weights).flatten()
            inner = FromRule([torch.nn.Parameter(start)], self._rule(problem))
            require("steps", self.steps, isinstance(self.steps, int) and self.steps >= 1, "an integer >= 1")
            online = self._online = Delayed(inner, self.delays, delay_cap=self.steps, seed=self._seed())
        (x,) = online.param_groups[0]["params"]
        for rows in torch.arange(X.shape[0]).split(self.batch):
            x.grad = problem.gradient(x.detach(), rows).to(x.dtype)
            online.step()
        online.zero_grad()
        self.n_iter_ = online.updates
        with online.output():
            self._set_vector(x.detach(), problem)
        return self

    def _row_weights(self, X: Array, y: Array, sample_weight: Any) -> Tensor | None:
        """A weight for each row; None if all are 1."""
        if sample_weight is None:
            return None
        return torch.tensor(_check_sample_weight(sample_weight, X, dtype=X.dtype, ensure_non_negative=True))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _seed(self) -> int:
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    def _rule(self, problem: LinearModel) -> AnyRule[Any]:
        if not isinstance(self.rule, str):
            is_valid = self.lr is None and self.domain is None
            require("lr and domain", (self.lr, self.domain), is_valid, "None with a rule object, which has its own")
            return self.rule
        spec = read_rule(self.rule)
        number = spec.entry.parameter
        if self.lr is not None:
            require("lr", self.lr, number not in spec.values, f"None: the rule {self.rule!r} has its {number}")
        if number not in spec.values:
            spec = spec.with_option(number, self._default(problem, spec) if self.lr is None else self.lr)
        require("rule", self.rule, not spec.swept, "one rule, not a sweep")
        return spec.build(self.domain)

    def _default(self, problem: LinearModel, spec: RuleSpec) -> float:
        """The rule's number for ``lr=None``."""
        parameter = spec.entry.parameter
        require("lr", None, parameter in ("lr", "diameter", "strong_convexity"), f"a number for rule {self.rule!r}")
        if parameter == "strong_convexity":
            return problem.strong_convexity
        if parameter == "lr" and spec.name not in _DISTANCES:
            return _SCALE / problem.smoothness
        _, gradient = problem.value_and_gradient(problem.start())
        return _SCALE * float(gradient.norm()) / problem.smoothness  # the optimum is at least a tenth of it away

    def _problem(self, X: Array, y: Array, weights: Tensor | None) -> LinearModel:
        """The objective on these rows, with encoded targets."""
        x, targets = _as_tensor(X), torch.tensor(y)
        classes = len(self.classes_) if isinstance(self, ClassifierMixin) else None
        data = Dataset(type(self).__name__, x, targets, x, targets, classes)
        # a batch of all rows is the full gradient; a larger one would repeat random rows
        batch = min(self.batch, X.shape[0]) if isinstance(self.batch, int) else self.batch
        return self._model(data, batch=batch, sampling="epochs", l2=self.l2, dtype=x.dtype, weights=weights)

    def _set_vector(self, x: Tensor, problem: LinearModel) -> None:
        self._weights = x.reshape(problem.outputs, -1).numpy().copy()
        self._set_weights(self._weights)

    def _scores(self, X: Any) -> Array:
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, **_FEATURES)
        return np.asarray(X @ self.coef_.T + self.intercept_)


def _as_tensor(X: Any) -> Tensor:
    if not scipy.sparse.issparse(X):
        return torch.tensor(X)
    coordinates = X.tocoo()
    indices = torch.tensor(np.stack(coordinates.coords).astype(np.int64))
    return torch.sparse_coo_tensor(indices, torch.tensor(coordinates.data), X.shape, check_invariants=True)


@dataclass(eq=False, repr=False)
class LateClassifier(ClassifierMixin, _LateEstimator):  # type: ignore[misc]
    """Softmax regression trained from late gradients.

    >>> from sklearn.datasets import load_digits
    >>> X, y = load_digits(return_X_y=True)
    >>> model = LateClassifier(delays="uniform:0,20", domain="ball:8", random_state=0).fit(X[:1200] / 16, y[:1200])
    >>> model.score(X[1200:] / 16, y[1200:]) > 0.9
    True

    Args:
        rule: a name from ``lategrad list``, with options or not, ``"steady:c=20"``; or a rule.
        lr: the rule's main hyper-parameter. By default, with the smoothness L of the objective: 10 / L where it is a
            step size; 10 / L times the norm of the first gradient where it is a distance (``steady``, rules with a
            diameter); and the strong convexity itself.
        domain: the constraint set of the weights, as ``"ball:5"`` or a set; None for no constraint.
        delays: of the gradients: updates, a text such as ``"lognormal:4,0.8"``, or a delay model.
        workers: train with this number of asynchronous workers instead of simulating ``delays``.
        engine: of the workers, "threads" or "processes".
        steps: number of updates of ``fit``.
        batch: rows for each gradient.
        l2: factor of the penalty l2/2 times the squared norm of all weights, intercepts included.
        class_weight: a weight for the rows of each class, as a dict, or "balanced" for inverse frequencies.
        random_state: of the order of the rows and of the delays.
        device: "cpu" or "cuda", for ``fit``.

    Attributes:
        classes_: the labels.
        coef_: the model: a row for each class, or one row for the second of two.
        intercept_: a number for each row of ``coef_``.
        n_features_in_: as everywhere in scikit-learn.
        feature_names_in_: as everywhere in scikit-learn.
        n_iter_: updates made.
        trace_: the :class:`~lategrad.Trace` of ``fit``: ``trace_.loss``, ``trace_.delays``, ``trace_.plot(path)``.
    """

    _: KW_ONLY
    class_weight: dict[Any, float] | str | None = None
    _model = SoftmaxRegression

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> "LateClassifier":
        """One pass over these rows in order, ``batch`` at a time, continuing previous calls.

        With delays the last gradients are in flight when it returns, and arrive in the next call. ``lr`` is fixed at
        the first call. After ``fit`` it starts from the fitted weights, with a new state of the rule.

        Args:
            X: rows of features.
            y: their labels.
            classes: all labels of this and later calls; required at the first call.
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
        best = self._class_scores(X).argmax(1)  # raises before fit, when there are no classes
        return np.asarray(self.classes_[best])

    def predict_proba(self, X: Any) -> Array:
        """The probability of each class, in the order of ``classes_``."""
        return np.exp(self.predict_log_proba(X))

    def predict_log_proba(self, X: Any) -> Array:
        return np.asarray(log_softmax(self._class_scores(X), axis=1))

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
        by_row = None if weights is None else weights.numpy()
        by_class = compute_class_weight(self.class_weight, classes=self.classes_, y=y, sample_weight=by_row)
        factors = torch.tensor(by_class[np.searchsorted(self.classes_, y)])
        return factors if weights is None else factors * weights

    def _set_weights(self, weights: Array) -> None:
        if len(weights) == 2:
            weights = weights[1:] - weights[:1]
        self.coef_, self.intercept_ = weights[:, :-1].copy(), weights[:, -1].copy()


@dataclass(eq=False, repr=False)
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

    _model = LeastSquares
    _checks_of_y: ClassVar[dict[str, Any]] = {"y_numeric": True}

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> "LateRegressor":
        """One pass over these rows; see :meth:`LateClassifier.partial_fit`."""
        return self._partial_fit(X, y, None, sample_weight)

    def predict(self, X: Any) -> Array:
        return self._scores(X)

    def _set_weights(self, weights: Array) -> None:
        self.coef_, self.intercept_ = weights[0, :-1].copy(), float(weights[0, -1])
