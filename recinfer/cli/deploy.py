"""``recinfer deploy``: an archive on many machines, through Kubernetes manifests."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from recinfer.cli.console import JsonOption, Output
from recinfer.cli.format import mebibytes
from recinfer.errors import ConfigError

__all__ = ["EXAMPLE", "NAME", "run"]

NAME = "deploy"
EXAMPLE = "Example: recinfer deploy movielens.rqa --k8s --out manifests"

_K8S = "Kubernetes"


def run(
    archive: Annotated[Path | None, typer.Argument(help="Archive folder.", show_default=False)] = None,
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
        int, typer.Option(min=1, help="Waiting requests of a server above which one more is started.")
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
        int | None, typer.Option(min=1, help="The same of rankers.", show_default="k8s: four times --rankers")
    ] = None,
    ranks_per_shard: Annotated[int, typer.Option(min=1, help="Ranks that one shard server holds.")] = 1,
    name: Annotated[str | None, typer.Option(help="Of the deployment.", show_default="the model's name")] = None,
    as_json: JsonOption = False,
) -> None:
    """Run an archive on many machines: shard servers hold its ranks, rankers answer.

    With --k8s, write what `kubectl apply -k` takes.
    """
    output = Output(as_json)
    if k8s:
        if archive is None or out is None:
            raise ConfigError("--k8s renders an archive to files: give ARCHIVE and --out DIR")
        options: dict[str, Any] = {
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
        _render(archive, out, ranks_per_shard, options, output)
        return
    raise ConfigError("say where to: --k8s --out DIR")


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
