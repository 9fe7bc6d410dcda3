"""Says why an address cannot be listened on, before gRPC fails without a reason."""

from __future__ import annotations

import os
import socket

from recinfer.errors import UnavailableError

__all__ = ["check_address"]


def check_address(host: str, port: int) -> None:
    """Bind and release the address: the system says why it cannot be had, gRPC does not; raises UnavailableError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise UnavailableError(
            f"cannot listen on {host}:{port}: {reason}; choose another port (0: a free one) or host"
        ) from None
