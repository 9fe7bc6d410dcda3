"""Ports for servers that tests start by number: chosen by the kernel and kept until the server has them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["held_port"]


@contextmanager
def held_port() -> Iterator[int]:
    """A port of 127.0.0.1 that nobody else is given within the block, and that a server can listen on all the same.

    A port that was only looked at and let go may be another test's before the server that is to have it is up. One that a
    socket holds, bound and not listening, the kernel hands to nobody who asks for any port; who asks for it by number
    gets it, if both sockets have SO_REUSEADDR, as those of servers do.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
