"""``recinfer deploy`` on a Ray cluster: deploy, status, scale, roll, down."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recinfer import env
from recinfer.cli.console import Output
from recinfer.cli.format import mebibytes
from recinfer.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from recinfer.deploy.ray.spec import Bounds

__all__ = ["Action", "RayOptions", "run_ray"]


@dataclass(frozen=True)
class Action:
    """What is asked for; without any of these the archive is deployed."""

    status: bool = False
    down: bool = False
    roll: bool = False
    rollback: bool = False
    scale: int | None = None
    scale_rankers: int | None = None

    @property
    def scales(self) -> bool:
        """Whether a number of servers is to change."""
        return self.scale is not None or self.scale_rankers is not None

    def check(self, archive: Path | None) -> None:
        """Raises ConfigError for two at a time, and for an archive where none is needed or none where one is."""
        given = [
            name
            for name, wanted in (
                ("--status", self.status),
                ("--down", self.down),
                ("--roll", self.roll),
                ("--rollback", self.rollback),
                ("--scale", self.scales),
            )
            if wanted
        ]
        if len(given) > 1:
            raise ConfigError(f"got {' and '.join(given)}: one at a time")
        needed = not given or self.roll
        if needed and archive is None:
            raise ConfigError("no archive: give the folder of the one to deploy, or --status, --down, --scale")
        if not needed and archive is not None:
            raise ConfigError(f"{given[0]} is about what is deployed; leave out {archive}")


@dataclass(frozen=True)
class RayOptions:
    """The options of ``recinfer deploy`` that a new deployment on Ray takes."""

    ranks_per_shard: int
    replicas: int | None
    min_replicas: int | None
    max_replicas: int | None
    rankers: int | None
    min_rankers: int | None
    max_rankers: int | None
    cpus: str
    queue_depth: int
    cool_down: float
    model_store: Path | None
    token_file: Path | None
    insecure: bool
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    tls_ca: Path | None = None
    tls_name: str | None = None


def run_ray(
    address: str,
    archive: Path | None,
    name: str | None,
    action: Action,
    options: RayOptions,
    wait: float,
    output: Output,
) -> None:
    """Do what was asked of the cluster at ``address``."""
    action.check(archive)
    from recinfer.deploy.ray import client

    version = None if not action.roll or archive is None else archive.resolve().name
    spec = _spec(archive, name, options) if archive is not None and not action.roll else None
    with client.connected(address):
        if action.status:
            found = client.status(name) if name or len(client.deployments()) == 1 else None
            if found is None:
                _show_names(client.deployments(), output)
                return
            _show(found, output)
        elif action.down:
            left = client.down(name)
            output.show("[green]gone[/green]" + (f"; by name: {', '.join(left)}" if left else ""))
            output.finish({"removed_by_name": left})
        elif action.scales:
            client.scale(name, action.scale, action.scale_rankers)
            _show(client.wait_until_ready(client.status(name)["name"], wait, output.note), output)
        elif action.roll or action.rollback:
            if archive is not None:
                _check_fits(archive, client.status(name))
            served = client.roll(name, version)
            output.show(f"[green]serving[/green] version {served}")
            output.finish({"version": served})
        elif spec is not None:
            client.deploy(spec)
            try:
                found = client.wait_until_ready(spec.name, wait, output.note)
            except BaseException:  # also Ctrl-C: half a deployment is of no use, and keeps its places
                output.note("taking it down again")
                client.down(spec.name)
                raise
            _show(found, output)


def _spec(archive: Path, name: str | None, options: RayOptions) -> Any:
    from recinfer.deploy.groups import footprint
    from recinfer.deploy.ray.spec import cores, deployment_of
    from recinfer.deploy.ray.tls import Tls
    from recinfer.serving.security import read_token

    return deployment_of(
        footprint(archive, options.ranks_per_shard),
        archive,
        options.model_store,
        secrets.token_hex(4),
        name=name,
        cpus=cores(options.cpus),
        shards=_bounds(options.replicas, options.min_replicas, options.max_replicas),
        rankers=_bounds(options.rankers, options.min_rankers, options.max_rankers),
        queue_depth=options.queue_depth,
        cool_down=options.cool_down,
        token=env.token() if options.token_file is None else read_token(options.token_file),
        insecure=options.insecure,
        tls=Tls.of(options.tls_cert, options.tls_key, options.tls_client_ca, options.tls_ca, options.tls_name),
    )


def _bounds(count: int | None, least: int | None, most: int | None) -> Bounds:
    from recinfer.deploy.ray.spec import Bounds

    start = count or max(2, least or 0) if most is None else count or min(max(2, least or 0), most)
    return Bounds(start, start if least is None else least, start if most is None else most)


def _check_fits(archive: Path, status: dict[str, Any]) -> None:
    """Raises ConfigError when an archive cannot take the place of the one that is served."""
    from recinfer.deploy.groups import footprint

    found = footprint(archive)
    here = sorted({rank for server in status["servers"] for rank in server["ranks"]})
    there = sorted(rank for group in found.groups for rank in group.ranks)
    if found.model != status["model"]:
        raise ConfigError(f"{archive} is of model {found.model!r}, and {status['name']} serves {status['model']!r}")
    if here != there:
        raise ConfigError(
            f"{archive} is cut for {len(there)} ranks, and {status['name']} has servers for {len(here)}; "
            "deploy it under another --name, or cut it with recinfer reshard"
        )


def _show_names(names: list[str], output: Output) -> None:
    output.show(f"deployments: {', '.join(names) or 'none'}")
    output.finish({"deployments": names})


def _show(found: dict[str, Any], output: Output) -> None:
    before = f", before that {found['previous']}" if found["previous"] else ""
    state = "[green]ready[/green]" if found["ready"] else "[yellow]not ready[/yellow]"
    output.show(f"{found['name']}: {found['model']} {found['version']}{before}; {state}", _table(found))
    if found["rankers"]:
        output.show(f"requests go to: {', '.join(found['rankers'])}")
    output.finish(found)


def _table(found: dict[str, Any]) -> Table:
    from rich.table import Table

    told = any(server["why"] for server in found["servers"])
    titles = ["node", "role", "ranks", "address", "state", "restarts", "version", "requests/s", "memory"]
    table = Table(*titles, *(["why"] if told else []))
    colors = {"serving": "green", "pending": "red", "starting": "yellow", "draining": "dim"}
    for server in found["servers"]:
        color = colors[server["state"]]
        table.add_row(
            server["host"] or "-",
            server["role"],
            ",".join(map(str, server["ranks"])) or "-",
            server["address"] or "-",
            f"[{color}]{server['state']}[/{color}]",
            str(server["restarts"]),
            server["version"] or "-",
            f"{server['rate']:.1f}",
            mebibytes(server["memory"]) if server["memory"] else "-",
            *([server["why"]] if told else []),
        )
    return table
