"""What a controller needs of whatever runs the servers: places, processes on them, and a memory of its own."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from recinfer.deploy.ray.members import Member
from recinfer.deploy.ray.place import Node
from recinfer.deploy.ray.process import Life
from recinfer.deploy.ray.spec import Need

__all__ = ["Engine"]


class Engine(Protocol):
    """Runs processes for members: by ``member.place`` and ``member.life``, which are never used twice."""

    def nodes(self) -> list[Node]:
        """The nodes that are alive, and what they have free."""

    def reserve(self, member: Member, need: Need, node: Node) -> bool:
        """Reserve a place for ``member`` on a node; whether it was had."""

    def launch(self, member: Member, arguments: list[str], environment: dict[str, str], shards: str | None) -> None:
        """Start a process at the member's place: see recinfer.deploy.ray.process.ServerProcess."""

    def look(self, members: Collection[Member]) -> Mapping[str, Life | None]:
        """How the processes of members are, by name; None: it is gone, with whoever watched it. Who does not answer in
        time is left out."""

    def write(self, member: Member, shards: str) -> bool:
        """Give a ranker another shards.json; whether it has it."""

    def stop(self, member: Member) -> None:
        """Have its process finish its requests and end."""

    def end(self, member: Member) -> None:
        """End its process now; nothing happens when there is none."""

    def free(self, member: Member) -> None:
        """Give its place back; nothing happens when it has none."""

    def sweep(self, known: Collection[Member]) -> None:
        """End the processes and free the places of this deployment that are not those of ``known``."""

    def save(self, state: str) -> None:
        """Keep ``state`` for a controller that takes over."""

    def saved(self) -> str | None:
        """What was kept; None: nothing."""
