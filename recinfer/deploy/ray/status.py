"""The state of a deployment, as ``recinfer deploy --status`` shows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from recinfer.deploy.ray.records import Saved, Server, requests_in
from recinfer.deploy.ray.spec import kind_name

__all__ = ["status_of"]

_OWN = ("group", "actor", "port", "inside", "calls")  # fields of a record that are no part of the status


def status_of(saved: Saved, servers: Sequence[Server]) -> dict[str, Any]:
    """The state as JSON values: name, model, version, and each server of ``servers``. A deployment is ``ready`` when the
    wanted number of servers serves and every ranker calls all shard servers."""
    spec, shown, counts = saved.spec, [], True
    for group in spec.kinds:
        bounds, mine = spec.bounds(group), [server for server in servers if server.group == group]
        here = [server for server in mine if server.state != "pending"]
        # The number that the load needs is Serve's affair; below the minimum a server is missing in any case.
        lacking = (bounds.least if bounds.scales else bounds.start) - len(here)
        counts &= lacking <= 0 if bounds.scales else lacking == 0
        absent = [server for server in mine if server.state == "pending"]
        absent += [Server(kind_name(group), group, why="it waits for a node with room")] * (lacking - len(absent))
        shown += here + absent[: max(0, lacking)]
    listed = {server.address for server in shown if server.group is not None}
    serve_all = all(server.serving and (server.group is not None or set(server.calls) == listed) for server in shown)
    return {
        "name": spec.name,
        "model": spec.model,
        "version": saved.version,
        "previous": saved.previous,
        "ready": counts and serve_all,
        "rankers": sorted(server.address for server in shown if server.group is None and server.serving),
        "servers": [
            {
                **{key: value for key, value in asdict(server).items() if key not in _OWN},
                "role": "ranker" if server.group is None else "shard",
                "ranks": [] if server.group is None else list(spec.groups[server.group]),
                "rate": round(server.rate, 1),
                "load": round(requests_in(server, servers), 1),
                "busy": None if server.group is None else round(server.busy, 2),
            }
            for server in shown
        ],
    }
