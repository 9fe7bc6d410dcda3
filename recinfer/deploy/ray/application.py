"""The Ray Serve application of a deployment: one Serve deployment per group of ranks, and one of the rankers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from recinfer.deploy.ray.replica import ServerReplica
from recinfer.deploy.ray.spec import Deployment, kind_name

if TYPE_CHECKING:
    from ray.serve import Application
    from ray.serve.config import AutoscalingContext

__all__ = ["application", "servers_needed"]

_WINDOW_S, _UP_S = 15.0, 5.0  # replicas push their metrics every ten seconds
_TOLERANCE = 0.1
_ANSWER_S = 10.0  # Serve replaces a replica after three such times
# A server may wait 15 s for rankers to drop it, then finishes requests for 20 s. serve.delete() waits for 60 s.
_STOP_S = 45.0


def application(spec: Deployment) -> Application:
    """The application. Serve has no requests of its own to route: the rankers are its ingress in name alone."""
    shards = [_deployment(spec, group).bind(spec.name, group) for group in range(len(spec.servers.groups))]
    found: Application = _deployment(spec, None).bind(spec.name, None, *shards)
    return found


def _deployment(spec: Deployment, group: int | None) -> Any:
    from ray import serve

    bounds, need = spec.bounds(group), spec.memory(group)
    number: dict[str, Any] = {"num_replicas": bounds.start}
    if bounds.scales:
        scaling: dict[str, Any] = {
            "min_replicas": bounds.least,
            "max_replicas": bounds.most,
            "initial_replicas": bounds.start,
        }
        scaling |= {"look_back_period_s": _WINDOW_S, "upscale_delay_s": _UP_S, "downscale_delay_s": spec.cool_down}
        policy = {"policy_function": f"{__name__}:{servers_needed.__name__}"}
        number = {"autoscaling_config": {**scaling, "policy": policy}}
    made = serve.deployment(
        ServerReplica,
        name=kind_name(group),
        ray_actor_options={
            "num_cpus": spec.cpus,
            "memory": need,
            "runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1", "GRPC_VERBOSITY": "NONE"}},
        },
        max_replicas_per_node=spec.per_node(group),
        health_check_period_s=1.0,
        health_check_timeout_s=_ANSWER_S,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=_STOP_S,
        **number,
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
