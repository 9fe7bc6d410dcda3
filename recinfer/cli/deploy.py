"""``recinfer deploy``: deploys an archive on several machines with Ray or Kubernetes manifests."""

from __future__ import annotations

from recinfer.cli.console import Output, styled
from recinfer.cli.declared import takes
from recinfer.cli.deploy_options import Action, DeployOptions
from recinfer.cli.deploy_ray import run_ray
from recinfer.errors import ConfigError
from recinfer.sizes import size_text

__all__ = ["EXAMPLE", "NAME", "run"]

NAME = "deploy"
EXAMPLE = "Example: recinfer deploy store/ctr/1 --ray 10.0.0.1:6379 --replicas 2; then: recinfer deploy --status"


@takes(DeployOptions)
def run(options: DeployOptions) -> None:
    """Deploy an archive on several machines as shard servers and rankers.

    Shard servers hold the embedding tables. Rankers serve clients, look up in the shard servers and run the dense part.
    On a Ray cluster, Ray Serve places, replaces and scales the servers. Requests do not pass through Ray.

    recinfer deploy store/ctr/1 --ray 10.0.0.1:6379 --replicas 2 --max-replicas 4 --token-file token

    recinfer deploy --status, --scale 3 or --down

    For Kubernetes, the command writes manifests for `kubectl apply -k`, or a Helm chart.

    recinfer deploy store/ctr/1 --k8s --out manifests; recinfer deploy store/ctr/1 --helm --out chart
    """
    output, on_ray = Output(options.as_json), options.ray.ray is not None or options.action != Action()
    others = options.ray.given()
    writes = [name for name, given in (("--k8s", options.k8s.k8s), ("--helm", options.k8s.helm)) if given]
    if len(writes) > 1:
        raise ConfigError("got --k8s and --helm; give one at a time, each with a folder of its own")
    if writes and (on_ray or others):
        named = f" ({', '.join(others)})" if others else ""
        raise ConfigError(
            f"got {writes[0]} and options of Ray{named}; {writes[0]} only writes files, so leave out one or the other"
        )
    if on_ray:
        run_ray(options, output)
        return
    if not writes:
        raise ConfigError("got no target: give --ray ADDRESS, or --k8s or --helm with --out DIR")
    _render(options, output)


def _render(options: DeployOptions, output: Output) -> None:
    from recinfer.deploy.groups import dns_label, footprint
    from recinfer.deploy.helm import write_chart
    from recinfer.deploy.k8s import K8sOptions, write_manifests

    k8s, servers, out = options.k8s, options.servers, options.k8s.out
    if options.archive is None or out is None:
        raise ConfigError(
            f"{'--helm' if k8s.helm else '--k8s'} writes files for an archive: give ARCHIVE and --out DIR"
        )
    if k8s.helm and k8s.prometheus is not None:
        raise ConfigError(
            "--prometheus is for --k8s; in the chart set autoscaling.kind to keda, and autoscaling.prometheus"
        )
    found = footprint(options.archive, servers.ranks_per_shard)
    rankers = servers.rankers or 2
    written = K8sOptions(
        namespace=k8s.namespace,
        image=k8s.image,
        name=options.name,
        replicas=servers.replicas or 2,
        rankers=rankers,
        max_replicas=servers.max_replicas,
        max_rankers=servers.max_rankers or 4 * rankers,
        claim=k8s.claim,
        token_secret=k8s.token_secret,
        cpus=servers.cpus,
        queue_depth=servers.queue_depth,
        busy_percent=servers.busy_percent,
        load_percent=servers.load_percent,
        prometheus=k8s.prometheus,
    )
    write = write_chart if k8s.helm else write_manifests
    files = write(found, written, out)
    for group in found.groups:
        output.show(f"shard {group.number}: ranks {group.listed}, {size_text(group.table_bytes)} of tables")
    output.show(f"pods read {found.model}/{found.version} from the claim {k8s.claim}")
    release = options.name or dns_label(found.model)
    after = f"helm install --namespace {k8s.namespace} {release} {out}" if k8s.helm else f"kubectl apply -k {out}"
    output.show(styled("green", "wrote", f" {len(files)} files to {out}; next: {after}"))
    output.finish(
        {
            "files": [str(path) for path in files],
            "model": found.model,
            "version": found.version,
            "groups": [{"ranks": list(group.ranks), "bytes": group.table_bytes} for group in found.groups],
        }
    )
