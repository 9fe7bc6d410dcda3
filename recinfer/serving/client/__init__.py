"""Clients of a server: blocking and asyncio, of the admin service, and of TorchServe."""

from __future__ import annotations

from recinfer.lazy import lazy_names

__all__ = [
    "AdminClient",
    "AsyncInferenceClient",
    "Embeddings",
    "InferenceClient",
    "ModelDescription",
    "ScoredRow",
    "TorchServeClient",
    "request_id",
]

_CLIENT = "recinfer.serving.client.client"

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "AdminClient": "recinfer.serving.client.admin",
        "AsyncInferenceClient": _CLIENT,
        "Embeddings": _CLIENT,
        "InferenceClient": _CLIENT,
        "ModelDescription": _CLIENT,
        "ScoredRow": "recinfer.serving.client.bulk",
        "TorchServeClient": "recinfer.serving.client.torchserve",
        "request_id": "recinfer.serving.wire.tracing",
    },
)
