"""Addresses: their text form, the meaning of a host for all ports of a server, and sockets that listen on or reserve an
address.

A host is an IP address, in brackets or not, or a name. ``::`` is all addresses of both families, ``0.0.0.0`` all of IPv4 alone, any
other address itself; a name is its first IPv4 address, or its first IPv6 address where it has no other.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import time

from recinfer.errors import UnavailableError

__all__ = ["check_address", "grpc_address", "hold_address", "join_address", "listening_socket", "plain_host"]

_ALL, _ALL_IPV4 = "::", "0.0.0.0"
_TURN_S, _LOOK_S = 2.0, 0.005  # a turn takes less than 10 ms


def plain_host(host: str) -> str:
    """``host`` without the brackets that URLs have around an IPv6 address."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def join_address(host: str, port: int | str) -> str:
    """``host:port``, an IPv6 address in brackets."""
    host = plain_host(host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listening_socket(host: str, port: int, *, share_port: bool = False) -> socket.socket:
    """Open a socket that listens on the addresses that ``host`` stands for.

    Args:
        port: 0 takes a free port.
        share_port: other processes may listen on the port too (SO_REUSEPORT).

    Raises:
        UnavailableError: the address cannot be bound; the message has the system's reason.
    """
    try:
        address = _address_of(host)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server(
            (address, port), family=family, reuse_port=share_port, dualstack_ipv6=address == _ALL
        )
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise UnavailableError(
            f"cannot listen on {join_address(host, port)}: {reason}; choose another port (0: a free one) or host"
        ) from None


def check_address(host: str, port: int) -> None:
    """Bind and release the address, since the system says why it cannot be bound and gRPC does not; raises UnavailableError."""
    listening_socket(host, port).close()


def hold_address(host: str, port: int) -> socket.socket:
    """Bind a socket to the address without listening, with SO_REUSEPORT: workers can bind the address, and no other program.

    Raises UnavailableError.
    """
    check_address(host, port)
    address = _address_of(host)
    held = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if held.family == socket.AF_INET6:
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(address != _ALL))
        held.bind((address, port))
    except OSError as error:
        held.close()
        raise UnavailableError(f"cannot listen on {join_address(host, port)}: {error.strerror}") from None
    return held


def grpc_address(host: str, port: int) -> tuple[str, socket.socket | None]:
    """The address to pass to gRPC so that it listens on ``host``, and a socket to close once gRPC listens, or None.

    gRPC treats 0.0.0.0 as all addresses of both families, and falls back to IPv4 alone where it cannot bind the IPv6
    addresses: the socket holds these. Workers that start together take turns, each with its own socket: with a socket
    of another process, the
    kernel would bind both families for the second worker, since its first check covers the last socket with SO_REUSEPORT alone.

    Raises:
        UnavailableError: no address has that name.
    """
    try:
        address = _address_of(host)
    except OSError as error:
        raise UnavailableError(f"cannot listen on {join_address(host, port)}: {error.strerror or error}") from None
    if address != _ALL_IPV4:
        return join_address(address, port), None
    if not port:
        with listening_socket(address, 0) as free:
            port = int(free.getsockname()[1])
    try:
        taken = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
    except OSError:  # this machine has no IPv6
        return join_address(address, port), None
    taken.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    end = time.monotonic() + _TURN_S
    while time.monotonic() < end:
        try:
            taken.bind((_ALL, port))
            break
        except OSError:  # another worker has its turn, or a server of IPv6 alone uses the port
            time.sleep(_LOOK_S)
    return join_address(address, port), taken


def _address_of(host: str) -> str:
    """The address that ``host`` means; raises OSError."""
    host = plain_host(host)
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        found = socket.getaddrinfo(host or None, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        return str(min(found, key=lambda entry: entry[0] != socket.AF_INET)[4][0])
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)
