"""The options of ``recinfer deploy``."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import typer

from recinfer.cli.console import JsonOption
from recinfer.deploy import BUSY_PERCENT
from recinfer.errors import ConfigError

__all__ = ["Action", "DeployOptions", "ManifestOptions", "RayOptions", "ServerOptions"]

_K8S, _RAY, _CHANGE = "Kubernetes", "Ray", "A deployment on Ray that is there"


@dataclass(frozen=True)
class RayOptions:
    """Where a new deployment on Ray is, and what it takes beside the servers."""

    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Run it on the Ray cluster there: host:port of its head, ray://host:port, or auto.",
            rich_help_panel=_RAY,
            show_default="auto, with an option about a deployment",
        ),
    ] = None
    model_store: Annotated[
        Path | None,
        typer.Option(
            help="Folder of <model>/<version>/, at this path on every node.",
            rich_help_panel=_RAY,
            show_default="where the archive lies at DIR/<model>/<version>: DIR",
        ),
    ] = None
    min_replicas: Annotated[
        int | None,
        typer.Option(
            min=1, help="Shard servers that load may bring it down to.", rich_help_panel=_RAY, show_default="--replicas"
        ),
    ] = None
    min_rankers: Annotated[
        int | None, typer.Option(min=1, help="The same of rankers.", rich_help_panel=_RAY, show_default="--rankers")
    ] = None
    cool_down: Annotated[
        float, typer.Option(min=1, help="Seconds of low load before one server is removed.", rich_help_panel=_RAY)
    ] = 300.0
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the bearer token of all servers; RECINFER_TOKEN does the same.",
            rich_help_panel=_RAY,
            show_default=False,
        ),
    ] = None
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen beyond loopback without a token.", rich_help_panel=_RAY)
    ] = False
    tls_cert: Annotated[
        Path | None,
        typer.Option(
            help="PEM file of the certificate chain of every server, at this path on every node, as all of these.",
            rich_help_panel=_RAY,
            show_default=False,
        ),
    ] = None
    tls_key: Annotated[
        Path | None, typer.Option(help="PEM file of its key.", rich_help_panel=_RAY, show_default=False)
    ] = None
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(
            help="PEM file of the authority of callers' certificates (mutual TLS); rankers show --tls-cert to shards.",
            rich_help_panel=_RAY,
            show_default=False,
        ),
    ] = None
    tls_ca: Annotated[
        Path | None,
        typer.Option(
            help="PEM file of the authority of --tls-cert: rankers check shards by it, the controller all servers.",
            rich_help_panel=_RAY,
            show_default=False,
        ),
    ] = None
    tls_name: Annotated[
        str | None,
        typer.Option(
            help="Name in --tls-cert, where it is not each node's address.", rich_help_panel=_RAY, show_default=False
        ),
    ] = None
    wait: Annotated[float, typer.Option(min=0, help="Seconds until all servers must serve.", rich_help_panel=_RAY)] = (
        600.0
    )

    def given(self) -> list[str]:
        """Those that are not as they are by themselves, as the command line calls them."""
        return [f"--{f.name.replace('_', '-')}" for f in fields(self) if getattr(self, f.name) != f.default]


@dataclass(frozen=True)
class Action:
    """What is asked of a deployment on Ray; without any of these the archive is deployed."""

    status: Annotated[bool, typer.Option("--status", help="Show its servers.", rich_help_panel=_CHANGE)] = False
    down: Annotated[bool, typer.Option("--down", help="End it; nothing stays.", rich_help_panel=_CHANGE)] = False
    scale: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Have so many shard servers of each group of ranks.",
            rich_help_panel=_CHANGE,
            show_default=False,
        ),
    ] = None
    scale_rankers: Annotated[
        int | None,
        typer.Option(min=1, help="Have so many rankers.", rich_help_panel=_CHANGE, show_default=False),
    ] = None
    roll: Annotated[
        bool, typer.Option("--roll", help="Serve ARCHIVE, another version in its store.", rich_help_panel=_CHANGE)
    ] = False
    rollback: Annotated[
        bool, typer.Option("--rollback", help="Serve the version before this one again.", rich_help_panel=_CHANGE)
    ] = False

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
class ManifestOptions:
    """What manifests say beside the servers."""

    k8s: Annotated[bool, typer.Option("--k8s", help="Write Kubernetes manifests.", rich_help_panel=_K8S)] = False
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for the manifests.", rich_help_panel=_K8S, show_default=False)
    ] = None
    image: Annotated[str, typer.Option(help="Image that has recinfer, see docker/.", rich_help_panel=_K8S)] = (
        "recinfer:0.2.0-cpu"
    )
    namespace: Annotated[str, typer.Option(help="Where everything lives.", rich_help_panel=_K8S)] = "recinfer"
    claim: Annotated[
        str,
        typer.Option(help="PersistentVolumeClaim with <model>/<version>/ archives.", rich_help_panel=_K8S),
    ] = "recinfer-models"
    token_secret: Annotated[
        str | None,
        typer.Option(help="Secret with the key 'token'.", rich_help_panel=_K8S, show_default="<name>-token"),
    ] = None


@dataclass(frozen=True)
class ServerOptions:
    """How many servers, and how large."""

    cpus: Annotated[str, typer.Option(help="Cores that each server asks for.")] = "1"
    queue_depth: Annotated[
        int, typer.Option(min=1, help="Requests that wait in a server (Ray: are in it) above which there is one more.")
    ] = 16
    busy_percent: Annotated[
        int,
        typer.Option(
            min=1, max=100, help="Of a shard server's time (Kubernetes: of cores too) above which there is one more."
        ),
    ] = BUSY_PERCENT
    replicas: Annotated[
        int | None, typer.Option(min=1, help="Shard servers of each group of ranks.", show_default="2")
    ] = None
    rankers: Annotated[int | None, typer.Option(min=1, help="Rankers, which callers talk to.", show_default="2")] = None
    max_replicas: Annotated[
        int | None, typer.Option(min=1, help="Shard servers that load may bring it to.", show_default="no scaling")
    ] = None
    max_rankers: Annotated[
        int | None,
        typer.Option(
            min=1, help="The same of rankers.", show_default="Kubernetes: four times --rankers; Ray: no scaling"
        ),
    ] = None
    ranks_per_shard: Annotated[int, typer.Option(min=1, help="Ranks that one shard server holds.")] = 1


@dataclass(frozen=True, kw_only=True)
class DeployOptions:
    """All of them."""

    archive: Annotated[Path | None, typer.Argument(help="Archive folder.", show_default=False)] = None
    ray: RayOptions
    action: Action
    k8s: ManifestOptions
    servers: ServerOptions
    name: Annotated[str | None, typer.Option(help="Of the deployment.", show_default="the model's name")] = None
    as_json: JsonOption = False
