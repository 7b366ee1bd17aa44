"""Data sets as tensors: Fashion-MNIST, scikit-learn's digits, or the user's own file.

Fashion-MNIST is searched for in the folder ``$LATEGRAD_DATA``, in the user's cache, in the folder of Debian's package
``dataset-fashion-mnist``, and on OpenML. Its four files are pinned by checksum: all ways give the same bytes or raise.
"""

import csv
import gzip
import hashlib
import logging
import math
import os
import zipfile
import zlib
from array import array
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lategrad.support.files import replacing
from lategrad.support.validation import require, require_choice

Array = npt.NDArray[Any]

PREPROCESSING = {
    "standardise": "each feature less its mean, divided by its standard deviation",
    "standardise-globally": "one mean and one standard deviation for all entries, as for pixels",
    "centre": "each feature less its mean",
    "none": "as it is",
}
"""Transformations of the features, with statistics of the training part alone."""

FASHION_MNIST_SHA256 = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
"""The four idx files and the SHA-256 of their unpacked contents (packing differs between mirrors)."""

DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
_OPENML_ID = 40996


class Dataset(NamedTuple):
    """A training and a test part: rows are examples, columns are features.

    Targets are int64 classes ``0, ..., classes - 1``, or float32 numbers when ``classes`` is None.
    """

    name: str
    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: int | None
    class_names: tuple[str, ...] | None = None  #: The labels of the classes in the file.


def load(name: str | os.PathLike[str], preprocessing: str = "none") -> Dataset:
    """Load a data set by name or from a file.

    Args:
        name: one of

            - ``digits``: 8×8 images bundled with scikit-learn, scaled to [0, 1]; 1,437 to train and 360 to test, split
              at random within each class, always the same way;
            - ``fashion-mnist``: 28×28 images scaled to [0, 1]; 60,000 to train and 10,000 to test;
            - a path ending in ``.npz``: arrays ``x_train``, ``y_train`` and, if there is a test part, ``x_test``,
              ``y_test``; or ``x`` and ``y``. Further dimensions of x are flattened;
            - a path ending in ``.csv``: columns separated by commas (or semicolons, tabs or bars, which are detected),
              the last one the target. A first row without any number is a header;
            - a path ending in ``.libsvm``, ``.svm`` or ``.svmlight``: stored sparse, loaded dense.

            A file without a test part is split at random 80/20, always the same way. Integer targets are classes,
            numbered 0, 1, ... in increasing order of the values in the file; others are for regression. The dtype of y
            decides in ``.npz``; in text, whole numbers are integers (to regress on whole numbers, save them as floats
            in ``.npz``). Targets in ``.csv`` may also be words, which are classes in alphabetical order.
        preprocessing: ``none``; ``standardise``, subtract the mean and divide by the standard deviation of each feature
            (a constant feature becomes zero); ``standardise-globally``, the same with one mean and one deviation for
            all entries, so that features keep their relative scale, as pixels should; or ``centre``, subtract the mean
            of each feature. All statistics are of the training part. Targets are not changed.

    >>> digits = load("digits")
    >>> digits.x_train.shape, digits.x_test.shape, digits.classes
    (torch.Size([1437, 64]), torch.Size([360, 64]), 10)
    """
    require_choice("preprocessing", preprocessing, tuple(PREPROCESSING))
    name = os.fspath(name)
    builtin = {"digits": _digits, "fashion-mnist": _fashion_mnist}
    return preprocess(builtin[name]() if name in builtin else _from_file(name), preprocessing)


def preprocess(dataset: Dataset, preprocessing: str) -> Dataset:
    """A data set with shifted and scaled features, by sums over the training part in float64; see :func:`load`."""
    if preprocessing == "none":
        return dataset
    x = dataset.x_train.double()
    if preprocessing == "centre":
        std, mean = torch.tensor(1.0), x.mean(0)
    elif preprocessing == "standardise":
        std, mean = torch.std_mean(x, dim=0, correction=0)
        std = torch.where(x.amax(0) > x.amin(0), std, 1.0)
    else:
        std, mean = torch.std_mean(x, correction=0)
        require(f"the standard deviation of {dataset.name!r}", std.item(), std > 0,
                "> 0 for preprocessing 'standardise-globally' (all training entries are equal)")  # fmt: skip
    x_train, x_test = ((x - mean.float()) / std.float() for x in (dataset.x_train, dataset.x_test))
    return dataset._replace(x_train=x_train, x_test=x_test)


def _dataset(name: str, x_train: Array, y_train: Array, x_test: Array, y_test: Array) -> Dataset:
    """Turn arrays into tensors, and targets that are integers or words into classes counted from zero."""
    y, classes, names = np.concatenate([y_train, y_test]), None, None
    if y.dtype.kind in "iubU":
        values, y = np.unique(y, return_inverse=True)
        y, classes, names = y.astype(np.int64), len(values), tuple(map(str, values.tolist()))
    n, tensor = len(y_train), torch.from_numpy
    return Dataset(name, tensor(x_train), tensor(y[:n]), tensor(x_test), tensor(y[n:]), classes, names)


def _digits() -> Dataset:
    from sklearn import datasets  # imported where it is used: it takes a second

    x, y = datasets.load_digits(return_X_y=True)
    return from_arrays("digits", (x / 16).astype(np.float32), y, test_size=360, stratify=y)


def from_arrays(name: str, x: Array, y: Array, **split: Any) -> Dataset:
    """A data set from rows and their targets, split at random, always the same way; options of ``train_test_split``."""
    from sklearn.model_selection import train_test_split

    x_train, x_test, y_train, y_test = train_test_split(x, y, random_state=0, **split)
    return _dataset(name, x_train, y_train, x_test, y_test)


# ---- The user's own files


def _from_file(name: str) -> Dataset:
    path = Path(name).expanduser()
    readers = {".npz": _read_npz, ".csv": _read_csv}
    readers |= dict.fromkeys((".libsvm", ".svm", ".svmlight"), _read_libsvm)
    require("name", name, path.suffix.lower() in readers,
            f"'digits', 'fashion-mnist', or a path ending in {', '.join(readers)}")  # fmt: skip
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {name!r}: check the path")
    arrays = readers[path.suffix.lower()](path)
    x_name, y_name = ("x", "y") if "x" in arrays else ("x_train", "y_train")
    x_train, y_train = _checked(arrays, x_name, y_name, path)
    if "x_test" not in arrays:
        rows = len(x_train)
        require(f"the number of rows in {path}", rows, rows > 1, "at least 2, to split off a test part")
        return from_arrays(name, x_train, y_train, test_size=0.2)
    x_test, y_test = _checked(arrays, "x_test", "y_test", path)
    require(f"x_test in {path}", x_test.shape, x_test.shape[1] == x_train.shape[1],
            f"of as many features as x_train, {x_train.shape[1]}")  # fmt: skip
    require(f"y_train and y_test in {path}", (y_train.dtype.name, y_test.dtype.name),
            (y_train.dtype.kind == "f") == (y_test.dtype.kind == "f"),
            "both integers (classes) or both floating-point (regression)")  # fmt: skip
    return _dataset(name, x_train, y_train, x_test, y_test)


def _checked(arrays: dict[str, Array], x_name: str, y_name: str, path: Path) -> tuple[Array, Array]:
    """x as float32 of shape (n, p) and y of shape (n,), as int64 or float32."""
    x, y = arrays[x_name], arrays[y_name]
    for key, values in ((x_name, x), (y_name, y)):
        kinds = "biufU" if key == y_name and path.suffix.lower() == ".csv" else "biuf"
        require(f"{key} in {path}", f"dtype {values.dtype}", values.dtype.kind in kinds, "real numbers")
    require(f"{x_name} in {path}", x.shape, x.ndim >= 2 and x.size > 0,
            "of shape (n, p), with at least one row and one feature")  # fmt: skip
    require(f"{y_name} in {path}", y.shape, y.shape in ((len(x),), (len(x), 1)),
            f"of shape ({len(x)},), one target for each row of {x_name}")  # fmt: skip
    y = y.reshape(-1)
    x = _finite_float32(x, x_name, path).reshape(len(x), -1)
    if y.dtype.kind == "f":
        return x, _finite_float32(y, y_name, path)
    return x, y if y.dtype.kind == "U" else y.astype(np.int64)


def _finite_float32(values: Array, key: str, path: Path) -> Array:
    with np.errstate(over="ignore"):  # what does not fit becomes inf, which the next lines report
        single = values.astype(np.float32, order="C")
    for bad in np.argwhere(~np.isfinite(single))[:1]:
        where = ", ".join(map(str, bad))
        require(f"{key}[{where}] in {path}", float(values[tuple(bad)]), False, "a finite float32 number")
    return single


def _read_npz(path: Path) -> dict[str, Array]:
    # a bare .npy array, which is no context manager, raises AttributeError or TypeError
    zip_errors = OSError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error
    with path.open("rb") as file:
        try:
            with np.load(file, allow_pickle=False) as stored:
                arrays = {key: stored[key] for key in stored.files}
        except (ValueError, AttributeError, TypeError, *zip_errors) as error:
            raise ValueError(f"{path} cannot be read as .npz: write it by numpy.savez, without objects") from error
    valid = {"x", "y"}, {"x_train", "y_train"}, {"x_train", "y_train", "x_test", "y_test"}
    names = arrays.keys() & set().union(*valid)
    require(f"the arrays in {path}", sorted(arrays), names in valid,
            "x_train, y_train and optionally x_test, y_test; or x, y")  # fmt: skip
    return {key: arrays[key] for key in names}


def _read_csv(path: Path) -> dict[str, Array]:
    values, words, width = array("d"), list[str](), 0
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            delimiter = _delimiter([next(file, "") for _ in range(2)])
            file.seek(0)
            for row in filter(None, reader := csv.reader(file, delimiter=delimiter)):
                where = f"row {reader.line_num} of {path}"
                is_header = width == 0 and all(_number(cell) is None for cell in row)
                width = width or len(row)
                valid = f"{width}, as before" if width > 1 else "2 or more, the last the target"
                require(f"the number of columns in {where}", len(row), len(row) == width > 1, valid)
                if not is_header:
                    if words or (not values and _number(row[-1]) is None):  # the first target says what they are
                        require(f"the target in {where}", row[-1], row[-1].strip() != "", "a word, as in the first row")
                        words.append(row.pop().strip())
                    values.extend(_finite_numbers(row, where))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} cannot be read as .csv: save it as UTF-8 text with commas") from error
    if words:
        return {"x": np.array(values).reshape(len(words), -1), "y": np.array(words)}
    table = np.array(values).reshape(-1, width or 2)
    return {"x": table[:, :-1], "y": _whole_as_int(table[:, -1])}


def _delimiter(lines: list[str]) -> str:
    """The separator that splits the first lines into the same number of columns, most of them numbers."""

    def score(separator: str) -> tuple[int, int]:
        rows = [row for row in csv.reader(filter(str.strip, lines), delimiter=separator) if row]
        widths = {len(row) for row in rows}
        if len(widths) != 1 or widths == {1}:
            return 0, 0
        return sum(_number(cell.replace(",", ".")) is not None for row in rows for cell in row), len(rows[0])

    best = max(",;\t|", key=score)
    return best if score(best) > (0, 0) else ","


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def _finite_numbers(row: list[str], where: str) -> Iterator[float]:
    for column, cell in enumerate(row, start=1):
        number = _number(cell)
        if number is None or not math.isfinite(number):
            hint = ": write decimals with a point" if _number(cell.replace(",", ".")) is not None else ""
            raise ValueError(f"column {column} in {where} must be a finite number, got {cell!r}{hint}")
        yield number


def _read_libsvm(path: Path) -> dict[str, Array]:
    from sklearn import datasets

    try:
        x, y = datasets.load_svmlight_file(str(path))
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{path} cannot be read as libsvm, lines `target index:value ...`: {error}") from error
    return {"x": x.toarray(), "y": _whole_as_int(y)}


def _whole_as_int(y: Array) -> Array:
    exact = np.isfinite(y) & (np.abs(y) < 2**53) & (np.trunc(y) == y)
    return y.astype(np.int64) if exact.all() else y


# ---- Fashion-MNIST


def cache_folder() -> Path:
    """Where a fetched Fashion-MNIST is stored: ``lategrad/fashion-mnist`` in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lategrad" / "fashion-mnist"


def find_fashion_mnist() -> Path | None:
    """The first folder with all four files, unpacked or as ``.gz``, not yet verified; None without one."""
    folder = os.environ.get("LATEGRAD_DATA")
    folders = [*([Path(folder).expanduser()] if folder else []), cache_folder(), DEBIAN_FOLDER]
    return next((folder for folder in folders if all(_idx_file(folder, name) for name in FASHION_MNIST_SHA256)), None)


def _idx_file(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def read_idx(path: Path, sha256: str | None = None) -> Array:
    """Read an idx file of bytes, compressed if it ends in ``.gz``; verify its uncompressed contents if asked."""
    advice = "delete it, then run `make data`"
    try:
        contents = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is damaged: {advice}") from error
    if sha256 is not None and hashlib.sha256(contents).hexdigest() != sha256:
        raise ValueError(f"the unpacked contents of {path} do not have SHA-256 {sha256}: {advice}")
    # zero, zero, 8 for unsigned bytes, the number of dimensions; then each size as a big-endian uint32
    start = 4 + 4 * contents[3] if contents[:3] == b"\0\0\x08" and len(contents) > 3 else 4
    shape = np.frombuffer(contents[4:start], ">u4").tolist() if len(contents) >= start else []
    if not shape or len(contents) - start != math.prod(shape):
        raise ValueError(f"{path} is not an idx file of bytes, or is cut short: {advice}")
    return np.frombuffer(contents, np.uint8, offset=start).reshape(shape)


def _fashion_mnist() -> Dataset:
    folder = find_fashion_mnist() or _store_openml_copy()
    paths = (_idx_file(folder, name) or folder / name for name in FASHION_MNIST_SHA256)
    x_train, y_train, x_test, y_test = map(read_idx, paths, FASHION_MNIST_SHA256.values())
    x_train, x_test = (x.reshape(len(x), -1).astype(np.float32) / 255 for x in (x_train, x_test))
    return _dataset("fashion-mnist", x_train, y_train, x_test, y_test)


def _store_openml_copy() -> Path:
    """Fetch Fashion-MNIST from OpenML, verify it and store it in the user's cache as idx files."""
    from sklearn import datasets

    names = list(FASHION_MNIST_SHA256)
    logging.getLogger(__name__).warning("fetching Fashion-MNIST from OpenML, which takes minutes ...")
    try:
        # this parser needs no pandas; the cache would keep a second, larger copy
        found = datasets.fetch_openml(data_id=_OPENML_ID, as_frame=False, parser="liac-arff", cache=False, n_retries=1)
        pixels, labels = (np.asarray(part).astype(np.uint8) for part in (found.data, found.target))
    except (OSError, HTTPException, ValueError) as error:
        raise FileNotFoundError(
            f"Fashion-MNIST was not found. Run `make data`; or put {', '.join(names)}, unpacked or .gz, in "
            f"{cache_folder()} or in the folder that the environment variable LATEGRAD_DATA names (now "
            f"{os.environ.get('LATEGRAD_DATA')!r}); or install Debian's package dataset-fashion-mnist; or "
            f"connect to OpenML, which failed with: {error}"
        ) from error
    images = pixels.reshape(-1, 28, 28)
    parts = images[:60_000], labels[:60_000], images[60_000:], labels[60_000:]
    contents = [bytes([0, 0, 8, part.ndim]) + np.array(part.shape, ">u4").tobytes() + part.tobytes() for part in parts]
    for name, content in zip(names, contents, strict=True):
        if hashlib.sha256(content).hexdigest() != FASHION_MNIST_SHA256[name]:
            raise ValueError(f"OpenML's data set {_OPENML_ID} does not have the SHA-256 of {name}: run `make data` "
                             "instead")  # fmt: skip
    folder = cache_folder()
    for name, content in zip(names, contents, strict=True):
        with replacing(folder / name) as part:  # whole or not at all, also when two processes fetch at once
            part.write_bytes(content)
    return folder
