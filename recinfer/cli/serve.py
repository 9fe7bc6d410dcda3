"""``recinfer serve``: archives behind a gRPC port."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recinfer import env
from recinfer.cli.console import Output
from recinfer.cli.declared import takes
from recinfer.cli.options import Device
from recinfer.cli.remote import parse_ranks, serve_ranks
from recinfer.cli.serve_models import limits_of, serve_models
from recinfer.cli.serve_options import AddressOptions, SecurityOptions, ServeOptions
from recinfer.cli.workers import supervise, worker_options
from recinfer.errors import ConfigError

if TYPE_CHECKING:
    from recinfer.serving.server.security import Security

__all__ = ["EXAMPLE", "NAME", "run", "security_of"]

NAME = "serve"
EXAMPLE = "Example: recinfer serve movielens.rqa --port 8500"


@takes(ServeOptions)
def run(options: ServeOptions) -> None:
    """Serve lookups and predictions of archives over gRPC, with health and reflection.

    The port also answers the gRPC form of the Open Inference Protocol (KServe v2).

    Ctrl-C and SIGTERM finish the requests in flight and stop.
    """
    env.keep_grpc_quiet()
    options = worker_options(options)
    ranks = None if options.roles.ranks is None else parse_ranks(options.roles.ranks)
    _check_ports(options.address)
    _check_roles(options)
    security = security_of(options.security, worker=options.worker)
    security.check_host(options.address.host)
    security.credentials()  # a file that is not there is found before any table is read
    address, models = options.address, options.models
    if address.log_json:
        from recinfer.serving.server.telemetry.observe import log_as_json

        log_as_json()
    else:
        from recinfer.serving.engine.change_log import show_changes

        show_changes()
    output = Output(options.as_json, logs=address.log_json)
    if ranks is not None:
        _serve_ranks(ranks, options, security, output)
        return
    if models.admin and models.model_store is None:
        raise ConfigError("admin: it loads versions from a model store; give --model-store DIR")
    if (models.poll is not None or models.model_config is not None) and models.model_store is None:
        raise ConfigError("poll and model-config: they say what of a model store is served; give --model-store DIR")
    if models.workers > 1 and not options.worker:
        supervise(
            models.workers,
            address.host,
            address.port,
            output,
            http_port=address.http_port,
            metrics_port=address.metrics_port,
            security=security,
            one_first=models.model_store is not None,
            timeout=models.worker_timeout,
            store=models.model_store,
            poll=models.poll,
            model_config=models.model_config,
        )
        return
    serve_models(options, security, output)


def security_of(options: SecurityOptions, *, worker: bool = False) -> Security:
    """How the server is protected; raises ConfigError.

    Args:
        worker: of a supervisor, which puts its own token into the environment of its workers: one that takes the place of
            another has the same as the others then, whatever the file says by now.
    """
    from recinfer.serving.server.security import Security
    from recinfer.serving.wire.tls import read_token

    path, token = options.token_file, env.token()
    return Security(
        token=token if path is None or (worker and token is not None) else read_token(path),
        tls_cert=options.tls_cert,
        tls_key=options.tls_key,
        client_ca=options.tls_client_ca,
        insecure=options.insecure,
    )


def _serve_ranks(ranks: list[int], options: ServeOptions, security: Security, output: Output) -> None:
    serve_ranks(
        ranks,
        options.archives or [],
        options.models.delta or [],
        options.models.model_store,
        output,
        host=options.address.host,
        port=options.address.port,
        metrics_port=options.address.metrics_port,
        security=security,
        limits=limits_of(options.limits),
        preload=options.tables.preload,
        lock=options.tables.lock,
        socket_port=options.roles.socket_port,
    )


def _check_ports(address: AddressOptions) -> None:
    """Raises ConfigError for two servers on one port, which workers, who share theirs, would both open."""
    ports = {"--port": address.port, "--http-port": address.http_port, "--metrics-port": address.metrics_port}
    at: dict[int, str] = {}
    for name, port in ports.items():
        if port and (other := at.setdefault(port, name)) != name:
            raise ConfigError(f"got {other} {port} and {name} {port}, expected a port for each; 0 takes a free one")


def _check_roles(options: ServeOptions) -> None:
    """Raises ConfigError for options that do not go together."""
    roles, device = options.roles, options.tables.device
    if roles.ranks is not None and roles.shards is not None:
        raise ConfigError(
            "got --ranks and --shards: a shard server has --ranks, a ranker --shards; start one of each kind"
        )
    if roles.ranks is None and roles.socket_port:
        raise ConfigError("--socket-port is a shard server's: give --ranks with it")
    if roles.shards is None and roles.missing_shards is not None:
        raise ConfigError("--missing-shards says what a ranker does: give --shards shards.json with it")
    if roles.shards is not None and device is not Device.cpu:
        raise ConfigError(f"--device {device.value}: a ranker's rows are on its shards, and its dense part on the CPU")
    odd = [
        name
        for name, given in (
            ("--http-port", options.address.http_port is not None),
            ("--workers", options.models.workers > 1),
            ("--admin", options.models.admin),
            ("--poll", options.models.poll is not None),
            ("--model-config", options.models.model_config is not None),
            ("--device cuda", device is not Device.cpu),
        )
        if given
    ]
    if roles.ranks is not None and odd:
        raise ConfigError(f"{', '.join(odd)}: a shard server answers rankers alone; give it to the ranker")
