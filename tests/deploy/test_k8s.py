"""Manifests of an archive: valid by Kubernetes' own schema, consistent with the archive, and the same every time."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from recinfer.cli.main import app
from recinfer.deploy.groups import MIB, footprint
from recinfer.deploy.k8s import K8sOptions, manifests, write_manifests
from recinfer.deploy.objects import BUSY_METRIC, LOAD_METRIC, QUEUE_METRIC
from recinfer.errors import ArchiveError, ConfigError
from recinfer.serving.server.health import LIVENESS, READINESS
from recinfer.serving.shards.config import read_shards
from tests.deploy.example import FOLDER, FOUND, OPTIONS
from tests.serving.conftest import build_archive
from tests.warm import RECINFER, run_program

yaml = pytest.importorskip("yaml", reason="PyYAML reads the manifests back")
VERSION = "1.34"


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks."""
    return build_archive(tmp_path_factory.mktemp("k8s"))


def check(manifest: dict[str, Any]) -> None:
    """Refuse what Kubernetes' API schema does not know."""
    schema = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate has the API's schema")
    schema.validate(manifest, VERSION, strict=True)


def of_kind(found: dict[str, dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [manifest for manifest in found.values() if manifest["kind"] == kind]


def pods(found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [m["spec"]["template"]["spec"] for kind in ("StatefulSet", "Deployment") for m in of_kind(found, kind)]


@pytest.mark.parametrize("options", [K8sOptions(), K8sOptions(max_replicas=5, max_rankers=9, cpus="500m")])
def test_every_manifest_is_one_by_the_api_schema(options: K8sOptions):
    found = manifests(FOUND, options)
    for manifest in found.values():
        check(manifest)
    assert len(of_kind(found, "StatefulSet")) == 2 and len(of_kind(found, "Deployment")) == 1
    assert len(of_kind(found, "PodDisruptionBudget")) == 3
    assert len(of_kind(found, "HorizontalPodAutoscaler")) == (3 if options.max_rankers else 0)


@pytest.mark.parametrize(
    ("file", "path", "value"),
    [
        ("ranker.yaml", ("spec", "template", "spec", "containers", 0, "readinessProbe", "grpc", "port"), "grpc"),
        ("ranker.yaml", ("spec", "replica"), 2),
        ("shard-0.yaml", ("spec", "serviceName"), 3),
        ("shard-0.yaml", ("spec", "template", "spec", "securityContext", "runAsRoot"), False),
        ("ranker-scaling.yaml", ("spec", "maxReplicas"), "eight"),
        ("shard-1-disruption.yaml", ("apiVersion",), "policy/v9"),
    ],
)
def test_a_broken_manifest_is_refused(file: str, path: tuple[Any, ...], value: Any):
    schema = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate has the API's schema")
    broken = copy.deepcopy(manifests(FOUND, OPTIONS)[file])
    check(broken)
    place: Any = broken
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises((schema.ValidationError, schema.InvalidSchemaError, schema.SchemaNotFoundError)):
        check(broken)


def test_names_and_labels_find_each_other():
    found = manifests(FOUND, OPTIONS)
    services = {service["metadata"]["name"]: service["spec"] for service in of_kind(found, "Service")}
    shards = of_kind(found, "StatefulSet")
    workloads = {w["metadata"]["name"]: w["spec"] for w in [*shards, *of_kind(found, "Deployment")]}
    for spec in workloads.values():
        labels = spec["template"]["metadata"]["labels"]
        assert spec["selector"]["matchLabels"] == labels
        assert any(service["selector"] == labels for service in services.values())
        (spread,) = spec["template"]["spec"]["topologySpreadConstraints"]
        assert spread["labelSelector"]["matchLabels"] == labels
        mounts = {mount["name"] for mount in spec["template"]["spec"]["containers"][0]["volumeMounts"]}
        assert mounts == {volume["name"] for volume in spec["template"]["spec"]["volumes"]}
    for shard in shards:
        assert services[shard["spec"]["serviceName"]]["clusterIP"] == "None"
    budgets = [b["spec"]["selector"]["matchLabels"] for b in of_kind(found, "PodDisruptionBudget")]
    assert sorted(map(str, budgets)) == sorted(str(w["selector"]["matchLabels"]) for w in workloads.values())
    (scaling,) = of_kind(found, "HorizontalPodAutoscaler")
    assert scaling["spec"]["scaleTargetRef"]["name"] in workloads
    pods = [metric["pods"] for metric in scaling["spec"]["metrics"] if metric["type"] == "Pods"]
    wanted = {each["metric"]["name"]: each["target"]["averageValue"] for each in pods}
    assert wanted == {LOAD_METRIC: "400m", QUEUE_METRIC: "16"}
    assert "replicas" not in workloads["ctr-ranker"], "the autoscaler's number must survive an apply"


def test_shards_are_scaled_by_how_busy_they_are():
    found = manifests(FOUND, K8sOptions(max_replicas=5, busy_percent=40))
    (scaling,) = (s for s in of_kind(found, "HorizontalPodAutoscaler") if s["metadata"]["name"] == "ctr-shard-0")
    pods, cores = scaling["spec"]["metrics"]
    assert pods["pods"] == {
        "metric": {"name": BUSY_METRIC},
        "target": {"type": "AverageValue", "averageValue": "400m"},
    }
    assert cores["resource"]["target"]["averageUtilization"] == 40


def test_rankers_use_the_addresses_of_the_shards(tmp_path: Path):
    found = manifests(FOUND, OPTIONS)
    path = tmp_path / "shards.json"
    path.write_text(found["shards-config.yaml"]["data"]["shards.json"])
    listed = read_shards(path).ranks
    names = [f"{s['metadata']['name']}.{s['metadata']['namespace']}.svc" for s in of_kind(found, "StatefulSet")]
    assert listed == {rank: (f"dns:///{name}:50051",) for rank, name in enumerate(names)}


def test_pods_may_do_no_more_than_they_need():
    for pod in pods(manifests(FOUND, OPTIONS)):
        (container,) = pod["containers"]
        inside, outside = container["securityContext"], pod["securityContext"]
        assert outside["runAsNonRoot"] and outside["seccompProfile"] == {"type": "RuntimeDefault"}
        assert inside["readOnlyRootFilesystem"] and inside["capabilities"] == {"drop": ["ALL"]}
        assert inside["allowPrivilegeEscalation"] is False and pod["automountServiceAccountToken"] is False
        models = next(volume for volume in pod["volumes"] if volume["name"] == "models")
        assert models["persistentVolumeClaim"]["readOnly"] is True
        asked = {"startupProbe": None, "readinessProbe": READINESS, "livenessProbe": LIVENESS}
        for probe, service in asked.items():
            assert container[probe]["grpc"]["port"] == container["ports"][0]["containerPort"]
            assert container[probe]["grpc"].get("service") == service
        # The grace period covers the sleep before SIGTERM and the drain of 10 s after it.
        assert pod["terminationGracePeriodSeconds"] >= container["lifecycle"]["preStop"]["sleep"]["seconds"] + 10 + 5


def test_memory_follows_the_tables():
    shards = of_kind(manifests(FOUND, OPTIONS), "StatefulSet")
    for shard, group in zip(shards, FOUND.groups):
        memory = shard["spec"]["template"]["spec"]["containers"][0]["resources"]
        asked, limit = (int(memory[kind]["memory"].removesuffix("Mi")) * MIB for kind in ("requests", "limits"))
        assert group.table_bytes < asked < 2 * group.table_bytes < limit


def test_the_command_renders_an_archive(archive: Path, tmp_path: Path):
    out = tmp_path / "manifests"
    more = ["--ranks-per-shard", "2", "--replicas", "3", "--namespace", "ads", "--image", "r.example/recinfer:1"]
    code, printed, err = run_program(RECINFER, "deploy", archive, "--k8s", "--out", out, "--json", *more)
    assert code == 0, err
    said = json.loads(printed.splitlines()[-1])
    assert [group["ranks"] for group in said["groups"]] == [[0, 1]]
    sizes = {f.name: f.stat().st_size for f in (archive / "shards").iterdir()}
    assert said["groups"][0]["bytes"] == sum(sizes.values())
    listed = yaml.safe_load((out / "kustomization.yaml").read_text())["resources"]
    read = {name: yaml.safe_load((out / name).read_text()) for name in listed}
    assert read == manifests(
        footprint(archive, 2), K8sOptions(namespace="ads", image="r.example/recinfer:1", replicas=3, max_rankers=8)
    )
    for manifest in read.values():
        check(manifest)
    container = read["shard-0.yaml"]["spec"]["template"]["spec"]["containers"][0]
    assert container["args"][:3] == ["/models/tiny/3", "--ranks", "0,1"]


def test_what_the_containers_run_is_a_command_that_serve_takes(archive: Path):
    """Parsed by the command line itself, which stops at the archive that is not there and at no option."""
    for pod in pods(manifests(footprint(archive), OPTIONS)):
        (container,) = pod["containers"]
        command = [*container["command"], *container["args"]]
        assert command[0] == "recinfer"
        at = command.index("--token-file")
        code, _, err = run_program(RECINFER, *command[1:at], *command[at + 2 :], "--insecure")
        assert code == 2 and ("/models" in err or "shards.json" in err), err


def test_the_example_is_up_to_date(tmp_path: Path):
    write_manifests(FOUND, OPTIONS, tmp_path)
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    kept = {path.name: path.read_text() for path in FOLDER.glob("*.yaml")}
    assert kept == written, "run python -m tests.deploy.example"


def test_files_of_another_plan_are_not_applied_by_chance(tmp_path: Path):
    (tmp_path / "shard-7.yaml").write_text("")
    with pytest.raises(ConfigError, match=r"shard-7\.yaml"):
        write_manifests(FOUND, OPTIONS, tmp_path)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"namespace": "Ads"}, "namespace"),
        ({"image": "a b"}, "image"),
        ({"image": "-x"}, "image"),
        ({"image": ""}, "image"),
        ({"image": "r.example/recinfer@sha256:12"}, "image"),
        ({"cpus": "two"}, "cpus"),
        ({"replicas": 0}, "replicas"),
        ({"rankers": 3, "max_rankers": 2}, "rankers"),
        ({"queue_depth": 0}, "queue depth"),
        ({"busy_percent": 0}, "busy percent"),
        ({"claim": "x\ny"}, "claim"),
        ({"claim": "x..y"}, "claim"),
        ({"token_secret": "-x"}, "token_secret"),
        ({"cpus": "0m"}, "cpus"),  # without requested cores an autoscaler cannot compute a share
        ({"cpus": "0.0001"}, "cpus"),
    ],
)
def test_wrong_options_are_named(wrong: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        K8sOptions(**wrong)


@pytest.mark.parametrize(
    "image",
    ["recinfer", "recinfer:0.2.0-cpu", "r.example:5000/a/b_c:1", "[::1]:5000/recinfer:1", f"r/x:1@sha256:{64 * 'a'}"],
)
def test_images_are_named_as_registries_do(image: str):
    assert K8sOptions(image=image).image == image


def test_claims_and_secrets_may_have_dots():
    options = K8sOptions(claim="models.v1", token_secret="ctr.token")
    for pod in pods(manifests(FOUND, options)):
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes["models"]["persistentVolumeClaim"]["claimName"] == "models.v1"
        assert volumes["token"]["secret"]["secretName"] == "ctr.token"


@pytest.mark.parametrize(("name", "message"), [("2024-ctr", "a letter first"), ("a" * 45, "longer than 52")])
def test_names_that_the_api_server_takes_and_pods_fail_on(name: str, message: str):
    """The schema knows neither rule: a Service's name begins with a letter, and pods get labels of their set's name."""
    with pytest.raises(ConfigError, match=message):
        manifests(FOUND, K8sOptions(name=name))
    assert manifests(FOUND, K8sOptions(name="a" * 44))


def test_another_version_is_the_folder_that_was_named(archive: Path, tmp_path: Path):
    """Checkpoints without a version of their own all give archives of version 1: in a store its folder tells them apart."""
    for version in ("1", "2"):
        shutil.copytree(archive, tmp_path / "store" / "tiny" / version)
        found = manifests(footprint(tmp_path / "store" / "tiny" / version), OPTIONS)
        for pod in pods(found):
            assert pod["containers"][0]["args"][0] == f"/models/tiny/{version}"
    assert footprint(archive).version == "3"  # it is in no store, so the version of its manifest


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"format": "other"}, r"\[M1\] .*'other'; expected 'recinfer.archive'"),
        ({"files": []}, r"\[F7\] .* lists no shards/rank-00000.safetensors"),
        ({"world_size": 10**12}, r"\[F7\] .* lists no shards/rank-00002.safetensors"),
        ({"world_size": 0}, r"\[F7\] .* has world_size 0"),
        ({"model": 3}, r"\[J3\] manifest.model"),
    ],
)
def test_a_bad_manifest_is_one_sentence(archive: Path, tmp_path: Path, change: dict[str, Any], text: str):
    manifest = json.loads((archive / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps({**manifest, **change}))
    with pytest.raises(ArchiveError, match=text):
        footprint(tmp_path)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(ArchiveError, match=r"\[F1\] .* is not an archive"):
        footprint(tmp_path)


def test_ray_options_without_ray_are_an_error(archive: Path, tmp_path: Path):
    """A user who gives --tls-cert expects TLS."""
    command = ["deploy", str(archive), "--k8s", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, [*command, "--tls-cert", "cert.pem", "--cool-down", "20"])
    assert done.exit_code == 2 and "--cool-down, --tls-cert" in " ".join(done.output.split())
    assert not (tmp_path / "out").exists()


def test_commands_of_the_page_render_both_versions_with_the_same_options():
    """An option that is left out gets its default: the image of version 2 would be another one."""
    page = (Path(__file__).parents[2] / "docs/how-to/deploy-kubernetes.md").read_text().replace("\\\n", " ")
    commands = [line.split("&&")[0].split() for line in page.splitlines() if line.startswith("recinfer deploy store")]
    first, second = ([*command[:2], *command[3:]] for command in commands if "--k8s" in command)
    assert first == second
