"""The Helm chart: it renders the same objects as the manifests, whatever it adds is valid, and a wrong value is an error."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from recinfer.deploy.groups import footprint
from recinfer.deploy.helm import chart, write_chart
from recinfer.deploy.k8s import K8sOptions, manifests
from recinfer.errors import ConfigError
from tests.deploy.example import CHART, FOUND, OPTIONS
from tests.serving.conftest import build_archive
from tests.warm import RECINFER, run_program

yaml = pytest.importorskip("yaml", reason="PyYAML reads the objects")
VERSION = "1.35"
Found = dict[tuple[str, str], dict[str, Any]]


def helm(*arguments: object) -> subprocess.CompletedProcess[str]:
    """A helm command; skips without helm."""
    program = shutil.which("helm")
    if program is None:
        pytest.skip("no helm on the PATH, which renders charts")
    return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, timeout=120, check=False)


def rendered(tmp_path: Path, values: Mapping[str, Any], folder: Path = CHART) -> Found:
    """(kind, name) -> object of a release ctr."""
    (tmp_path / "values.yaml").write_text(json.dumps(values))
    done = helm("template", "ctr", folder, "--namespace", "recinfer", "--values", tmp_path / "values.yaml")
    assert done.returncode == 0, done.stderr
    return by_name(made for made in yaml.safe_load_all(done.stdout) if made)


def by_name(objects: Any) -> Found:
    return {(each["kind"], each["metadata"]["name"]): each for each in map(copy.deepcopy, objects)}


def plain(found: Found) -> Found:
    """The same with shards.json as data: its spaces say nothing."""
    for (kind, _), made in found.items():
        if kind == "ConfigMap":
            made["data"] = json.loads(made["data"]["shards.json"])
    return found


def check(found: Found) -> None:
    """Refuse what Kubernetes' API schema does not know; objects of operators are not in it."""
    schema = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate has the API's schema")
    for made in found.values():
        if made["kind"] not in ("ScaledObject", "PodMonitor"):
            schema.validate(made, VERSION, strict=True)


def pods(found: Found) -> list[dict[str, Any]]:
    return [m["spec"]["template"] for (kind, _), m in found.items() if kind in ("StatefulSet", "Deployment")]


def test_the_example_is_up_to_date():
    kept = {str(path.relative_to(CHART)): path.read_text() for path in CHART.rglob("*") if path.is_file()}
    assert kept == chart(FOUND, OPTIONS), "run python -m tests.deploy.example"


def test_helm_finds_nothing_to_complain_about():
    done = helm("lint", "--strict", CHART)
    assert done.returncode == 0 and "[WARNING]" not in done.stdout + done.stderr, done.stdout


@pytest.mark.parametrize("more", [{}, {"max_replicas": 5, "rankers": 3, "busy_percent": 40, "load_percent": 60}])
def test_the_chart_renders_the_manifests(more: dict[str, Any], tmp_path: Path):
    options = K8sOptions(**{"max_rankers": 8, **more})
    write_chart(FOUND, options, tmp_path / "chart")
    found = rendered(tmp_path, {}, tmp_path / "chart")
    assert plain(found) == plain(by_name(manifests(FOUND, options).values()))


def test_keda_in_place_of_the_autoscalers(tmp_path: Path):
    options = K8sOptions(max_rankers=8, max_replicas=5, prometheus="http://prometheus:9090")
    want = by_name(manifests(FOUND, options).values())
    keda = {"kind": "keda", "prometheus": options.prometheus}
    found = rendered(tmp_path, {"autoscaling": keda, "shard": {"maxReplicas": 5}})
    assert plain(found) == plain(want)
    spec = found["ScaledObject", "ctr-ranker"]["spec"]
    (asked, cores) = spec["triggers"]
    assert asked["metadata"] == {
        "serverAddress": "http://prometheus:9090",
        "query": 'sum(recinfer_load{namespace="recinfer", pod=~"ctr-ranker-.+"})',
        "threshold": "0.4",
    }
    assert cores["metadata"] == {"value": "70"} and (spec["minReplicaCount"], spec["maxReplicaCount"]) == (2, 8)
    assert found["ScaledObject", "ctr-shard-1"]["spec"]["triggers"][0]["metadata"]["threshold"] == "0.7"


def test_without_autoscaling_the_values_say_how_many(tmp_path: Path):
    found = rendered(tmp_path, {"autoscaling": {"kind": "none"}, "ranker": {"replicas": 3}})
    assert not [kind for kind, _ in found if kind == "HorizontalPodAutoscaler"]
    assert found["Deployment", "ctr-ranker"]["spec"]["replicas"] == 3


def test_tls_of_all_ports(tmp_path: Path):
    tls = {"secret": "ctr-tls", "clientCa": True, "name": "ctr.example"}
    found = rendered(tmp_path, {"tls": tls, "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}}})
    check(found)
    for pod in pods(found):
        (container,) = pod["spec"]["containers"]
        text = " ".join(container["args"])
        assert "--tls-cert /run/secrets/tls/tls.crt --tls-key /run/secrets/tls/tls.key --tls-client-ca" in text
        assert container["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "metrics", "scheme": "HTTPS"}
        assert {"name": "tls", "secret": {"secretName": "ctr-tls", "defaultMode": 0o440}} in pod["spec"]["volumes"]
    settings = json.loads(found["ConfigMap", "ctr-shards"]["data"]["shards.json"])["settings"]
    assert settings["tls_name"] == "ctr.example" and settings["tls_key"] == "/run/secrets/tls/tls.key"
    monitor = found["PodMonitor", "ctr"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["scheme"] == "https" and endpoint["tlsConfig"]["serverName"] == "ctr.example"
    assert endpoint["authorization"]["credentials"] == {"name": "ctr-token", "key": "token"}
    assert monitor["metadata"]["labels"]["release"] == "prometheus"


@pytest.mark.parametrize(
    ("archive", "source"),
    [
        ({"claim": "models.v1"}, {"persistentVolumeClaim": {"claimName": "models.v1", "readOnly": True}}),
        ({"image": "r.example/ctr:1"}, {"image": {"reference": "r.example/ctr:1"}}),
        ({"url": "https://a.example/ctr.tar", "size": "60Gi"}, {"emptyDir": {"medium": "", "sizeLimit": "60Gi"}}),
    ],
)
def test_where_the_archive_comes_from(archive: dict[str, str], source: dict[str, Any], tmp_path: Path):
    digest = {"sha256": 64 * "a"} if "url" in archive else {}
    found = rendered(tmp_path, {"archive": archive | digest})
    check(found)
    for pod in pods(found):
        assert {"name": "models", **source} in pod["spec"]["volumes"]
        first = pod["spec"].get("initContainers", [])
        assert [each["args"] for each in first] == (
            [["https://a.example/ctr.tar", "/models/ctr/1", "--sha256", 64 * "a"]] if digest else []
        )
        assert all("readOnly" not in each["volumeMounts"][0] for each in first)


def test_what_a_cluster_wants_of_its_pods(tmp_path: Path):
    role = {
        "args": ["--max-queue", "64"],
        "env": [{"name": "TZ", "value": "UTC"}],
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}},
        "tolerations": [{"key": "recinfer", "operator": "Exists", "effect": "NoSchedule"}],
        "nodeSelector": {"pool": "memory"},
        "annotations": {"team": "ads"},
    }
    image = {"name": "r.example/recinfer:1", "pullPolicy": "Always", "pullSecrets": [{"name": "registry"}]}
    found = rendered(tmp_path, {"shard": role, "ranker": role, "image": image, "nameOverride": "ads"})
    check(found)
    for template in pods(found):
        pod, (container,) = template["spec"], template["spec"]["containers"]
        assert container["args"][-2:] == role["args"] and container["env"][-1] == role["env"][0]
        assert {key: pod[key] for key in ("affinity", "tolerations", "nodeSelector")}.items() <= role.items()
        assert template["metadata"]["annotations"]["team"] == "ads"
        assert (container["image"], container["imagePullPolicy"]) == ("r.example/recinfer:1", "Always")
        assert pod["imagePullSecrets"] == [{"name": "registry"}]
    assert ("Deployment", "ads-ranker") in found


def test_shards_take_lookups_of_rankers_alone(tmp_path: Path):
    web = [{"podSelector": {"matchLabels": {"app": "web"}}}]
    found = rendered(tmp_path, {"networkPolicy": {"enabled": True, "clients": web}})
    check(found)
    shards, ranker = (found["NetworkPolicy", f"ctr-{name}"]["spec"] for name in ("shards", "ranker"))
    lookups, metrics = shards["ingress"]
    ports = found["StatefulSet", "ctr-shard-0"]["spec"]["template"]["spec"]["containers"][0]["ports"]
    assert [each["port"] for each in (*lookups["ports"], *metrics["ports"])] == [p["containerPort"] for p in ports]
    rankers = found["Deployment", "ctr-ranker"]["spec"]["selector"]["matchLabels"]
    assert lookups["from"] == [{"podSelector": {"matchLabels": rankers}}] and "from" not in metrics
    assert ranker["podSelector"]["matchLabels"] == rankers and ranker["ingress"][0]["from"] == web


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"ranker": {"replicas": "two"}}, "replicas"),
        ({"shards": [{"ranks": 0, "memory": "1Gi", "memoryLimit": "2Gi"}]}, "ranks"),
        ({"ranker": {"memory": 12}}, "memory"),
        ({"autoscaling": {"kind": "HPA"}}, "kind"),
        ({"tls": {"clientCa": "yes"}}, "clientCa"),
        ({"rankers": {}}, "rankers"),
        ({"archive": {"version": "a/b"}}, "version"),
        ({"ranker": {"loadPercent": 0}}, "loadPercent"),
    ],
)
def test_a_wrong_value_is_named(values: dict[str, Any], said: str, tmp_path: Path):
    (tmp_path / "values.yaml").write_text(json.dumps(values))
    done = helm("template", "ctr", CHART, "--values", tmp_path / "values.yaml")
    assert done.returncode != 0 and not done.stdout
    lines = [line for line in done.stderr.splitlines() if line.startswith("- at")]
    assert len(lines) == 1 and said in lines[0], done.stderr


def test_the_schema_takes_the_values():
    """Without helm too."""
    schema = pytest.importorskip("jsonschema", reason="jsonschema checks the values")
    made = chart(FOUND, K8sOptions())
    schema.Draft7Validator.check_schema(json.loads(made["values.schema.json"]))
    schema.validate(yaml.safe_load(made["values.yaml"]), json.loads(made["values.schema.json"]))


def test_the_command_writes_the_chart_of_an_archive(tmp_path: Path):
    archive, out = build_archive(tmp_path), tmp_path / "chart"
    more = ["--image", "r.example/recinfer:1", "--replicas", "3", "--ranks-per-shard", "2", "--json"]
    code, printed, err = run_program(RECINFER, "deploy", archive, "--helm", "--out", out, *more)
    assert code == 0, err
    assert str(out / "Chart.yaml") in json.loads(printed.splitlines()[-1])["files"]
    options = K8sOptions(image="r.example/recinfer:1", replicas=3, max_rankers=8)
    assert (out / "values.yaml").read_text() == chart(footprint(archive, 2), options)["values.yaml"]
    values = yaml.safe_load((out / "values.yaml").read_text())
    assert values["shards"][0]["ranks"] == [0, 1] and values["archive"]["model"] == "tiny"
    code, _, err = run_program(RECINFER, "deploy", archive, "--helm", "--k8s", "--out", out)
    assert code == 2 and "--k8s and --helm" in err


def test_prometheus_is_a_url():
    with pytest.raises(ConfigError, match="prometheus"):
        K8sOptions(prometheus="prometheus:9090")
