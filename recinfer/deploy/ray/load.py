"""Computes the number of servers that the load needs, by the rule of Kubernetes' HorizontalPodAutoscaler."""

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
    """Requests in a server at once: in a ranker by its own count; in a shard server the calls that rankers wait for,
    because its queue is in its sockets. ``probes``: the last probes of all servers, by name."""
    if member.group is None:
        return probes.get(member.name, Probe()).inside
    return sum(probe.outstanding.get(member.address, 0) for probe in probes.values())


def busy_share(member: Member, probes: Mapping[str, Probe]) -> float:
    """The share of time that a shard server is busy, 0 to 1; 0 for a ranker."""
    held = probes.get(member.name, Probe()).status.get("held") or {}
    return float(held.get("busy", 0.0))


def servers_needed(member: Member, probes: Mapping[str, Probe], spec: Deployment) -> float:
    """Number of fully loaded servers that the load of one server amounts to: by its requests and, for a shard server,
    by its busy time. Busy time is needed because rankers merge lookups, so an overloaded shard server has few open
    calls."""
    return max(requests_in(member, probes) / spec.queue_depth, 100 * busy_share(member, probes) / spec.busy_percent)


class LoadFollower:
    """Smooths the number of servers of one kind that :func:`servers_needed` gives.

    Args:
        cool_down: seconds of low load before the number falls.
    """

    def __init__(self, cool_down: float) -> None:
        self._cool_down = cool_down
        self._sums: deque[tuple[float, float]] = deque()
        self._wanted: deque[tuple[float, int]] = deque()
        self._since: float | None = None

    def wanted(self, now: float, total: float, count: int, bounds: Bounds) -> int:
        """The number of servers that there should be.

        Args:
            now: ``time.monotonic()``.
            total: sum of :func:`servers_needed` over the servers (a mean would be too high while servers start without
                load).
            count: current number, including servers that are starting.
            bounds: allowed numbers.
        """
        if self._since is None:
            self._since = now
        self._sums.append((now, total))
        while self._sums[0][0] < now - _WINDOW_S:
            self._sums.popleft()
        if now - self._since < _WINDOW_S:  # too early to decide
            return count
        needed = sum(value for _, value in self._sums) / len(self._sums)
        right = count if abs(needed / count - 1.0) <= _TOLERANCE else math.ceil(needed)
        right = max(bounds.least, min(bounds.most, right, 2 * count))
        self._wanted.append((now, right))
        while self._wanted[0][0] < now - self._cool_down:
            self._wanted.popleft()
        if right > count:
            self._sums.clear()  # measure again with the added servers
            self._since = now
            return right
        if now - self._wanted[0][0] < 0.9 * self._cool_down:  # the load has not been low for the whole cool-down
            return count
        return min(count, max(number for _, number in self._wanted))
