"""The Ray Serve application of a deployment: one Serve deployment per group of ranks, and one of the rankers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recinfer import env
from recinfer.archive.mapping import name_files_at_sigbus
from recinfer.deploy.ray.records import Records
from recinfer.deploy.ray.replica import Agent
from recinfer.deploy.ray.spec import Deployment, kind_name
from recinfer.serving.engine.change_log import show_changes
from recinfer.serving.server.tuning import raise_open_files, tune_process

if TYPE_CHECKING:
    from ray.serve import Application
    from ray.serve.config import AutoscalingContext

__all__ = ["ServerReplica", "application", "servers_needed"]

_WINDOW_S, _UP_S = 15.0, 5.0  # replicas push their metrics every ten seconds
_TOLERANCE = 0.1
_ANSWER_S = 10.0  # Serve replaces a replica after three such times
# A server may wait 15 s for rankers to drop it, then finishes requests for 20 s. serve.delete() waits for 60 s.
_STOP_S = 45.0


class ServerReplica(Agent):
    """The class of all Serve deployments. Serve calls all its methods.

    Args:
        deployment: name of the deployment.
        group: number of the group of ranks of its server; None for a ranker.
        others: Serve's handles of the deployments of shard servers, which make them part of the application.
    """

    def __init__(self, deployment: str, group: int | None, *others: object) -> None:
        import ray
        from ray import serve

        context, actor = ray.get_runtime_context(), serve.get_replica_context().replica_id.to_full_id_str()
        folder = Path(context.get_temp_dir(), context.get_session_name())  # where Ray keeps the replica's log too
        # This process runs the server alone, so it gets the settings of `recinfer serve`.
        env.share_heaps()
        raise_open_files()
        name_files_at_sigbus()
        tune_process()
        show_changes()
        super().__init__(Records(), deployment, group, actor, ray.util.get_node_ip_address(), folder)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """The number of servers at the wanted load that the load of this one amounts to, for ``servers_needed``."""
        wanted = self._spec.load_percent if self.server.group is None else self._spec.busy_percent
        return {"needed": 100 * self.server.load / wanted}

    def __del__(self) -> None:
        """Serve's hook for a graceful shutdown."""
        self.stop()


def application(spec: Deployment) -> Application:
    """The application. Serve has no requests of its own to route: the rankers are its ingress in name alone."""
    shards = [_deployment(spec, group).bind(spec.name, group) for group in range(len(spec.servers.groups))]
    found: Application = _deployment(spec, None).bind(spec.name, None, *shards)
    return found


def _deployment(spec: Deployment, group: int | None) -> Any:
    from ray import serve

    bounds = spec.bounds(group)
    scaling: dict[str, Any] | None = None
    if bounds.least < bounds.most:
        scaling = {
            "min_replicas": bounds.least,
            "max_replicas": bounds.most,
            "look_back_period_s": _WINDOW_S,
            "upscale_delay_s": _UP_S,
            "downscale_delay_s": spec.cool_down,
            "policy": {"policy_function": f"{__name__}:{servers_needed.__name__}"},
        }
    variables = {"OMP_NUM_THREADS": "1", "GRPC_VERBOSITY": "NONE"}
    made = serve.deployment(
        ServerReplica,
        name=kind_name(group),
        ray_actor_options={
            "num_cpus": spec.cpus,
            "memory": spec.memory(group),
            "runtime_env": {"env_vars": variables},
        },
        max_replicas_per_node=spec.per_node(group),
        health_check_period_s=1.0,
        health_check_timeout_s=_ANSWER_S,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=_STOP_S,
        num_replicas=bounds.least if scaling is None else None,
        autoscaling_config=scaling,
    )
    # Serve restarts all replicas of an application that runs again, unless its code has the same version. Serve 2.60
    # has no public name for it.
    made._version = "1"
    return made


def servers_needed(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """Serve's policy: as many servers as the load amounts to, by the rule of Kubernetes' HorizontalPodAutoscaler."""
    needed, count = (context.aggregated_metrics or {}).get("needed", {}), context.target_num_replicas
    if not needed or len(needed) < context.current_num_replicas:
        return count, {}  # a server that has not reported yet may be the one with the load
    total = sum(needed.values())
    if abs(total / count - 1.0) <= _TOLERANCE:
        return count, {}
    return min(math.ceil(total), 2 * count), {}
