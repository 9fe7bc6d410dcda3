"""``recinfer serve``: serves archives over gRPC and HTTP."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from recinfer import env
from recinfer.cli.console import Output
from recinfer.cli.declared import takes
from recinfer.cli.interrupts import end_at_hangup
from recinfer.cli.options import Device
from recinfer.cli.remote import parse_ranks, serve_ranks
from recinfer.cli.serve_models import limits_of, serve_models
from recinfer.cli.serve_options import AddressOptions, SecurityOptions, ServeOptions
from recinfer.cli.workers import supervise, worker_options
from recinfer.errors import ConfigError
from recinfer.serving.wire.address import plain_host

if TYPE_CHECKING:
    from recinfer.serving.server.security import Security

__all__ = ["EXAMPLE", "NAME", "run", "security_of"]

NAME = "serve"
EXAMPLE = "Example: recinfer serve movielens.rqa --port 8500"


@takes(ServeOptions)
def run(options: ServeOptions) -> None:
    """Serve embedding lookups and predictions of one or more archives over gRPC and REST.

    The gRPC port serves recinfer's own protocol, the Open Inference Protocol (KServe v2), the health service and
    reflection. --http-port adds REST.

    On Ctrl-C or SIGTERM the server finishes the requests in flight and exits.
    """
    from recinfer.serving.server.tuning import raise_open_files

    env.keep_grpc_quiet()
    env.share_heaps()
    raise_open_files()
    options = worker_options(options)
    if options.roles.shards is None and options.models.poll is None and options.models.model_config is None:
        end_at_hangup()
    options = replace(options, address=replace(options.address, host=plain_host(options.address.host)))
    ranks = None if options.roles.ranks is None else parse_ranks(options.roles.ranks)
    _check_ports(options.address)
    _check_roles(options)
    security = security_of(options.security, worker=options.worker)
    security.check_host(options.address.host)
    security.credentials()  # fails for a missing file before any table is read
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
        raise ConfigError("--admin needs a model store to load versions from; give --model-store DIR")
    if (models.poll is not None or models.model_config is not None) and models.model_store is None:
        raise ConfigError("--poll and --model-config choose versions of a model store; give --model-store DIR")
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
            is_ranker=options.roles.shards is not None,
        )
        return
    serve_models(options, security, output)


def security_of(options: SecurityOptions, *, worker: bool = False) -> Security:
    """The security settings of the server; raises ConfigError for a token file that cannot be read.

    Args:
        worker: whether this process is a worker. The supervisor passes its token in the environment of its workers, so
            that a restarted worker has the token of the others even if the file has changed.
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
    """Raises ConfigError for two listeners on one port; workers share their ports, so binding would not fail."""
    ports = {"--port": address.port, "--http-port": address.http_port, "--metrics-port": address.metrics_port}
    at: dict[int, str] = {}
    for name, port in ports.items():
        if port and (other := at.setdefault(port, name)) != name:
            raise ConfigError(f"got {other} {port} and {name} {port}, expected different ports; 0 picks a free port")


def _check_roles(options: ServeOptions) -> None:
    """Raises ConfigError for options that do not go together."""
    roles, device = options.roles, options.tables.device
    if roles.ranks is not None and roles.shards is not None:
        raise ConfigError(
            "got --ranks and --shards: a shard server has --ranks, a ranker --shards; start one of each kind"
        )
    if roles.ranks is None and roles.socket_port:
        raise ConfigError("--socket-port is an option of shard servers; give --ranks too")
    if roles.shards is None and roles.missing_shards is not None:
        raise ConfigError("--missing-shards is an option of rankers; give --shards shards.json too")
    if roles.shards is not None and device is not Device.cpu:
        raise ConfigError(
            f"got --device {device.value} with --shards: a ranker runs on the CPU and its shard servers hold the "
            f"tables; leave --device out"
        )
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
        raise ConfigError(
            f"got {', '.join(odd)} with --ranks, but a shard server serves rankers only; give it to the ranker"
        )
