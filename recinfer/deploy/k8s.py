"""Renders the Kubernetes manifests of an archive: a StatefulSet per group of ranks, a Deployment of rankers, and their
services and policies."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recinfer.deploy import BUSY_PERCENT, check_percent
from recinfer.deploy.groups import MIB, Footprint, RankGroup, dns_label
from recinfer.deploy.yaml import to_yaml
from recinfer.errors import ConfigError
from recinfer.files import write_file
from recinfer.serving.shards.config import shards_json

__all__ = ["BUSY_METRIC", "QUEUE_METRIC", "K8sOptions", "manifests", "write_manifests"]

QUEUE_METRIC = "recinfer_queue_requests"
"""Metric of a ranker for its HorizontalPodAutoscaler: the number of queued requests."""
BUSY_METRIC = "recinfer_shard_busy"
"""Metric of a shard server for its HorizontalPodAutoscaler: the share of time that it is busy. A shard server has no
queue of its own: waiting lookups are in its sockets, or in the rankers, which merge them."""

_PORT, _METRICS = 50051, 9100
_USER = 10001
_STORE, _SHARDS, _SECRETS = "/models", "/etc/recinfer", "/run/secrets/recinfer"
_DRAIN_S, _UNLISTED_S = 15, 5
_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_DNS, _SUBDOMAIN = re.compile(rf"{_LABEL}\Z"), re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(\.{_LABEL})*\Z")
_SET_NAME = 52  # a StatefulSet's pods have a label of its name, "-" and a hash of 10
_CPUS = re.compile(r"(?=.*[1-9])([0-9]+(\.[0-9]{1,3})?|[0-9]+m)\Z")
# A host that may have a port, a path, a tag, a digest; what registries refuse beyond that they say themselves.
_IMAGE = re.compile(r"(?=.{1,512}\Z)[A-Za-z0-9\[][\w.:\[\]/-]*(@[A-Za-z][\w.+-]*:[0-9A-Fa-f]{32,})?\Z", re.ASCII)
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,61}[A-Za-z0-9_]?\Z")


@dataclass(frozen=True)
class K8sOptions:
    """Options of the manifests.

    Attributes:
        namespace: of all objects; the manifests do not create it.
        image: container image with ``recinfer`` on its PATH.
        name: prefix of all names; None: the model's name.
        replicas: shard servers of each group of ranks.
        rankers: number of rankers.
        max_replicas: most shard servers per group; None, or the value of replicas, means no autoscaler.
        max_rankers: most rankers, in the same way.
        claim: PersistentVolumeClaim with ``<model>/<version>/`` archives.
        token_secret: Secret with the bearer token under the key ``token``; None: ``<name>-token``.
        cpus: requested cores per container, in Kubernetes' notation.
        queue_depth: queued requests per ranker above which the autoscaler adds a ranker.
        busy_percent: share of the requested cores, and of a shard server's time, above which the autoscaler adds a pod.
    """

    namespace: str = "recinfer"
    image: str = "recinfer:0.2.0-cpu"
    name: str | None = None
    replicas: int = 2
    rankers: int = 2
    max_replicas: int | None = None
    max_rankers: int | None = None
    claim: str = "recinfer-models"
    token_secret: str | None = None
    cpus: str = "1"
    queue_depth: int = 16
    busy_percent: int = BUSY_PERCENT

    def __post_init__(self) -> None:
        for what in ("namespace", "name"):
            value = getattr(self, what)
            if value is not None and not _DNS.match(value):
                raise ConfigError(f"{what}: got {value[:80]!r}, expected a DNS label: a-z, 0-9 and '-', at most 63")
        for what in ("claim", "token_secret"):
            value = getattr(self, what)
            if value is not None and not _SUBDOMAIN.match(value):
                raise ConfigError(f"{what}: got {value[:80]!r}, expected a name of a-z, 0-9, '-' and '.'")
        if not _IMAGE.match(self.image):
            raise ConfigError(f"image: got {self.image[:80]!r}, expected one as in registry/recinfer:0.2.0-cpu")
        if not _CPUS.match(self.cpus):
            raise ConfigError(f"cpus: got {self.cpus!r}, expected more than 0, as in 2, 0.5 or 500m")
        for what, least, most in (
            ("replicas", self.replicas, self.max_replicas),
            ("rankers", self.rankers, self.max_rankers),
        ):
            if least < 1 or (most is not None and most < least):
                raise ConfigError(
                    f"{what}: got {least}, at most {most}; expected at least 1, and a maximum that is not smaller"
                )
        if self.queue_depth < 1:
            raise ConfigError(f"queue depth: got {self.queue_depth}, expected at least 1")
        check_percent(self.busy_percent)


def manifests(found: Footprint, options: K8sOptions) -> dict[str, dict[str, Any]]:
    """File name -> manifest, in the order to apply them; the same arguments give the same manifests.

    Raises:
        ConfigError: model or version is not a valid label, or the names of so many ranks are too long.
    """
    return _Renderer(found, options).all()


def write_manifests(found: Footprint, options: K8sOptions, out: Path) -> list[Path]:
    """Write each manifest to a file in ``out``, which is created, and a kustomization.yaml that lists them.

    Raises:
        ConfigError: ``out`` holds other YAML files, for example of an older plan, which kubectl would apply too.
    """
    texts = {name: to_yaml(manifest) for name, manifest in manifests(found, options).items()}
    kustomization = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "resources": list(texts)}
    texts["kustomization.yaml"] = to_yaml(kustomization)
    out.mkdir(parents=True, exist_ok=True)
    odd = sorted(path.name for path in out.glob("*.yaml") if path.name not in texts)
    if odd:
        raise ConfigError(
            f"{out} holds {', '.join(odd[:5])}, which are not manifests of this archive; remove them, or choose "
            f"another folder"
        )
    for name, text in texts.items():
        write_file(out / name, text.encode())
    return [out / name for name in texts]


class _Renderer:
    def __init__(self, found: Footprint, options: K8sOptions) -> None:
        self.found, self.options = found, options
        self.name = options.name or dns_label(found.model)
        self.secret = options.token_secret or f"{self.name}-token"
        self.store = f"{_STORE}/{found.model}"
        self.archive = f"{self.store}/{found.version}"
        if not self.name[0].isalpha():
            raise ConfigError(
                f"name: got {self.name!r}, expected a letter first, as Kubernetes requires of a Service; give --name"
            )
        longest = f"{self.name}-shard-{len(found.groups) - 1}"
        if len(longest) > _SET_NAME:
            raise ConfigError(
                f"name: {longest!r} would be longer than {_SET_NAME} characters, too long for the labels of pods; "
                f"give a shorter --name"
            )
        for what, value in (("model", found.model), ("version", found.version)):
            if "/" in value or value in (".", ".."):
                raise ConfigError(f"{what}: got {value[:80]!r}, expected the name of a folder")
        addresses = {
            rank: [f"dns:///{self._shard(group)}.{options.namespace}.svc:{_PORT}"]
            for group in found.groups
            for rank in group.ranks
        }
        self.shards = shards_json(addresses)

    def all(self) -> dict[str, dict[str, Any]]:
        made = {"shards-config.yaml": self._config()}
        for group in self.found.groups:
            name = f"shard-{group.number}"
            made[f"{name}.yaml"] = self._stateful_set(group)
            made[f"{name}-service.yaml"] = self._service(self._shard(group), self._labels(name), headless=True)
            made[f"{name}-disruption.yaml"] = self._disruption(self._shard(group), self._labels(name))
            if (bounds := self._bounds("shard")) is not None:
                made[f"{name}-scaling.yaml"] = self._scaling("StatefulSet", self._shard(group), bounds)
        ranker, labels = f"{self.name}-ranker", self._labels("ranker")
        made["ranker.yaml"] = self._deployment(ranker, labels)
        made["ranker-service.yaml"] = self._service(self.name, labels, headless=False)
        made["ranker-disruption.yaml"] = self._disruption(ranker, labels)
        if (bounds := self._bounds("ranker")) is not None:
            made["ranker-scaling.yaml"] = self._scaling("Deployment", ranker, bounds)
        return made

    def _bounds(self, role: str) -> tuple[int, int] | None:
        """The bounds of an autoscaler; None without autoscaling."""
        options = self.options
        if role == "shard":
            least, most = options.replicas, options.max_replicas
        else:
            least, most = options.rankers, options.max_rankers
        return None if most is None or most == least else (least, most)

    def _shard(self, group: RankGroup) -> str:
        return f"{self.name}-shard-{group.number}"

    def _labels(self, component: str) -> dict[str, str]:
        return {
            "app.kubernetes.io/name": "recinfer",
            "app.kubernetes.io/instance": self.name,
            "app.kubernetes.io/component": component,
        }

    def _meta(self, name: str, labels: Mapping[str, str]) -> dict[str, Any]:
        version = self.found.version
        shown = {"app.kubernetes.io/version": version} if _TAG.match(version) else {}
        return {"name": name, "namespace": self.options.namespace, "labels": {**labels, **shown}}

    def _config(self) -> dict[str, Any]:
        return {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": self._meta(f"{self.name}-shards", self._labels("ranker")),
            "data": {"shards.json": self.shards},
        }

    def _service(self, name: str, labels: dict[str, str], *, headless: bool) -> dict[str, Any]:
        ports = [{"name": "grpc", "port": _PORT, "targetPort": "grpc", "appProtocol": "kubernetes.io/h2c"}]
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

    def _scaling(self, kind: str, name: str, bounds: tuple[int, int]) -> dict[str, Any]:
        metric, most = QUEUE_METRIC, str(self.options.queue_depth)
        if kind == "StatefulSet":
            metric, most = BUSY_METRIC, f"{10 * self.options.busy_percent}m"
        average = {"type": "AverageValue", "averageValue": most}
        busy = {"type": "Utilization", "averageUtilization": self.options.busy_percent}
        return {
            "apiVersion": "autoscaling/v2",
            "kind": "HorizontalPodAutoscaler",
            "metadata": self._meta(name, self._labels(name.removeprefix(f"{self.name}-"))),
            "spec": {
                "scaleTargetRef": {"apiVersion": "apps/v1", "kind": kind, "name": name},
                "minReplicas": bounds[0],
                "maxReplicas": bounds[1],
                # The metric that needs more pods decides. A ranker that waits for shards has an empty queue and busy
                # cores.
                "metrics": [
                    {"type": "Pods", "pods": {"metric": {"name": metric}, "target": average}},
                    {"type": "Resource", "resource": {"name": "cpu", "target": busy}},
                ],
                "behavior": {"scaleDown": {"stabilizationWindowSeconds": 300}},
            },
        }

    def _stateful_set(self, group: RankGroup) -> dict[str, Any]:
        name, labels = self._shard(group), self._labels(f"shard-{group.number}")
        args = [self.archive, "--ranks", group.listed, "--model-store", self.store, "--preload"]
        pod = self._pod("shard", labels, args, (group.memory_bytes, group.memory_limit_bytes))
        spec: dict[str, Any] = {
            "serviceName": name,
            "selector": {"matchLabels": labels},
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "RollingUpdate"},
            "template": pod,
        }
        if self._bounds("shard") is None:  # an autoscaler's number must survive the next apply
            spec = {"replicas": self.options.replicas, **spec}
        return {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": self._meta(name, labels), "spec": spec}

    def _deployment(self, name: str, labels: dict[str, str]) -> dict[str, Any]:
        args = [self.archive, "--shards", f"{_SHARDS}/shards.json"]
        pod = self._pod("ranker", labels, args, (self.found.ranker_bytes, self.found.ranker_limit_bytes))
        container = pod["spec"]["containers"][0]
        container["volumeMounts"].append({"name": "shards", "mountPath": _SHARDS, "readOnly": True})
        pod["spec"]["volumes"].append({"name": "shards", "configMap": {"name": f"{self.name}-shards"}})
        spec: dict[str, Any] = {
            "selector": {"matchLabels": labels},
            # A ranker of the new version is ready when all shards have it; only then does one of the old version go.
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "template": pod,
        }
        if self._bounds("ranker") is None:
            spec = {"replicas": self.options.rankers, **spec}
        return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": self._meta(name, labels), "spec": spec}

    def _pod(self, role: str, labels: dict[str, str], args: list[str], memory: tuple[int, int]) -> dict[str, Any]:
        # The list of shards is part of the template: pods of another cut of the tables are other pods.
        marks = {"recinfer/shards": hashlib.sha256(self.shards.encode()).hexdigest()[:16]}
        scrape = {"prometheus.io/scrape": "true", "prometheus.io/port": str(_METRICS), "prometheus.io/path": "/metrics"}
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
            "containers": [self._container(role, args, memory)],
            "volumes": [
                {"name": "models", "persistentVolumeClaim": {"claimName": self.options.claim, "readOnly": True}},
                {"name": "token", "secret": {"secretName": self.secret, "defaultMode": 0o440}},
                {"name": "tmp", "emptyDir": {"sizeLimit": "256Mi"}},
            ],
        }
        return {"metadata": {"labels": labels, "annotations": {**scrape, **marks}}, "spec": spec}

    def _container(self, role: str, args: list[str], memory: tuple[int, int]) -> dict[str, Any]:
        def probe(service: str = "") -> dict[str, Any]:
            return {"grpc": {"port": _PORT, **({"service": service} if service else {})}, "timeoutSeconds": 2}

        return {
            "name": role,
            "image": self.options.image,
            "command": ["recinfer", "serve"],
            "args": [
                *args,
                *("--host", "0.0.0.0", "--port", str(_PORT), "--metrics-port", str(_METRICS)),
                *("--token-file", f"{_SECRETS}/token", "--log-json"),
            ],
            "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
            "ports": [
                {"name": "grpc", "containerPort": _PORT},
                {"name": "metrics", "containerPort": _METRICS},
            ],
            # Mapping and checking may take as long as the volume needs to read every byte: ten minutes, then again.
            "startupProbe": {**probe(), "periodSeconds": 2, "failureThreshold": 300},
            "readinessProbe": {**probe("readiness"), "periodSeconds": 2, "failureThreshold": 2},
            "livenessProbe": {**probe("liveness"), "periodSeconds": 10, "failureThreshold": 6},
            # Stop listing first, then drain: callers that resolved the name before still come for some seconds.
            "lifecycle": {"preStop": {"sleep": {"seconds": _UNLISTED_S}}},
            "resources": {
                "requests": {"cpu": self.options.cpus, "memory": _mebibytes(memory[0])},
                "limits": {"memory": _mebibytes(memory[1])},
            },
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            },
            "volumeMounts": [
                {"name": "models", "mountPath": _STORE, "readOnly": True},
                {"name": "token", "mountPath": _SECRETS, "readOnly": True},
                {"name": "tmp", "mountPath": "/tmp"},
            ],
        }


def _mebibytes(count: int) -> str:
    return f"{-(-count // MIB)}Mi"
