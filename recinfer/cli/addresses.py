"""The lines that a server prints when it starts: what it serves, and at which addresses."""

from __future__ import annotations

from collections.abc import Sequence

from recinfer.cli.console import Output, styled
from recinfer.serving.server.http_protocols import HTTP_PROTOCOLS
from recinfer.serving.wire.address import join_address

__all__ = ["show_addresses"]


def show_addresses(
    output: Output,
    what: str,
    host: str,
    port: int,
    *,
    http_port: int | None = None,
    metrics_port: int | None = None,
    unix_socket: str | None = None,
    tls: bool = False,
    engines: Sequence[str] = (),
) -> None:
    """Print the served models and the addresses: one line per port with an address to copy, then the lines of
    ``engines``.

    Args:
        what: the models, or ranks.
        tls: whether the ports speak TLS.
        engines: a line per model that names the engine of its dense part.
    """
    secure = "s" if tls else ""
    output.show(styled("green", "serving", f" {what} on {join_address(host, port)}  (Ctrl-C stops)"))
    if unix_socket is not None:
        output.show(f"gRPC also on unix:{unix_socket}")
    if http_port is not None:
        names = ", ".join([*(known.name for known in HTTP_PROTOCOLS), "/docs"])
        output.show(f"REST ({names}) over HTTP{secure.upper()} on {join_address(host, http_port)}")
    if metrics_port is not None:
        output.show(f"status page on http{secure}://{join_address(host, metrics_port)}/")
    for engine in engines:
        output.show(engine)
