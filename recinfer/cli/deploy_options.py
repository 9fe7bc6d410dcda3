"""The options of ``recinfer deploy``."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from recinfer.cli.console import JsonOption
from recinfer.deploy import BUSY_PERCENT, IMAGE, LOAD_PERCENT
from recinfer.errors import ConfigError

__all__ = ["Action", "DeployOptions", "ManifestOptions", "RayOptions", "ServerOptions"]


@dataclass(frozen=True)
class RayOptions:
    """Options of a new deployment on Ray."""

    PANEL: ClassVar[str] = "Ray"

    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Address of the Ray cluster: host:port of its head, ray://host:port, or auto.",
            show_default="auto, with an option that changes a deployment",
        ),
    ] = None
    model_config: Annotated[
        Path | None,
        typer.Option(
            help="File, at the same path on every node, that chooses versions of the archive's store as for recinfer serve. "
            "Rankers follow it.",
            show_default="the archive alone",
        ),
    ] = None
    cool_down: Annotated[
        float,
        typer.Option(min=1, help="Seconds of low load before a server is removed."),
    ] = 300.0
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the bearer token of all servers. Default: RECINFER_TOKEN.",
            show_default=False,
        ),
    ] = None
    insecure: Annotated[
        bool,
        typer.Option("--insecure", help="Allow servers to listen beyond loopback without a token."),
    ] = False
    tls_cert: Annotated[
        Path | None,
        typer.Option(
            help="PEM file of every server's certificate chain. PEM files are read at the same path on every node.",
            show_default=False,
        ),
    ] = None
    tls_key: Annotated[
        Path | None,
        typer.Option(help="PEM file of the certificate's private key.", show_default=False),
    ] = None
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(
            help="PEM file of the certificate authority that signs client certificates (mutual TLS). Rankers present "
            "--tls-cert to shard servers.",
            show_default=False,
        ),
    ] = None
    tls_ca: Annotated[
        Path | None,
        typer.Option(
            help="PEM file of the certificate authority of --tls-cert. Rankers verify shard servers with it.",
            show_default=False,
        ),
    ] = None
    tls_name: Annotated[
        str | None,
        typer.Option(
            help="Host name in --tls-cert, if it differs from the nodes' addresses.",
            show_default=False,
        ),
    ] = None
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait until all servers are ready.")] = 600.0

    def given(self) -> list[str]:
        """The options that differ from their defaults, by their command-line names."""
        return [f"--{f.name.replace('_', '-')}" for f in fields(self) if getattr(self, f.name) != f.default]


@dataclass(frozen=True)
class Action:
    """The action on an existing Ray deployment; without one the archive is deployed."""

    PANEL: ClassVar[str] = "Change a deployment on Ray"

    status: Annotated[bool, typer.Option("--status", help="Show the servers of the deployment.")] = False
    down: Annotated[bool, typer.Option("--down", help="Stop all servers and remove the deployment.")] = False
    scale: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Scale to this many shard servers per group of ranks.",
            show_default=False,
        ),
    ] = None
    scale_rankers: Annotated[
        int | None,
        typer.Option(min=1, help="Scale to this many rankers.", show_default=False),
    ] = None

    @property
    def scales(self) -> bool:
        """Whether the action changes the number of servers."""
        return self.scale is not None or self.scale_rankers is not None

    def check(self, archive: Path | None) -> None:
        """Raises ConfigError for two actions at once, for a missing archive and for an archive that the action does not
        take."""
        given = [
            name
            for name, wanted in (
                ("--status", self.status),
                ("--down", self.down),
                ("--scale", self.scales),
            )
            if wanted
        ]
        if len(given) > 1:
            raise ConfigError(f"got {' and '.join(given)}; give one at a time")
        if not given and archive is None:
            raise ConfigError("got no archive: give the archive folder to deploy, or --status, --scale or --down")
        if given and archive is not None:
            raise ConfigError(f"{given[0]} takes no archive; leave out {archive}")


@dataclass(frozen=True)
class ManifestOptions:
    """Options of the Kubernetes manifests and of the Helm chart."""

    PANEL: ClassVar[str] = "Kubernetes"

    k8s: Annotated[bool, typer.Option("--k8s", help="Write Kubernetes manifests.")] = False
    helm: Annotated[bool, typer.Option("--helm", help="Write a Helm chart, whose values are this archive's.")] = False
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for the manifests or the chart.", show_default=False)
    ] = None
    image: Annotated[str, typer.Option(help="Container image with recinfer; docker/ builds one.")] = IMAGE
    namespace: Annotated[str, typer.Option(help="Namespace of all objects.")] = "recinfer"
    claim: Annotated[
        str,
        typer.Option(help="PersistentVolumeClaim of the model store, with archives at <model>/<version>."),
    ] = "recinfer-models"
    token_secret: Annotated[
        str | None,
        typer.Option(
            help="Secret that holds the bearer token under the key 'token'.",
            show_default="<name>-token",
        ),
    ] = None
    prometheus: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="With --k8s, scale by KEDA, which reads this Prometheus, in place of HorizontalPodAutoscalers.",
            show_default=False,
        ),
    ] = None


@dataclass(frozen=True)
class ServerOptions:
    """Number and size of the servers, and when to scale them."""

    PANEL: ClassVar[str] = "Servers"

    cpus: Annotated[str, typer.Option(help="CPU cores to request per server.")] = "1"
    queue_depth: Annotated[
        int,
        typer.Option(min=1, help="Kubernetes: add a ranker when this many requests are queued per ranker."),
    ] = 16
    load_percent: Annotated[
        int,
        typer.Option(min=1, max=100, help="Add a ranker when the rankers' load exceeds this percentage."),
    ] = LOAD_PERCENT
    busy_percent: Annotated[
        int,
        typer.Option(
            min=1,
            max=100,
            help="Add a shard server when its busy time (Kubernetes: also its CPU use) exceeds this percentage.",
        ),
    ] = BUSY_PERCENT
    replicas: Annotated[int | None, typer.Option(min=1, help="Shard servers per group of ranks.", show_default="2")] = (
        None
    )
    rankers: Annotated[
        int | None, typer.Option(min=1, help="Rankers, the servers that clients call.", show_default="2")
    ] = None
    max_replicas: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Most shard servers per group of ranks when autoscaling; --replicas is the least number.",
            show_default="no scaling",
        ),
    ] = None
    max_rankers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Most rankers when autoscaling; --rankers is the least number.",
            show_default="Kubernetes: four times --rankers; Ray: no scaling",
        ),
    ] = None
    ranks_per_shard: Annotated[int, typer.Option(min=1, help="Ranks per shard server.")] = 1


@dataclass(frozen=True, kw_only=True)
class DeployOptions:
    """All options of ``recinfer deploy``."""

    archive: Annotated[Path | None, typer.Argument(help="Archive folder.", show_default=False)] = None
    ray: RayOptions
    action: Action
    k8s: ManifestOptions
    servers: ServerOptions
    name: Annotated[str | None, typer.Option(help="Name of the deployment.", show_default="the model's name")] = None
    as_json: JsonOption = False
