"""Agents without a cluster: records in a dictionary, servers in this process."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recinfer.deploy.ray.application import Agent
from recinfer.deploy.ray.records import Records, status_of
from recinfer.deploy.ray.spec import Deployment


def until(condition: Callable[[], Any], seconds: float = 240.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "not within that time"
        time.sleep(0.05)


def choose(config: Path, versions: str, served: str) -> None:
    """Have servers load ``versions`` of the model tiny, each of one digit, and send requests to ``served``."""
    made = config.with_suffix(".new")
    made.write_text(f'[models.tiny]\nversions = {list(versions)}\nweights = {{"{served}" = 1}}\n')
    made.rename(config)


class LocalStore:
    """Ray's key-value store in a dictionary."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}

    def _internal_kv_put(self, key: bytes, value: bytes, overwrite: bool, namespace: str) -> bool:
        """Returns whether there was a value."""
        before = self.values.get(key)
        if before is None or overwrite:
            self.values[key] = value
        return before is not None

    def _internal_kv_get(self, key: bytes, namespace: str) -> bytes | None:
        return self.values.get(key)

    def _internal_kv_del(self, key: bytes, namespace: str) -> int:
        return int(self.values.pop(key, None) is not None)

    def _internal_kv_list(self, prefix: bytes, namespace: str) -> list[bytes]:
        return [key for key in list(self.values) if key.startswith(prefix)]


class LocalRecords(Records):
    """Records in a dictionary. ``alive``: names of the actors that have not ended."""

    def __init__(self) -> None:
        self.local = LocalStore()
        self.alive: set[str] = set()

    @property
    def _store(self) -> LocalStore:
        return self.local

    def _actors(self) -> set[str]:
        return set(self.alive)


class Running:
    """A deployment, one agent per server; this class starts agents where Serve would start replicas. Rankers' lists are in
    ``folder``."""

    def __init__(self, spec: Deployment, folder: Path) -> None:
        self.spec, self.folder, self.records = spec, folder, LocalRecords()
        self.records.save(spec)
        self.agents: dict[str, Agent] = {}
        self._started = 0

    def start(self, kind: str, host: str = "127.0.0.1") -> Agent:
        """Start a server, and wait until it serves."""
        self._started += 1
        actor = f"actor-{self._started}"
        self.records.alive.add(actor)
        agent = Agent(self.records, self.spec.name, kind, actor, host, self.folder)
        self.agents[agent.server.name] = agent
        return agent

    def stop(self, name: str) -> None:
        """End a server as Serve does at a scale-down."""
        agent = self.agents.pop(name)
        agent.stop()
        self.records.alive.discard(agent.server.actor)

    def lose(self, name: str) -> None:
        """End a server as the end of its process does."""
        agent = self.agents.pop(name)
        agent._stopping.set()
        agent._thread.join()
        agent._running.stop(0.0)
        self.records.alive.discard(agent.server.actor)

    def status(self) -> dict[str, Any]:
        return status_of(self.records.deployment(self.spec.name), self.records.servers(self.spec.name))

    def servers(self, prefix: str = "") -> dict[str, dict[str, Any]]:
        return {each["name"]: each for each in self.status()["servers"] if each["name"].startswith(prefix)}

    def wait(self) -> None:
        until(lambda: self.status()["ready"])

    def close(self) -> None:
        """End everything."""
        for name in sorted(self.agents):  # rankers first
            self.stop(name)
