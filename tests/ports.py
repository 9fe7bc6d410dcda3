"""Ports for servers that tests start by number: chosen by the kernel and kept until the server has them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["free_port", "held_port"]

_held: list[socket.socket] = []


@contextmanager
def held_port() -> Iterator[int]:
    """A port of 127.0.0.1 that is reserved within the block, and on which a server can still listen.

    A port that was only looked at and let go may be another test's before the server that is to have it is up. One that a
    socket holds, bound and not listening, the kernel hands to nobody who asks for any port, nor to a connection that goes
    out; who asks for it by number gets it, if both sockets have SO_REUSEADDR, as those of servers do, or SO_REUSEPORT, as
    those of workers.
    """
    with _hold("127.0.0.1") as held:
        yield held.getsockname()[1]


def free_port(host: str = "127.0.0.1") -> int:
    """As ``held_port``, until this process ends: for servers that are started again where they were."""
    _held.append(_hold(host))
    return int(_held[-1].getsockname()[1])


def _hold(host: str) -> socket.socket:
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind((host, 0))
    return held
