"""The estimators against scikit-learn's own checks, and against what they are made of."""

import pickle
import re
from pathlib import Path

import numpy as np
import pandas
import pytest
import scipy.sparse
import torch
from sklearn.base import clone
from sklearn.datasets import load_diabetes, load_digits
from sklearn.linear_model import LogisticRegression, Ridge, SGDClassifier
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler, scale
from sklearn.utils import compute_sample_weight
from sklearn.utils.estimator_checks import parametrize_with_checks

import lategrad as lg
from helpers.examples import example
from helpers.memory import largest_allocation
from lategrad.sklearn import LateClassifier, LateRegressor

ESTIMATORS = [LateClassifier, LateRegressor]


@parametrize_with_checks([build(steps=300) for build in ESTIMATORS])
def test_scikit_learns_own_checks(estimator, check):
    check(estimator)


def digits():
    X, y = load_digits(return_X_y=True)
    return train_test_split(X / 16, y, random_state=0, stratify=y)


def diabetes():
    X, y = load_diabetes(return_X_y=True)
    return scale(X), y


# ---- What they compute


def test_fit_is_a_simulation():
    X, _, y, _ = digits()
    model = LateClassifier("anytime-sgd", lr=0.5, domain="ball:5", delays="uniform:0,9", steps=60, random_state=3)
    model.fit(X, y)
    data = lg.problems.Dataset("digits", *map(torch.tensor, (X, y, X, y)), classes=10)
    problem = lg.problems.SoftmaxRegression(data, batch=32, sampling="epochs", l2=1e-4, dtype=torch.float64)
    seed = np.random.RandomState(3).randint(2**31 - 1)
    rule = lg.Anytime(lg.OGD(0.5, lg.Ball(5.0)))
    trace = lg.simulate(problem, rule, "uniform:0,9", 60, seed=int(seed))
    assert np.array_equal(model.coef_, trace.output.view(10, -1)[:, :-1])
    assert np.array_equal(model.intercept_, trace.output.view(10, -1)[:, -1])
    assert torch.equal(model.trace_.loss, trace.loss)
    assert model.n_iter_ == 60
    by_objects = LateClassifier(rule, delays=lg.delays.Uniform(0, 9), steps=60, random_state=3).fit(X, y)
    assert np.array_equal(by_objects.coef_, model.coef_)


def test_digits_out_of_the_box_is_on_a_par_with_scikit_learn():
    X, X_test, y, y_test = digits()
    models = LogisticRegression(max_iter=1000), SGDClassifier(random_state=0), LateClassifier(random_state=0)
    of = {type(model).__name__: model.fit(X, y).score(X_test, y_test) for model in models}
    assert of["LateClassifier"] > of["LogisticRegression"] - 0.02
    assert of["LateClassifier"] > of["SGDClassifier"] - 0.01
    assert LateClassifier(delays=20, random_state=0).fit(X, y).score(X_test, y_test) > 0.93


@pytest.mark.parametrize("delays", [0, 20])
def test_diabetes_out_of_the_box_is_ridge_regression(delays):
    X, y = diabetes()
    want = Ridge().fit(X, y).score(X, y)
    assert LateRegressor(delays=delays, random_state=0).fit(X, y).score(X, y) == pytest.approx(want, abs=0.03)


@pytest.mark.parametrize("engine", ["threads", "processes"])
def test_real_workers(engine):
    X, X_test, y, y_test = digits()
    model = LateClassifier(workers=2, engine=engine, steps=600, random_state=0).fit(X, y)
    assert model.score(X_test, y_test) > 0.9
    assert model.n_iter_ == 600
    assert model.trace_.worker is not None


# ---- partial_fit


def test_partial_fit_continues_with_the_same_state():
    """Two calls are one call with all the rows, late gradients across the border included."""
    X, _, y, _ = digits()
    model = LateClassifier("anytime-sgd", lr=0.5, delays=3, random_state=0)
    once = clone(model).partial_fit(X[:640], y[:640], classes=range(10))
    twice = clone(model).partial_fit(X[:320], y[:320], classes=range(10))
    copied = pickle.loads(pickle.dumps(twice))
    for part in (twice, copied):
        part.partial_fit(X[320:640], y[320:640])
        assert np.array_equal(part.coef_, once.coef_)
        assert part.n_iter_ == 640 // 32 - 3  # three gradients are on their way


def test_partial_fit_is_the_rule_on_rows_in_order():
    X, y = diabetes()
    model = LateRegressor("sgd", lr=0.1, batch=50, l2=0.0).partial_fit(X[:200], y[:200])
    w = np.zeros(11)
    for rows in np.split(np.arange(200), 4):
        z = np.hstack([X[rows], np.ones((50, 1))])
        w -= 0.1 * z.T @ (z @ w - y[rows]) / 50
    np.testing.assert_allclose([*model.coef_, model.intercept_], w)


def test_partial_fit_learns_and_continues_after_fit():
    X, X_test, y, y_test = digits()
    model = LateClassifier(delays="geometric:5", random_state=0)
    for _ in range(20):
        model.partial_fit(X, y, classes=np.unique(y))
    assert model.score(X_test, y_test) > 0.9
    fitted = LateClassifier("anytime-sgd", lr=1e-9, random_state=0, steps=100)
    before = fitted.set_params(lr=1.0).fit(X, y).coef_
    after = fitted.set_params(lr=1e-9).partial_fit(X, y).coef_
    np.testing.assert_allclose(after, before, atol=1e-6)


def test_classes_of_partial_fit():
    X, _, y, _ = digits()
    with pytest.raises(ValueError, match="classes must be"):
        LateClassifier().partial_fit(X, y)
    model = LateClassifier().partial_fit(X[:50], y[:50], classes=range(10))
    with pytest.raises(ValueError, match="classes must be the same as in the first call"):
        model.partial_fit(X, y, classes=range(11))
    with pytest.raises(ValueError, match="y must be one of the classes"):
        model.partial_fit(X[:2], [3, 77])
    assert model.predict_proba(X[:5]).shape == (5, 10)


# ---- Weights, sparse rows, tables


def weighted_rows():
    generator = np.random.default_rng(0)
    X, y = load_digits(return_X_y=True)
    few = y < 3
    X, y = X[few][:60] / 16, y[few][:60]
    return X, y, generator.integers(0, 4, len(X))


@pytest.mark.parametrize("build", ESTIMATORS)
def test_a_weight_is_a_row_that_is_there_so_often(build):
    """With batches of all rows to rounding, for fit and for its step (lr=None)."""
    X, y, weights = weighted_rows()
    model = build(steps=100, batch=1000, random_state=0)
    weighted = clone(model).fit(X, y, sample_weight=weights)
    repeated = clone(model).fit(X.repeat(weights, axis=0), y.repeat(weights))
    np.testing.assert_allclose(weighted.coef_, repeated.coef_, rtol=1e-9, atol=1e-12)
    scaled = clone(model).fit(X, y, sample_weight=weights * 7.0)
    np.testing.assert_allclose(weighted.coef_, scaled.coef_, rtol=1e-9, atol=1e-12)
    assert np.abs(clone(model).fit(X, y).coef_ - weighted.coef_).max() > 1e-3


def test_minibatches_find_the_weighted_optimum():
    X, y, weights = weighted_rows()
    want = LogisticRegression(C=1 / (0.1 * weights.sum()), max_iter=1000).fit(X, y, sample_weight=weights)
    model = LateClassifier(steps=4000, batch=8, l2=0.1, random_state=0).fit(X, y, sample_weight=weights)
    assert np.abs(model.predict_proba(X) - want.predict_proba(X)).max() < 0.04


def test_weights_of_partial_fit_are_factors_on_the_gradients():
    X, y = diabetes()
    weights = np.random.default_rng(0).random(200)
    model = LateRegressor("sgd", lr=0.1, batch=50, l2=0.0).partial_fit(X[:200], y[:200], sample_weight=weights)
    w = np.zeros(11)
    for rows in np.split(np.arange(200), 4):
        z = np.hstack([X[rows], np.ones((50, 1))])
        w -= 0.1 * z.T @ (weights[rows] * (z @ w - y[rows])) / 50
    np.testing.assert_allclose([*model.coef_, model.intercept_], w)


@pytest.mark.parametrize("class_weight", ["balanced", {"a": 3.0, "b": 0.5}])
def test_class_weights_are_sample_weights(class_weight):
    X, y, weights = weighted_rows()
    labels = np.array(["a", "b", "b"])[y]
    of_rows = compute_sample_weight(class_weight, labels)
    model = LateClassifier(steps=50, random_state=0)
    want = clone(model).fit(X, labels, sample_weight=of_rows)
    got = clone(model).set_params(class_weight=class_weight).fit(X, labels)
    np.testing.assert_allclose(got.coef_, want.coef_)
    both = clone(model).set_params(class_weight={"a": 2.0, "b": 1.0}).fit(X, labels, sample_weight=weights)
    np.testing.assert_allclose(both.coef_, clone(model).fit(X, labels, weights * np.where(y == 0, 2, 1)).coef_)


def test_balancing_a_stream_is_refused():
    X, y, _ = weighted_rows()
    with pytest.raises(ValueError, match="class_weight must be a dict or None for partial_fit"):
        LateClassifier(class_weight="balanced").partial_fit(X, y, classes=range(3))


def test_no_weight_at_all_is_refused():
    X, y, weights = weighted_rows()
    with pytest.raises(ValueError, match="at least one non-zero|must be positive for some row"):
        LateClassifier().fit(X, y, sample_weight=0 * weights)
    with pytest.raises(ValueError, match="sample_weight times class_weight must be positive for some row"):
        LateClassifier(class_weight=dict.fromkeys(range(3), 0.0)).fit(X, y)
    with pytest.raises(ValueError, match="Negative values"):
        LateClassifier().fit(X, y, sample_weight=weights - 1)


@pytest.mark.parametrize("build", ESTIMATORS)
@pytest.mark.parametrize("format", ["csr", "csc", "coo"])
def test_sparse_rows_are_the_dense_ones(build, format):
    X, y, weights = weighted_rows()
    X[:, :5] = 0  # columns without entries
    sparse = scipy.sparse.csr_array(X).asformat(format)
    model = build(steps=100, delays=3, random_state=0)
    dense = clone(model).fit(X, y, sample_weight=weights)
    got = clone(model).fit(sparse, y, sample_weight=weights)
    np.testing.assert_allclose(got.coef_, dense.coef_, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(got.predict(sparse), dense.predict(X))
    for part in (dense, got):
        part.partial_fit(sparse if part is got else X, y)
    np.testing.assert_allclose(got.coef_, dense.coef_, rtol=1e-6, atol=1e-9)


@pytest.mark.slow
def test_wide_sparse_rows_are_never_dense_at_once():
    """1,500 texts over 20,000 words: dense they would take 240 MB."""
    generator = np.random.default_rng(0)
    X = scipy.sparse.random_array((1500, 20_000), density=5e-4, rng=generator, format="csr")
    y = generator.integers(0, 2, 1500)
    X = scipy.sparse.hstack([scipy.sparse.csr_array(y[:, None] * 1.0), X[:, 1:]], format="csr")
    model = LateClassifier(steps=20, random_state=0)
    assert largest_allocation(lambda: model.fit(X, y)) < 120e6
    assert model.score(X, y) == 1.0


def test_a_table_with_names():
    X, y, weights = weighted_rows()
    table = pandas.DataFrame(X, columns=[f"pixel {i}" for i in range(64)])
    model = LateClassifier(steps=50, random_state=0).fit(table, pandas.Series(y), sample_weight=pandas.Series(weights))
    assert list(model.feature_names_in_) == list(table.columns)
    assert np.array_equal(model.coef_, clone(model).fit(X, y, sample_weight=weights).coef_)
    with pytest.raises(ValueError, match="feature names"):
        model.predict(table[table.columns[::-1]])


# ---- Within scikit-learn


def test_grid_search_over_a_pipeline():
    X, X_test, y, y_test = digits()
    pipeline = make_pipeline(StandardScaler(), LateClassifier(steps=300, random_state=0))
    grid = {"lateclassifier__rule": ["anytime-sgd", "sgd"], "lateclassifier__domain": [None, "ball:5"]}
    search = GridSearchCV(pipeline, grid, cv=2).fit(X, y)
    assert search.score(X_test, y_test) > 0.9
    assert search.best_params_.keys() == grid.keys()


def test_labels_may_be_anything():
    X, _, y, _ = digits()
    names = np.array(["zero", "one", "two"])
    few = y < 3
    model = LateClassifier(steps=200, random_state=0).fit(X[few], names[y[few]])
    assert model.score(X[few], names[y[few]]) > 0.98
    two = y < 2
    model = LateClassifier(steps=200, random_state=0).fit(X[two], names[y[two]])
    assert model.coef_.shape == (1, 64)
    assert list(model.classes_) == ["one", "zero"]
    assert model.score(X[two], names[y[two]]) == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "xyz"}, "unknown rule 'xyz'; .*valid: anytime-sgd"),
        ({"rule": lg.SGD(0.1), "lr": 0.1}, "lr and domain must be None with a rule object"),
        ({"domain": "cube:1"}, "unknown constraint set 'cube'"),
        ({"delays": "sometimes"}, "sometimes"),
        ({"steps": 0}, "steps must be an integer >= 1"),
        ({"batch": 0}, "batch must be an integer >= 1"),
        ({"l2": -1.0}, "l2 must be a finite number >= 0"),
        ({"lr": -1.0}, "lr must be a finite number >= 0"),
        ({"rule": "fed-async"}, "lr must be a number for rule 'fed-async'"),
        ({"workers": 2, "delays": 5}, "delays must be 0 with workers"),
    ],
)
@pytest.mark.parametrize("build", ESTIMATORS)
def test_bad_options(build, options, message):
    X, y = [[0.0], [1.0], [2.0]], [0, 1, 1]
    with pytest.raises(ValueError, match=message):
        build(**options).fit(X, y)


@pytest.mark.slow
def test_the_page_runs_as_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "sklearn.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    X, _, y, _ = digits()
    names = {"X": X[:400], "y": y[:400]}
    exec(program, names)
    assert names["search"].best_score_ > 0.85
    assert (tmp_path / "loss.png").exists()


@pytest.mark.slow
def test_the_example_of_estimators(capsys):
    accuracy = example("late_estimators").main(["--quick"])
    assert accuracy["steady", 0] > 0.92
    assert accuracy["steady", 100] > accuracy["sgd", 100] + 0.05
    assert "LogisticRegression" in capsys.readouterr().out
