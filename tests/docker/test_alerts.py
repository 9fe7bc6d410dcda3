"""The alerts of Prometheus: each has unit tests in which it fires and in which it is silent, and promtool runs them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from recinfer.serving.shards.fan_out import FanOut
from recinfer.serving.shards.replicas import ReplicaPool
from tests.docker.test_files import DOCKER
from tests.ports import free_port
from tests.serving.remote.fleet import write_shards

yaml = pytest.importorskip("yaml", reason="PyYAML reads the rules")
FOLDER = DOCKER / "prometheus"


def promtool() -> str:
    """Its binary; skips without one."""
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("no promtool; it is part of Prometheus (Debian: apt install prometheus)")
    return found


def run(*arguments: str | Path) -> None:
    """Run promtool in the folder of the rules, and expect that it finds nothing."""
    done = subprocess.run(
        [promtool(), *arguments], cwd=FOLDER, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def groups() -> list[dict[str, Any]]:
    """The groups of rules."""
    return yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"]


def test_promtool_accepts_rules_and_configuration() -> None:
    run("check", "rules", "rules.yml")
    run("check", "config", "--syntax-only", "prometheus.yml")


def test_alerts_fire_on_faults_and_are_silent_on_a_sound_fleet() -> None:
    run("test", "rules", "rules_test.yml")


def test_each_alert_has_a_test_in_which_it_fires_and_one_in_which_it_is_silent() -> None:
    tests = yaml.safe_load((FOLDER / "rules_test.yml").read_text())["tests"]
    alerts = {rule["alert"] for group in groups() for rule in group["rules"]}
    expected = [case for test in tests for case in test["alert_rule_test"]]
    assert {case["alertname"] for case in expected if case["exp_alerts"]} == alerts
    assert {case["alertname"] for case in tests[-1]["alert_rule_test"]} == alerts
    assert not any(case["exp_alerts"] for case in tests[-1]["alert_rule_test"])
    evaluated = {group["interval"] for group in groups()}
    assert evaluated == {"5s"}, "promtool's tests do not see it, and Prometheus' default is a minute"


def test_counters_of_default_rows_begin_at_zero(tmp_path: Path) -> None:
    """Prometheus sees no increase in a counter whose first sample is above zero."""
    shards = write_shards(tmp_path / "shards.json", {rank: [f"127.0.0.1:{free_port()}"] for rank in (0, 1)})
    pool = ReplicaPool(shards)
    try:
        assert FanOut(pool).status()["default_rows"] == {"0": 0, "1": 0}
    finally:
        pool.close()
