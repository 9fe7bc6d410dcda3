"""The interface between a controller and the system that runs its servers: placement, processes and saved state."""

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
        """The live nodes and their free resources."""

    def reserve(self, member: Member, need: Need, node: Node) -> bool:
        """Reserve resources for ``member`` on a node; returns whether that succeeded."""

    def launch(self, member: Member, arguments: list[str], environment: dict[str, str], shards: str | None) -> None:
        """Start a process on the member's reserved resources: see recinfer.deploy.ray.process.ServerProcess."""

    def look(self, members: Collection[Member]) -> Mapping[str, Life | None]:
        """The states of the members' processes by name; None for a process whose actor has ended. Members without a
        response in time are left out."""

    def write(self, member: Member, shards: str) -> bool:
        """Write another shards.json for a ranker; returns whether that succeeded."""

    def stop(self, member: Member) -> None:
        """Ask its process to finish its requests and exit."""

    def end(self, member: Member) -> None:
        """End its process now; no effect without one."""

    def free(self, member: Member) -> None:
        """Release its resources; no effect without any."""

    def sweep(self, known: Collection[Member]) -> None:
        """End the processes and release the resources of this deployment that do not belong to ``known``."""

    def save(self, state: str) -> None:
        """Save ``state`` for a controller that takes over."""

    def saved(self) -> str | None:
        """The saved state; None if there is none."""
