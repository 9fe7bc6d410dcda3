"""Creates, changes and removes deployments on a Ray cluster."""

from __future__ import annotations

import logging
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from recinfer.deploy.ray import rollout
from recinfer.deploy.ray.records import NAMESPACE, Records, status_of
from recinfer.deploy.ray.spec import Deployment, kind_name
from recinfer.errors import ConfigError, NotFoundError, UnavailableError
from recinfer.sizes import size_text

__all__ = ["connected", "deploy", "deployments", "down", "rankers", "roll", "scale", "status", "wait_until_ready"]

_REACH_S, _ANSWER_S, _ROOM_S = 3.0, 60.0, 30.0
_TRIES = 2  # starts of a server after its first, after which a command gives up; Serve gives up after as many


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Connects this process as a driver to the cluster at ``address``: ``host:port`` of its head, ``auto``, or
    ``ray://host:port``.

    Raises:
        ModuleNotFoundError: Ray is not installed.
        ConfigError: an address of another form.
        UnavailableError: there is no cluster; names the address.
    """
    import ray

    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if address != "auto" and not (host and port.isdecimal()):
        raise ConfigError(f"--ray: got {address[:80]!r}, expected host:port, ray://host:port or auto")
    try:
        if address != "auto":  # Ray would try for minutes and end the process
            socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, TimeoutError, ValueError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        first = first.replace("`--address`", "`--ray`").rstrip(".; ")
        raise UnavailableError(
            f"no Ray cluster at {address!r}: {first}; start one with `ray start --head`, and a node of it on this machine"
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


def deploy(spec: Deployment) -> None:
    """Create a deployment, whose servers then start.

    Raises:
        ConfigError: a deployment of that name exists, a node is reachable from other machines and there is no token, or a
            node lacks a PEM file; names the node.
        UnavailableError: no node has room for a server, or a node does not respond.
    """
    security, hosts = spec.security.read(), [node["NodeManagerAddress"] for node in _nodes()]
    for host in hosts:
        security.check_host(host)  # servers check this too, but only after they start
    missing = _on_every_node(missing_files, spec.files) if spec.files else {}
    if listed := [f"node {host} cannot read {', '.join(files)}" for host, files in missing.items() if files]:
        raise ConfigError(f"TLS: {'; '.join(listed)}; put each file at its path on every node")
    if spec.name in deployments():
        raise ConfigError(
            f"deployment {spec.name!r} exists already: remove it (--down), update it (--roll), or give another --name"
        )
    _run(replace(spec, nodes=len(hosts)), None)


def deployments() -> list[str]:
    """Names of the deployments of the cluster."""
    return Records().names()


def status(name: str | None) -> dict[str, Any]:
    """The state of a deployment as JSON values: name, model, version, and each server as ``recinfer deploy --status``
    shows it; ``name`` may be None if there is only one deployment.

    Raises:
        NotFoundError: there is no such deployment, or there are several.
    """
    spec = _deployment(name)
    return status_of(spec, Records().servers(spec.name))


def rankers(name: str | None = None) -> list[str]:
    """Addresses of a deployment's serving rankers, as ``host:port``. Raises as ``status`` does."""
    return list(status(name)["rankers"])


def scale(name: str | None, shards: int | None, rankers: int | None) -> None:
    """Change the number of shard servers per group of ranks, or of rankers. Raises ConfigError, UnavailableError, and as
    ``status`` does."""
    spec = _deployment(name)
    _run(replace(spec, shards=spec.shards.scaled(shards), rankers=spec.rankers.scaled(rankers)), spec)


def roll(name: str | None, archive: Path | None) -> str:
    """Switch to another version in the same model store (None: the previous one) and return the served version. Raises
    RecinferError."""
    spec = _deployment(name)
    if archive is not None and spec.store is not None and archive.parent.name != spec.servers.model:
        raise ConfigError(
            f"{archive}: expected an archive at STORE/{spec.servers.model}/VERSION, which {spec.name} serves"
        )
    return rollout.roll(Records(), spec, None if archive is None else archive.name)


def wait_until_ready(name: str, seconds: float, report: Callable[[str], None]) -> dict[str, Any]:
    """Wait until all servers serve, and return the status.

    Args:
        seconds: timeout.
        report: called with a line of text when the reason for waiting changes.

    Raises:
        UnavailableError: a server keeps failing, or the timeout expires; names the server and the reason.
    """
    end = time.monotonic() + seconds
    reported, first = "", dict[str, int]()
    while not (now := status(name))["ready"]:
        lacking = [server for server in now["servers"] if server["why"]]
        for server in lacking:
            if server["restarts"] - first.setdefault(server["name"], server["restarts"]) >= _TRIES:
                raise UnavailableError(f"{server['name']}: {server['why']}")
        line = "; ".join(f"{server['name']}: {server['why']}" for server in lacking[:3])
        if line and line != reported:
            reported = line
            report(f"waiting: {line}")
        if time.monotonic() > end:
            raise UnavailableError(f"not ready within {seconds:g} s: {line or 'servers are missing'}")
        time.sleep(0.5)
    return now


def down(name: str | None) -> list[str]:
    """Remove a deployment: servers, replicas, files. Returns the names of servers that did not end by themselves, usually
    none. Raises NotFoundError."""
    from ray import serve

    spec = _deployment(name)
    with suppress(serve.exceptions.RayServeException):  # Serve has been shut down
        serve.delete(spec.name)
    rest = [server.name for server in Records().servers(spec.name) if server.state != "pending"]
    Records().forget(spec.name)
    with suppress(UnavailableError):  # a node ends meanwhile
        _on_every_node(_remove_files, spec.tag)
    if not deployments() and not serve.status().applications:
        serve.shutdown()
    return rest


def _deployment(name: str | None) -> Deployment:
    there = deployments()
    found = Records().deployment(there[0] if name is None and len(there) == 1 else name or "")
    if found is None:
        raise NotFoundError(
            f"deployment: got {'none' if name is None else repr(name)}, expected one of: {', '.join(there) or 'none exist'}"
        )
    return found


def _run(spec: Deployment, before: Deployment | None) -> None:
    """Write a deployment, and have Serve run it or change its numbers of servers, if nodes have room for the servers that
    ``before`` lacks. Proxies stay off if Serve does not run yet."""
    from ray import serve

    from recinfer.deploy.ray.application import application

    more = {kind: spec.bounds(kind).least - (before.bounds(kind).least if before else 0) for kind in spec.kinds}
    _check_room(spec, [kind for kind, count in more.items() for _ in range(count)])
    Records().save(spec)
    serve.start(proxy_location="Disabled")
    target = serve.RunTarget(application(spec), name=spec.name, route_prefix=None)
    serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)


def _check_room(spec: Deployment, more: list[int | None]) -> None:
    """Have Ray reserve resources for more servers for a moment: Serve would wait for them. Raises UnavailableError, which
    names the needed and the free resources."""
    import ray

    if not more:
        return
    group = ray.util.placement_group([spec.resources(kind) for kind in more], strategy="SPREAD")
    has_room = group.wait(_ROOM_S)
    ray.util.remove_placement_group(group)
    if not has_room:
        kinds = (
            f"{more.count(kind)} {kind_name(kind)} ({_shown(spec.resources(kind))} each)"
            for kind in dict.fromkeys(more)
        )
        free = _shown(ray.available_resources())
        raise UnavailableError(f"no nodes have resources for {', '.join(kinds)}; free on all nodes together: {free}")


def _shown(resources: Mapping[str, float]) -> str:
    return f"{size_text(resources.get('memory', 0.0))} and {resources.get('CPU', 0.0):g} CPUs"


def missing_files(paths: list[Path]) -> list[str]:
    """The ``paths`` that this machine has no readable file at."""
    return [str(path) for path in paths if not (path.is_file() and os.access(path, os.R_OK))]


def _remove_files(tag: str) -> None:
    """Remove the files of rankers that were killed on this node."""
    for path in Path(tempfile.gettempdir()).glob(f"recinfer-{tag}-*"):
        path.unlink(missing_ok=True)


def _nodes() -> list[dict[str, Any]]:
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def _on_every_node(run: Callable[[Any], Any], argument: Any) -> dict[str, Any]:
    """Run ``run(argument)`` on each node; returns the results by address. Raises UnavailableError for a node that does not
    respond in 60 s."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    asked = {}
    for node in _nodes():
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        task = ray.remote(run).options(num_cpus=0, scheduling_strategy=there)
        asked[node["NodeManagerAddress"]] = task.remote(argument)
    ray.wait(list(asked.values()), num_returns=len(asked), timeout=_ANSWER_S)
    found = {}
    for host, answer in asked.items():
        try:
            found[host] = ray.get(answer, timeout=0)
        except ray.exceptions.RayError:
            raise UnavailableError(f"node {host} did not respond within {_ANSWER_S:g} s; try again") from None
    return found
