"""``recinfer deploy``: an archive on many machines, by Ray or through Kubernetes manifests."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from recinfer.cli.console import JsonOption, Output
from recinfer.cli.deploy_ray import Action, RayOptions, run_ray
from recinfer.cli.format import mebibytes
from recinfer.errors import ConfigError

__all__ = ["EXAMPLE", "NAME", "run"]

NAME = "deploy"
EXAMPLE = "Example: recinfer deploy store/ctr/1 --ray 10.0.0.1:6379 --replicas 2; then: recinfer deploy --status"

_K8S, _RAY, _CHANGE = "Kubernetes", "Ray", "A deployment on Ray that is there"


def run(
    archive: Annotated[Path | None, typer.Argument(help="Archive folder.", show_default=False)] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Run it on the Ray cluster there: host:port of its head, ray://host:port, or auto.",
            rich_help_panel=_RAY,
            show_default="auto, with an option about a deployment",
        ),
    ] = None,
    model_store: Annotated[
        Path | None,
        typer.Option(
            help="Folder of <model>/<version>/, at this path on every node.",
            rich_help_panel=_RAY,
            show_default="where the archive lies at DIR/<model>/<version>: DIR",
        ),
    ] = None,
    min_replicas: Annotated[
        int | None,
        typer.Option(
            min=1, help="Shard servers that load may bring it down to.", rich_help_panel=_RAY, show_default="--replicas"
        ),
    ] = None,
    min_rankers: Annotated[
        int | None, typer.Option(min=1, help="The same of rankers.", rich_help_panel=_RAY, show_default="--rankers")
    ] = None,
    cool_down: Annotated[
        float, typer.Option(min=1, help="Seconds of low load before there is a server less.", rich_help_panel=_RAY)
    ] = 300.0,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the bearer token of all servers; RECINFER_TOKEN does the same.",
            rich_help_panel=_RAY,
            show_default=False,
        ),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen beyond loopback without a token.", rich_help_panel=_RAY)
    ] = False,
    tls_cert: Annotated[
        Path | None,
        typer.Option(
            help="PEM file of the certificate chain of every server, at this path on every node, as all of these.",
            rich_help_panel=_RAY,
            show_default=False,
        ),
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(help="PEM file of its key.", rich_help_panel=_RAY, show_default=False)
    ] = None,
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(
            help="PEM file of the authority of callers' certificates (mutual TLS); rankers show --tls-cert to shards.",
            rich_help_panel=_RAY,
            show_default=False,
        ),
    ] = None,
    tls_ca: Annotated[
        Path | None,
        typer.Option(
            help="PEM file of the authority of --tls-cert: rankers check shards by it, the controller all servers.",
            rich_help_panel=_RAY,
            show_default=False,
        ),
    ] = None,
    tls_name: Annotated[
        str | None,
        typer.Option(
            help="Name in --tls-cert, where it is not each node's address.", rich_help_panel=_RAY, show_default=False
        ),
    ] = None,
    wait: Annotated[
        float, typer.Option(min=0, help="Seconds until all servers must serve.", rich_help_panel=_RAY)
    ] = 600.0,
    status: Annotated[bool, typer.Option("--status", help="Show its servers.", rich_help_panel=_CHANGE)] = False,
    down: Annotated[bool, typer.Option("--down", help="End it; nothing stays.", rich_help_panel=_CHANGE)] = False,
    scale: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Have so many shard servers of each group of ranks.",
            rich_help_panel=_CHANGE,
            show_default=False,
        ),
    ] = None,
    scale_rankers: Annotated[
        int | None,
        typer.Option(min=1, help="Have so many rankers.", rich_help_panel=_CHANGE, show_default=False),
    ] = None,
    roll: Annotated[
        bool, typer.Option("--roll", help="Serve ARCHIVE, another version in its store.", rich_help_panel=_CHANGE)
    ] = False,
    rollback: Annotated[
        bool, typer.Option("--rollback", help="Serve the version before this one again.", rich_help_panel=_CHANGE)
    ] = False,
    k8s: Annotated[bool, typer.Option("--k8s", help="Write Kubernetes manifests.", rich_help_panel=_K8S)] = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for the manifests.", rich_help_panel=_K8S, show_default=False)
    ] = None,
    image: Annotated[
        str, typer.Option(help="Image that has recinfer, see docker/.", rich_help_panel=_K8S)
    ] = "recinfer:0.1.0-cpu",
    namespace: Annotated[str, typer.Option(help="Where everything lives.", rich_help_panel=_K8S)] = "recinfer",
    claim: Annotated[
        str,
        typer.Option(help="PersistentVolumeClaim with <model>/<version>/ archives.", rich_help_panel=_K8S),
    ] = "recinfer-models",
    token_secret: Annotated[
        str | None,
        typer.Option(help="Secret with the key 'token'.", rich_help_panel=_K8S, show_default="<name>-token"),
    ] = None,
    cpus: Annotated[str, typer.Option(help="Cores that each server asks for.")] = "1",
    queue_depth: Annotated[
        int, typer.Option(min=1, help="Requests that wait in a server (Ray: are in it) above which there is one more.")
    ] = 16,
    replicas: Annotated[
        int | None, typer.Option(min=1, help="Shard servers of each group of ranks.", show_default="2")
    ] = None,
    rankers: Annotated[
        int | None, typer.Option(min=1, help="Rankers, which callers talk to.", show_default="2")
    ] = None,
    max_replicas: Annotated[
        int | None, typer.Option(min=1, help="Shard servers that load may bring it to.", show_default="no scaling")
    ] = None,
    max_rankers: Annotated[
        int | None,
        typer.Option(
            min=1, help="The same of rankers.", show_default="Kubernetes: four times --rankers; Ray: no scaling"
        ),
    ] = None,
    ranks_per_shard: Annotated[int, typer.Option(min=1, help="Ranks that one shard server holds.")] = 1,
    name: Annotated[str | None, typer.Option(help="Of the deployment.", show_default="the model's name")] = None,
    as_json: JsonOption = False,
) -> None:
    """Run an archive on many machines: shard servers hold its ranks, rankers answer.

    With --ray, on a Ray cluster: it places, watches, restarts and scales the servers; requests go between them directly.

    recinfer deploy store/ctr/1 --ray 10.0.0.1:6379 --replicas 2 --max-replicas 4 --token-file token

    recinfer deploy --status, --scale 3, --rollback or --down; recinfer deploy store/ctr/2 --roll

    With --k8s, write what `kubectl apply -k` takes.

    recinfer deploy store/ctr/1 --k8s --out manifests
    """
    output = Output(as_json)
    action = Action(status, down, roll, rollback, scale, scale_rankers)
    if k8s and (ray is not None or action != Action()):
        raise ConfigError("--k8s writes files and knows no cluster: leave out the options of Ray, or --k8s")
    if ray is not None or action != Action():
        options = RayOptions(
            ranks_per_shard=ranks_per_shard,
            replicas=replicas,
            min_replicas=min_replicas,
            max_replicas=max_replicas,
            rankers=rankers,
            min_rankers=min_rankers,
            max_rankers=max_rankers,
            cpus=cpus,
            queue_depth=queue_depth,
            cool_down=cool_down,
            model_store=model_store,
            token_file=token_file,
            insecure=insecure,
            tls_cert=tls_cert,
            tls_key=tls_key,
            tls_client_ca=tls_client_ca,
            tls_ca=tls_ca,
            tls_name=tls_name,
        )
        run_ray(ray or "auto", archive, name, action, options, wait, output)
        return
    if not k8s:
        raise ConfigError("say where to: --ray ADDRESS, or --k8s --out DIR")
    if archive is None or out is None:
        raise ConfigError("--k8s renders an archive to files: give ARCHIVE and --out DIR")
    kept: dict[str, Any] = {
        "namespace": namespace,
        "image": image,
        "name": name,
        "replicas": replicas or 2,
        "rankers": rankers or 2,
        "max_replicas": max_replicas,
        "max_rankers": max_rankers or 4 * (rankers or 2),
        "claim": claim,
        "token_secret": token_secret,
        "cpus": cpus,
        "queue_depth": queue_depth,
    }
    _render(archive, out, ranks_per_shard, kept, output)


def _render(archive: Path, out: Path, ranks_per_shard: int, options: dict[str, Any], output: Output) -> None:
    from recinfer.deploy.groups import footprint
    from recinfer.deploy.k8s import K8sOptions, write_manifests

    found = footprint(archive, ranks_per_shard)
    files = write_manifests(found, K8sOptions(**options), out)
    for group in found.groups:
        output.show(f"shard {group.number}: ranks {group.listed}, {mebibytes(group.table_bytes)} of tables")
    output.show(f"[green]wrote[/green] {len(files)} files to {out}; next: kubectl apply -k {out}")
    output.finish(
        {
            "files": [str(path) for path in files],
            "model": found.model,
            "version": found.version,
            "groups": [{"ranks": list(group.ranks), "bytes": group.table_bytes} for group in found.groups],
        }
    )
