"""Looks at a server from outside: does it take requests, and what has it counted."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from recinfer.deploy.ray.members import Member

__all__ = ["Probe", "Prober"]

_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
_TIMEOUT_S = 2.0
_THREADS = 16
_UNCOUNTED = frozenset({"State", "Prepare", "ListModels", "Load", "Unload", "SetDefault"})  # the control's own calls


@dataclass(frozen=True)
class Probe:
    """What a look found.

    Attributes:
        answers: its health service answered; ``serving``: and that it takes requests.
        status: as recinfer.serving.metrics has it; empty when it was not to be had.
        rate: requests a second since the last look.
        inside: requests that were in the server at a time, on average since the last look (waiting or at work): the
            seconds that those spent in it which were answered since then, by the seconds that have passed.
    """

    answers: bool = False
    serving: bool = False
    status: Mapping[str, Any] = field(default_factory=dict)
    rate: float = 0.0
    inside: float = 0.0

    @property
    def version(self) -> str:
        """The versions that it serves."""
        if self.status.get("held"):
            return ", ".join(dict.fromkeys(version["version"] for version in self.status["held"]["versions"]))
        return ", ".join(model["version"] for model in self.status.get("models", []) if model["weight"])

    @property
    def outstanding(self) -> dict[str, int]:
        """A ranker's calls that shard servers have not answered, by address."""
        found = (self.status.get("shards") or {}).get("replicas", [])
        return {replica["address"]: int(replica["outstanding"]) for replica in found}


class Prober:
    """Keeps a connection to each server's health, and what it had counted when it was last looked at."""

    def __init__(self, token: str | None) -> None:
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._channels: dict[str, grpc.Channel] = {}
        self._counts: dict[str, tuple[float, int, float]] = {}
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="recinfer-probe")
        # A proxy of the environment has nothing to do with servers next door.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def look(self, members: list[Member]) -> dict[str, Probe]:
        """By name, all at a time; members without a port are left out."""
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
        code = self._health(member.address)
        status = self._status(member) if code is not None else {}
        rate, inside = self._since_last(f"{member.name}/{member.life}", status)
        return Probe(
            answers=code is not None,
            serving=code == health_pb2.HealthCheckResponse.SERVING,
            status=status,
            rate=rate,
            inside=inside,
        )

    def _health(self, address: str) -> int | None:
        channel = self._channels.get(address)
        if channel is None:
            options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
            channel = self._channels[address] = grpc.insecure_channel(address, options=options)
        try:
            call = channel.unary_unary(f"/{_HEALTH}/Check")
            answer = call(health_pb2.HealthCheckRequest().SerializeToString(), timeout=_TIMEOUT_S)
            return int(health_pb2.HealthCheckResponse.FromString(answer).status)
        except grpc.RpcError:
            self._forget(address)  # a server that starts again there is not to wait for this one's patience
            return None

    def _forget(self, address: str) -> None:
        channel = self._channels.pop(address, None)
        if channel is not None:
            channel.close()

    def _status(self, member: Member) -> dict[str, Any]:
        host = f"[{member.host}]" if ":" in member.host else member.host
        request = urllib.request.Request(f"http://{host}:{member.metrics_port}/status.json", headers=self._headers)
        with suppress(OSError, ValueError), self._opener.open(request, timeout=_TIMEOUT_S) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
        return {}

    def _since_last(self, key: str, status: Mapping[str, Any]) -> tuple[float, float]:
        """Requests a second, and seconds spent in them a second."""
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
