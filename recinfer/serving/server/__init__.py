"""The gRPC and HTTP server: connections, admission, health, security; the engine answers the requests."""

from __future__ import annotations

from recinfer.lazy import lazy_names

__all__ = ["Server", "serve"]

__getattr__, __dir__ = lazy_names(
    __name__, {"Server": "recinfer.serving.server.server", "serve": "recinfer.serving.server.run"}
)
