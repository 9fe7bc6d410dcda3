"""The only import of grpcio's binding of gRPC's core, ``grpc._cython.cygrpc``, and the names of it that recinfer uses.

grpcio's own synchronous server (``grpc/_server.py``) is made of these objects. The objects are no public interface. So
pyproject.toml caps grpcio at the releases that were tried, and tests/serving/test_grpc_binding.py is the contract: the test
shows how each object is called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import grpc
from grpc._cython import cygrpc

__all__ = ["PARTS", "check_binding", "cygrpc"]

PARTS: Mapping[str, Sequence[str]] = {
    "Server": (
        "register_completion_queue",
        "add_http2_port",
        "start",
        "request_call",
        "shutdown",
        "cancel_all_calls",
        "destroy",
    ),
    "CompletionQueue": ("poll",),
    "CompletionType": ("queue_timeout",),
    "StatusCode": tuple(code.name.lower() for code in grpc.StatusCode),
    "Call": ("start_server_batch", "cancel", "peer"),
    "auth_context": (),
    "SendInitialMetadataOperation": (),
    "SendMessageOperation": (),
    "SendStatusFromServerOperation": (),
    "ReceiveMessageOperation": ("message",),
    "ReceiveCloseOnServerOperation": ("cancelled",),
}
"""Classes and functions of the binding, with the attributes that each class must have."""


def check_binding(binding: Any, version: str) -> None:
    """Raise ImportError, which names the missing parts, if the installed grpcio lacks parts of the binding."""
    missing = [kind for kind in PARTS if not hasattr(binding, kind)]
    missing += [
        f"{kind}.{n}" for kind, names in PARTS.items() for n in names if not hasattr(getattr(binding, kind, None), n)
    ]
    if missing:
        raise ImportError(
            f"grpcio {version} lacks {', '.join(missing[:5])} of grpc._cython.cygrpc, which recinfer's server is made of; "
            "install a release that recinfer was tried with: pip install 'grpcio>=1.81.1,<1.86'"
        )


check_binding(cygrpc, grpc.__version__)
