"""Probes a server: its health and its metrics."""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from recinfer.deploy.ray.members import Member
from recinfer.deploy.ray.tls import Tls

__all__ = ["Probe", "Prober"]

_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
_TIMEOUT_S = 2.0
_THREADS = 16
_LAST = "last error: "  # in gRPC's message, after a text about all addresses
_UNCOUNTED = frozenset({"State", "Prepare", "ListModels", "Load", "Unload", "SetDefault"})  # the control's own calls


@dataclass(frozen=True)
class Probe:
    """The result of a probe.

    Attributes:
        answers: whether its health service responds; ``serving``: whether it is ready.
        why: gRPC's reason for a failed call; empty without TLS, where it only means that the server does not listen
            yet.
        status: as recinfer.serving.server.telemetry.metrics has it; empty if it was not available.
        rate: requests per second since the last probe.
        inside: average number of requests in the server (queued or running) since the last probe: the seconds that the
            completed requests spent in it, divided by the elapsed seconds.
    """

    answers: bool = False
    serving: bool = False
    status: Mapping[str, Any] = field(default_factory=dict)
    rate: float = 0.0
    inside: float = 0.0
    why: str = ""

    @property
    def version(self) -> str:
        """The served version or versions."""
        if self.status.get("held"):
            return ", ".join(dict.fromkeys(version["version"] for version in self.status["held"]["versions"]))
        return ", ".join(model["version"] for model in self.status.get("models", []) if model["weight"])

    @property
    def outstanding(self) -> dict[str, int]:
        """Open calls of a ranker to shard servers, by their address."""
        found = (self.status.get("shards") or {}).get("replicas", [])
        return {replica["address"]: int(replica["outstanding"]) for replica in found}


class Prober:
    """Keeps a connection to each server's health service, and the counters of its last probe.

    Args:
        token: bearer token of the servers; None for none.
        tls: TLS settings of the servers; None for none.
    """

    def __init__(self, token: str | None, tls: Tls | None = None) -> None:
        self._tls = tls
        self._credentials: grpc.ChannelCredentials | None = None
        self._context: ssl.SSLContext | None = None
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._channels: dict[str, grpc.Channel] = {}
        self._counts: dict[str, tuple[float, int, float]] = {}
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="recinfer-probe")

    def look(self, members: list[Member]) -> dict[str, Probe]:
        """Probe all members concurrently; returns results by name, without members that have no port.

        Raises:
            ConfigError: a TLS file is missing on this node. No server's state is known then, so none may be treated as
                failed.
        """
        if self._tls is not None and self._context is None:
            self._credentials, self._context = self._tls.credentials(), self._tls.context()
        there = [member for member in members if member.port]
        known = {member.address for member in there}
        for address in [address for address in self._channels if address not in known]:
            self._forget(address)
        return dict(zip([member.name for member in there], self._pool.map(self._one, there)))

    def close(self) -> None:
        """Close all connections."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for address in list(self._channels):
            self._forget(address)

    def _one(self, member: Member) -> Probe:
        code, why = self._health(member.address)
        status = self._status(member) if code is not None else {}
        rate, inside = self._since_last(f"{member.name}/{member.life}", status)
        return Probe(
            answers=code is not None,
            serving=code == health_pb2.HealthCheckResponse.SERVING,
            status=status,
            rate=rate,
            inside=inside,
            why=why,
        )

    def _health(self, address: str) -> tuple[int | None, str]:
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = self._channel(address)
        try:
            call = channel.unary_unary(f"/{_HEALTH}/Check")
            answer = call(health_pb2.HealthCheckRequest().SerializeToString(), timeout=_TIMEOUT_S)
            return int(health_pb2.HealthCheckResponse.FromString(answer).status), ""
        except grpc.RpcError as error:
            self._forget(address)  # so that a server that restarts there does not wait for this channel's backoff
            if self._tls is None:
                return None, ""
            return None, f"its health service does not respond over TLS: {(error.details() or '').rpartition(_LAST)[2]}"

    def _channel(self, address: str) -> grpc.Channel:
        options: list[tuple[str, int | str]] = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
        if self._tls is None:
            return grpc.insecure_channel(address, options=options)
        if self._tls.name is not None:
            options.append(("grpc.ssl_target_name_override", self._tls.name))
        return grpc.secure_channel(address, self._credentials, options=options)

    def _forget(self, address: str) -> None:
        channel = self._channels.pop(address, None)
        if channel is not None:
            channel.close()

    def _status(self, member: Member) -> dict[str, Any]:
        # Straight to the server: the environment's proxy is not for servers of the same network.
        name = "" if self._tls is None else self._tls.name or member.host
        connection = _Connection(member.host, member.metrics_port, self._context, name)
        with suppress(OSError, ValueError, http.client.HTTPException), closing(connection):
            connection.request("GET", "/status.json", headers=self._headers)
            answer = connection.getresponse()
            if answer.status == http.client.OK:
                found: dict[str, Any] = json.load(answer)
                return found
        return {}

    def _since_last(self, key: str, status: Mapping[str, Any]) -> tuple[float, float]:
        """Requests per second, and seconds spent in them per second."""
        if not status:
            return 0.0, 0.0
        count = sum(item["count"] for item in status["requests"] if item["method"] not in _UNCOUNTED)
        seconds = sum(state["total"] for method, state in status["latency"].items() if method not in _UNCOUNTED)
        now = time.monotonic()
        before, last_count, last_seconds = self._counts.get(key, (now, count, seconds))
        self._counts[key] = now, count, seconds
        if now <= before:
            return 0.0, 0.0
        return max(0, count - last_count) / (now - before), max(0.0, seconds - last_seconds) / (now - before)


class _Connection(http.client.HTTPConnection):
    """A connection to a server's metrics, over TLS with a context; ``name`` is the expected name in the certificate."""

    def __init__(self, host: str, port: int, context: ssl.SSLContext | None, name: str) -> None:
        super().__init__(host, port, timeout=_TIMEOUT_S)
        self._through, self._name = context, name

    def connect(self) -> None:
        super().connect()
        if self._through is not None:
            self.sock = self._through.wrap_socket(self.sock, server_hostname=self._name)
