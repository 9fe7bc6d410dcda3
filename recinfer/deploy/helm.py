"""Writes the Helm chart of an archive: the objects of recinfer.deploy.objects with expressions of templates as values."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from recinfer.deploy.groups import Footprint, dns_label, mebibytes
from recinfer.deploy.k8s import K8sOptions, check_names, write_files
from recinfer.deploy.objects import (
    METRICS_PORT,
    PORT,
    SOCKET_PORT,
    STORE,
    Group,
    Objects,
    Role,
    Shards,
    Values,
    container_security,
    grpc_probes,
    http_probes,
)
from recinfer.deploy.yaml import Expression, to_yaml
from recinfer.version import __version__

__all__ = ["chart", "write_chart"]

_INDENT = re.compile(r"^( *)(.*)nindent @", re.MULTILINE)
_NAME = "{{ include `recinfer.name` $ }}"
_TLS = "/run/secrets/tls"
_QUANTITY: dict[str, Any] = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?([numkMGTPE]|[KMGTPE]i)?$"}
_TEXT: dict[str, Any] = {"type": "string"}
_LIST: dict[str, Any] = {"type": "array"}
_OBJECT: dict[str, Any] = {"type": "object"}
_PERCENT: dict[str, Any] = {"type": "integer", "minimum": 1, "maximum": 100}
_COUNT: dict[str, Any] = {"type": "integer", "minimum": 1}


def chart(found: Footprint, options: K8sOptions) -> dict[str, str]:
    """Path in the chart -> text. The values are those of the archive and the options; the templates are always the same.

    Raises:
        ConfigError: model or version is not the name of a folder, or the names of so many ranks are too long.
    """
    name = options.name or dns_label(found.model)
    check_names(name, found)
    static = files("recinfer.deploy").joinpath("chart")
    about = {
        "apiVersion": "v2",
        "name": "recinfer",
        "description": "Serves a sharded recommendation model: shard servers with the embedding tables, and rankers.",
        "type": "application",
        "version": __version__,
        "appVersion": __version__,
        "kubeVersion": ">=1.30.0-0",
    }
    return {
        "Chart.yaml": to_yaml(about),
        "values.yaml": _values(static.joinpath("values.yaml").read_text(encoding="utf-8"), found, options),
        "values.schema.json": json.dumps(_schema(), indent=1) + "\n",
        "templates/_helpers.tpl": static.joinpath("_helpers.tpl").read_text(encoding="utf-8"),
        "templates/NOTES.txt": static.joinpath("NOTES.txt").read_text(encoding="utf-8"),
        **{f"templates/{path}": text for path, text in _templates().items()},
    }


def write_chart(found: Footprint, options: K8sOptions, out: Path) -> list[Path]:
    """Write the chart to the folder ``out``, which is created.

    Raises:
        ConfigError: ``out`` holds other YAML files.
    """
    return write_files(chart(found, options), out)


# -- values ------------------------------------------------------------------------------------------------------------


def _values(text: str, found: Footprint, options: K8sOptions) -> str:
    shards = [
        line
        for group in found.groups
        for line in (
            f"  - ranks: [{', '.join(map(str, group.ranks))}]",
            f"    memory: {mebibytes(group.memory_bytes)}",
            f"    memoryLimit: {mebibytes(group.memory_limit_bytes)}",
        )
    ]
    put: dict[str, Any] = {
        "image": options.image,
        "model": found.model,
        "version": found.version,
        "claim": options.claim,
        "secret": options.token_secret or "",
        "replicas": options.replicas,
        "max_replicas": options.max_replicas or options.replicas,
        "rankers": options.rankers,
        "max_rankers": options.max_rankers or options.rankers,
        "cpus": options.cpus,
        "busy_percent": options.busy_percent,
        "load_percent": options.load_percent,
        "queue_depth": options.queue_depth,
        "ranker_memory": mebibytes(found.ranker_bytes),
        "ranker_limit": mebibytes(found.ranker_limit_bytes),
    }
    for key, value in put.items():
        text = text.replace(f"@{key}@", json.dumps(value))
    return text.replace("@shards@", "\n".join(shards))


def _schema() -> dict[str, Any]:
    """The JSON schema of the values: Helm refuses a value of another type, and a name that the chart does not have."""

    def closed(properties: Mapping[str, Any], required: Iterable[str] = ()) -> dict[str, Any]:
        needed = {"required": [*required]} if required else {}
        return {"type": "object", "additionalProperties": False, "properties": dict(properties), **needed}

    extra = {"args": {"type": "array", "items": _TEXT}, "env": {"type": "array", "items": _OBJECT}}
    pods = {
        "replicas": _COUNT,
        "maxReplicas": _COUNT,
        "cpus": {"type": "string", "pattern": r"^([0-9]+(\.[0-9]{1,3})?|[0-9]+m)$"},
        "busyPercent": _PERCENT,
        **extra,
        "affinity": _OBJECT,
        "tolerations": {"type": "array", "items": _OBJECT},
        "nodeSelector": _OBJECT,
        "annotations": {"type": "object", "additionalProperties": _TEXT},
    }
    ranker = {"memory": _QUANTITY, "memoryLimit": _QUANTITY, "loadPercent": _PERCENT, "queueDepth": _COUNT}
    group = {"ranks": {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}}
    group |= {"memory": _QUANTITY, "memoryLimit": _QUANTITY}
    folder = {"type": "string", "pattern": r"^[A-Za-z0-9_]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9_])?$"}
    archive = {
        "model": {"type": "string", "pattern": "^[^/]+$"},
        "version": folder,
        "claim": _TEXT,
        "url": {"type": "string", "pattern": "^(https?://.*)?$"},
        "sha256": {"type": "string", "pattern": "^([0-9a-fA-F]{64})?$"},
        "size": {"anyOf": [_QUANTITY, {"type": "string", "maxLength": 0}]},
        "image": _TEXT,
    }
    switch = {"type": "boolean"}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        **closed(
            {
                "nameOverride": {"type": "string", "pattern": "^([a-z]([a-z0-9-]{0,38}[a-z0-9])?)?$"},
                "image": closed({"name": _TEXT, "pullPolicy": _TEXT, "pullSecrets": _LIST}, ("name",)),
                "archive": closed(archive, ("model", "version")),
                "token": closed({"secret": _TEXT}),
                "tls": closed({"secret": _TEXT, "clientCa": switch, "name": _TEXT}),
                "shards": {"type": "array", "minItems": 1, "items": closed(group, group)},
                "shard": closed(pods),
                "ranker": closed({**pods, **ranker}, ("memory", "memoryLimit")),
                "autoscaling": closed({"kind": {"enum": ["hpa", "keda", "none"]}, "prometheus": _TEXT}),
                "podMonitor": closed({"enabled": switch, "interval": _TEXT, "labels": _OBJECT}),
                "networkPolicy": closed({"enabled": switch, "clients": _LIST, "monitoring": _LIST}),
                "global": _OBJECT,
            }
        ),
    }


# -- templates ---------------------------------------------------------------------------------------------------------


def _templates() -> dict[str, str]:
    """Path below templates/ -> text."""
    objects = Objects(_values_of_templates())
    group = Group("{{ $number }}", "{{ join `,` $shard.ranks }}", "{{ $shard.memory }}", "{{ $shard.memoryLimit }}")
    number = f"shard-{group.number}"
    shard = {path.replace(number, "shard"): _text(data) for path, data in objects.shard(group).items()}
    shard["shard-scaling.yaml"] = _scaling("StatefulSet", number, "shard")
    ranker = objects.ranker("{{ $.Values.ranker.memory }}", "{{ $.Values.ranker.memoryLimit }}")
    policies = "---\n".join(map(_text, _network_policies(objects)))
    return {
        "shards-config.yaml": _text(objects.config()),
        **{path: _block("range $number, $shard := $.Values.shards", f"---\n{text}") for path, text in shard.items()},
        **{path: _text(data) for path, data in ranker.items()},
        "ranker-scaling.yaml": _scaling("Deployment", "ranker", "ranker"),
        "podmonitor.yaml": _block("if $.Values.podMonitor.enabled", _text(_pod_monitor(objects))),
        "networkpolicy.yaml": _block("if $.Values.networkPolicy.enabled", policies),
    }


def _text(data: Mapping[str, Any]) -> str:
    """YAML text; ``nindent @`` becomes the indentation of its line."""
    return _INDENT.sub(lambda found: f"{found[1]}{found[2]}nindent {len(found[1])}", to_yaml(data))


def _block(condition: str, text: str) -> str:
    return f"{{{{- {condition} }}}}\n{text.rstrip()}\n{{{{- end }}}}\n"


def _entries(condition: str, data: Any, otherwise: Any = None) -> Expression:
    """Entries of a mapping or a list that a condition guards."""
    other = "" if otherwise is None else f"\n{{{{- else }}}}\n{to_yaml(otherwise).rstrip()}"
    return Expression(f"{{{{- {condition} }}}}\n{to_yaml(data).rstrip()}{other}\n{{{{- end }}}}")


def _given(value: str, name: str) -> Expression:
    """The entry ``name`` with a value of any form, if the value is not empty."""
    return Expression(f"{{{{- with {value} }}}}\n{name}:\n  {{{{- toYaml . | nindent @ }}}}\n{{{{- end }}}}")


def _spliced(value: str) -> Expression:
    """All entries of a value, a list or a mapping, if it is not empty."""
    return Expression(f"{{{{- with {value} }}}}\n{{{{- toYaml . | nindent @ }}}}\n{{{{- end }}}}")


def _scales(role: str) -> str:
    return f"include `recinfer.scales` (dict `autoscaling` $.Values.autoscaling `role` $.Values.{role})"


def _values_of_templates(role: str = "ranker", *, keda: bool = False) -> Values:
    """Expressions as values; of an autoscaler, those of its role."""
    percent = f"$.Values.{role}.busyPercent"

    def of_capacity(value: str) -> str:
        return f"{{{{ divf {value} 100 }}}}" if keda else f"{{{{ mul 10 {value} }}}}m"

    folder = f"{STORE}/{{{{ $.Values.archive.model }}}}"
    return Values(
        name=_NAME,
        namespace="{{ $.Release.Namespace }}",
        image="{{ $.Values.image.name }}",
        version="{{ $.Values.archive.version }}",
        store=folder,
        archive=f"{folder}/{{{{ $.Values.archive.version }}}}",
        models={"": _models()},
        secret="{{ $.Values.token.secret | default (printf `%s-token` (include `recinfer.name` $)) }}",
        shards=Shards(
            "{{ include `recinfer.shards` $ }}\n", "{{ include `recinfer.shards` $ | sha256sum | trunc 16 }}"
        ),
        shard=_role("shard"),
        ranker=_role("ranker"),
        busy_percent=f"{{{{ {percent} }}}}" if keda else Expression(f"{{{{ {percent} }}}}"),
        shard_busy=of_capacity("$.Values.shard.busyPercent"),
        load=of_capacity("$.Values.ranker.loadPercent"),
        queue_depth="{{ $.Values.ranker.queueDepth }}",
        prometheus="{{ $.Values.autoscaling.prometheus }}" if keda else None,
    )


def _role(name: str) -> Role:
    values, tls = f"$.Values.{name}", "if $.Values.tls.secret"
    replicas = _entries(f"if not ({_scales(name)})", {"replicas": Expression(f"{{{{ {values}.replicas }}}}")})
    files = ["--tls-cert", f"{_TLS}/tls.crt", "--tls-key", f"{_TLS}/tls.key"]
    pod = {key: _given(f"{values}.{key}", key) for key in ("affinity", "tolerations", "nodeSelector")}
    more = {
        "pod": {"secrets": _given("$.Values.image.pullSecrets", "imagePullSecrets"), **pod, "init": _init()},
        "container": {"pull": _given_text("$.Values.image.pullPolicy", "imagePullPolicy")},
        "args": [
            _entries(tls, files),
            _entries("if and $.Values.tls.secret $.Values.tls.clientCa", ["--tls-client-ca", f"{_TLS}/ca.crt"]),
            _spliced(f"{values}.args"),
        ],
        "env": [_spliced(f"{values}.env")],
        "mounts": [_entries(tls, [{"name": "tls", "mountPath": _TLS, "readOnly": True}])],
        "volumes": [
            _entries(
                tls,
                [{"name": "tls", "secret": {"secretName": "{{ $.Values.tls.secret }}", "defaultMode": 0o440}}],
            )
        ],
        "annotations": {"": _spliced(f"{values}.annotations")},
    }
    # gRPC probes know no TLS; HTTP's take any certificate.
    probes = {"probes": _entries(tls, http_probes("HTTPS"), grpc_probes())}
    return Role(f"{{{{ {values}.cpus }}}}", None, {"": replicas}, more, probes)


def _given_text(value: str, name: str) -> Expression:
    return _entries(f"with {value}", {name: "{{ . }}"})


def _models() -> Expression:
    claim = {"persistentVolumeClaim": {"claimName": "{{ $.Values.archive.claim }}", "readOnly": True}}
    image = {"image": {"reference": "{{ $.Values.archive.image }}"}}
    limit = _given_text("$.Values.archive.size", "sizeLimit")
    lines = [
        "{{- if $.Values.archive.image }}",
        to_yaml(image).rstrip(),
        "{{- else if $.Values.archive.url }}",
        "emptyDir:",
        '  medium: ""',
        *(f"  {line}" for line in limit.splitlines()),
        "{{- else }}",
        to_yaml(claim).rstrip(),
        "{{- end }}",
    ]
    return Expression("\n".join(lines))


def _init() -> Expression:
    """The container that downloads an archive from a URL."""
    sha256 = _entries("with $.Values.archive.sha256", ["--sha256", "{{ . }}"])
    fetch = {
        "name": "fetch",
        "image": "{{ $.Values.image.name }}",
        "command": ["python", "/opt/recinfer/fetch.py"],
        "args": [
            "{{ $.Values.archive.url }}",
            f"{STORE}/{{{{ $.Values.archive.model }}}}/{{{{ $.Values.archive.version }}}}",
            sha256,
        ],
        "securityContext": container_security(),
        "volumeMounts": [{"name": "models", "mountPath": STORE}, {"name": "tmp", "mountPath": "/tmp"}],
    }
    return _entries("if and $.Values.archive.url (not $.Values.archive.image)", {"initContainers": [fetch]})


def _scaling(kind: str, component: str, role: str) -> str:
    """The autoscaler that the values choose, if the role has one."""
    values = f"$.Values.{role}"
    bounds = Expression(f"{{{{ {values}.replicas }}}}"), Expression(f"{{{{ {values}.maxReplicas }}}}")

    def made(*, keda: bool) -> str:
        objects = Objects(_values_of_templates(role, keda=keda))
        return _text(objects.scaling(kind, f"{_NAME}-{component}", objects.labels(component), bounds)).rstrip()

    chosen = "{{- if eq $.Values.autoscaling.kind `keda` }}"
    return _block(
        f"if {_scales(role)}", f"{chosen}\n{made(keda=True)}\n{{{{- else }}}}\n{made(keda=False)}\n{{{{- end }}}}"
    )


def _pod_monitor(objects: Objects) -> dict[str, Any]:
    """Scrapes of all pods by Prometheus' operator. A target's role is the name of its container."""
    tls = {"secret": {"name": "{{ $.Values.tls.secret }}", "key": "ca.crt"}}
    name = _given_text("$.Values.tls.name", "serverName")
    mine = {
        "cert": {"secret": {"name": "{{ $.Values.tls.secret }}", "key": "tls.crt"}},
        "keySecret": {"name": "{{ $.Values.tls.secret }}", "key": "tls.key"},
    }
    client = _entries("if $.Values.tls.clientCa", mine)
    endpoint = {
        "port": "metrics",
        "path": "/metrics",
        "interval": "{{ $.Values.podMonitor.interval }}",
        "authorization": {"type": "Bearer", "credentials": {"name": objects.values.secret, "key": "token"}},
        "": _entries("if $.Values.tls.secret", {"scheme": "https", "tlsConfig": {"ca": tls, "name": name, "": client}}),
        "relabelings": [{"sourceLabels": ["__meta_kubernetes_pod_container_name"], "targetLabel": "role"}],
    }
    labels = {**objects.labels(None), "": _spliced("$.Values.podMonitor.labels")}
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": {"name": _NAME, "namespace": objects.values.namespace, "labels": labels},
        "spec": {"selector": {"matchLabels": objects.labels(None)}, "podMetricsEndpoints": [endpoint]},
    }


def _network_policies(objects: Objects) -> list[dict[str, Any]]:
    """The rules of connections to shard servers and to rankers. Probes come from the node, which policies let through."""
    ranker = objects.labels("ranker")
    metrics = {
        "ports": [{"protocol": "TCP", "port": METRICS_PORT}],
        "": _given("$.Values.networkPolicy.monitoring", "from"),
    }
    lookups = {
        "ports": [{"protocol": "TCP", "port": port} for port in (PORT, SOCKET_PORT)],
        "from": [{"podSelector": {"matchLabels": ranker}}],
    }
    calls = {"ports": [{"protocol": "TCP", "port": PORT}], "": _given("$.Values.networkPolicy.clients", "from")}
    shards = {
        "matchLabels": objects.labels(None),
        "matchExpressions": [{"key": "app.kubernetes.io/component", "operator": "NotIn", "values": ["ranker"]}],
    }
    return [
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {
                "name": f"{_NAME}-{name}",
                "namespace": objects.values.namespace,
                "labels": objects.labels(None),
            },
            "spec": {"podSelector": selector, "policyTypes": ["Ingress"], "ingress": [rule, metrics]},
        }
        for name, selector, rule in (("shards", shards, lookups), ("ranker", {"matchLabels": ranker}, calls))
    ]
