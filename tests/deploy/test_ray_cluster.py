"""``recinfer deploy`` on a real Ray cluster of one node, where Ray is installed; tools/ray_trial.py has one of three nodes.

Ray listens on every interface, so the cluster runs in a network namespace that has loopback alone.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from recinfer import env

ROOT = Path(__file__).resolve().parents[2]
HEAD = "127.0.0.1:6379"
SPACE = ["unshare", "--net", "--pid", "--fork", "--mount-proc", "--kill-child"]
HAS_RAY = importlib.util.find_spec("ray") is not None


def recinfer(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "recinfer", "deploy", *map(str, arguments), "--json"]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=ROOT)


def error_of(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2, done.stderr
    return str(json.loads(done.stdout.splitlines()[-1])["error"]["message"])


@pytest.mark.skipif(HAS_RAY, reason="Ray is installed")
def test_without_ray_the_extra_is_named(archive: Path):
    assert "recinfer[ray]" in error_of(recinfer(archive, "--ray", HEAD))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ray", HEAD], "got no archive"),
        (["--status", "--down"], "--status and --down; give one at a time"),
        (["x.rqa", "--scale", "2"], "leave out x.rqa"),
        (["x.rqa", "--k8s", "--out", "y", "--ray", HEAD], "--k8s"),
        (["x.rqa"], "--ray ADDRESS, or --k8s"),
    ],
)
def test_options_that_do_not_go_together(arguments: list[str], message: str):
    from typer.testing import CliRunner

    from recinfer.cli.main import app

    done = CliRunner().invoke(app, ["deploy", *arguments, "--json"])
    assert done.exit_code == 2 and message in done.output


@pytest.mark.nightly
@pytest.mark.skipif(not HAS_RAY, reason="needs the extra ray")
def test_a_deployment_from_its_beginning_to_its_end(archive: Path, tmp_path: Path):
    if os.geteuid() or subprocess.run([*SPACE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs root and namespaces: Ray listens on every interface")
    changes = {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0", "RAY_memory_monitor_refresh_ms": "0"}
    changes["RAY_raylet_start_wait_time_s"] = "240"  # a minute is too little on a machine that runs other tests
    command = [*SPACE, sys.executable, "-m", "tests.deploy.test_ray_cluster", str(archive)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        cwd=ROOT,
        env=env.child_environment(**changes),
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


# ---------------------------------------------------------------- in the namespace


def ok(*arguments: object) -> dict[str, Any]:
    done = recinfer(*arguments)
    assert done.returncode == 0 and "INFO" not in done.stderr, done.stderr  # Ray's log is no text of the command
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(archive: str) -> None:
    """Deploy, look, lose a server, scale, end."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    assert "no Ray cluster at '127.0.0.1:6379'" in error_of(recinfer(archive, "--ray", HEAD))
    with tempfile.TemporaryDirectory(prefix="rt", dir="/tmp", ignore_cleanup_errors=True) as folder:
        head = ["--head", "--port=6379", "--node-ip-address=127.0.0.1", "--include-dashboard=false"]
        sizes = ["--num-cpus=8", "--memory=6000000000", "--object-store-memory=80000000", f"--temp-dir={folder}"]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *head, *sizes, "--disable-usage-stats"]
        subprocess.run(command, check=True, capture_output=True, timeout=240)
        life(archive)


def life(archive: str) -> None:
    """Of one deployment."""
    deploy = [archive, "--ray", HEAD, "--ranks-per-shard", 2, "--rankers", 1]
    waited = error_of(recinfer(*deploy, "--cpus", 9, "--wait", 45))
    assert "shard-0: " in waited and 'required for each replica: {"CPU": 9' in waited.replace("'", '"'), waited
    files = (f"--tls-{option}={archive}/gone.pem" for option in ("cert", "key", "ca"))
    lacking = error_of(recinfer(*deploy, *files))
    assert "shard-0: on 127.0.0.1: " in lacking and "cannot read" in lacking and "gone.pem" in lacking, lacking
    assert ok("--ray", HEAD, "--status") == {"deployments": []}, "incomplete deployments were removed"
    made = ok(*deploy, "--replicas", 1, "--name", "one")
    assert [server["name"] for server in made["servers"]] == ["shard-0-0", "ranker-0"] and made["ready"]
    assert "exists already" in error_of(recinfer(*deploy, "--name", "one"))
    os.kill(made["servers"][0]["pid"], 9)
    end = time.monotonic() + 240
    while not (now := ok("--ray", HEAD, "--status"))["ready"] or now["servers"][0]["pid"] == made["servers"][0]["pid"]:
        assert time.monotonic() < end, now
    before, after = made["servers"][0], now["servers"][0]
    assert (after["name"], after["address"], after["restarts"]) == (before["name"], before["address"], 1)
    assert len(ok("--ray", HEAD, "--scale", 2)["servers"]) == 3
    assert ok("--ray", HEAD, "--down", "--name", "one") == {"removed": "one"}
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")]
    assert not any(b"\0serve\0" in command or b"ServeReplica" in command for command in commands)
    assert "none exist" in error_of(recinfer("--ray", HEAD, "--down"))


if __name__ == "__main__":
    main(sys.argv[1])
