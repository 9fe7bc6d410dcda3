"""Deploys, scales and removes a deployment on a Ray cluster."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from recinfer import env
from recinfer.cli.console import Output, styled
from recinfer.cli.deploy_options import DeployOptions, ServerOptions
from recinfer.errors import ConfigError
from recinfer.printed import slim_table
from recinfer.sizes import size_text

if TYPE_CHECKING:
    from recinfer.deploy.ray.spec import Deployment

__all__ = ["cores", "run_ray", "spec_of_options"]


def run_ray(options: DeployOptions, output: Output) -> None:
    """Run the action of ``options`` on the Ray cluster."""
    action, archive, name, wait = options.action, options.archive, options.name, options.ray.wait
    action.check(archive)
    from recinfer.deploy.ray import client
    from recinfer.deploy.ray.records import Records

    spec = None if archive is None else spec_of_options(archive, options)
    with client.connected(options.ray.ray or "auto"):
        if spec is not None:
            client.deploy(spec)
            try:
                found = client.wait_until_ready(spec.name, wait, output.note)
            except BaseException:  # also Ctrl-C: an incomplete deployment serves nothing and holds resources
                output.note("removing the incomplete deployment")
                client.down(spec.name)
                raise
            _show(found, output)
        elif action.status:
            names = Records().names()
            if name or len(names) == 1:
                _show(client.status(name), output)
            else:
                output.show(f"deployments: {', '.join(names) or 'none'}")
                output.finish({"deployments": names})
        elif action.scales:
            client.scale(name, action.scale, action.scale_rankers)
            _show(client.wait_until_ready(name, wait, output.note), output)
        else:
            removed = client.down(name)
            output.show(styled("green", "removed", f" {removed}"))
            output.finish({"removed": removed})


def spec_of_options(archive: Path, options: DeployOptions) -> Deployment:
    """The deployment that the options describe; paths become absolute. Raises ConfigError."""
    from recinfer.deploy.groups import check_label, dns_label, footprint
    from recinfer.deploy.ray.spec import Deployment, Kind
    from recinfer.serving.config import SecurityConfig
    from recinfer.serving.wire.tls import read_token

    ray, servers = options.ray, options.servers
    if servers.queue_depth != ServerOptions.queue_depth:
        raise ConfigError("--queue-depth is for Kubernetes; rankers on Ray scale by their load: give --load-percent")
    cert, key, client_ca, ca = (
        None if path is None else path.absolute() for path in (ray.tls_cert, ray.tls_key, ray.tls_client_ca, ray.tls_ca)
    )
    if None in (cert, key, ca) and any((cert, key, client_ca, ca, ray.tls_name)):
        raise ConfigError(
            "TLS: expected --tls-cert and --tls-key of the servers and --tls-ca, by which rankers verify them"
        )
    clients = {"tls_ca": ca, "tls_name": ray.tls_name}
    if client_ca is not None:
        clients |= {"tls_cert": cert, "tls_key": key}
    token = env.token() if ray.token_file is None else read_token(ray.token_file)
    check_label("name", options.name)
    found = footprint(archive, servers.ranks_per_shard)
    numbers = _least(servers.replicas, servers.max_replicas), servers.max_replicas
    shards = [Kind(f"shard-{g.number}", g.ranks, g.memory_bytes, servers.busy_percent, *numbers) for g in found.groups]
    numbers = _least(servers.rankers, servers.max_rankers), servers.max_rankers
    made = Deployment(
        name=options.name or dns_label(found.model),
        model=found.model,
        archive=archive.resolve(),
        kinds=(*shards, Kind("ranker", (), found.ranker_bytes, servers.load_percent, *numbers)),
        cpus=cores(servers.cpus),
        cool_down=ray.cool_down,
        security=SecurityConfig(token, None, cert, key, client_ca, ray.insecure),
        model_config=None if ray.model_config is None else ray.model_config.absolute(),
        clients={name: str(value) for name, value in clients.items() if value is not None},
    )
    if made.model_config is not None and made.store is None:
        raise ConfigError(f"--model-config: expected an archive at STORE/{made.model}/VERSION, got {made.archive}")
    return made


def cores(text: str) -> float:
    """``"2"``, ``"0.5"`` or ``"500m"`` as a number; raises ConfigError."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(m?)", text)
    if found is None:
        raise ConfigError(f"cpus: got {text!r}, expected a number as in 2, 0.5 or 500m")
    return float(found[1]) / (1000 if found[2] else 1)


def _least(count: int | None, most: int | None) -> int:
    """The least number of servers; by default two, if the largest number allows it."""
    return count or min(2, most or 2)


def _show(found: dict[str, Any], output: Output) -> None:
    state = ("ready", "green") if found["ready"] else ("not ready", "yellow")
    table = slim_table("address", "role", "state", "restarts", "version", "load", "memory")
    for column in table.columns[:3]:
        column.no_wrap = True
    colors = {"serving": "green", "starting": "yellow", "draining": "dim"}
    for server in found["servers"]:
        table.add_row(
            server["address"] or server["host"],
            " ".join([server["role"], ",".join(map(str, server["ranks"]))]).rstrip(),
            styled(colors[server["state"]], server["state"]),
            str(server["restarts"]),
            server["version"] or "-",
            f"{server['load']:.0%}",
            size_text(server["memory"]) if server["memory"] else "-",
        )
    output.show(Text.assemble(f"{found['name']}: {found['model']} {found['version']}; ", state), table)
    for line in found["why"]:
        output.show(line)
    if found["rankers"]:
        output.show(f"requests go to: {', '.join(found['rankers'])}")
    output.finish(found)
