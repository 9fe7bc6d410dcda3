"""Images, compose file and dashboards, read as data: the files and names in them exist, and privileges are minimal."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from recinfer.serving.shards.config import read_shards
from tests.warm import RECINFER, run_program

yaml = pytest.importorskip("yaml", reason="PyYAML reads the compose file")
ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
IMAGES = ("Dockerfile", "Dockerfile.cuda")


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    """The compose file."""
    return yaml.safe_load((DOCKER / "compose.yaml").read_text())


def instructions(image: str) -> list[tuple[str, str]]:
    """(instruction, rest) of a Dockerfile, lines joined."""
    lines = [line for line in (DOCKER / image).read_text().splitlines() if not line.startswith("#")]
    text = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in text.splitlines() if line)]


def hadolint() -> str:
    """Its binary; skips without one."""
    found = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if found is None:
        pytest.skip("no hadolint; it comes with recinfer[dev]")
    return found


@pytest.mark.parametrize("image", IMAGES)
def test_hadolint_finds_nothing(image: str):
    done = subprocess.run([hadolint(), DOCKER / image], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_hadolint_reports_a_bad_file(tmp_path: Path):
    broken = tmp_path / "Dockerfile"
    broken.write_text((DOCKER / "Dockerfile").read_text().replace("python:3.11.14-slim-bookworm", "python"))
    done = subprocess.run([hadolint(), broken], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0 and "DL3006" in done.stdout


@pytest.mark.parametrize("image", IMAGES)
def test_what_is_copied_exists_and_reaches_the_builder(image: str):
    ignored = (ROOT / ".dockerignore").read_text().split()
    sources = [
        source
        for name, rest in instructions(image)
        if name == "COPY" and "--from" not in rest
        for source in rest.split()[:-1]
    ]
    assert {"recinfer", "./recinfer"} & set(sources) and "docker/healthcheck.py" in sources
    for source in sources:
        assert (ROOT / source).exists(), source
        kept = f"!{source}" in ignored or f"!{Path(source).parent}/*{Path(source).suffix}" in ignored
        assert kept, f".dockerignore keeps {source} from the builder"


@pytest.mark.parametrize("image", IMAGES)
def test_images_are_pinned_as_the_project_is_and_run_as_nobody(image: str):
    steps = instructions(image)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    kind = "cuda" if image.endswith("cuda") else "cpu"
    text = (DOCKER / image).read_text()
    pins = [pin for pin in project["optional-dependencies"][kind] if pin.startswith(("torch==", "fbgemm-gpu"))]
    assert len(pins) == 2
    for pin in pins:
        assert f"install {pin} " in text or f"install {pin}\n" in text, pin
    assert f"recinfer:{project['version']}-{kind}" in text
    for base in (rest for name, rest in steps if name == "FROM"):
        assert re.match(r"python:3\.11\.\d+-(slim-\w+|\w+ AS build)$", base)
    names = [name for name, _ in steps]
    assert dict(steps)["USER"] == "10001:10001" and names.index("USER") < names.index("ENTRYPOINT")
    for name in ("HEALTHCHECK", "ENTRYPOINT"):
        for script in re.findall(r"/opt/recinfer/([\w.]+)", dict(steps)[name]):
            assert (DOCKER / script).is_file() and f"docker/{script}" in text


def test_every_path_in_the_compose_file_exists(compose: dict[str, Any]):
    services = compose["services"]
    assert services.keys() == {"shard-0", "shard-1", "ranker-0", "ranker-1", "prometheus", "grafana"}
    for name in ("shard-0", "shard-1"):
        assert services[name]["deploy"]["replicas"] == 2
    for service in services.values():
        for volume in service["volumes"]:
            source, _, rest = volume.rpartition(":")[0].rpartition(":")
            assert rest and volume.endswith(":ro")
            assert source.startswith("${RECINFER_STORE") or (DOCKER / source).exists(), source
        for line in service.get("entrypoint", []):
            assert (DOCKER / Path(line).name).stat().st_mode & 0o111, line
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:")
        assert ":" in service["image"] and not service["image"].endswith(":latest")
        if "build" in service:
            build = service["build"]
            assert (DOCKER / build["context"]).resolve() == ROOT and (ROOT / build["dockerfile"]).is_file()
        assert set(service.get("secrets", [])) <= compose["secrets"].keys()


def test_servers_of_the_compose_file_may_do_no_more_than_they_need(compose: dict[str, Any]):
    for name in ("shard-0", "shard-1", "ranker-0", "ranker-1"):
        service = compose["services"][name]
        assert service["read_only"] is True and service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"] and service["user"] == "10001:10001"
        assert int(service["stop_grace_period"].removesuffix("s")) > 10  # seconds that a server drains for


def test_names_in_the_files_are_services(compose: dict[str, Any]):
    shards = read_shards(DOCKER / "shards.json").ranks
    for rank, addresses in shards.items():
        assert addresses == (f"dns:///shard-{rank}:50051",)
        assert compose["services"][f"shard-{rank}"]["environment"]["RECINFER_RANKS"] == str(rank)
    prometheus = yaml.safe_load((DOCKER / "prometheus" / "prometheus.yml").read_text())
    names = [name for job in prometheus["scrape_configs"] for dns in job["dns_sd_configs"] for name in dns["names"]]
    assert sorted(names) == ["ranker-0", "ranker-1", "shard-0", "shard-1"]
    for file in prometheus["rule_files"]:
        assert (DOCKER / "prometheus" / file).is_file()
    for job in prometheus["scrape_configs"]:
        assert job["authorization"]["credentials_file"] == "/run/secrets/recinfer_token"
    source = yaml.safe_load((DOCKER / "grafana/provisioning/datasources/prometheus.yaml").read_text())["datasources"][0]
    dashboard = json.loads((DOCKER / "grafana/dashboards/recinfer.json").read_text())
    assert {panel["datasource"]["uid"] for panel in dashboard["panels"]} == {source["uid"]}
    assert source["url"] == "http://prometheus:9090"
    provider = yaml.safe_load((DOCKER / "grafana/provisioning/dashboards/recinfer.yaml").read_text())["providers"][0]
    assert any(provider["options"]["path"] in volume for volume in compose["services"]["grafana"]["volumes"])


def test_kserve_runs_a_command_that_serve_takes():
    """KServe puts the archive at /mnt/models, which is not there: the command line takes all options before it says so."""
    runtime = yaml.safe_load((DOCKER / "kserve/serving-runtime.yaml").read_text())
    service = yaml.safe_load((DOCKER / "kserve/inference-service.yaml").read_text())
    model = service["spec"]["predictor"]["model"]
    assert model["runtime"] == runtime["metadata"]["name"]
    (known,) = runtime["spec"]["supportedModelFormats"]
    assert model["modelFormat"] == {key: known[key] for key in ("name", "version")}
    assert model["protocolVersion"] in runtime["spec"]["protocolVersions"]
    (container,) = runtime["spec"]["containers"]
    command = [*container["command"], *container["args"]]
    code, _, err = run_program(RECINFER, *command[1:], "--insecure")
    assert code == 2 and "/mnt/models" in err, err
    served = {int(option.partition("=")[2]) for option in command if "port=" in option}
    probed = {container[f"{name}Probe"]["httpGet"]["port"] for name in ("startup", "readiness", "liveness")}
    assert probed | {port["containerPort"] for port in container["ports"]} == {8080} <= served


def test_the_check_of_the_images_says_why_it_is_skipped(tmp_path: Path):
    done = subprocess.run(
        ["bash", DOCKER / "build_check.sh"],
        env={"PATH": str(_tools(tmp_path))},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0 and done.stdout.startswith("skipped: buildah is not installed"), done


def _tools(folder: Path) -> Path:
    for name in ("bash", "dirname", "mktemp"):
        (folder / name).symlink_to(shutil.which(name) or name)
    return folder
