"""The servers of a deployment as its controller knows them: what becomes of each, who is listed, who goes first."""

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
    """What a server is at."""

    pending = "pending"  # no place for it, or waiting before it starts again
    starting = "starting"  # its process is there, and does not take requests yet
    serving = "serving"
    draining = "draining"  # nobody new is sent to it, and then it ends


@dataclass
class Member:
    """One server, through all its processes.

    Attributes:
        name: in the deployment, as in ``shard-0-2`` or ``ranker-1``.
        group: of ranks; None: a ranker.
        phase: see Phase.
        place: the number of its place, which is one placement group; ``node`` and ``host`` say where. 0: none.
        life: of its process, in the same way; ``restarts`` of them ended unasked.
        port, metrics_port, pid: of the process that is there; 0: none yet. ``wish``: the port that the next one tries.
        memory: bytes resident; ``rate``: requests a second; ``version``: what it serves.
        again_at: ``time.monotonic()`` before which it is not started again; ``pause``: how long that took last.
        since: ``time.monotonic()`` of its last change of phase.
        why: what keeps it from serving.
        stopped: it was told to end; ``since`` says when.
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
        """Where it listens; empty while it does not."""
        return join_address(self.host, self.port) if self.port else ""

    @property
    def process(self) -> str:
        """A name of the process that it has now."""
        return f"{self.name}/{self.life}"

    def enter(self, phase: Phase, now: float, why: str = "") -> None:
        """Go to another phase."""
        if phase is not self.phase:
            self.phase, self.since = phase, now
        self.why = why

    def shown(self) -> dict[str, Any]:
        """What ``recinfer deploy --status`` says of it by itself, as JSON."""
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

    def kept(self) -> dict[str, Any]:
        """What another controller needs to go on with it, as JSON. Times are this process's own, and stay out."""
        return {k: v for k, v in asdict(self).items() if k not in ("again_at", "since", "rate", "memory")}

    @classmethod
    def from_kept(cls, kept: Mapping[str, Any], now: float) -> Member:
        """The opposite."""
        return cls(**{**kept, "phase": Phase(kept["phase"])}, since=now)


def backoff(last: float, lived: float) -> float:
    """Seconds to wait before a server starts again: none after a long life, twice as long after each short one."""
    return 0.0 if lived >= _STEADY_S else min(_MOST_S, max(_FIRST_S, 2 * last))


def addresses_by_group(
    groups: int, members: Iterable[Member], last: Mapping[int, tuple[str, ...]]
) -> dict[int, tuple[str, ...]]:
    """Which servers of each group are listed: those that serve; where none does, the last ones, so that rankers can say
    whom they miss. A group that never had one is not in it."""
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
    """shards.json; None while a group has never had a server: rankers refuse a file that lacks a rank."""
    if len(listed) < len(groups):
        return None
    return shards_json({rank: listed[number] for number, ranks in enumerate(groups) for rank in ranks}, settings)


def to_remove(members: Iterable[Member], count: int) -> list[Member]:
    """The ``count`` members of one kind to do without: those that do not serve, then those that share a node with another
    one, then the youngest."""
    left = [member for member in members if member.phase is not Phase.draining]
    gone: list[Member] = []
    for _ in range(min(count, len(left))):
        nodes = [member.node for member in left]
        worst = max(left, key=lambda m: (m.phase is not Phase.serving, nodes.count(m.node), len(m.name), m.name))
        left.remove(worst)
        gone.append(worst)
    return gone
