"""Creates, changes and removes deployments on a Ray cluster."""

from __future__ import annotations

import logging
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from recinfer.deploy.ray import rollout
from recinfer.deploy.ray.records import NAMESPACE, Records, status_of
from recinfer.deploy.ray.spec import Deployment, check_room
from recinfer.errors import ConfigError, NotFoundError, UnavailableError

__all__ = ["connected", "deploy", "deployments", "down", "rankers", "roll", "scale", "status", "wait_until_ready"]

_REACH_S, _ANSWER_S, _FREE_S = 3.0, 60.0, 120.0
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
            f"no Ray cluster at {address!r}: {first}; start one with `ray start --head`, and a node of it on this "
            f"machine"
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
    security = spec.security.read()
    hosts = [node["NodeManagerAddress"] for node in _nodes()]
    for host in hosts:
        security.check_host(host)  # servers check this too, but only after they start
    if spec.files:
        missing = _on_every_node(missing_files, spec.files)
        if silent := sorted(set(hosts) - missing.keys()):
            raise UnavailableError(f"TLS: node {', '.join(silent)} did not respond within {_ANSWER_S:g} s; try again")
        listed = "; ".join(f"node {host} cannot read {', '.join(f)}" for host, f in sorted(missing.items()) if f)
        if listed:
            raise ConfigError(f"TLS: {listed}; put each file at its path on every node")
    if spec.name in Records().names():
        raise ConfigError(
            f"deployment {spec.name!r} exists already: remove it (--down), update it (--roll), or give another --name"
        )
    check_room(spec, [group for group in spec.kinds for _ in range(spec.bounds(group).start)], _free())
    _run(replace(spec, nodes=len(_nodes())).spread())


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
    before = _deployment(name)
    spec = replace(before, shards=before.shards.scaled(shards), rankers=before.rankers.scaled(rankers)).spread()
    more = [group for group in spec.kinds for _ in range(spec.bounds(group).start - before.bounds(group).start)]
    if more:
        check_room(spec, more, _free())
    _run(spec)


def roll(name: str | None, version: str | None) -> str:
    """Switch to another version (None: the previous one) and return the served version. Raises RecinferError."""
    return rollout.roll(Records(), _deployment(name), version)


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
    _on_every_node(_remove_files, spec.tag)
    if not Records().names() and not serve.status().applications:
        serve.shutdown()
    return rest


def _run(spec: Deployment) -> None:
    """Write a deployment, and have Serve run it or change its numbers of servers. Proxies stay off if Serve does not run
    yet."""
    from ray import serve

    from recinfer.deploy.ray.application import application

    Records().save(spec)
    serve.start(proxy_location="Disabled")
    target = serve.RunTarget(application(spec), name=spec.name, route_prefix=None)
    serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)


def _deployment(name: str | None) -> Deployment:
    there = Records().names()
    if name is None and len(there) == 1:
        name = there[0]
    found = None if name is None else Records().deployment(name)
    if found is None:
        which = "got none" if name is None else f"got {name!r}"
        raise NotFoundError(f"deployment: {which}, expected one of: {', '.join(there) or 'none exist'}")
    return found


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


def _free() -> dict[str, tuple[float, float]]:
    """By address of a node, its bytes of memory and CPUs that nothing has reserved."""
    import ray
    from ray._private.state import available_resources_per_node  # Ray 2.60 has no public name for it

    try:  # on a node: a client from outside the cluster cannot call the function
        found = ray.get(ray.remote(available_resources_per_node).options(num_cpus=0).remote(), timeout=_FREE_S)
    except ray.exceptions.RayError as error:
        raise UnavailableError(f"the cluster did not respond: {error}; try again") from None
    free = {node["NodeManagerAddress"]: found.get(node["NodeID"], {}) for node in _nodes()}
    return {host: (mine.get("memory", 0.0), mine.get("CPU", 0.0)) for host, mine in free.items()}


def _on_every_node(run: Callable[[Any], Any], argument: Any) -> dict[str, Any]:
    """Run ``run(argument)`` on each node; returns the results by address, without nodes that do not respond in 60 s."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    asked = {
        ray.remote(run)
        .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False))
        .remote(argument): node["NodeManagerAddress"]
        for node in _nodes()
    }
    ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_ANSWER_S)
    found = {}
    for answer in ready:
        with suppress(ray.exceptions.RayError):  # the node failed meanwhile
            found[asked[answer]] = ray.get(answer)
    return found
