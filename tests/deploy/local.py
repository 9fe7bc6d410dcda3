"""An engine that needs no cluster: nodes are addresses of loopback, servers are children of this process."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

from recinfer.deploy.ray.members import Member
from recinfer.deploy.ray.place import Node
from recinfer.deploy.ray.process import Life, ServerProcess
from recinfer.deploy.ray.spec import Need


class LocalEngine:
    """See recinfer.deploy.ray.engine.Engine. ``sizes``: node's address -> bytes of memory.

    A test loses nodes while its controller looks: ``lock`` is held while ``lives`` is read or changed.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = dict(sizes)
        self.lock = threading.RLock()
        self.places: dict[int, tuple[str, Need]] = {}
        self.lives: dict[int, tuple[str, ServerProcess]] = {}
        self.state: str | None = None

    def nodes(self) -> list[Node]:
        free = dict(self.sizes)
        for host, need in self.places.values():
            if host in free:
                free[host] -= need.memory
        return [Node(f"id-{host}", host, memory, 8.0) for host, memory in free.items()]

    def reserve(self, member: Member, need: Need, node: Node) -> bool:
        # As in a cluster: the controller's view of the nodes may be seconds old.
        if not any(each.host == node.host and each.memory >= need.memory for each in self.nodes()):
            return False
        self.places[member.place] = node.host, need
        return True

    def launch(self, member: Member, arguments: list[str], environment: dict[str, str], shards: str | None) -> None:
        assert self.places[member.place][0] == member.host
        with self.lock:
            self.lives[member.life] = member.host, ServerProcess(arguments, environment, shards, "test", grace=5.0)

    def look(self, members: Collection[Member]) -> Mapping[str, Life | None]:
        with self.lock:
            return {m.name: self.lives[m.life][1].look() if m.life in self.lives else None for m in members}

    def write(self, member: Member, shards: str) -> bool:
        with self.lock:
            if member.life not in self.lives:
                return False
            self.lives[member.life][1].write(shards)
            return True

    def stop(self, member: Member) -> None:
        with self.lock:
            if member.life in self.lives:
                self.lives[member.life][1].stop()

    def end(self, member: Member) -> None:
        with self.lock:
            found = self.lives.pop(member.life, None)
        if found is not None:
            found[1].stop()
            assert found[1].wait(60)

    def free(self, member: Member) -> None:
        self.places.pop(member.place, None)

    def sweep(self, known: Collection[Member]) -> None:
        with self.lock:
            for life in self.lives.keys() - {member.life for member in known}:
                self.lives.pop(life)[1].stop()

    def save(self, state: str) -> None:
        self.state = state

    def saved(self) -> str | None:
        return self.state

    # -- what tests do to it -----------------------------------------------------------------------------------------

    def lose(self, host: str) -> None:
        """A node with all servers on it."""
        with self.lock:
            del self.sizes[host]
            for life, (where, process) in list(self.lives.items()):
                if where == host:
                    with suppress(ProcessLookupError):
                        os.kill(process.guard_pid, signal.SIGKILL)
                    assert process.wait(60)
                    if process.folder is not None:  # a killed guard removes no files, as on a lost node
                        shutil.rmtree(process.folder)
                    del self.lives[life]

    def close(self) -> None:
        """End everything."""
        for _, process in self.lives.values():
            process.stop()
        for _, process in self.lives.values():
            assert process.wait(60)

    def listed(self, member: Member) -> str:
        """The shards.json that a ranker has."""
        with self.lock:
            folder = self.lives[member.life][1].folder
        assert folder is not None
        return (Path(folder) / "shards.json").read_text()
