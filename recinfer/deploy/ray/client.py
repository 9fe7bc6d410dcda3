"""Creates, changes and removes deployments on a Ray cluster."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from recinfer.deploy.ray.records import NAMESPACE, Records, status_of
from recinfer.deploy.ray.spec import Deployment
from recinfer.errors import ConfigError, UnavailableError

__all__ = ["connected", "deploy", "down", "rankers", "scale", "status", "wait_until_ready"]

_REACH_S = 3.0


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
    """Create a deployment, whose servers then start. Raises ConfigError if a deployment of that name exists."""
    import ray

    if spec.name in Records().names():
        raise ConfigError(f"deployment {spec.name!r} exists already: remove it (--down), or give another --name")
    _run(replace(spec, nodes=sum(node["Alive"] for node in ray.nodes())))


def status(name: str | None) -> dict[str, Any]:
    """The state of a deployment as JSON values: name, model, version, whether it is ready or has failed, why it is not
    ready, and each server as ``recinfer deploy --status`` shows it; ``name`` may be None if there is only one deployment.

    Raises:
        NotFoundError: there is no such deployment, or there are several.
    """
    import ray
    from ray import serve

    spec = Records().deployment(name)
    found = status_of(spec, Records().servers(spec.name)) | {"failed": False}
    with suppress(
        ray.exceptions.RayError
    ):  # Serve's controller is away, or another process ended the Serve of this one
        application = None if found["ready"] else serve.status().applications.get(spec.name)
        for kind, now in ({} if application is None else application.deployments).items():
            found["failed"] |= now.status == "DEPLOY_FAILED"
            if now.message:
                found["why"].append(f"{kind}: {_reason(now.message)}")
    return found


def _reason(message: str) -> str:
    """The reason in a message of Serve's: the error, if the message ends with a traceback."""
    lines = message.strip().splitlines()
    return lines[-1].removeprefix("recinfer.errors.UnavailableError: ") if "Traceback (" in message else lines[0]


def rankers(name: str | None = None) -> list[str]:
    """Addresses of a deployment's serving rankers, as ``host:port``, without a call to Serve. Raises as ``status`` does."""
    spec = Records().deployment(name)
    found: list[str] = status_of(spec, Records().servers(spec.name))["rankers"]
    return found


def scale(name: str | None, shards: int | None, rankers: int | None) -> None:
    """Change the number of shard servers per group of ranks, or of rankers. Raises ConfigError, and as ``status`` does."""
    _run(Records().deployment(name).scaled(shards, rankers))


def wait_until_ready(name: str | None, seconds: float, report: Callable[[str], None]) -> dict[str, Any]:
    """Wait until all servers serve, and return the status.

    Args:
        name: as of ``status``.
        seconds: timeout.
        report: called with a line of text when the reason for waiting changes.

    Raises:
        UnavailableError: Serve gave up, or the timeout expires; names the reason.
    """
    end, reported = time.monotonic() + seconds, ""
    while not (now := status(name))["ready"]:
        line = "; ".join(now["why"][:3])
        if now["failed"]:
            raise UnavailableError(line)
        if line and line != reported:
            reported = line
            report(f"waiting: {line}")
        if time.monotonic() > end:
            raise UnavailableError(f"not ready within {seconds:g} s: {line or 'servers are missing'}")
        time.sleep(0.5)
    return now


def down(name: str | None) -> str:
    """Remove a deployment: servers, replicas, records. Returns its name. Raises NotFoundError."""
    from ray import serve

    name = Records().deployment(name).name
    with suppress(serve.exceptions.RayServeException):  # Serve has been shut down
        serve.delete(name)
    Records().forget(name)
    if not Records().names() and not serve.status().applications:
        serve.shutdown()
    return name


def _run(spec: Deployment) -> None:
    """Write a deployment, and have Serve run it or change its numbers of servers. Proxies stay off if Serve does not run
    yet."""
    from ray import serve

    from recinfer.deploy.ray.application import application

    Records().save(spec)
    serve.start(proxy_location="Disabled")
    target = serve.RunTarget(application(spec), name=spec.name, route_prefix=None)
    serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
