"""The controller's records of a deployment's servers: their phases, the shards.json they form, and which to remove
first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from recinfer.deploy.groups import shards_json
from recinfer.serving.wire.address import join_address

__all__ = ["Member", "Phase", "addresses_by_group", "backoff", "shards_text", "to_remove"]

_STEADY_S = 10.0  # a server that served this long starts again at once
_FIRST_S, _MOST_S = 1.0, 30.0


class Phase(StrEnum):
    """The state of a server in its deployment."""

    pending = "pending"  # waits for a node, or for its next start
    starting = "starting"  # the process runs but is not ready
    serving = "serving"
    draining = "draining"  # gets no new requests and then stops


@dataclass
class Member:
    """One server of a deployment, across restarts of its process.

    Attributes:
        name: name in the deployment, such as ``shard-0-2`` or ``ranker-1``.
        group: number of its group of ranks; None for a ranker.
        phase: see Phase.
        place: number of its placement group, on ``node`` and ``host``; 0 for none.
        life: number of its process; ``restarts`` counts processes that ended unexpectedly.
        port, metrics_port, pid: of the running process; 0 for none. ``wish``: the port that the next process tries
        first.
        memory: resident bytes; ``rate``: requests per second; ``version``: the served version.
        again_at: earliest ``time.monotonic()`` of the next start; ``pause``: the last delay, in seconds.
        since: ``time.monotonic()`` of its last change of phase.
        why: the reason why it is not serving.
        stopped: it received the request to stop, at ``since``.
    """

    name: str
    group: int | None
    phase: Phase = Phase.pending
    place: int = 0
    node: str = ""
    host: str = ""
    life: int = 0
    restarts: int = 0
    port: int = 0
    metrics_port: int = 0
    pid: int = 0
    wish: int = 0
    memory: int = 0
    rate: float = 0.0
    version: str = ""
    why: str = ""
    again_at: float = 0.0
    pause: float = 0.0
    since: float = 0.0
    stopped: bool = False

    @property
    def role(self) -> str:
        """``shard`` or ``ranker``."""
        return "ranker" if self.group is None else "shard"

    @property
    def placed(self) -> bool:
        """Whether a node has a place reserved for it."""
        return bool(self.node)

    @property
    def address(self) -> str:
        """Address that it listens on; empty if its process is not listening."""
        return join_address(self.host, self.port) if self.port else ""

    @property
    def process(self) -> str:
        """Name of its current process."""
        return f"{self.name}/{self.life}"

    def enter(self, phase: Phase, now: float, why: str = "") -> None:
        """Change to ``phase``."""
        if phase is not self.phase:
            self.phase, self.since = phase, now
        self.why = why

    def status(self) -> dict[str, Any]:
        """The server's part of ``recinfer deploy --status``, as JSON values."""
        return {
            "name": self.name,
            "role": self.role,
            "node": self.node,
            "host": self.host,
            "address": self.address,
            "metrics_port": self.metrics_port,
            "state": self.phase.value,
            "restarts": self.restarts,
            "version": self.version,
            "rate": round(self.rate, 1),
            "memory": self.memory,
            "pid": self.pid,
            "why": self.why,
        }

    def to_state(self) -> dict[str, Any]:
        """The state that a new controller needs, as JSON values, without times, which are local to this process."""
        return {k: v for k, v in asdict(self).items() if k not in ("again_at", "since", "rate", "memory")}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], now: float) -> Member:
        """The member of :meth:`to_state`."""
        return cls(**{**state, "phase": Phase(state["phase"])}, since=now)


def backoff(last: float, lived: float) -> float:
    """Seconds to wait before a restart: none after a long run, twice the last delay after a short run."""
    return 0.0 if lived >= _STEADY_S else min(_MOST_S, max(_FIRST_S, 2 * last))


def addresses_by_group(
    groups: int, members: Iterable[Member], last: Mapping[int, tuple[str, ...]]
) -> dict[int, tuple[str, ...]]:
    """The addresses to list for each group: its serving servers, or, if none serves, the last listed ones, which
    rankers then name in their errors. A group that never had a server is left out."""
    serving: dict[int, list[str]] = {}
    for member in members:
        if member.group is not None and member.phase is Phase.serving and member.address:
            serving.setdefault(member.group, []).append(member.address)
    listed = {group: tuple(sorted(serving.get(group, ()))) or tuple(last.get(group, ())) for group in range(groups)}
    return {group: found for group, found in listed.items() if found}


def shards_text(
    groups: tuple[tuple[int, ...], ...],
    listed: Mapping[int, tuple[str, ...]],
    settings: Mapping[str, str] | None = None,
) -> str | None:
    """The text of shards.json; None while a group has never had a server, because rankers reject a file that lacks a
    rank."""
    if len(listed) < len(groups):
        return None
    return shards_json({rank: listed[number] for number, ranks in enumerate(groups) for rank in ranks}, settings)


def to_remove(members: Iterable[Member], count: int) -> list[Member]:
    """The ``count`` members of one kind to remove: first those that do not serve, then those that share a node, then
    the newest."""
    left = [member for member in members if member.phase is not Phase.draining]
    gone: list[Member] = []
    for _ in range(min(count, len(left))):
        nodes = [member.node for member in left]
        worst = max(left, key=lambda m: (m.phase is not Phase.serving, nodes.count(m.node), len(m.name), m.name))
        left.remove(worst)
        gone.append(worst)
    return gone
