"""Implements the engine on Ray: a placement group per place, a detached actor per process, and Ray's key-value store
for state.

A group has one bundle, on the node that recinfer.deploy.ray.place chose. Ray's own SPREAD does not consider which
bundles are replicas of one shard, and a group can neither grow nor release a part of its resources.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from recinfer.deploy.ray.members import Member
from recinfer.deploy.ray.place import Node
from recinfer.deploy.ray.process import Life, ServerProcess
from recinfer.deploy.ray.spec import Deployment, Need

__all__ = ["NAMESPACE", "RayEngine", "remove_files", "sweep"]

NAMESPACE = "recinfer"
"""The Ray namespace of all names."""

_LOOK_S, _RESERVE_S, _GONE_S = 2.0, 5.0, 10.0
_GRACE_S = 15.0
_log = logging.getLogger(__name__)


class RayEngine:
    """See recinfer.deploy.ray.engine.Engine. Used inside the controller's actor."""

    def __init__(self, spec: Deployment) -> None:
        self._spec = spec
        self._actors: dict[str, Any] = {}

    def nodes(self) -> list[Node]:
        """The live nodes and their free resources."""
        import ray
        from ray._private.state import available_resources_per_node  # Ray 2.60 has no public name for it

        free = available_resources_per_node()
        return [
            Node(found["NodeID"], found["NodeManagerAddress"], mine.get("memory", 0.0), mine.get("CPU", 0.0))
            for found in ray.nodes()
            if found["Alive"] and (mine := free.get(found["NodeID"])) is not None
        ]

    def reserve(self, member: Member, need: Need, node: Node) -> bool:
        """Create a placement group of one bundle on ``node``."""
        from ray.util.placement_group import placement_group

        bundle = {"memory": float(need.memory), "CPU": need.cpus}
        group = placement_group(
            [{what: amount for what, amount in bundle.items() if amount}],
            name=self._place(member),
            lifetime="detached",
            bundle_label_selector=[{"ray.io/node-id": node.id}],
        )
        return bool(group.wait(_RESERVE_S))

    def launch(self, member: Member, arguments: list[str], environment: dict[str, str], shards: str | None) -> None:
        """Start an actor in the member's placement group."""
        import ray
        from ray.util.placement_group import get_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        need = self._spec.need(member.group)
        group = get_placement_group(self._place(member))
        actor = ray.remote(ServerProcess).options(
            name=self._life(member),
            namespace=NAMESPACE,
            lifetime="detached",
            max_restarts=0,  # the controller starts another one with the right version and port
            num_cpus=need.cpus,
            memory=need.memory,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
        )
        self._actors[self._life(member)] = actor.remote(arguments, environment, shards, self._spec.tag, _GRACE_S)

    def look(self, members: Collection[Member]) -> Mapping[str, Life | None]:
        """Call all actors concurrently."""
        import ray

        found: dict[str, Life | None] = {}
        asked: dict[Any, str] = {}
        for member in members:
            actor = self._actor(member)
            if actor is None:
                found[member.name] = None
            else:
                asked[actor.look.remote()] = member.name
        if asked:
            ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_LOOK_S)
            for answer in ready:
                found[asked[answer]] = _answer(answer)
        return found

    def write(self, member: Member, shards: str) -> bool:
        """Have the actor write the file on its node."""
        actor = self._actor(member)
        return actor is not None and _in_time(actor.write.remote(shards))

    def stop(self, member: Member) -> None:
        """Have the actor close the pipe whose end stops its server."""
        actor = self._actor(member)
        if actor is not None:
            _in_time(actor.stop.remote())

    def end(self, member: Member) -> None:
        """Kill the actor; the guard then sends its server SIGTERM and waits."""
        import ray

        actor = self._actor(member)
        if actor is not None:
            ray.kill(actor, no_restart=True)
        self._actors.pop(self._life(member), None)

    def free(self, member: Member) -> None:
        """Remove the placement group."""
        if member.place:
            _remove_group(self._place(member))

    def sweep(self, known: Collection[Member]) -> None:
        """Remove actors and placement groups of this deployment that belong to no member."""
        lives = {self._life(member) for member in known} | {self._spec.name}
        sweep(self._spec.name, lives, {self._place(member) for member in known})

    def save(self, state: str) -> None:
        """Write to Ray's key-value store, which lives as long as the cluster's head."""
        from ray.experimental.internal_kv import _internal_kv_put

        _internal_kv_put(_key(self._spec.name), state.encode(), overwrite=True, namespace=NAMESPACE)

    def saved(self) -> str | None:
        """The saved state."""
        from ray.experimental.internal_kv import _internal_kv_get

        found = _internal_kv_get(_key(self._spec.name), namespace=NAMESPACE)
        return None if found is None else found.decode()

    def _place(self, member: Member) -> str:
        return f"{self._spec.name}/{member.name}@{member.place}"

    def _life(self, member: Member) -> str:
        return f"{self._spec.name}/{member.name}#{member.life}"

    def _actor(self, member: Member) -> Any:
        """The member's actor; None if there is none."""
        import ray

        name = self._life(member)
        if name not in self._actors:
            with suppress(ValueError):
                self._actors[name] = ray.get_actor(name, namespace=NAMESPACE)
        return self._actors.get(name)


def sweep(name: str, lives: Collection[str] = (), places: Collection[str] = ()) -> list[str]:
    """Kill the actors and remove the placement groups of a deployment, except those named; returns the names of the
    removed."""
    import ray
    from ray.util.placement_group import placement_group_table

    gone = []
    for found in ray.util.list_named_actors(all_namespaces=True):
        actor = found["name"]
        if found["namespace"] == NAMESPACE and actor not in lives and (actor == name or actor.startswith(f"{name}/")):
            with suppress(ValueError):
                ray.kill(ray.get_actor(actor, namespace=NAMESPACE), no_restart=True)
                gone.append(actor)
    for group in placement_group_table().values():
        if group["name"].startswith(f"{name}/") and group["name"] not in places and group["state"] != "REMOVED":
            _remove_group(group["name"])
            gone.append(group["name"])
    return gone


def forget(name: str) -> None:
    """Remove the saved state of a controller."""
    from ray.experimental.internal_kv import _internal_kv_del

    _internal_kv_del(_key(name), namespace=NAMESPACE)


def remove_files(tag: str) -> int:
    """Remove folders that the rankers of a deployment left on this node because their guards were killed; returns the
    number."""
    found = list(Path(tempfile.gettempdir()).glob(f"recinfer-{tag}-*"))
    for folder in found:
        shutil.rmtree(folder, ignore_errors=True)
    return len(found)


def _key(name: str) -> bytes:
    return f"deployment:{name}".encode()


def _remove_group(name: str) -> None:
    from ray.util.placement_group import get_placement_group, remove_placement_group

    with suppress(ValueError):
        remove_placement_group(get_placement_group(name))


def _answer(answer: Any) -> Life | None:
    import ray

    try:
        life: Life = ray.get(answer)
        return life
    except ray.exceptions.RayError as error:
        _log.info("an actor has ended: %s", str(error).splitlines()[0])
        return None


def _in_time(answer: Any) -> bool:
    """Whether the call succeeded; the actor may have ended."""
    import ray

    try:
        ray.get(answer, timeout=_LOOK_S)
    except ray.exceptions.RayError as error:
        _log.info("an actor did not respond: %s", str(error).splitlines()[0])
        return False
    return True
