"""Data sets: what each name and file format loads, and that every bad input says what to do."""

import gzip
import hashlib
import struct
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lategrad.problems import data

X = np.array([[0.5, -1.0], [2.0, 3.25], [0.0, 1.0], [4.0, 0.125], [-2.5, 7.0]])
CLASSES = np.array([3, -1, 3, 8, -1])
NUMBERS = np.array([0.25, 1.0, -3.5, 2.0, 8.0])


def rows(dataset):
    """All (features, target) pairs, the training part first, as a sorted list."""
    x, y = torch.cat([dataset.x_train, dataset.x_test]), torch.cat([dataset.y_train, dataset.y_test])
    return sorted((*features, target) for features, target in zip(x.tolist(), y.tolist(), strict=True))


def write_csv(path, x, y, header=""):
    lines = [",".join(map(str, [*features, target])) for features, target in zip(x, y, strict=True)]
    path.write_text(header + "\n".join(lines) + "\n")


def write_libsvm(path, x, y):
    lines = [f"{t} " + " ".join(f"{j}:{v}" for j, v in enumerate(f, 1) if v) for f, t in zip(x, y, strict=True)]
    path.write_text("\n".join(lines) + "\n")


def write_npz(path, x, y):
    with path.open("wb") as file:  # given a path, savez would append .npz to .NPZ
        np.savez(file, x=x, y=y)


WRITERS = {
    ".csv": write_csv,
    ".npz": write_npz,
    ".svm": write_libsvm,
    ".libsvm": write_libsvm,
    ".svmlight": write_libsvm,
}


# ---- Digits and preprocessing


def test_digits_are_the_bundled_images_split_within_classes():
    digits = data.load("digits")
    assert (digits.name, digits.classes) == ("digits", 10)
    assert digits.x_train.shape == (1437, 64)
    assert digits.x_test.shape == (360, 64)
    assert (digits.x_train.dtype, digits.y_train.dtype) == (torch.float32, torch.int64)
    assert digits.x_train.min() == 0
    assert digits.x_train.max() == 1
    train, test = digits.y_train.bincount(), digits.y_test.bincount()
    torch.testing.assert_close(test / (train + test), torch.full((10,), 0.2), atol=0.01, rtol=0)
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    assert rows(digits) == sorted((*(features / 16), target) for features, target in zip(x, y, strict=True))


def test_digits_split_never_changes():
    digits = data.load("digits")
    assert all(map(torch.equal, digits[1:5], data.load("digits")[1:5]))
    fingerprint = hashlib.sha256(b"".join(part.numpy().tobytes() for part in digits[1:5])).hexdigest()
    assert fingerprint == "dd82963602a00ec7a5acb3d83ef540e3a20b54d2e70797c745a817e4328ba5e4"


def test_standardise_uses_two_numbers_for_each_feature(tmp_path):
    raw, digits = data.load("digits"), data.load("digits", "standardise")
    varies = raw.x_train.std(0) > 0
    assert 0 < varies.sum() < 64
    torch.testing.assert_close(digits.x_train.mean(0), torch.zeros(64), atol=1e-6, rtol=0)
    torch.testing.assert_close(digits.x_train.std(0, correction=0), varies.float(), atol=1e-5, rtol=0)
    scale = torch.where(varies, raw.x_train.std(0, correction=0), 1.0)
    torch.testing.assert_close(digits.x_test, (raw.x_test - raw.x_train.mean(0)) / scale, atol=1e-5, rtol=1e-5)
    write_npz(tmp_path / "flat.npz", np.full((5, 2), 0.1), CLASSES)
    assert data.load(tmp_path / "flat.npz", "standardise").x_train.abs().max() < 1e-6


def test_standardise_globally_uses_two_numbers_of_the_training_part():
    raw, digits = data.load("digits"), data.load("digits", "standardise-globally")
    assert digits.x_train.mean().item() == pytest.approx(0, abs=1e-6)
    assert digits.x_train.std(correction=0).item() == pytest.approx(1, abs=1e-6)
    mean, std = raw.x_train.mean(), raw.x_train.std(correction=0)
    torch.testing.assert_close(digits.x_test, (raw.x_test - mean) / std)
    assert torch.equal(digits.y_train, raw.y_train)


def test_centre_subtracts_the_training_mean_of_each_feature():
    raw, digits = data.load("digits"), data.load("digits", preprocessing="centre")
    torch.testing.assert_close(digits.x_train.mean(0), torch.zeros(64), atol=1e-6, rtol=0)
    torch.testing.assert_close(digits.x_test, raw.x_test - raw.x_train.mean(0))
    assert digits.x_train.dtype == torch.float32


def test_preprocessing_errors(tmp_path):
    with pytest.raises(ValueError, match=r"preprocessing must be one of 'standardise', .*'none', got 'whiten'"):
        data.load("digits", "whiten")
    write_npz(tmp_path / "flat.npz", np.full((5, 2), 0.1), CLASSES)
    with pytest.raises(ValueError, match=r"standard deviation of '.*flat.npz' must be > 0"):
        data.load(tmp_path / "flat.npz", "standardise-globally")


# ---- Files that load


@pytest.mark.parametrize("suffix", WRITERS)
def test_integer_targets_become_classes_from_zero(tmp_path, suffix):
    path = tmp_path / f"own{suffix}"
    WRITERS[suffix](path, X, CLASSES)
    own = data.load(str(path))
    assert (own.name, own.classes) == (str(path), 3)
    assert (len(own.x_train), len(own.x_test)) == (4, 1)
    assert (own.x_train.dtype, own.y_train.dtype) == (torch.float32, torch.int64)
    renumbered = {-1: 0, 3: 1, 8: 2}
    assert rows(own) == sorted((*x, renumbered[y]) for x, y in zip(X.tolist(), CLASSES.tolist(), strict=True))
    assert all(map(torch.equal, own[1:5], data.load(str(path))[1:5]))


@pytest.mark.parametrize("suffix", WRITERS)
def test_other_targets_are_for_regression(tmp_path, suffix):
    path = tmp_path / f"own{suffix.upper()}"
    WRITERS[suffix](path, X, NUMBERS)
    own = data.load(path)
    assert own.classes is None
    assert (own.y_train.dtype, own.y_test.dtype) == (torch.float32, torch.float32)
    assert rows(own) == sorted((*x, y) for x, y in zip(X.tolist(), NUMBERS.tolist(), strict=True))


@pytest.mark.parametrize("mark", [",", ";", "\t", "|"])
@pytest.mark.parametrize("header", ["", "length{0}width{0}kind\n"])
def test_csv_with_words_as_targets_and_any_mark_between_columns(tmp_path, mark, header):
    path = tmp_path / "flowers.csv"
    lines = [f"{i}.5{mark}{-i}{mark}{kind}" for i, kind in enumerate(["rose", "aster", "rose", "tulip", "aster"])]
    path.write_text(header.format(mark) + "\n".join(lines) + "\n")
    own = data.load(path)
    assert own.classes == 3
    assert own.class_names == ("aster", "rose", "tulip")
    names = {"rose": 1.0, "aster": 0.0, "tulip": 2.0}
    assert rows(own) == sorted((i + 0.5, -i, names[line.rpartition(mark)[2]]) for i, line in enumerate(lines))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1,5;2,5;a\n1,5;2,5;b\n", "got '1,5': write decimals with a point"),
        ("1,2,a\n3,4,\n", "the target in row 2 of .* must be a word"),
        ("1,2,3\n3,4,a\n", "column 3 in row 2 of .* must be a finite number, got 'a'"),
        ("1,x,a\n3,4,b\n", "column 2 in row 1 of .* must be a finite number, got 'x'"),
    ],
)
def test_csv_that_is_nearly_right_is_told_what_is_wrong(tmp_path, text, message):
    (tmp_path / "odd.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        data.load(tmp_path / "odd.csv")


def test_npz_with_a_test_part_keeps_order_and_flattens_images(tmp_path):
    images = np.asfortranarray(np.arange(5 * 2 * 3, dtype=">i2").reshape(5, 2, 3))
    y = np.array([[True], [False], [True]])
    np.savez(tmp_path / "a.npz", x_train=images[:3], y_train=y, x_test=images[3:], y_test=y[:2], note="hello")
    own = data.load(tmp_path / "a.npz")
    assert own.x_train.tolist() == np.arange(18.0).reshape(3, 6).tolist()
    assert own.x_test.tolist() == np.arange(18.0, 30.0).reshape(2, 6).tolist()
    assert (own.y_train.tolist(), own.y_test.tolist(), own.classes) == ([1, 0, 1], [1, 0], 2)


def test_npz_classes_are_numbered_over_both_parts(tmp_path):
    by_column = np.asfortranarray(X[:3])
    np.savez(tmp_path / "a.npz", x_train=by_column, y_train=[5, 9, 5], x_test=X[3:], y_test=[7, 9])
    own = data.load(tmp_path / "a.npz")
    assert own.x_train.is_contiguous()
    assert (own.y_train.tolist(), own.y_test.tolist(), own.classes) == ([0, 2, 0], [1, 2], 3)


def test_npz_integers_of_two_kinds_are_classes(tmp_path):
    y_train, y_test = np.array([5, 9, 5], np.uint64), np.array([7, 9], np.int64)
    np.savez(tmp_path / "a.npz", x_train=X[:3], y_train=y_train, x_test=X[3:], y_test=y_test)
    assert data.load(tmp_path / "a.npz").classes == 3


def test_npz_with_only_a_training_part_is_split(tmp_path):
    np.savez(tmp_path / "a.npz", x_train=X, y_train=CLASSES)
    write_npz(tmp_path / "b.npz", X, CLASSES)
    first, second = data.load(tmp_path / "a.npz"), data.load(tmp_path / "b.npz")
    assert all(map(torch.equal, first[1:5], second[1:5]))


def test_whole_numbers_saved_as_floats_in_npz_are_for_regression(tmp_path):
    write_npz(tmp_path / "a.npz", X, CLASSES.astype(np.float64))
    assert data.load(tmp_path / "a.npz").classes is None


@pytest.mark.parametrize("header", ["a,b,label\n", "\ufeffa,b,label\n\n", '"x, first",,y\n', "\ufeff"])
def test_csv_header_and_byte_order_mark_are_detected(tmp_path, header):
    write_csv(tmp_path / "with.csv", X, CLASSES, header)
    write_csv(tmp_path / "without.csv", X, CLASSES)
    assert rows(data.load(tmp_path / "with.csv")) == rows(data.load(tmp_path / "without.csv"))


def test_path_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_npz(tmp_path / "own.npz", X, CLASSES)
    assert data.load("~/own.npz").classes == 3


# ---- Files that do not


@pytest.mark.parametrize("name", ["mnist", "own.parquet", "", "Digits"])
def test_unknown_name(name):
    with pytest.raises(ValueError, match=rf"'digits', 'fashion-mnist', .*or .*\.npz, \.csv, .* got '{name}'"):
        data.load(name)


@pytest.mark.parametrize("suffix", WRITERS)
def test_missing_file(tmp_path, suffix):
    with pytest.raises(FileNotFoundError, match=rf"no file '.*nowhere\{suffix}': check the path"):
        data.load(tmp_path / f"nowhere{suffix}")


BAD_CSV = {
    "1,2,0\n3,oops,1\n": r"column 2 in row 2 of .*own\.csv must be a finite number, got 'oops'",
    "a,b,y\n1,2,0\n\n3,,1\n": r"column 2 in row 4 .* got ''",
    "1,oops,0\n3,4,1\n": r"column 2 in row 1 .* got 'oops'",
    "1,2,0\n3,4,nan\n": r"column 3 in row 2 .* got 'nan'",
    "nan,nan,nan\n3,4,1\n": r"column 1 in row 1 .* got 'nan'",
    "1,2,0\n3,1\n": r"number of columns in row 2 of .*own\.csv must be 3, as before, got 2",
    "1\n2\n": r"number of columns in row 1 .* must be 2 or more, the last the target, got 1",
    "1,2,0\n": r"number of rows in .*own\.csv must be at least 2, .* got 1",
    "a,b,y\n": r"x in .*own\.csv must be .* at least one row .* got \(0, 2\)",
    "": r"x in .*own\.csv must be .* at least one row .* got \(0, 1\)",
    "1e39,2,0\n3,4,1\n": r"x\[0, 0\] in .*own\.csv must be a finite float32 number, got 1e\+39",
    "1,2,\xff\n": r"own\.csv cannot be read as \.csv: save it as UTF-8",
}


@pytest.mark.parametrize("text", BAD_CSV)
def test_csv_errors(tmp_path, text):
    (tmp_path / "own.csv").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=BAD_CSV[text]):
        data.load(tmp_path / "own.csv")


BAD_LIBSVM = {
    "1 1:0.5\nhello\n": r"own\.svm cannot be read as libsvm, lines `target index:value \.\.\.`: .*hello",
    "1 1:0.5\n0 1:nan\n": r"x\[1, 0\] in .*own\.svm must be a finite float32 number, got nan",
    "0.5 1:0.5\ninf 1:1\n": r"y\[1\] in .*own\.svm must be a finite float32 number, got inf",
    "": r"x in .*own\.svm must be .* at least one row",
}


@pytest.mark.parametrize("text", BAD_LIBSVM)
def test_libsvm_errors(tmp_path, text):
    (tmp_path / "own.svm").write_text(text)
    with pytest.raises(ValueError, match=BAD_LIBSVM[text]):
        data.load(tmp_path / "own.svm")


def with_value(array, index, value):
    array = array.copy()
    array[index] = value
    return array


FOUR = {"x_train": X, "y_train": CLASSES, "x_test": X, "y_test": CLASSES}
BAD_NPZ = {
    "no arrays": ({}, r"the arrays in .*own\.npz must be x_train, y_train and .*; or x, y, got \[\]"),
    "no targets": ({"x": X}, r"the arrays in .* must be .* got \['x'\]"),
    "half a test part": (
        {k: v for k, v in FOUR.items() if k != "y_test"},
        r"got \['x_test', 'x_train', 'y_train'\]",
    ),
    "lengths": ({"x": X, "y": CLASSES[:4]}, r"y in .* must be of shape \(5,\), one .* row of x, got \(4,\)"),
    "test lengths": (FOUR | {"x_test": X[:2]}, r"y_test in .* must be of shape \(2,\), .* got \(5,\)"),
    "one-hot": ({"x": X, "y": np.eye(5)}, r"y in .* must be of shape \(5,\), .* got \(5, 5\)"),
    "features": (FOUR | {"x_test": X[:, :1]}, r"x_test in .* as many features as x_train, 2, got \(5, 1\)"),
    "kinds": (FOUR | {"y_test": NUMBERS}, r"y_train and y_test in .* both .* got \('int64', 'float32'\)"),
    "a vector": ({"x": X[:, 0], "y": CLASSES}, r"x in .* must be of shape \(n, p\), .* got \(5,\)"),
    "a number": ({"x": X, "y": 3}, r"y in .* must be of shape \(5,\), .* got \(\)"),
    "no rows": ({"x": X[:0], "y": CLASSES[:0]}, r"x in .* at least one row .* got \(0, 2\)"),
    "no features": ({"x": X[:, :0], "y": CLASSES}, r"x in .* one feature, got \(5, 0\)"),
    "no test rows": (FOUR | {"x_test": X[:0], "y_test": CLASSES[:0]}, r"x_test in .* got \(0, 2\)"),
    "one row": ({"x": X[:1], "y": CLASSES[:1]}, r"number of rows in .* at least 2, .* got 1"),
    "nan": (
        {"x": with_value(X, (3, 1), np.nan), "y": CLASSES},
        r"x\[3, 1\] in .*own\.npz must be .* got nan",
    ),
    "inf": (FOUR | {"x_test": with_value(X, (0, 1), -np.inf)}, r"x_test\[0, 1\] in .* got -inf"),
    "nan in training": (
        {"x_train": with_value(X, (4, 0), np.nan), "y_train": CLASSES},
        r"x_train\[4, 0\] in .* got nan",
    ),
    "nan target": ({"x": X, "y": with_value(NUMBERS, 2, np.nan)}, r"y\[2\] in .* got nan"),
    "strings": ({"x": X, "y": np.array(list("abcde"))}, r"y in .* must be real numbers, got 'dtype <U1'"),
    "complex": ({"x": X + 1j, "y": CLASSES}, r"x in .* must be real numbers, got 'dtype complex128'"),
    "objects": (
        {"x": X.astype(object), "y": CLASSES},
        r"own\.npz cannot be read as \.npz: .* without objects",
    ),
}


@pytest.mark.parametrize("case", BAD_NPZ)
def test_npz_errors(tmp_path, case):
    arrays, message = BAD_NPZ[case]
    np.savez(tmp_path / "own.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        data.load(tmp_path / "own.npz")


@pytest.mark.parametrize("case", ["text", "empty", "cut short", "npy", "pickle"])
def test_unreadable_npz(tmp_path, case):
    path = tmp_path / "own.npz"
    write_npz(path, X, CLASSES)
    if case == "npy":
        with path.open("wb") as file:
            np.save(file, X)
    elif case == "pickle":
        np.array([{}], dtype=object).dump(path)
    else:
        path.write_bytes({"text": b"hello", "empty": b"", "cut short": path.read_bytes()[:-30]}[case])
    with pytest.raises(ValueError, match=r"own\.npz cannot be read as \.npz: write it by numpy\.savez"):
        data.load(path)


# ---- idx files


def idx_bytes(array):
    return struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


IMAGES = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)


@pytest.mark.parametrize("array", [IMAGES, IMAGES[0, 0]])
def test_read_idx(tmp_path, array):
    (tmp_path / "a").write_bytes(idx_bytes(array))
    (tmp_path / "a.gz").write_bytes(gzip.compress(idx_bytes(array)))
    right = hashlib.sha256(idx_bytes(array)).hexdigest()
    for path in (tmp_path / "a", tmp_path / "a.gz"):
        np.testing.assert_array_equal(data.read_idx(path), array, strict=True)
        np.testing.assert_array_equal(data.read_idx(path, right), array, strict=True)
        with pytest.raises(ValueError, match=rf"{path} do not have SHA-256 {'0' * 64}: delete it, then run"):
            data.read_idx(path, "0" * 64)


@pytest.mark.parametrize(
    "contents",
    [b"", b"\0\0\x08", b"\0\0\x08\3\0\0", b"\0\0\x08\0", idx_bytes(IMAGES)[:-1], idx_bytes(IMAGES) + b"\0",
     b"\1" + idx_bytes(IMAGES)[1:], b"\0\0\x0d" + idx_bytes(IMAGES)[3:]],
)  # fmt: skip
def test_read_idx_rejects_what_is_not_idx(tmp_path, contents):
    (tmp_path / "a").write_bytes(contents)
    with pytest.raises(ValueError, match="a is not an idx file of bytes, or is cut short: delete it"):
        data.read_idx(tmp_path / "a")


@pytest.mark.parametrize("damage", [lambda b: b[:-9], lambda b: b"junk" + b, lambda b: b[:12] + b"\xff" * 20 + b[32:]])
def test_read_idx_rejects_a_damaged_gz(tmp_path, damage):
    (tmp_path / "a.gz").write_bytes(damage(gzip.compress(idx_bytes(IMAGES))))
    with pytest.raises(ValueError, match=r"a\.gz is damaged: delete it"):
        data.read_idx(tmp_path / "a.gz")


# ---- Where Fashion-MNIST is looked for


SMALL = {
    "train-images-idx3-ubyte": np.array([0, 255, 51, 102] * 3, dtype=np.uint8).reshape(3, 2, 2),
    "train-labels-idx1-ubyte": np.array([1, 0, 1], dtype=np.uint8),
    "t10k-images-idx3-ubyte": np.array([255, 0, 0, 0] * 2, dtype=np.uint8).reshape(2, 2, 2),
    "t10k-labels-idx1-ubyte": np.array([0, 1], dtype=np.uint8),
}


def write_small(folder, names=tuple(SMALL), packed=True):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        contents = idx_bytes(SMALL[name])
        if packed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(contents))
        else:
            (folder / name).write_bytes(contents)


@pytest.fixture
def places(tmp_path, monkeypatch):
    """The three local places, empty, in the order of the search; OpenML out of reach."""
    own, cache, debian = (
        tmp_path / "own",
        tmp_path / "xdg" / "lategrad" / "fashion-mnist",
        tmp_path / "debian",
    )
    monkeypatch.setenv("LATEGRAD_DATA", str(own))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(data, "DEBIAN_FOLDER", debian)

    def unreachable(**_):
        raise OSError("no route to host")

    monkeypatch.setattr("sklearn.datasets.fetch_openml", unreachable)
    return own, cache, debian


def test_search_order_and_that_the_contents_are_verified(places):
    for place in reversed(places):  # from the last resort to the first choice: each new copy takes over
        write_small(place)
        assert data.find_fashion_mnist() == place
        with pytest.raises(ValueError, match=rf"{place}/train-images-idx3-ubyte\.gz do not have SHA-256 .*delete it"):
            data.load("fashion-mnist")


def test_an_incomplete_folder_is_passed_over(places):
    own, cache, _ = places
    write_small(own, list(SMALL)[:3])
    assert data.find_fashion_mnist() is None
    write_small(cache)
    assert data.find_fashion_mnist() == cache
    write_small(own, list(SMALL)[3:], packed=False)
    assert data.find_fashion_mnist() == own


def test_cache_folder_is_in_the_home_folder_by_default(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert data.cache_folder() == tmp_path / ".cache" / "lategrad" / "fashion-mnist"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert data.cache_folder() == tmp_path / ".cache" / "lategrad" / "fashion-mnist"


@pytest.mark.parametrize("packed", [True, False])
def test_verified_files_are_scaled_and_flattened(places, monkeypatch, packed):
    write_small(places[1], packed=packed)
    sums = {name: hashlib.sha256(idx_bytes(array)).hexdigest() for name, array in SMALL.items()}
    monkeypatch.setattr(data, "FASHION_MNIST_SHA256", sums)
    small = data.load("fashion-mnist")
    torch.testing.assert_close(small.x_train, torch.tensor([[0.0, 1.0, 0.2, 0.4]] * 3))
    torch.testing.assert_close(small.x_test, torch.tensor([[1.0, 0.0, 0.0, 0.0]] * 2))
    assert (small.y_train.tolist(), small.y_test.tolist(), small.classes) == ([1, 0, 1], [0, 1], 2)
    assert (small.x_train.dtype, small.y_train.dtype) == (torch.float32, torch.int64)


def test_without_any_copy_the_error_names_the_ways(places):
    own, cache, _ = places
    with pytest.raises(FileNotFoundError) as caught:
        data.load("fashion-mnist")
    message = str(caught.value)
    ways = ("`make data`", "LATEGRAD_DATA", str(own), str(cache), "dataset-fashion-mnist", "OpenML", *SMALL)
    assert [way for way in ways if way not in message] == []
    assert message.endswith("no route to host")
    assert "\n" not in message
    assert not cache.exists()


def test_other_data_from_openml_are_refused_and_not_stored(places, monkeypatch):
    found = SimpleNamespace(data=np.zeros((70_000, 784), np.uint8), target=np.array(["0"] * 70_000, dtype=object))
    monkeypatch.setattr("sklearn.datasets.fetch_openml", lambda **_: found)
    with pytest.raises(ValueError, match=r"40996 does not have the SHA-256 of train-images.*`make data`"):
        data.load("fashion-mnist")
    assert not places[1].exists()


@pytest.mark.slow
def test_fashion_mnist():
    fashion = data.load("fashion-mnist")
    assert fashion.x_train.shape == (60_000, 784)
    assert fashion.x_test.shape == (10_000, 784)
    assert fashion.classes == 10
    assert fashion.y_train.bincount().tolist() == [6000] * 10
    assert fashion.y_test.bincount().tolist() == [1000] * 10
    assert fashion.x_train.mean(dtype=torch.float64).item() == pytest.approx(0.2860, abs=5e-5)
    assert fashion.x_train.double().std().item() == pytest.approx(0.3530, abs=5e-5)
    assert (fashion.x_train.min(), fashion.x_train.max()) == (0, 1)


@pytest.mark.slow
def test_the_copy_from_openml_is_kept_in_the_cache(request, monkeypatch):
    fashion = data.load("fashion-mnist")
    _, cache, _ = request.getfixturevalue("places")
    pixels = torch.cat([fashion.x_train, fashion.x_test]).mul(255).round().double().numpy()
    labels = torch.cat([fashion.y_train, fashion.y_test]).numpy().astype(str).astype(object)
    # what fetch_openml returns: pixels as floats and labels as strings, the training part first
    monkeypatch.setattr("sklearn.datasets.fetch_openml", lambda **_: SimpleNamespace(data=pixels, target=labels))
    assert all(map(torch.equal, data.load("fashion-mnist")[1:5], fashion[1:5]))
    assert sorted(path.name for path in cache.iterdir()) == sorted(SMALL)
    monkeypatch.setattr("sklearn.datasets.fetch_openml", None)
    assert all(map(torch.equal, data.load("fashion-mnist")[1:5], fashion[1:5]))
