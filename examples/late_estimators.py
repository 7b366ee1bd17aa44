"""scikit-learn estimators under late gradients: which rule still classifies digits at a delay of 100 updates?

Every rule has the learning rate that ``lr=None`` chooses without knowing the delays. Prints the accuracy by
cross-validation, next to that of scikit-learn's own estimators, which have no delays; then searches a rule and a
constraint set for one delay, in a pipeline.
"""

import argparse

from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression, SGDClassifier
from sklearn.model_selection import GridSearchCV, StratifiedKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from lategrad.sklearn import LateClassifier

RULES = ("steady", "anytime-sgd", "schedule-free", "sgd")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two rules, two folds, one delay")
    options = parser.parse_args(argv)
    X, y = load_digits(return_X_y=True)
    X = X / 16
    folds = StratifiedKFold(2 if options.quick else 5, shuffle=True, random_state=0)
    for theirs in (LogisticRegression(max_iter=1000), SGDClassifier(random_state=0)):
        print(f"{type(theirs).__name__:<20} {cross_val_score(theirs, X, y, cv=folds).mean():.3f}")

    delays = (0, 100) if options.quick else (0, 20, 100)
    accuracy = {}
    print(f"{'delay':<20}", *(f"{delay:>6}" for delay in delays))
    for rule in ("steady", "sgd") if options.quick else RULES:
        for delay in delays:
            model = LateClassifier(rule, delays=delay, random_state=0)
            accuracy[rule, delay] = cross_val_score(model, X, y, cv=folds).mean()
        print(f"{rule:<20}", *(f"{accuracy[rule, delay]:6.3f}" for delay in delays))

    pipeline = make_pipeline(StandardScaler(), LateClassifier(delays=100, random_state=0, steps=1000))
    grid = {"lateclassifier__domain": [None, "ball:8"]}
    if not options.quick:
        grid["lateclassifier__rule"] = ["steady", "anytime-sgd"]
    search = GridSearchCV(pipeline, grid, cv=folds).fit(X, y)
    print(f"best of a search at delay 100: {search.best_params_}, accuracy {search.best_score_:.3f}")
    return accuracy


if __name__ == "__main__":
    main()
