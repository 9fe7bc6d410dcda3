"""Creates, changes and removes deployments on a Ray cluster."""

from __future__ import annotations

import logging
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from recinfer.deploy.ray.records import NAMESPACE, Records, Saved
from recinfer.deploy.ray.rollout import Rollout, version_to_roll
from recinfer.deploy.ray.spec import Deployment, Node, check_room
from recinfer.deploy.ray.status import status_of
from recinfer.deploy.ray.tls import Tls, missing_files
from recinfer.errors import ConfigError, NotFoundError, RecinferError, UnavailableError
from recinfer.serving.server.security import Security

__all__ = ["connected", "deploy", "deployments", "down", "rankers", "roll", "scale", "status", "wait_until_ready"]

_REACH_S, _ANSWER_S, _FREE_S, _ROLL_S = 3.0, 30.0, 120.0, 3600.0
_TRIES = 2  # starts of a server after its first, after which a command gives up; Serve gives up after as many


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
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, TimeoutError, ValueError) as error:
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
        ConfigError: a deployment of that name exists, or a node is reachable from other machines and there is no token.
        UnavailableError: no node has room for a server.
    """
    nodes = _nodes()
    tls = spec.tls if spec.tls is not None and spec.tls.client_ca is not None else None
    security = Security(
        token=spec.token,
        insecure=spec.insecure,
        tls_cert=None if tls is None else tls.cert,
        tls_key=None if tls is None else tls.key,
        client_ca=None if tls is None else tls.client_ca,
    )
    for node in nodes:
        _check_host(security, node["NodeManagerAddress"])
    if spec.tls is not None:
        _check_files(nodes, spec.tls)
    if spec.name in Records().names():
        raise ConfigError(
            f"deployment {spec.name!r} exists already: remove it (--down), update it (--roll), or give another --name"
        )
    check_room(spec, [group for group in spec.kinds for _ in range(spec.bounds(group).start)], _free(nodes))
    spec = replace(spec, nodes=len(nodes)).spread()
    Records().save(Saved(spec, spec.version))
    _run(spec)


def deployments() -> list[str]:
    """Names of the deployments of the cluster."""
    return Records().names()


def status(name: str | None) -> dict[str, Any]:
    """The state of a deployment as JSON values: name, model, version, and each server as ``recinfer deploy --status``
    shows it; ``name`` may be None if there is only one deployment.

    Raises:
        NotFoundError: there is no such deployment, or there are several.
    """
    saved = _saved(name)
    return status_of(saved, Records().servers(saved.spec.name))


def rankers(name: str | None = None) -> list[str]:
    """Addresses of a deployment's serving rankers, as ``host:port``. Raises as ``status`` does."""
    return list(status(name)["rankers"])


def scale(name: str | None, shards: int | None, rankers: int | None) -> None:
    """Change the number of shard servers per group of ranks, or of rankers. Raises ConfigError, UnavailableError, and as
    ``status`` does."""
    saved = _saved(name)
    before = saved.spec
    shards_to, rankers_to = before.shards.scaled("replicas", shards), before.rankers.scaled("rankers", rankers)
    spec = replace(before, shards=shards_to, rankers=rankers_to).spread()
    more = [group for group in spec.kinds for _ in range(spec.bounds(group).start - before.bounds(group).start)]
    if more:
        check_room(spec, more, _free(_nodes()))
    Records().save(replace(saved, spec=spec))
    _run(spec)


def roll(name: str | None, version: str | None) -> str:
    """Switch to another version (None: the previous one) and return the served version. Raises RecinferError."""
    import ray

    saved = _saved(name)
    version_to_roll(saved, version)
    options: dict[str, Any] = {"name": f"{saved.spec.name}/roll", "namespace": NAMESPACE, "num_cpus": 0}
    try:
        actor: Any = ray.remote(Rollout).options(**options).remote()
    except ValueError:
        raise UnavailableError("versions: another rollout is in progress; try again when it has finished") from None
    return str(_get(actor.roll.remote(saved.spec.name, version), _ROLL_S))


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
        for server in now["servers"]:
            before = first.setdefault(server["name"], server["restarts"])
            if server["why"] and server["restarts"] - before >= _TRIES:
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

    saved = _saved(name)
    with suppress(serve.exceptions.RayServeException):  # Serve has been shut down
        serve.delete(saved.spec.name)
    rest = [server.name for server in Records().servers(saved.spec.name) if server.state != "pending"]
    Records().forget(saved.spec.name)
    _on_every_node(_nodes(), _remove_files, saved.spec.tag)
    if not Records().names() and not serve.status().applications:
        serve.shutdown()
    return rest


def _run(spec: Deployment) -> None:
    """Have Serve run the application, or change its numbers of servers. Proxies stay off if Serve does not run yet."""
    from ray import serve

    from recinfer.deploy.ray.application import application

    serve.start(proxy_location="Disabled")
    target = serve.RunTarget(application(spec), name=spec.name, route_prefix=None)
    serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)


def _saved(name: str | None) -> Saved:
    there = Records().names()
    if name is None and len(there) == 1:
        name = there[0]
    found = None if name is None else Records().saved(name)
    if found is None:
        which = "got none" if name is None else f"got {name!r}"
        raise NotFoundError(f"deployment: {which}, expected one of: {', '.join(there) or 'none exist'}")
    return found


def _get(answer: Any, seconds: float) -> Any:
    """The result of a call on the cluster; raises the RecinferError that it raised."""
    import ray

    try:
        return ray.get(answer, timeout=seconds)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, RecinferError):
            raise error.cause from None
        raise
    except ray.exceptions.RayError as error:
        raise UnavailableError(
            f"the cluster did not respond: {str(error).strip().splitlines()[0]}; try again"
        ) from None


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


def _remove_files(tag: str) -> None:
    """Remove the files of rankers that were killed on this node."""
    for path in Path(tempfile.gettempdir()).glob(f"recinfer-{tag}-*"):
        path.unlink(missing_ok=True)


def _nodes() -> list[dict[str, Any]]:
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def _free(nodes: list[dict[str, Any]]) -> list[Node]:
    """The free resources of nodes."""
    import ray
    from ray._private.state import available_resources_per_node  # Ray 2.60 has no public name for it

    # On the cluster: a client from outside it cannot call the function.
    free = _get(ray.remote(available_resources_per_node).options(num_cpus=0).remote(), _FREE_S)
    found = [(node["NodeManagerAddress"], free.get(node["NodeID"], {})) for node in nodes]
    return [Node(host, mine.get("memory", 0.0), mine.get("CPU", 0.0)) for host, mine in found]


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
