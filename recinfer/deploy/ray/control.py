"""The controller of a deployment: every second it checks all servers and acts to reach the wanted state.

It does not depend on Ray: an Engine runs the processes. Requests do not need the controller, so servers continue
without it. The engine stores its state, and a new controller continues from there.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

from recinfer.deploy.ray.engine import Engine
from recinfer.deploy.ray.load import LoadFollower, busy_share, requests_in, servers_needed
from recinfer.deploy.ray.members import Member, Phase, addresses_by_group, backoff, shards_text, to_remove
from recinfer.deploy.ray.place import Node, choose_node, taken
from recinfer.deploy.ray.probe import Probe, Prober
from recinfer.deploy.ray.process import Life
from recinfer.deploy.ray.rollout import Versions
from recinfer.deploy.ray.spec import Bounds, Deployment
from recinfer.errors import ConfigError, UnavailableError

__all__ = ["Controller"]

_PERIOD_S = 1.0
_MISSES = 10  # looks without an answer after which a process, or its health, is given up
_START_S = 600.0  # until a process takes requests; one that never answered a look is given up after a tenth
_READ_S, _READ_AT_MOST_S = 1.0, 15.0  # for rankers to have read another list: they look twice a second
_RANKER_DRAIN_S = 5.0  # for callers to have noticed that a ranker is not listed any more
_STOP_S = 30.0
_SKIP = 1000  # numbers that the last controller may have used without noting it
_log = logging.getLogger(__name__)

Kind = int | None
"""Number of a group of ranks, or None for the rankers."""


class Controller:
    """Runs one deployment from ``start`` to ``down``. All methods may be called from any thread.

    Args:
        spec: the deployment; its numbers of servers and version are initial values, which saved state overrides.
        engine: runs the processes.
    """

    def __init__(self, spec: Deployment, engine: Engine) -> None:
        self.spec, self._engine = spec, engine
        self._kinds: list[Kind] = [*range(len(spec.groups)), None]
        self._members: dict[str, Member] = {}
        self._wanted: dict[Kind, int] = {kind: spec.bounds(kind).start for kind in self._kinds}
        self._listed: dict[int, tuple[str, ...]] = {}
        self._text: str | None = None
        self._versions = Versions(spec, self._targets, self._note)
        self._serial = 0
        self._whole = False  # every server has served at the same time once
        self._written: dict[str, str] = {}  # by process
        self._misses: dict[str, int] = {}  # by process
        self._probes: Mapping[str, Probe] = {}
        self._prober = Prober(spec.token, spec.tls)
        self._followers = {kind: LoadFollower(spec.cool_down) for kind in self._kinds}
        self._step = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._kept = self._engine.saved()
        if self._kept is not None:
            self._restore(json.loads(self._kept))

    def start(self) -> None:
        """Start the control loop in a thread."""
        self._thread = threading.Thread(target=self._run, name="recinfer-control", daemon=True)
        self._thread.start()

    # -- what is asked of it -----------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """The state of the deployment as JSON values: name, model, version, and each server as ``recinfer deploy
        --status`` shows it."""
        members = sorted(self._members.values(), key=lambda m: (m.group is None, m.group or 0, m.name))
        return {
            "name": self.spec.name,
            "model": self.spec.model,
            "version": self._versions.current,
            "previous": self._versions.previous,
            "rolling": self._versions.rolling,
            "whole": self._whole,
            "ready": self._is_ready(),
            "wanted": {_kind_name(kind): count for kind, count in self._wanted.items()},
            "rankers": self._targets(),
            "servers": [
                {
                    **member.status(),
                    "ranks": [] if member.group is None else list(self.spec.groups[member.group]),
                    "load": round(requests_in(member, self._probes), 1),
                    "busy": None if member.group is None else round(busy_share(member, self._probes), 2),
                }
                for member in members
            ],
        }

    def scale(self, shards: int | None, rankers: int | None) -> None:
        """Change the number of servers per group, or of rankers; None leaves it unchanged. Raises ConfigError."""
        asked: list[tuple[str, int, list[Kind], Bounds]] = []
        if shards is not None:
            asked.append(("replicas", shards, [kind for kind in self._kinds if kind is not None], self.spec.shards))
        if rankers is not None:
            asked.append(("rankers", rankers, [None], self.spec.rankers))
        for what, count, _, bounds in asked:
            if count < 1 or (bounds.scales and not bounds.least <= count <= bounds.most):
                limits = f"{bounds.least} to {bounds.most}, the bounds of autoscaling" if bounds.scales else "1 or more"
                raise ConfigError(f"{what}: got {count}, expected {limits}")
        with self._step:
            for _, count, kinds, _ in asked:
                self._wanted.update(dict.fromkeys(kinds, count))

    def roll(self, version: str | None) -> str:
        """See recinfer.deploy.ray.rollout.Versions."""
        return self._versions.roll(version)

    def down(self) -> None:
        """Stop all servers, rankers first, and release all resources. The controller stops too."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(60.0)
        with self._step:
            for role in ("ranker", "shard"):
                mine = [member for member in self._members.values() if member.role == role and member.placed]
                for member in mine:
                    self._engine.stop(member)
                self._wait_for_the_end(mine)
                for member in mine:
                    self._engine.end(member)
                    self._engine.free(member)
            self._members.clear()
        self._prober.close()
        self._versions.close()

    # -- one step of the control loop --------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self.step()
            except Exception:  # the next step may succeed
                _log.exception("deployment %s: a step of the controller failed", self.spec.name)
            self._stopping.wait(_PERIOD_S)

    def step(self) -> None:
        """Check all servers once, and act on the result."""
        members = [member for member in self._members.values() if member.phase is not Phase.pending]
        lives = self._engine.look(members)
        nodes = self._engine.nodes()
        for member in members:
            life = lives.get(member.name)
            if life is not None and life.running:
                member.port, member.metrics_port, member.pid = life.port, life.metrics_port, life.pid
                member.memory = life.memory
        self._probes = self._prober.look([m for m in members if m.port])
        with self._step:
            now = time.monotonic()
            for member in members:
                self._judge(member, lives, {node.id for node in nodes}, now)
            self._follow_load(now)
            self._count(now)
            self._list()
            self._place(nodes, now)
            self._drain(now)
            for member in self._members.values():
                if member.group is None and member.phase is Phase.serving:
                    self._versions.follow(member.address, member.process, member.version)
            self._whole = self._whole or self._is_ready()
            self._save()

    def _judge(self, member: Member, lives: Mapping[str, Life | None], nodes: set[str], now: float) -> None:
        """Update the phase of one server from its process state and its probe."""
        life = lives.get(member.name)
        probe = self._probes.get(member.name, Probe())
        if member.name not in lives and member.node in nodes:
            if self._missed(member, _MISSES if member.pid else int(_START_S / 10)):
                self._lost(member, "the actor that runs it does not respond", nodes, now)
        elif life is None or not life.running:
            gone = f"node {member.host} is lost" if member.node not in nodes else "the actor that ran it has ended"
            self._lost(member, gone if life is None else life.why, nodes, now)
        elif member.phase is Phase.draining:
            member.rate = probe.rate
        elif probe.serving:
            self._misses.pop(member.process, None)
            member.rate, member.version = probe.rate, probe.version or member.version
            member.enter(Phase.serving, now)
        elif member.phase is Phase.serving and not probe.answers:
            if self._missed(member, _MISSES):
                self._lost(member, "its health service does not respond", nodes, now)
        else:
            why = "it is not ready yet" if probe.answers else probe.why or "it is starting"
            member.enter(Phase.starting, now, member.why if member.restarts else why)
            if now - member.since > _START_S:
                self._lost(member, f"it was not ready within {_START_S:g} s", nodes, now)

    def _missed(self, member: Member, most: int) -> bool:
        """Count a failed check; returns whether there were ``most`` in a row."""
        key = member.process
        self._misses[key] = self._misses.get(key, 0) + 1
        return self._misses[key] >= most

    def _lost(self, member: Member, why: str, nodes: set[str], now: float) -> None:
        """End a failed process and schedule its restart."""
        self._engine.end(member)
        self._misses.pop(member.process, None)
        self._written.pop(member.process, None)
        if member.phase is Phase.draining:
            self._engine.free(member)
            del self._members[member.name]
            return
        _log.warning("deployment %s: %s on %s: %s", self.spec.name, member.name, member.host, why)
        served = member.phase is Phase.serving
        member.restarts += 1
        member.pause = backoff(member.pause, now - member.since if served else 0.0)
        member.again_at = now + member.pause
        # Clients have a ranker's address: the next process takes the same port, unless this one never served.
        member.wish = member.port if served else 0
        member.port = member.metrics_port = member.pid = member.memory = 0
        member.rate = 0.0
        member.enter(Phase.pending, now, why)
        if member.node not in nodes:
            self._engine.free(member)
            member.node = member.host = ""

    def _count(self, now: float) -> None:
        """Add or remove members until each kind has the wanted number."""
        for kind in self._kinds:
            here = [m for m in self._members.values() if m.group == kind and m.phase is not Phase.draining]
            for _ in range(self._wanted[kind] - len(here)):
                name = self._free_name(kind)
                self._members[name] = Member(name, kind, since=now)
            for member in to_remove(here, len(here) - self._wanted[kind]):
                if member.phase is Phase.serving:
                    member.enter(Phase.draining, now)
                    continue
                self._engine.end(member)
                self._engine.free(member)
                del self._members[member.name]

    def _free_name(self, kind: Kind) -> str:
        number = 0
        while (name := f"{_kind_name(kind)}-{number}") in self._members:
            number += 1
        return name

    def _list(self) -> None:
        """Write shards.json to the rankers whose copy is outdated."""
        self._listed = addresses_by_group(len(self.spec.groups), self._members.values(), self._listed)
        self._text = shards_text(self.spec.groups, self._listed, self.spec.settings())
        text = self._text
        for member in self._members.values():
            stale = member.group is None and member.pid and self._written.get(member.process) != text
            if stale and text is not None and self._engine.write(member, text):
                self._written[member.process] = text

    def _place(self, nodes: list[Node], now: float) -> None:
        """Reserve resources and start processes for pending members; all reservations come first, to detect a lack of
        resources early."""
        waiting = [m for m in self._members.values() if m.phase is Phase.pending and m.again_at <= now]
        for member in waiting:
            if not member.placed:
                nodes = self._reserve(member, nodes)
        for member in waiting:
            if not member.placed:
                continue
            if member.group is None and self._text is None:
                member.why = "it waits for the shard servers"
                continue
            self._serial += 1
            member.life = self._serial
            arguments = self.spec.arguments(member.group, self._versions.current, member.host, member.wish)
            text = self._text if member.group is None else None
            self._engine.launch(member, arguments, self.spec.environment(), text)
            if text is not None:
                self._written[member.process] = text
            member.enter(Phase.starting, now, member.why if member.restarts else "")

    def _reserve(self, member: Member, nodes: list[Node]) -> list[Node]:
        need = self.spec.need(member.group)
        same = [m.node for m in self._members.values() if m.group == member.group and m.node]
        ranks = "" if member.group is None else f" (ranks {', '.join(map(str, self.spec.groups[member.group]))})"
        try:
            node = choose_node(f"{member.name}{ranks}", need, nodes, same)
        except UnavailableError as error:
            member.why = str(error)
            return nodes
        self._serial += 1
        member.place = self._serial
        if not self._engine.reserve(member, need, node):
            self._engine.free(member)
            member.why = f"{node.host} did not have the resources when they were reserved"
            return nodes
        member.node, member.host, member.why = node.id, node.host, ""
        return taken(nodes, node, need)

    def _drain(self, now: float) -> None:
        """Stop draining members that receive no more requests; ``_lost`` removes them when they end."""
        for member in self._members.values():
            if member.phase is not Phase.draining:
                continue
            spent = now - member.since
            if member.stopped:
                if spent > _STOP_S:
                    self._engine.end(member)
            elif (member.group is None and spent >= _RANKER_DRAIN_S) or (
                member.group is not None and spent >= _READ_S and (self._unlisted(member) or spent > _READ_AT_MOST_S)
            ):
                self._engine.stop(member)
                member.stopped, member.since = True, now

    def _unlisted(self, member: Member) -> bool:
        """Whether no ranker lists a shard server any more."""
        return not any(member.address in probe.outstanding for probe in self._probes.values())

    # -- load --------------------------------------------------------------------------------------------------------

    def _follow_load(self, now: float) -> None:
        for kind in self._kinds:
            bounds = self.spec.bounds(kind)
            serving = [m for m in self._members.values() if m.group == kind and m.phase is Phase.serving]
            if bounds.scales and serving:
                total = sum(servers_needed(member, self._probes, self.spec) for member in serving)
                wanted = self._followers[kind].wanted(now, total, self._wanted[kind], bounds)
                if wanted != self._wanted[kind]:
                    _log.info(
                        "%s: %s: scaling to %d, the load needs %.1f", self.spec.name, _kind_name(kind), wanted, total
                    )
                    self._wanted[kind] = wanted

    # -- small things ------------------------------------------------------------------------------------------------

    def _targets(self) -> list[str]:
        """Addresses of the serving rankers."""
        members = list(self._members.values())
        return sorted(m.address for m in members if m.group is None and m.phase is Phase.serving and m.address)

    def _is_ready(self) -> bool:
        """Whether the wanted number of servers serves, and every ranker has the current shards.json.

        Takes no lock, since a step may hold it for long, and therefore computes from the members as they are now.
        """
        members = list(self._members.values())
        counts = all(sum(m.group == kind for m in members) == self._wanted[kind] for kind in self._kinds)
        if not counts or not all(member.phase is Phase.serving for member in members):
            return False
        listed = addresses_by_group(len(self.spec.groups), members, {})
        text = shards_text(self.spec.groups, listed, self.spec.settings())
        return all(self._written.get(member.process) == text for member in members if member.group is None)

    def _wait_for_the_end(self, members: list[Member]) -> None:
        end = time.monotonic() + _STOP_S
        left = list(members)
        while left and time.monotonic() < end:
            lives = self._engine.look(left)
            left = [m for m in left if (life := lives.get(m.name)) is not None and life.running]
            if left:
                time.sleep(0.2)

    def _note(self) -> None:
        with self._step:
            self._save()

    def _save(self) -> None:
        state = {
            "version": self._versions.current,
            "previous": self._versions.previous,
            "serial": self._serial,
            "whole": self._whole,
            "wanted": [[kind, count] for kind, count in self._wanted.items()],
            "listed": {str(group): list(found) for group, found in self._listed.items()},
            "members": [member.to_state() for member in self._members.values()],
        }
        text = json.dumps(state, sort_keys=True)
        if text != self._kept:
            self._engine.save(text)
            self._kept = text

    def _restore(self, state: Mapping[str, Any]) -> None:
        now = time.monotonic()
        self._versions.current, self._versions.previous = state["version"], state["previous"]
        self._serial, self._whole = state["serial"], state["whole"]
        self._wanted = {kind: count for kind, count in state["wanted"]}
        self._listed = {int(group): tuple(found) for group, found in state["listed"].items()}
        members = [Member.from_state(saved, now) for saved in state["members"]]
        self._members = {member.name: member for member in members}
        self._engine.sweep(members)  # leftovers that the last controller did not save
        self._serial += _SKIP


def _kind_name(kind: Kind) -> str:
    return "ranker" if kind is None else f"shard-{kind}"
