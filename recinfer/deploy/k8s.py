"""Renders the Kubernetes manifests of an archive: a StatefulSet per group of ranks, a Deployment of rankers, and their
services and policies."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recinfer.deploy import BUSY_PERCENT, IMAGE, LOAD_PERCENT, check_percent
from recinfer.deploy.groups import Footprint, check_label, dns_label
from recinfer.deploy.objects import STORE, Objects, Role, Values, shards_of
from recinfer.deploy.yaml import to_yaml
from recinfer.errors import ConfigError
from recinfer.files import write_file

__all__ = ["K8sOptions", "check_names", "manifests", "write_files", "write_manifests"]

_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_SUBDOMAIN = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(\.{_LABEL})*\Z")
_SET_NAME = 52  # a StatefulSet's pods have a label of its name, "-" and a hash of 10
_CPUS = re.compile(r"(?=.*[1-9])([0-9]+(\.[0-9]{1,3})?|[0-9]+m)\Z")
# A host that may have a port, a path, a tag, a digest; what registries refuse beyond that they say themselves.
_IMAGE = re.compile(r"(?=.{1,512}\Z)[A-Za-z0-9\[][\w.:\[\]/-]*(@[A-Za-z][\w.+-]*:[0-9A-Fa-f]{32,})?\Z", re.ASCII)
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,61}[A-Za-z0-9_]?\Z")


_URL = re.compile(r"https?://[\w.\[\]:-]+(/[\w./-]*)?\Z", re.ASCII)


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
        load_percent: load of a ranker above which the autoscaler adds a ranker.
        prometheus: URL of the Prometheus that KEDA asks; None: HorizontalPodAutoscalers in place of KEDA's objects.
    """

    namespace: str = "recinfer"
    image: str = IMAGE
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
    load_percent: int = LOAD_PERCENT
    prometheus: str | None = None

    def __post_init__(self) -> None:
        for what in ("namespace", "name"):
            check_label(what, getattr(self, what))
        for what in ("claim", "token_secret"):
            value = getattr(self, what)
            if value is not None and not _SUBDOMAIN.match(value):
                raise ConfigError(f"{what}: got {value[:80]!r}, expected a name of a-z, 0-9, '-' and '.'")
        if not _IMAGE.match(self.image):
            raise ConfigError(f"image: got {self.image[:80]!r}, expected one as in registry/{IMAGE}")
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
        check_percent(self.load_percent, "load percent")
        if self.prometheus is not None and not _URL.match(self.prometheus):
            raise ConfigError(f"prometheus: got {self.prometheus[:80]!r}, expected a URL as in http://prometheus:9090")


def manifests(found: Footprint, options: K8sOptions) -> dict[str, dict[str, Any]]:
    """File name -> manifest, in the order to apply them; the same arguments give the same manifests.

    Raises:
        ConfigError: model or version is not the name of a folder, or the names of so many ranks are too long.
    """

    def bounds(least: int, most: int | None) -> tuple[int, int] | None:
        return None if most is None or most == least else (least, most)

    name = options.name or dns_label(found.model)
    check_names(name, found)
    shard, ranker = bounds(options.replicas, options.max_replicas), bounds(options.rankers, options.max_rankers)
    values = Values(
        name=name,
        namespace=options.namespace,
        image=options.image,
        version=found.version if _TAG.match(found.version) else None,
        store=f"{STORE}/{found.model}",
        archive=f"{STORE}/{found.model}/{found.version}",
        models={"persistentVolumeClaim": {"claimName": options.claim, "readOnly": True}},
        secret=options.token_secret or f"{name}-token",
        shards=shards_of(found, name, options.namespace),
        shard=Role(options.cpus, shard, {"replicas": options.replicas} if shard is None else {}),
        ranker=Role(options.cpus, ranker, {"replicas": options.rankers} if ranker is None else {}),
        busy_percent=options.busy_percent,
        shard_busy=f"{10 * options.busy_percent}m",
        load=f"{10 * options.load_percent}m",
        queue_depth=str(options.queue_depth),
        prometheus=options.prometheus,
    )
    return Objects(values).all(found)


def write_manifests(found: Footprint, options: K8sOptions, out: Path) -> list[Path]:
    """Write each manifest to a file in ``out``, which is created, and a kustomization.yaml that lists them.

    Raises:
        ConfigError: ``out`` holds other YAML files, for example of an older plan, which kubectl would apply too.
    """
    texts = {name: to_yaml(manifest) for name, manifest in manifests(found, options).items()}
    kustomization = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "resources": list(texts)}
    return write_files({**texts, "kustomization.yaml": to_yaml(kustomization)}, out)


def write_files(texts: Mapping[str, str], out: Path) -> list[Path]:
    """Write each text to its path below ``out``; folders are created.

    Raises:
        ConfigError: a folder that is written to holds other YAML files.
    """
    paths = {out / name: text for name, text in texts.items()}
    odd = sorted(
        path.name for folder in {p.parent for p in paths} for path in folder.glob("*.yaml") if path not in paths
    )
    if odd:
        raise ConfigError(
            f"{out} holds {', '.join(odd[:5])}, which are not manifests of this archive; remove them, or choose "
            f"another folder"
        )
    for path, text in paths.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, text.encode())
    return list(paths)


def check_names(name: str, found: Footprint) -> None:
    """Raises ConfigError if Kubernetes does not take names that begin with ``name``, or a model or version is no folder's
    name."""
    if not name[0].isalpha():
        raise ConfigError(
            f"name: got {name!r}, expected a letter first, as Kubernetes requires of a Service; give --name"
        )
    longest = f"{name}-shard-{len(found.groups) - 1}"
    if len(longest) > _SET_NAME:
        raise ConfigError(
            f"name: {longest!r} would be longer than {_SET_NAME} characters, too long for the labels of pods; "
            f"give a shorter --name"
        )
    for what, value in (("model", found.model), ("version", found.version)):
        if "/" in value or value in (".", ".."):
            raise ConfigError(f"{what}: got {value[:80]!r}, expected the name of a folder")
