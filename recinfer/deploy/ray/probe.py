"""Reads a server's state and load from its metrics port."""

from __future__ import annotations

import http.client
import json
import ssl
import time
from contextlib import closing
from typing import Any

from recinfer.deploy.ray.records import Server
from recinfer.deploy.ray.spec import Deployment

__all__ = ["Prober"]

_TIMEOUT_S = 2.0
_UNCOUNTED = frozenset({"State", "Prepare", "ListModels", "Load", "Unload", "SetDefault"})  # a deployment's own calls


class Prober:
    """Reads the metrics of one process, and keeps its counters between reads.

    Raises:
        ConfigError: a TLS file is missing on this node.
    """

    def __init__(self, spec: Deployment) -> None:
        self._tls = spec.tls
        self._context = None if spec.tls is None else spec.tls.context()
        self._headers = {} if spec.token is None else {"Authorization": f"Bearer {spec.token}"}
        self._counts: tuple[float, int, float] | None = None

    def look(self, server: Server) -> bool:
        """Write what the metrics say into ``server``; returns whether it takes requests.

        Raises:
            OSError: the server does not respond; ``ssl`` errors are among them.
        """
        name = "" if self._tls is None else self._tls.name or server.host
        with closing(_Connection(server.host, server.metrics_port, self._context, name)) as connection:
            try:
                connection.request("GET", "/status.json", headers=self._headers)
                status: dict[str, Any] = json.load(connection.getresponse())
                models = (status["held"] or {}).get("versions") if status.get("held") else status["models"]
            except (http.client.HTTPException, ValueError, LookupError) as error:
                raise OSError(f"its metrics port responds with something else: {error}") from None
        used = [model["version"] for model in models or () if model.get("weight", 1)]
        server.version = ", ".join(dict.fromkeys(used)) or server.version
        server.busy = float((status.get("held") or {}).get("busy", 0.0))
        server.calls = {
            replica["address"]: int(replica["outstanding"])
            for replica in (status.get("shards") or {}).get("replicas", ())
        }
        server.rate, server.inside = self._since_last(status)
        return bool(status["ready"])

    def _since_last(self, status: dict[str, Any]) -> tuple[float, float]:
        """Requests per second, and the seconds per second that completed requests spent in the server."""
        count = sum(item["count"] for item in status["requests"] if item["method"] not in _UNCOUNTED)
        seconds = sum(state["total"] for method, state in status["latency"].items() if method not in _UNCOUNTED)
        now = time.monotonic()
        before, last_count, last_seconds = self._counts or (now, count, seconds)
        self._counts = now, count, seconds
        if now <= before:
            return 0.0, 0.0
        return (count - last_count) / (now - before), (seconds - last_seconds) / (now - before)


class _Connection(http.client.HTTPConnection):
    """A connection to a server's metrics, over TLS with a context; ``name`` is the expected name in the certificate."""

    def __init__(self, host: str, port: int, context: ssl.SSLContext | None, name: str) -> None:
        super().__init__(host, port, timeout=_TIMEOUT_S)
        self._through, self._name = context, name

    def connect(self) -> None:
        super().connect()
        if self._through is not None:
            self.sock = self._through.wrap_socket(self.sock, server_hostname=self._name)
