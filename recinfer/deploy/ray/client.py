"""Creates and calls the controllers of deployments on a Ray cluster."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from recinfer.deploy.ray.cluster import NAMESPACE, forget, remove_files, sweep
from recinfer.deploy.ray.spec import Deployment
from recinfer.deploy.ray.tls import Tls, missing_files
from recinfer.errors import ConfigError, NotFoundError, RecinferError, UnavailableError
from recinfer.serving.server.security import Security

__all__ = ["connected", "deploy", "deployments", "down", "rankers", "roll", "scale", "status", "wait_until_ready"]

_log = logging.getLogger(__name__)
_REACH_S, _ANSWER_S, _DOWN_S, _ROLL_S = 3.0, 30.0, 150.0, 3600.0
_GONE_S, _ROOM_S = 20.0, 15.0
_TRIES = 3  # restarts of a server that never served, after which a deployment fails


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Connects this process as a driver to the cluster at ``address``: ``host:port`` of its head, ``auto``, or
    ``ray://host:port``.

    Raises:
        ModuleNotFoundError: Ray is not installed.
        UnavailableError: there is no cluster; names the address.
    """
    import ray

    _check_address(address)
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, TimeoutError, ValueError) as error:
        first = (
            (str(error).strip().splitlines() or [type(error).__name__])[0]
            .replace("`--address`", "`--ray`")
            .rstrip(".; ")
        )
        raise UnavailableError(
            f"no Ray cluster at {address!r}: {first}; start one with `ray start --head`, and a node of it on this "
            f"machine"
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


def deploy(spec: Deployment) -> None:
    """Create the controller of a deployment, which starts its servers.

    Raises:
        ConfigError: a deployment of that name exists, or a node is reachable from other machines and there is no token.
    """
    import ray

    there = None if spec.tls is None or spec.tls.client_ca is None else spec.tls
    security = Security(
        token=spec.token,
        insecure=spec.insecure,
        tls_cert=None if there is None else Path(there.cert),
        tls_key=None if there is None else Path(there.key),
        client_ca=None if there is None or there.client_ca is None else Path(there.client_ca),
    )
    nodes = [node for node in ray.nodes() if node["Alive"]]
    for node in nodes:
        _check_host(security, node["NodeManagerAddress"])
    if spec.tls is not None:
        _check_files(nodes, spec.tls)
    if spec.name in deployments():
        raise ConfigError(
            f"deployment {spec.name!r} exists already: remove it (--down), update it (--roll), or give another --name"
        )
    from recinfer.deploy.ray.actor import ControllerActor

    # Ray's type stubs lack remote() on an actor's methods.
    actor: Any = ray.remote(ControllerActor).options(
        name=spec.name,
        namespace=NAMESPACE,
        lifetime="detached",
        max_restarts=-1,
        num_cpus=0,
        max_concurrency=8,
    )
    _get(actor.remote(spec).status.remote(), _ANSWER_S)


def deployments() -> list[str]:
    """Names of the deployments of the cluster."""
    import ray

    found = ray.util.list_named_actors(all_namespaces=True)
    return sorted(each["name"] for each in found if each["namespace"] == NAMESPACE and "/" not in each["name"])


def status(name: str | None) -> dict[str, Any]:
    """The result of recinfer.deploy.ray.control.Controller.status; ``name`` may be None if there is only one
    deployment.

    Raises:
        NotFoundError: there is no such deployment, or there are several.
        UnavailableError: its controller does not respond; it may be restarting on another node.
    """
    found: dict[str, Any] = _get(_controller(name).status.remote(), _ANSWER_S)
    return found


def rankers(name: str | None = None) -> list[str]:
    """Addresses of a deployment's serving rankers, as ``host:port``. Raises as ``status`` does."""
    return list(status(name)["rankers"])


def scale(name: str | None, shards: int | None, rankers: int | None) -> None:
    """Change the number of shard servers per group of ranks, or of rankers. Raises ConfigError, and as ``status``
    does."""
    _get(_controller(name).scale.remote(shards, rankers), _ANSWER_S)


def roll(name: str | None, version: str | None) -> str:
    """Switch to another version (None: the previous one) and return the served version. Raises RecinferError."""
    return str(_get(_controller(name).roll.remote(version), _ROLL_S))


def wait_until_ready(name: str, seconds: float, report: Callable[[str], None]) -> dict[str, Any]:
    """Wait until all servers serve, and return the status.

    Args:
        seconds: timeout.
        report: called with a line of text when the reason for waiting changes.

    Raises:
        UnavailableError: no node has resources for a server, a server keeps failing, or the timeout expires; names the
            server and the reason.
    """
    start = time.monotonic()
    reported = ""
    while True:
        now = status(name)
        if now["ready"]:
            return now
        waiting = [server for server in now["servers"] if server["state"] != "serving"]
        lacking = [server for server in waiting if server["why"]]
        may_free = now["whole"] and time.monotonic() - start < _ROOM_S  # other servers may release resources
        for server in lacking:
            unplaced = server["state"] == "pending" and not server["node"] and not may_free
            failing = server["restarts"] >= _TRIES and not now["whole"]
            if unplaced:
                later = "; it starts when a node has; or scale down" if now["whole"] else ""
                raise UnavailableError(f"{server['why']}{later}")
            if failing:
                raise UnavailableError(f"{server['name']}: {server['why']}")
        line = "; ".join(f"{server['name']}: {server['why']}" for server in lacking[:3])
        if line and line != reported:
            reported = line
            report(f"waiting: {line}")
        if time.monotonic() - start > seconds:
            raise UnavailableError(f"not ready within {seconds:g} s: {line or 'servers are missing'}")
        time.sleep(0.5)


def down(name: str | None) -> list[str]:
    """Remove a deployment: servers, actors, placement groups, files. Returns the names of what the controller did not
    remove itself, usually none. Raises NotFoundError, UnavailableError."""
    import ray

    actor = _controller(name)
    name = name or deployments()[0]
    tag = None
    try:
        tag = _get(actor.spec.remote(), _ANSWER_S).tag
        _get(actor.down.remote(), _DOWN_S)
    except RecinferError:
        pass  # the sweep below removes the rest by name
    ray.kill(actor, no_restart=True)
    end = time.monotonic() + _GONE_S
    gone: list[str] = []
    while True:
        gone += [each for each in sweep(name) if each != name and each not in gone]
        if not _left(name):
            break
        if time.monotonic() > end:
            raise UnavailableError(f"{name}: could not remove {', '.join(_left(name))}; run --down again")
        time.sleep(0.2)
    forget(name)
    if tag is not None:  # a guard that was killed with its ranker could not remove its folder
        nodes = [node for node in ray.nodes() if node["Alive"]]
        cleaned = _on_every_node(nodes, remove_files, tag)
        if silent := sorted({node["NodeManagerAddress"] for node in nodes} - set(cleaned)):
            _log.warning(
                "nodes %s did not respond in %g s: remove folders named recinfer-%s-* from their temporary folders",
                ", ".join(silent),
                _ANSWER_S,
                tag,
            )
    return gone


def _left(name: str) -> list[str]:
    import ray
    from ray.util.placement_group import placement_group_table

    actors = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True)]
    groups = [group["name"] for group in placement_group_table().values() if group["state"] != "REMOVED"]
    return [each for each in (*actors, *groups) if each == name or each.startswith(f"{name}/")]


def _controller(name: str | None) -> Any:
    import ray

    there = deployments()
    if name is None and len(there) == 1:
        name = there[0]
    if name is None or name not in there:
        which = "got none" if name is None else f"got {name!r}"
        raise NotFoundError(f"deployment: {which}, expected one of: {', '.join(there) or 'none exist'}")
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        raise NotFoundError(f"deployment: {name!r} was removed meanwhile") from None


def _get(answer: Any, seconds: float) -> Any:
    """The result of a controller's call; raises the error that the controller raised."""
    import ray

    try:
        return ray.get(answer, timeout=seconds)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, RecinferError):
            raise error.cause from None
        raise
    except ray.exceptions.GetTimeoutError:
        raise UnavailableError(
            f"the controller did not respond within {seconds:g} s; try again, or remove the deployment with --down"
        ) from None
    except ray.exceptions.RayActorError as error:
        first = str(error).strip().splitlines()[0]
        raise UnavailableError(f"the controller failed or is restarting on another node: {first}") from None


def _check_host(security: Security, host: str) -> None:
    """Raises ConfigError if ``host`` needs a token; servers check this too, but only after they start."""
    try:
        security.check_host(host)
    except ConfigError:
        raise ConfigError(
            f"node {host} is reachable from other machines, and there is no token: set RECINFER_TOKEN, or give "
            f"--token-file, --tls-client-ca or --insecure"
        ) from None


def _check_files(nodes: list[dict[str, Any]], tls: Tls) -> None:
    """Check on every node that the TLS files are readable; raises ConfigError naming nodes and files."""
    found = _on_every_node(nodes, missing_files, tls.files)
    missing = [f"node {host} cannot read {', '.join(gone)}" for host, gone in sorted(found.items()) if gone]
    if missing:
        raise ConfigError(f"TLS: {'; '.join(missing)}; put each file at its path on every node")


def _on_every_node(nodes: list[dict[str, Any]], run: Callable[[Any], Any], argument: Any) -> dict[str, Any]:
    """Run ``run(argument)`` on each of ``nodes``; returns the results by address, without nodes that do not respond in
    30 s."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    asked = {
        ray.remote(run)
        .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False))
        .remote(argument): node["NodeManagerAddress"]
        for node in nodes
    }
    ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_ANSWER_S)
    found = {}
    for answer in ready:
        with suppress(ray.exceptions.RayError):  # the node failed meanwhile
            found[asked[answer]] = ray.get(answer)
    return found


def _check_address(address: str) -> None:
    """Raises UnavailableError within seconds if nothing listens at ``address``; Ray would take minutes and end the
    process."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if address in ("auto", "local") or not colon or not port.isdecimal():
        if address == "auto":
            return
        raise ConfigError(f"--ray: got {address[:80]!r}, expected host:port, ray://host:port or auto")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()
    except OSError as error:
        raise UnavailableError(
            f"no Ray cluster at {address!r}: {error.strerror or error}; start one with `ray start --head`"
        ) from None
