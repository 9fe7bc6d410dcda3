"""The Kubernetes objects of a deployment, from values: plain ones for manifests, expressions of templates for the chart."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from recinfer.deploy.groups import Footprint, mebibytes
from recinfer.serving.shards.config import shards_json

__all__ = [
    "BUSY_METRIC",
    "LOAD_METRIC",
    "METRICS_PORT",
    "PORT",
    "QUEUE_METRIC",
    "SECRETS",
    "SOCKET_PORT",
    "STORE",
    "Group",
    "Objects",
    "Role",
    "Shards",
    "Values",
    "container_security",
    "grpc_probes",
    "http_probes",
    "shards_of",
]

LOAD_METRIC = "recinfer_load"
"""Metric of a server for its autoscaler: the share of its capacity in use."""
QUEUE_METRIC = "recinfer_queue_requests"
"""Metric of a ranker for its HorizontalPodAutoscaler: the number of queued requests."""
BUSY_METRIC = "recinfer_shard_busy"
"""Metric of a shard server for its HorizontalPodAutoscaler: the share of time that it is busy. A shard server has no
queue of its own: waiting lookups are in its sockets, or in the rankers, which merge them."""

PORT, SOCKET_PORT, METRICS_PORT = 50051, 50052, 9100
STORE, SECRETS = "/models", "/run/secrets/recinfer"
_SHARDS = "/etc/recinfer"
_USER = 10001
_DRAIN_S, _UNLISTED_S = 15, 5


@dataclass(frozen=True)
class Shards:
    """The text of shards.json, and a mark that changes with it."""

    text: str
    mark: str


@dataclass(frozen=True)
class Role:
    """Values of the shard servers, or of the rankers.

    Attributes:
        cpus: requested cores of a container.
        bounds: least and most pods for the autoscaler; None: no autoscaler.
        replicas: entries of the workload's ``spec``: ``replicas`` where no autoscaler sets the number.
        more: place -> further entries of the pods: ``pod``, ``container`` and ``annotations`` are mappings;
            ``args``, ``env``, ``mounts`` and ``volumes`` are lists.
        probes: the probes; empty: gRPC's health service.
    """

    cpus: str
    bounds: tuple[Any, Any] | None
    replicas: Mapping[str, Any]
    more: Mapping[str, Any] = field(default_factory=dict)
    probes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Values:
    """Values of all objects.

    Attributes:
        name: prefix of all names.
        namespace: of all objects.
        image: of all containers.
        version: label of all objects; None: none.
        store, archive: folders in the containers.
        models: the source of the volume with the archives.
        secret: Secret with the token under the key ``token``.
        shards: shards.json.
        shard, ranker: the servers of the two roles.
        busy_percent: share of the requested cores above which the autoscaler adds a pod.
        shard_busy, load, queue_depth: quantities of the metrics above which it adds a shard server, a ranker, a ranker.
        prometheus: URL for KEDA; None: HorizontalPodAutoscalers.
    """

    name: str
    namespace: str
    image: str
    version: str | None
    store: str
    archive: str
    models: Mapping[str, Any]
    secret: str
    shards: Shards
    shard: Role
    ranker: Role
    busy_percent: Any
    shard_busy: str
    load: str
    queue_depth: str
    prometheus: str | None = None


@dataclass(frozen=True)
class Group:
    """A group of ranks: its number, its ranks as an argument of ``recinfer serve``, memory to request and to allow."""

    number: str
    ranks: str
    memory: str
    limit: str


def shards_of(found: Footprint, name: str, namespace: str) -> Shards:
    """shards.json with the headless Services of the groups."""
    text = shards_json(
        {
            rank: [f"dns:///{name}-shard-{group.number}.{namespace}.svc:{PORT}"]
            for group in found.groups
            for rank in group.ranks
        }
    )
    # The hash is of the content, not of its spaces, so that a template computes the same mark.
    content = json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))
    return Shards(text, hashlib.sha256(content.encode()).hexdigest()[:16])


class Objects:
    """Renders the objects as plain data."""

    def __init__(self, values: Values) -> None:
        self.values = values

    def all(self, found: Footprint) -> dict[str, dict[str, Any]]:
        """File name -> object, for all groups of an archive and the rankers, in the order to apply them."""
        made = {"shards-config.yaml": self.config()}
        for each in found.groups:
            memory = mebibytes(each.memory_bytes), mebibytes(each.memory_limit_bytes)
            made |= self.shard(Group(str(each.number), each.listed, *memory))
        return made | self.ranker(mebibytes(found.ranker_bytes), mebibytes(found.ranker_limit_bytes))

    def config(self) -> dict[str, Any]:
        """The ConfigMap with shards.json."""
        return {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": self._meta(f"{self.values.name}-shards", self.labels("ranker")),
            "data": {"shards.json": self.values.shards.text},
        }

    def shard(self, group: Group) -> dict[str, dict[str, Any]]:
        """File name -> object, of one group of ranks."""
        file, role = f"shard-{group.number}", self.values.shard
        name, labels = f"{self.values.name}-{file}", self.labels(file)
        made = {
            f"{file}.yaml": self._stateful_set(name, labels, group),
            f"{file}-service.yaml": self._service(name, labels, headless=True),
            f"{file}-disruption.yaml": self._disruption(name, labels),
        }
        if role.bounds is not None:
            made[f"{file}-scaling.yaml"] = self.scaling("StatefulSet", name, labels, role.bounds)
        return made

    def ranker(self, memory: str, limit: str) -> dict[str, dict[str, Any]]:
        """File name -> object, of the rankers."""
        role = self.values.ranker
        name, labels = f"{self.values.name}-ranker", self.labels("ranker")
        made = {
            "ranker.yaml": self._deployment(name, labels, memory, limit),
            "ranker-service.yaml": self._service(self.values.name, labels, headless=False),
            "ranker-disruption.yaml": self._disruption(name, labels),
        }
        if role.bounds is not None:
            made["ranker-scaling.yaml"] = self.scaling("Deployment", name, labels, role.bounds)
        return made

    def labels(self, component: str | None) -> dict[str, str]:
        """The labels of a component's pods; None: those that all pods have."""
        found = {"app.kubernetes.io/name": "recinfer", "app.kubernetes.io/instance": self.values.name}
        return found if component is None else {**found, "app.kubernetes.io/component": component}

    def scaling(self, kind: str, name: str, labels: dict[str, str], bounds: tuple[Any, Any]) -> dict[str, Any]:
        """The autoscaler of a workload: a HorizontalPodAutoscaler, or with Prometheus' URL KEDA's ScaledObject."""
        if self.values.prometheus is not None:
            return self.scaled_object(kind, name, labels, bounds)
        return self.pod_autoscaler(kind, name, labels, bounds)

    def pod_autoscaler(self, kind: str, name: str, labels: dict[str, str], bounds: tuple[Any, Any]) -> dict[str, Any]:
        """A HorizontalPodAutoscaler by the servers' metrics and their CPU."""
        limits = {LOAD_METRIC: self.values.load, QUEUE_METRIC: self.values.queue_depth}
        if kind == "StatefulSet":
            limits = {BUSY_METRIC: self.values.shard_busy}
        pods = [
            {"metric": {"name": metric}, "target": {"type": "AverageValue", "averageValue": most}}
            for metric, most in limits.items()
        ]
        busy = {"type": "Utilization", "averageUtilization": self.values.busy_percent}
        return {
            "apiVersion": "autoscaling/v2",
            "kind": "HorizontalPodAutoscaler",
            "metadata": self._meta(name, labels),
            "spec": {
                "scaleTargetRef": {"apiVersion": "apps/v1", "kind": kind, "name": name},
                "minReplicas": bounds[0],
                "maxReplicas": bounds[1],
                # The metric that needs more pods decides.
                "metrics": [
                    *({"type": "Pods", "pods": each} for each in pods),
                    {"type": "Resource", "resource": {"name": "cpu", "target": busy}},
                ],
                "behavior": {"scaleDown": {"stabilizationWindowSeconds": 300}},
            },
        }

    def scaled_object(self, kind: str, name: str, labels: dict[str, str], bounds: tuple[Any, Any]) -> dict[str, Any]:
        """KEDA's object by the same figures, which KEDA asks of Prometheus: no adapter for metrics is needed."""
        values = self.values
        # The labels namespace and pod are those of a target that Prometheus' operator found. KEDA divides by the pods.
        query = f'sum({LOAD_METRIC}{{namespace="{values.namespace}", pod=~"{name}-.+"}})'
        threshold = values.shard_busy if kind == "StatefulSet" else values.load
        asked = {"serverAddress": values.prometheus, "query": query, "threshold": _decimal(threshold)}
        return {
            "apiVersion": "keda.sh/v1alpha1",
            "kind": "ScaledObject",
            "metadata": self._meta(name, labels),
            "spec": {
                "scaleTargetRef": {"apiVersion": "apps/v1", "kind": kind, "name": name},
                "minReplicaCount": bounds[0],
                "maxReplicaCount": bounds[1],
                "pollingInterval": 15,
                "advanced": {
                    "horizontalPodAutoscalerConfig": {"behavior": {"scaleDown": {"stabilizationWindowSeconds": 300}}}
                },
                "triggers": [
                    {"type": "prometheus", "metricType": "AverageValue", "metadata": asked},
                    {"type": "cpu", "metricType": "Utilization", "metadata": {"value": _text(values.busy_percent)}},
                ],
            },
        }

    # -- parts -------------------------------------------------------------------------------------------------------

    def _meta(self, name: str, labels: Mapping[str, str]) -> dict[str, Any]:
        version = self.values.version
        shown = {} if version is None else {"app.kubernetes.io/version": version}
        return {"name": name, "namespace": self.values.namespace, "labels": {**labels, **shown}}

    def _service(self, name: str, labels: dict[str, str], *, headless: bool) -> dict[str, Any]:
        ports = [{"name": "grpc", "port": PORT, "targetPort": "grpc", "appProtocol": "kubernetes.io/h2c"}]
        # Long-lived gRPC connections are spread by clients: with an address for each pod, they can.
        spec = {"clusterIP": "None", "selector": labels, "ports": ports}
        if not headless:
            del spec["clusterIP"]
        return {"apiVersion": "v1", "kind": "Service", "metadata": self._meta(name, labels), "spec": spec}

    def _disruption(self, name: str, labels: dict[str, str]) -> dict[str, Any]:
        return {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": self._meta(name, labels),
            "spec": {"maxUnavailable": 1, "selector": {"matchLabels": labels}},
        }

    def _stateful_set(self, name: str, labels: dict[str, str], group: Group) -> dict[str, Any]:
        values = self.values
        args = [values.archive, "--ranks", group.ranks, "--model-store", values.store, "--preload"]
        args += ["--socket-port", str(SOCKET_PORT)]  # a port that a firewall can name
        spec = {
            **values.shard.replicas,  # none with an autoscaler, whose number must survive the next apply
            "serviceName": name,
            "selector": {"matchLabels": labels},
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "RollingUpdate"},
            "template": self._pod("shard", labels, args, (group.memory, group.limit)),
        }
        return {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": self._meta(name, labels), "spec": spec}

    def _deployment(self, name: str, labels: dict[str, str], memory: str, limit: str) -> dict[str, Any]:
        args = [self.values.archive, "--shards", f"{_SHARDS}/shards.json"]
        pod = self._pod("ranker", labels, args, (memory, limit))
        container = pod["spec"]["containers"][0]
        container["volumeMounts"].append({"name": "shards", "mountPath": _SHARDS, "readOnly": True})
        pod["spec"]["volumes"].append({"name": "shards", "configMap": {"name": f"{self.values.name}-shards"}})
        spec = {
            **self.values.ranker.replicas,
            "selector": {"matchLabels": labels},
            # A ranker of the new version is ready when all shards have it; only then does one of the old version go.
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "template": pod,
        }
        return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": self._meta(name, labels), "spec": spec}

    def _pod(self, role: str, labels: dict[str, str], args: list[str], memory: tuple[str, str]) -> dict[str, Any]:
        values = self.values
        more = (values.shard if role == "shard" else values.ranker).more
        # The list of shards is part of the template: pods of another cut of the tables are other pods.
        marks = {"recinfer/shards": values.shards.mark}
        path = {"prometheus.io/path": "/metrics"}
        scrape = {"prometheus.io/scrape": "true", "prometheus.io/port": str(METRICS_PORT), **path}
        spread = {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            # Two replicas of a rank on one node would be lost together; rankers may share one, as others take over.
            "whenUnsatisfiable": "DoNotSchedule" if role == "shard" else "ScheduleAnyway",
            "nodeTaintsPolicy": "Honor",
            "labelSelector": {"matchLabels": labels},
        }
        spec = {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": _UNLISTED_S + _DRAIN_S + 10,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": _USER,
                "runAsGroup": _USER,
                "fsGroup": _USER,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "topologySpreadConstraints": [spread],
            **more.get("pod", {}),
            "containers": [self._container(role, args, memory)],
            "volumes": [
                {"name": "models", **values.models},
                {"name": "token", "secret": {"secretName": values.secret, "defaultMode": 0o440}},
                {"name": "tmp", "emptyDir": {"sizeLimit": "256Mi"}},
                *more.get("volumes", ()),
            ],
        }
        annotations = {**scrape, **marks, **more.get("annotations", {})}
        return {"metadata": {"labels": labels, "annotations": annotations}, "spec": spec}

    def _container(self, role: str, args: list[str], memory: tuple[str, str]) -> dict[str, Any]:
        values = self.values
        own = values.shard if role == "shard" else values.ranker
        more = own.more
        sockets = [{"name": "lookups", "containerPort": SOCKET_PORT}] if role == "shard" else []
        return {
            "name": role,
            "image": values.image,
            **more.get("container", {}),
            "command": ["recinfer", "serve"],
            "args": [
                *args,
                *("--host", "0.0.0.0", "--port", str(PORT), "--metrics-port", str(METRICS_PORT)),
                *("--token-file", f"{SECRETS}/token", "--log-json"),
                *more.get("args", ()),
            ],
            "env": [{"name": "OMP_NUM_THREADS", "value": "1"}, *more.get("env", ())],
            "ports": [
                {"name": "grpc", "containerPort": PORT},
                *sockets,
                {"name": "metrics", "containerPort": METRICS_PORT},
            ],
            **(own.probes or grpc_probes()),
            # Stop listing first, then drain: callers that resolved the name before still come for some seconds.
            "lifecycle": {"preStop": {"sleep": {"seconds": _UNLISTED_S}}},
            "resources": {
                "requests": {"cpu": own.cpus, "memory": memory[0]},
                "limits": {"memory": memory[1]},
            },
            "securityContext": container_security(),
            "volumeMounts": [
                {"name": "models", "mountPath": STORE, "readOnly": True},
                {"name": "token", "mountPath": SECRETS, "readOnly": True},
                {"name": "tmp", "mountPath": "/tmp"},
                *more.get("mounts", ()),
            ],
        }


def container_security() -> dict[str, Any]:
    """The securityContext of all containers."""
    return {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}


def grpc_probes() -> dict[str, Any]:
    """Probes by gRPC's health service, which needs no token."""

    def probe(service: str = "") -> dict[str, Any]:
        return {"grpc": {"port": PORT, **({"service": service} if service else {})}, "timeoutSeconds": 2}

    return _timed(probe(), probe("readiness"), probe("liveness"))


def http_probes(scheme: str) -> dict[str, Any]:
    """Probes by the metrics port, which needs no token for them; ``scheme``: HTTP or HTTPS."""

    def probe(path: str) -> dict[str, Any]:
        return {"httpGet": {"path": path, "port": "metrics", "scheme": scheme}, "timeoutSeconds": 2}

    return _timed(probe("/ready"), probe("/ready"), probe("/live"))


def _timed(start: dict[str, Any], ready: dict[str, Any], live: dict[str, Any]) -> dict[str, Any]:
    return {
        # Mapping and checking may take as long as the volume needs to read every byte: ten minutes, then again.
        "startupProbe": {**start, "periodSeconds": 2, "failureThreshold": 300},
        "readinessProbe": {**ready, "periodSeconds": 2, "failureThreshold": 2},
        "livenessProbe": {**live, "periodSeconds": 10, "failureThreshold": 6},
    }


def _decimal(quantity: str) -> str:
    """A quantity in thousandths as KEDA takes it: 500m as 0.5. A template's expression stays."""
    return f"{int(quantity[:-1]) / 1000:g}" if quantity[:-1].isdigit() else quantity


def _text(value: Any) -> Any:
    return str(value) if isinstance(value, int) else value
