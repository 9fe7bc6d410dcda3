"""Deploys, scales, updates and removes a deployment on a Ray cluster."""

from __future__ import annotations

import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from recinfer import env
from recinfer.cli.console import Output, styled
from recinfer.cli.deploy_options import DeployOptions
from recinfer.errors import ConfigError
from recinfer.sizes import size_text

if TYPE_CHECKING:
    from rich.table import Table

    from recinfer.deploy.ray.spec import Bounds, Deployment

__all__ = ["cores", "run_ray", "spec_of_options"]


def run_ray(options: DeployOptions, output: Output) -> None:
    """Run the action of ``options`` on the Ray cluster."""
    action, archive, name, wait = options.action, options.archive, options.name, options.ray.wait
    action.check(archive)
    from recinfer.deploy.ray import client

    version = None if not action.roll or archive is None else archive.resolve().name
    spec = spec_of_options(archive, options) if archive is not None and not action.roll else None
    with client.connected(options.ray.ray or "auto"):
        if action.status:
            found = client.status(name) if name or len(client.deployments()) == 1 else None
            if found is None:
                _show_names(client.deployments(), output)
                return
            _show(found, output)
        elif action.down:
            left = client.down(name)
            output.show(
                styled(
                    "green",
                    "removed",
                    f"; these servers did not end by themselves: {', '.join(left)}" if left else "",
                )
            )
            output.finish({"removed_by_name": left})
        elif action.scales:
            client.scale(name, action.scale, action.scale_rankers)
            _show(client.wait_until_ready(client.status(name)["name"], wait, output.note), output)
        elif action.roll or action.rollback:
            if archive is not None:
                _check_fits(archive, client.status(name))
            served = client.roll(name, version)
            output.show(styled("green", "serving", f" version {served}"))
            output.finish({"version": served})
        elif spec is not None:
            client.deploy(spec)
            try:
                found = client.wait_until_ready(spec.name, wait, output.note)
            except BaseException:  # also Ctrl-C: an incomplete deployment serves nothing and holds resources
                output.note("removing the incomplete deployment")
                client.down(spec.name)
                raise
            _show(found, output)


def spec_of_options(archive: Path, options: DeployOptions) -> Deployment:
    """The deployment that the options describe; paths become absolute. Raises ConfigError."""
    from recinfer.deploy.groups import footprint
    from recinfer.deploy.ray.spec import deployment_of
    from recinfer.serving.config import SecurityConfig
    from recinfer.serving.wire.tls import read_token

    ray, servers = options.ray, options.servers
    cert, key, client_ca, ca = (
        None if path is None else path.absolute() for path in (ray.tls_cert, ray.tls_key, ray.tls_client_ca, ray.tls_ca)
    )
    token = env.token() if ray.token_file is None else read_token(ray.token_file)
    return deployment_of(
        footprint(archive, servers.ranks_per_shard),
        archive,
        ray.model_store,
        secrets.token_hex(4),
        name=options.name,
        cpus=cores(servers.cpus),
        shards=_bounds(servers.replicas, ray.min_replicas, servers.max_replicas),
        rankers=_bounds(servers.rankers, ray.min_rankers, servers.max_rankers),
        queue_depth=servers.queue_depth,
        busy_percent=servers.busy_percent,
        cool_down=ray.cool_down,
        security=SecurityConfig(token, None, cert, key, client_ca, ray.insecure),
        tls_ca=ca,
        tls_name=ray.tls_name,
    )


def cores(text: str) -> float:
    """``"2"``, ``"0.5"`` or ``"500m"`` as a number; raises ConfigError."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(m?)", text)
    if found is None:
        raise ConfigError(f"cpus: got {text!r}, expected a number as in 2, 0.5 or 500m")
    return float(found[1]) / (1000 if found[2] else 1)


def _bounds(count: int | None, least: int | None, most: int | None) -> Bounds:
    from recinfer.deploy.ray.spec import Bounds

    start = count or max(2, least or 0) if most is None else count or min(max(2, least or 0), most)
    return Bounds(start, start if least is None else least, start if most is None else most)


def _check_fits(archive: Path, status: dict[str, Any]) -> None:
    """Raises ConfigError if an archive cannot replace the served one."""
    from recinfer.deploy.groups import footprint

    found = footprint(archive)
    here = sorted({rank for server in status["servers"] for rank in server["ranks"]})
    there = sorted(rank for group in found.groups for rank in group.ranks)
    if found.model != status["model"]:
        raise ConfigError(
            f"{archive} is an archive of model {found.model!r}, but {status['name']} serves {status['model']!r}; "
            f"deploy it under another --name"
        )
    if here != there:
        raise ConfigError(
            f"{archive} has {len(there)} ranks, but {status['name']} has servers for {len(here)}; deploy it under "
            f"another --name, or run recinfer reshard"
        )


def _show_names(names: list[str], output: Output) -> None:
    output.show(f"deployments: {', '.join(names) or 'none'}")
    output.finish({"deployments": names})


def _show(found: dict[str, Any], output: Output) -> None:
    before = f", before that {found['previous']}" if found["previous"] else ""
    state = ("ready", "green") if found["ready"] else ("not ready", "yellow")
    what = f"{found['name']}: {found['model']} {found['version']}{before}; "
    output.show(Text.assemble(what, state), _table(found))
    for server in found["servers"]:
        if server["why"]:
            output.show(f"{server['name']}: {server['why']}")
    if found["rankers"]:
        output.show(f"requests go to: {', '.join(found['rankers'])}")
    output.finish(found)


def _table(found: dict[str, Any]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)  # 80 columns are enough
    for title in ("address", "role", "state", "restarts", "version", "calls/s", "load", "busy", "memory"):
        table.add_column(title, no_wrap=title in ("address", "role", "state"))
    colors = {"serving": "green", "pending": "red", "starting": "yellow", "draining": "dim"}
    for server in found["servers"]:
        table.add_row(
            server["address"] or server["host"] or "-",
            " ".join([server["role"], ",".join(map(str, server["ranks"]))]).rstrip(),
            styled(colors[server["state"]], server["state"]),
            str(server["restarts"]),
            server["version"] or "-",
            f"{server['rate']:.1f}",
            f"{server['load']:.1f}",
            "-" if server["busy"] is None else f"{server['busy']:.0%}",
            size_text(server["memory"]) if server["memory"] else "-",
        )
    return table
