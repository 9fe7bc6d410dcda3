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

    A free port that is only looked up may belong to another test before the server binds it. The kernel does not assign a
    port that a socket has bound, without listening, to a bind of port 0 or to an outgoing connection. A bind of that number
    succeeds if both sockets have SO_REUSEADDR, as those of servers do, or SO_REUSEPORT, as those of workers.
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
