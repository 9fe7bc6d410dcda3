"""Chooses the node of a server: one with enough resources, first without a server of the same group, then with the most
free memory."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from recinfer.deploy.ray.spec import Need
from recinfer.errors import UnavailableError
from recinfer.sizes import size_text

__all__ = ["Node", "choose_node", "taken"]


@dataclass(frozen=True)
class Node:
    """A live machine of the cluster.

    Attributes:
        id: the cluster's id of the node.
        host: its address.
        memory, cpus: unreserved resources.
    """

    id: str
    host: str
    memory: float
    cpus: float


def choose_node(what: str, need: Need, nodes: Collection[Node], same: Iterable[str]) -> Node:
    """The node for one more server.

    Args:
        what: the server, for messages.
        same: ids of the nodes with servers of the same group, once per server.

    Raises:
        UnavailableError: no node has the resources; names the needed and the free ones.
    """
    room = [node for node in nodes if node.memory >= need.memory and node.cpus >= need.cpus]
    if not room:
        free = "; ".join(
            f"{node.host} {size_text(node.memory)} and {node.cpus:g} CPUs"
            for node in sorted(nodes, key=lambda n: n.host)
        )
        raise UnavailableError(
            f"no node has resources for {what}: it needs {size_text(need.memory)} of memory and {need.cpus:g} CPUs; free: "
            f"{free or 'no nodes'}"
        )
    held = list(same)
    return max(room, key=lambda node: (-held.count(node.id), node.memory, node.cpus, node.host))


def taken(nodes: Iterable[Node], node: Node, need: Need) -> list[Node]:
    """``nodes`` after a server takes its resources from one of them."""
    return [
        replace(each, memory=each.memory - need.memory, cpus=each.cpus - need.cpus) if each.id == node.id else each
        for each in nodes
    ]
