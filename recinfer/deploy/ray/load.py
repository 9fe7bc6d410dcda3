"""How many servers the load asks for: the rule that Kubernetes' HorizontalPodAutoscaler has, on what servers say of theirs."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

from recinfer.deploy.ray.members import Member
from recinfer.deploy.ray.probe import Probe
from recinfer.deploy.ray.spec import Bounds, Deployment

__all__ = ["LoadFollower", "busy_share", "requests_in", "servers_needed"]

_WINDOW_S = 10.0
_TOLERANCE = 0.1


def requests_in(member: Member, probes: Mapping[str, Probe]) -> float:
    """Requests that are in a server at a time: in a ranker as it counts them; at a shard server the calls that rankers wait
    for, since it sees none before it gets to it. ``probes``: of the last look at all servers, by name."""
    if member.group is None:
        return probes.get(member.name, Probe()).inside
    return sum(probe.outstanding.get(member.address, 0) for probe in probes.values())


def busy_share(member: Member, probes: Mapping[str, Probe]) -> float:
    """Of its time, 0 to 1; of a ranker 0."""
    held = probes.get(member.name, Probe()).status.get("held") or {}
    return float(held.get("busy", 0.0))


def servers_needed(member: Member, probes: Mapping[str, Probe], spec: Deployment) -> float:
    """How many servers what one does would keep as loaded as they may be: by the requests in it and, of a shard server, by
    its time. Rankers put together what waits for one, so that few calls are under way to it however full it is."""
    return max(requests_in(member, probes) / spec.queue_depth, 100 * busy_share(member, probes) / spec.busy_percent)


class LoadFollower:
    """Follows how many servers of one kind are needed, as :func:`servers_needed` has it.

    Args:
        cool_down: seconds; servers go when none of the numbers that were right within it needed them.
    """

    def __init__(self, cool_down: float) -> None:
        self._cool_down = cool_down
        self._sums: deque[tuple[float, float]] = deque()
        self._wanted: deque[tuple[float, int]] = deque()
        self._since: float | None = None

    def wanted(self, now: float, total: float, count: int, bounds: Bounds) -> int:
        """How many there should be.

        Args:
            now: ``time.monotonic()``.
            total: sum over the servers. Not their mean, which says too much while servers start and take no load yet.
            count: how many there are, or will be when those that start have.
            bounds: what may be chosen.
        """
        if self._since is None:
            self._since = now
        self._sums.append((now, total))
        while self._sums[0][0] < now - _WINDOW_S:
            self._sums.popleft()
        if now - self._since < _WINDOW_S:  # nothing is known yet
            return count
        needed = sum(value for _, value in self._sums) / len(self._sums)
        right = count if abs(needed / count - 1.0) <= _TOLERANCE else math.ceil(needed)
        right = max(bounds.least, min(bounds.most, right, 2 * count))
        self._wanted.append((now, right))
        while self._wanted[0][0] < now - self._cool_down:
            self._wanted.popleft()
        if right > count:
            self._sums.clear()  # the next look is at what the new ones made of it
            self._since = now
            return right
        if now - self._wanted[0][0] < 0.9 * self._cool_down:  # not yet as long as that
            return count
        return min(count, max(number for _, number in self._wanted))
