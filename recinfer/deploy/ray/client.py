"""Creates, changes and removes deployments on a Ray cluster."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from recinfer.deploy.ray import rollout
from recinfer.deploy.ray.records import NAMESPACE, Records, status_of
from recinfer.deploy.ray.spec import Deployment
from recinfer.errors import ConfigError, NotFoundError, UnavailableError

__all__ = ["connected", "deploy", "deployments", "down", "rankers", "roll", "scale", "status", "wait_until_ready"]

_REACH_S = 3.0
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

    # Not its level, which the import of ray.serve sets.
    logging.getLogger("ray.serve").addFilter(lambda record: record.levelno >= logging.ERROR)
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
        ConfigError: a deployment of that name exists, or a node is reachable from other machines and there is no token.
    """
    import ray

    security, hosts = spec.security.read(), [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]
    for host in hosts:
        security.check_host(host)  # servers check this too, but only after they start
    if spec.name in deployments():
        raise ConfigError(
            f"deployment {spec.name!r} exists already: remove it (--down), update it (--roll), or give another --name"
        )
    _run(replace(spec, nodes=len(hosts)))


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
    """Change the number of shard servers per group of ranks, or of rankers. Raises ConfigError, and as ``status`` does."""
    spec = _deployment(name)
    _run(replace(spec, shards=spec.shards.scaled(shards), rankers=spec.rankers.scaled(rankers)))


def roll(name: str | None, archive: Path | None) -> str:
    """Switch to another version in the same model store (None: the previous one) and return the served version. Raises
    RecinferError."""
    spec = _deployment(name)
    if archive is not None and spec.store is not None and archive.parent != spec.archive.parent:
        raise ConfigError(f"{archive}: expected an archive at {spec.archive.parent}/VERSION, which {spec.name} serves")
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
    while not (now := _with_reasons(status(name)))["ready"]:
        reasons = list[str]()
        for server in now["servers"]:
            if server["why"]:
                where = f" on {server['host']}" if server["host"] else ""
                reasons.append(f"{server['name']}{where}: {server['why']}")
                if server["restarts"] - first.setdefault(server["name"], server["restarts"]) >= _TRIES:
                    raise UnavailableError(reasons[-1])
        line = "; ".join(list(dict.fromkeys(reasons))[:3])
        if line and line != reported:
            reported = line
            report(f"waiting: {line}")
        if time.monotonic() > end:
            raise UnavailableError(f"not ready within {seconds:g} s: {line or 'servers are missing'}")
        time.sleep(0.5)
    return now


def _with_reasons(found: dict[str, Any]) -> dict[str, Any]:
    """A status in which servers that have not started have Serve's reason, such as resources that it waits for. Raises
    UnavailableError if Serve gave up, as on nodes without recinfer."""
    if any(not server["actor"] for server in found["servers"]):
        from ray import serve

        there = serve.status().applications.get(found["name"])
        kinds = {} if there is None else there.deployments
        for server in found["servers"]:
            kind = kinds.get(server["name"])  # until its start, a server has its kind's name
            if kind is not None:
                last_line = kind.message.rstrip().rpartition("\n")[2]  # the error, if it is a traceback
                server["why"] = last_line or server["why"]
                if kind.status == "DEPLOY_FAILED":
                    raise UnavailableError(f"{server['name']}: {server['why']}")
    return found


def down(name: str | None) -> list[str]:
    """Remove a deployment: servers, replicas, records. Returns the names of servers that did not end by themselves, usually
    none. Raises NotFoundError."""
    from ray import serve

    spec = _deployment(name)
    with suppress(serve.exceptions.RayServeException):  # Serve has been shut down
        serve.delete(spec.name)
    rest = [server.name for server in Records().servers(spec.name) if server.state != "pending"]
    Records().forget(spec.name)
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


def _run(spec: Deployment) -> None:
    """Write a deployment, and have Serve run it or change its numbers of servers. Proxies stay off if Serve does not run
    yet."""
    from ray import serve

    from recinfer.deploy.ray.application import application

    Records().save(spec)
    serve.start(proxy_location="Disabled")
    target = serve.RunTarget(application(spec), name=spec.name, route_prefix=None)
    serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
