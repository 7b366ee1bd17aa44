"""Which Ray a run is on: that of its process, a cluster at an address, or one of its own."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator

import ray

from lategrad.serve.engines.ray.own_ray import own_ray
from lategrad.serve.engines.ray.session import session
from lategrad.support.timeouts import OutOfTimeError

_CONNECT = 60.0  # seconds
_KNOCK = 10.0  # seconds of them, to see whether anybody listens
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@contextlib.contextmanager
def connected(address: str | None, cpus: int, is_stopping: Callable[[], bool]) -> Iterator[bool]:
    """A connection to Ray: the one that is there, or one to a running cluster, or a Ray of this run's own.

    Yields whether it is this run's own, so that Ray ends the run's actors with it.

    Args:
        address: of a cluster; None for this process's connection, and for a Ray of our own if it has none.
        cpus: what a Ray of our own is to pretend to have, so that there is room for all workers.
        is_stopping: whether it is not to be waited for any more.
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
            stack.enter_context(session(join, lambda: 0.0 if is_stopping() else _CONNECT, what))
        except OutOfTimeError as error:
            raise OutOfTimeError(f"{error}: {_REMEDY}") from None
        yield True


_REMEDY = "see that the cluster runs (`ray status`) and that address=... is what `ray start --head` printed"


def _require_listener(address: str) -> None:
    """Refuse an address at once where nobody listens: Ray itself would try for minutes.

    Only an address with a host and a port is looked at. Ray takes this machine's own address for the loopback's.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return
    host = host.strip("[]")
    hosts = [host, ray.util.get_node_ip_address()] if host in _LOOPBACK else [host]
    problem: Exception | None = None
    for one in hosts:
        try:
            socket.create_connection((one, int(port)), timeout=_KNOCK).close()
        except (OSError, OverflowError) as error:  # the latter of a port that is none
            problem = error
        else:
            return
    raise ConnectionError(f"nobody listens at the address of Ray, {address!r} ({problem}): {_REMEDY}")
