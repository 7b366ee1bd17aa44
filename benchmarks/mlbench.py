"""Two data sets of R's package mlbench, read without R, on which nothing was chosen, neither a rule nor a constant.

Their ``.rda`` files are looked for in the folder ``$LATEGRAD_DATA``, in the user's cache, and where Debian's
package ``r-cran-mlbench`` puts them. They are pinned by checksum.
"""

import hashlib
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lategrad.problems import SoftmaxRegression
from lategrad.problems.data import Dataset, cache_folder, from_arrays, preprocess
from reproduction.baselines.plan import SoftmaxSetting
from reproduction.text import find_file

DEBIAN_FOLDER = Path("/usr/lib/R/site-library/mlbench/data")


class File(NamedTuple):
    """A data set of the package: a data frame in a file of the same name, with a column of classes."""

    table: str
    target: str
    test_rows: int
    sha256: str


FILES = {
    "letters": File("LetterRecognition", "lettr", 4_000,
                    "967a1a3e10b548d7269cbe50182bcecd6365cc58ea07638bbc34c51f17f34f1d"),
    "satellite": File("Satellite", "classes", 2_000,
                      "29f8cf9bb1bc51b769d694c9caf740fd1c36ed6a7c87603edf5985962e330f64"),
}  # fmt: skip


def find(name: str) -> Path:
    file = FILES[name]
    cached, debian = (folder / f"{file.table}.rda" for folder in (cache_folder().parent / "mlbench", DEBIAN_FOLDER))
    path = find_file(cached) or find_file(debian)
    if path is None:
        raise FileNotFoundError(f"{cached.name}, which {name!r} is read from, was not found at {cached}: run "
                                "scripts/fetch_mlbench.sh, or install Debian's package r-cran-mlbench")  # fmt: skip
    if hashlib.sha256(path.read_bytes()).hexdigest() != file.sha256:
        raise ValueError(f"{path} does not have SHA-256 {file.sha256}: delete it, then run scripts/fetch_mlbench.sh")
    return path


def load(name: str, preprocessing: str = "none") -> Dataset:
    """A data set of mlbench, with a fixed split: 4,000 letters or 2,000 pieces of satellite images to test."""
    path, file = find(name), FILES[name]
    try:
        import rdata
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{name!r} is stored in R's format, which the package rdata reads: pip install 'lategrad[mlbench]'"
        ) from error
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Unknown encoding")  # all text in the files is ASCII
        frame = rdata.read_rda(path)[file.table]
    y = np.asarray(frame[file.target].astype(str), dtype=np.str_)
    x = frame.drop(columns=file.target).to_numpy(np.float32)
    return preprocess(from_arrays(name, x, y, test_size=file.test_rows, stratify=y), preprocessing)


@dataclass(frozen=True)
class UnseenSetting(SoftmaxSetting):
    """Softmax regression on one of them."""

    preprocessing: str = "standardise"

    def problem(self) -> SoftmaxRegression:
        return SoftmaxRegression(load(self.data, self.preprocessing), batch=self.batch)


UNSEEN = tuple(UnseenSetting(name, 20_000, 16) for name in FILES)
