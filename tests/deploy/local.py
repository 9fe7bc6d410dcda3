"""Agents without a cluster: records in a dictionary, servers as children of this process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from recinfer.deploy.ray.records import Records, Saved, Store
from recinfer.deploy.ray.replica import Agent
from recinfer.deploy.ray.spec import Deployment
from recinfer.deploy.ray.status import status_of


def until(condition: Callable[[], Any], seconds: float = 240.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "not within that time"
        time.sleep(0.05)


class LocalStore(Store):
    """Values in a dictionary. ``alive``: names of the actors that have not ended."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.alive: set[str] = set()

    def put(self, key: str, value: bytes, overwrite: bool) -> bool:
        before = self.values.get(key)
        if before is None or overwrite:
            self.values[key] = value
        return before is None

    def get(self, key: str) -> bytes | None:
        return self.values.get(key)

    def delete(self, key: str) -> bool:
        return self.values.pop(key, None) is not None

    def keys(self, prefix: str) -> list[str]:
        return [key for key in list(self.values) if key.startswith(prefix)]

    def actors(self) -> set[str]:
        return set(self.alive)


class Running:
    """A deployment, one agent per server; this class starts agents where Serve would start replicas."""

    def __init__(self, spec: Deployment) -> None:
        self.store, self.spec = LocalStore(), spec
        self.records = Records(self.store)
        self.records.save(Saved(spec, spec.version))
        self.agents: dict[str, Agent] = {}
        self._started = 0

    def start(self, group: int | None, host: str = "127.0.0.1") -> Agent:
        """Start a server, without waiting for it."""
        self._started += 1
        actor = f"actor-{self._started}"
        self.store.alive.add(actor)
        agent = Agent(self.records, self.spec.name, group, actor, f"node-{host}", host)
        self.agents[agent.server.name] = agent
        return agent

    def stop(self, name: str) -> None:
        """End a server as Serve does at a scale-down."""
        agent = self.agents.pop(name)
        agent.stop()
        self.store.alive.discard(agent.server.actor)

    def status(self) -> dict[str, Any]:
        saved = self.records.saved(self.spec.name)
        assert saved is not None
        return status_of(saved, self.records.servers(self.spec.name))

    def servers(self, prefix: str = "") -> dict[str, dict[str, Any]]:
        return {each["name"]: each for each in self.status()["servers"] if each["name"].startswith(prefix)}

    def wait(self) -> None:
        until(lambda: self.status()["ready"])

    def close(self) -> None:
        """End everything."""
        for name in sorted(self.agents):  # rankers first
            self.stop(name)
