"""A Ray of a run's own on this machine: it listens on the loopback address only, and nothing of it stays.

Ray itself can be told neither: it would listen on all addresses of the machine, and leave its folder behind.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import ray
from ray._private import ray_constants

from lategrad.serve.engines.ray import cleanup as ray_cleanup
from lategrad.serve.engines.ray.session import session

_LOOPBACK = "127.0.0.1"
_START = 300.0  # seconds; it takes a few, where the machine is not busy
_LAST_START = 10.0  # seconds, when the run is to end: what has started is ended in an orderly way
_CLEAN_UP = 15.0  # seconds


@contextlib.contextmanager
def own_ray(cpus: int, is_stopping: Callable[[], bool]) -> Iterator[None]:
    """Start a Ray, and end it.

    Args:
        cpus: what it is to pretend to have.
        is_stopping: whether it is not to be waited for any more.
    """

    def start() -> None:
        with _marked(folder), _on_loopback():
            ray.init(address="local", num_cpus=cpus, include_dashboard=False, log_to_driver=False,
                     logging_level="error", _temp_dir=folder)  # fmt: skip

    with _disposable_folder() as folder:
        protect_token()
        with session(start, lambda: _LAST_START if is_stopping() else _START, "Ray has not started on this machine"):
            if (address := ray.util.get_node_ip_address()) != _LOOPBACK:
                warnings.warn(f"this version of Ray, {ray.__version__}, listens on {address}, not on the loopback "
                              "address alone", stacklevel=3)  # fmt: skip
            yield


@contextlib.contextmanager
def _disposable_folder() -> Iterator[str]:
    """A temporary folder that a process of its own removes, also if this one is killed."""
    folder = tempfile.mkdtemp(prefix="lategrad-ray-", dir=os.environ.get("RAY_TMPDIR"))
    cleaner = subprocess.Popen(
        [sys.executable, "-I", "-S", ray_cleanup.__file__, folder],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is not for it
    )  # fmt: skip
    assert cleaner.stdin is not None
    try:
        yield folder
    finally:
        cleaner.stdin.close()
        try:
            cleaner.wait(_CLEAN_UP)
        except subprocess.TimeoutExpired:
            warnings.warn(f"Ray's folder {folder!r} is not removed yet", stacklevel=3)


@contextlib.contextmanager
def _marked(folder: str) -> Iterator[None]:
    """All processes that start meanwhile, and their descendants, can be told by their environment."""
    before = os.environ.get(ray_cleanup.MARK)
    os.environ[ray_cleanup.MARK] = folder
    try:
        yield
    finally:
        os.environ.pop(ray_cleanup.MARK)
        if before is not None:
            os.environ[ray_cleanup.MARK] = before


@contextlib.contextmanager
def _on_loopback() -> Iterator[None]:
    """What starts meanwhile takes the loopback address for this machine's, and listens there alone.

    As Ray does by itself where it supports no clusters; ``_node_ip_address="127.0.0.1"`` would be replaced.
    """
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def protect_token() -> None:
    """See that the token that Ray asks of whoever connects can be read by this user alone.

    Ray would write it for all to read. Where it comes from a variable, or is not asked for, there is nothing to do.
    """
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token" or "RAY_AUTH_TOKEN" in os.environ:
        return
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        found = path.stat()
        if found.st_uid == os.getuid() and stat.S_IMODE(found.st_mode) & 0o077:
            path.chmod(0o600)
        return
    with open(descriptor, "w") as file:
        file.write(secrets.token_hex(32))
