"""Which Ray a run uses (that of its process, a cluster at an address, or one of its own), and calls that time out.

A Ray of a run's own listens on the loopback address only, and leaves nothing behind. Ray itself has no option for
either: it would listen on all addresses of the machine and keep its folder.
"""

import atexit
import contextlib
import logging
import os
import secrets
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray._private import ray_constants
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayError, RayTaskError

from lategrad.serve.engines import reaper
from lategrad.support.threads import OutOfTimeError, limited, run_in_thread

_START_TIMEOUT = 300.0  # seconds; it takes a few, where the machine is not busy
_STOPPING_TIMEOUT = 10.0  # seconds, when the run is to stop: what has started is ended in an orderly way
CONNECT_TIMEOUT = 60.0  # seconds
_PROBE_TIMEOUT = 10.0  # seconds of them, to see whether anything listens
_SHUTDOWN_TIMEOUT = 20.0  # seconds; it takes one or two, where the machine is not busy and Ray does not hang
_CLEAN_UP_TIMEOUT = 15.0  # seconds
_ANSWER_TIMEOUT = 10.0  # seconds for an answer of an actor, and more where vectors are long
_ENTRIES_PER_SECOND = 1e6  # of a vector, on a slow network
_LAST_ANSWER_TIMEOUT = 5.0  # seconds for an answer when the run is to stop, and more where vectors are long
_LAST_ENTRIES_PER_SECOND = 1e7
_POLL_INTERVAL = 0.2  # seconds after which a wait for an answer checks whether the run is to stop
_LOOPBACK = "127.0.0.1"
_REMEDY = "see that the cluster runs (`ray status`) and that address=... is what `ray start --head` printed"

Returned = TypeVar("Returned")


@contextlib.contextmanager
def connected(address: str | None, cpus: int, is_stopping: Callable[[], bool]) -> Iterator[bool]:
    """Connect to Ray: reuse the connection of this process, join the cluster at ``address``, or start a Ray of its own.

    The latter claims to have ``cpus`` CPUs, so that there is room for all workers. Yields whether the connection is
    this run's own, so that Ray ends the run's actors with it.
    """
    if ray.is_initialized():
        yield False
        return
    if address is None:
        with own_ray(cpus, is_stopping):
            yield True
        return

    def join() -> None:
        _require_listener(address)
        ray.init(address=address, log_to_driver=False, logging_level="error")

    with contextlib.ExitStack() as stack:
        what = f"there was no answer from Ray at {address!r}"
        try:
            stack.enter_context(_session(join, lambda: 0.0 if is_stopping() else CONNECT_TIMEOUT, what))
        except OutOfTimeError as error:
            raise OutOfTimeError(f"{error}: {_REMEDY}") from None
        yield True


def _require_listener(address: str) -> None:
    """Refuse a host and a port at once where nothing listens: Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return
    host = host.strip("[]")  # Ray replaces the loopback address by the machine's own
    hosts = [host, ray.util.get_node_ip_address()] if host in ("localhost", _LOOPBACK, "::1") else [host]
    problem: Exception | None = None
    for one in hosts:
        try:
            socket.create_connection((one, int(port)), timeout=_PROBE_TIMEOUT).close()
        except (OSError, OverflowError) as error:  # the latter if the port is too large
            problem = error
        else:
            return
    raise ConnectionError(f"nothing listens at the address of Ray, {address!r} ({problem}): {_REMEDY}")


@contextlib.contextmanager
def _session(init: Callable[[], object], seconds: Callable[[], float], what: str) -> Iterator[None]:
    """Be connected; :class:`OutOfTimeError` if that takes longer than ``seconds``.

    One thread connects and disconnects: the system kills processes that Ray starts when the thread ends that started
    them. As it is not the main thread, Ray leaves SIGTERM to the run.
    """
    connected, over = threading.Event(), threading.Event()

    def live() -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(ray.shutdown)  # also if connecting fails half-way
            _quietly(init)
            connected.set()
            over.wait()

    ended = run_in_thread(live, "lategrad-ray")
    ended.add_done_callback(lambda _: connected.set())
    try:
        limited(connected.wait, seconds, what)
        if ended.done():
            ended.result()  # raises why it could not connect
        yield
    finally:
        over.set()  # also if it is not connected yet
        if connected.is_set():
            try:
                limited(lambda: ended.exception(), _SHUTDOWN_TIMEOUT, "Ray has not closed the connection")
            except OutOfTimeError as error:
                atexit.unregister(ray.shutdown)  # it would hang again, without a limit
                warnings.warn(str(error), stacklevel=4)


def _quietly(init: Callable[[], object]) -> None:
    """Call it without Ray's warning that SIGTERM is left to others."""
    logger = logging.getLogger("ray._private.worker")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        init()
    finally:
        logger.setLevel(before)


@contextlib.contextmanager
def own_ray(cpus: int, is_stopping: Callable[[], bool]) -> Iterator[None]:
    """Start a Ray with ``cpus`` CPUs on this machine, and end it."""

    def start() -> None:
        # The mark is inherited by all processes of this Ray. Where Ray supports no clusters, it listens on the loopback
        # address alone; it would replace _node_ip_address="127.0.0.1".
        no_clusters = _replaced(vars(ray_constants), "ENABLE_RAY_CLUSTER", False)
        with _replaced(os.environ, reaper.MARK, folder), no_clusters:
            ray.init(address="local", num_cpus=cpus, include_dashboard=False, log_to_driver=False,
                     logging_level="error", _temp_dir=folder)  # fmt: skip

    with _disposable_folder() as folder:
        protect_token()
        limit = lambda: _STOPPING_TIMEOUT if is_stopping() else _START_TIMEOUT  # noqa: E731
        with _session(start, limit, "Ray has not started on this machine"):
            if (address := ray.util.get_node_ip_address()) != _LOOPBACK:
                warnings.warn(f"this version of Ray, {ray.__version__}, listens on {address}, not on the loopback "
                              "address alone", stacklevel=3)  # fmt: skip
            yield


@contextlib.contextmanager
def _disposable_folder() -> Iterator[str]:
    """A temporary folder that a process of its own removes, also if this one is killed."""
    folder = tempfile.mkdtemp(prefix="lategrad-ray-", dir=os.environ.get("RAY_TMPDIR"))
    cleaner = subprocess.Popen(
        [sys.executable, "-I", "-S", reaper.__file__, folder],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is not for it
    )  # fmt: skip
    assert cleaner.stdin is not None
    try:
        yield folder
    finally:
        cleaner.stdin.close()
        try:
            cleaner.wait(_CLEAN_UP_TIMEOUT)
        except subprocess.TimeoutExpired:
            warnings.warn(f"Ray's folder {folder!r} is not removed yet", stacklevel=3)


@contextlib.contextmanager
def _replaced(names: MutableMapping[str, Any], name: str, value: object) -> Iterator[None]:
    before = names.get(name)
    names[name] = value
    try:
        yield
    finally:
        del names[name]
        if before is not None:
            names[name] = before


def protect_token() -> None:
    """Create the token that Ray asks of clients so that only this user can read it; Ray would let all users."""
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token" or "RAY_AUTH_TOKEN" in os.environ:
        return  # it is not used, or not in a file
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


class NoAnswerError(OutOfTimeError):
    """An actor, or its answer, did not arrive: it may be back soon."""


class Calls:
    """Calls into Ray that time out, later where answers hold vectors of many entries, sooner when the run stops."""

    def __init__(self, dim: int, is_stopping: Callable[[], bool]) -> None:
        self._timeout = _ANSWER_TIMEOUT + dim / _ENTRIES_PER_SECOND
        self._last_timeout = _LAST_ANSWER_TIMEOUT + dim / _LAST_ENTRIES_PER_SECOND
        self._is_stopping = is_stopping

    def limited(self, call: Callable[[], Returned], seconds: float = 0.0,
                undo: Callable[[Returned], object] | None = None) -> Returned:  # fmt: skip
        """What a call returns within ``seconds``, by default those of an answer."""
        seconds = seconds or self._timeout
        limit = lambda: min(seconds, self._last_timeout) if self._is_stopping() else seconds  # noqa: E731
        return limited(call, limit, "Ray did not answer", undo=undo)

    def answer(self, reference: Any, seconds: float = 0.0) -> Any:
        """What an actor answers, or raises, within ``seconds`` and at least those of an answer."""
        end = time.monotonic() + max(seconds, self._timeout)
        last_end = time.monotonic() + self._last_timeout
        while not self.ready([reference], _POLL_INTERVAL):
            if time.monotonic() > (last_end if self._is_stopping() else end):
                raise NoAnswerError("it does not answer")
        try:
            return self.read(reference)
        except RayTaskError:
            raise
        except RayError as error:
            raise NoAnswerError(why_ended(error)) from None

    def ready(self, references: list[Any], timeout: float) -> list[Any]:
        """The first of some answers that exists within ``timeout`` seconds, if any; it may be on another machine."""
        return list(self.limited(lambda: ray.wait(references, num_returns=1, timeout=timeout, fetch_local=False))[0])

    def read(self, reference: Any) -> Any:
        return self.limited(lambda: ray.get(reference, timeout=self._timeout))


def why_ended(error: RayError) -> str:
    """Why an actor or its work ended, in one line."""
    if isinstance(error, GetTimeoutError):
        return "it does not answer"
    if isinstance(error, ActorUnavailableError):
        return "it cannot be reached"
    if isinstance(error, RayTaskError):
        return f"{type(error.cause).__name__}: {error.cause}"
    text = str(error)
    if "creation task" in text or "Error" in text.splitlines()[-1]:
        return text.strip().splitlines()[-1].strip()
    return "its machine is gone" if "its node has died" in text else "its process ended"
