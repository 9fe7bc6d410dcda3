"""Addresses: their text form, a check with the reason why one cannot be bound, and a socket that reserves one."""

from __future__ import annotations

import os
import socket

from recinfer.errors import UnavailableError

__all__ = ["check_address", "hold_address", "join_address"]


def join_address(host: str, port: int | str) -> str:
    """``host:port``, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_address(host: str, port: int) -> None:
    """Bind and release the address, since the system says why it cannot be bound and gRPC does not; raises UnavailableError."""
    try:
        socket.create_server((host, port), family=_family(host)).close()
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise UnavailableError(
            f"cannot listen on {host}:{port}: {reason}; choose another port (0: a free one) or host"
        ) from None


def hold_address(host: str, port: int) -> socket.socket:
    """A socket bound to the address and not listening, with SO_REUSEPORT: workers can bind it too, and nobody else takes it.

    Raises UnavailableError.
    """
    check_address(host, port)
    held = socket.socket(_family(host), socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        held.bind((host, port))
    except OSError as error:
        held.close()
        raise UnavailableError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    return held


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
