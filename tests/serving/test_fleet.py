"""Several workers are one server: one sum of what they count, one change of models in all of them, and a worker that
takes the place of another begins with what is served then."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from recinfer.errors import InputError
from recinfer.serving.client.admin import AdminClient
from recinfer.serving.client.client import InferenceClient
from recinfer.serving.server.telemetry.metrics import merge_statuses, only_counts
from tests.serving.conftest import make_request
from tests.serving.supervised import PATIENT, WAITS
from tests.serving.test_deltas import store
from tests.waiting import stand_still, until
from tests.warm import RECINFER, Program, warm_workers

pytest.importorskip("aiohttp", reason="aiohttp is not installed (the serve extra)")
parser = pytest.importorskip("prometheus_client.parser", reason="prometheus_client is not installed (the serve extra)")
pytestmark = pytest.mark.skipif(not hasattr(socket, "SO_REUSEPORT"), reason="needs SO_REUSEPORT")

__all__ = ["store"]


@contextmanager
def serving(*arguments: str, program: str = "") -> Iterator[tuple[Program, dict[str, Any]]]:
    """``recinfer serve`` with ``arguments``; what it said when it was ready.

    Args:
        program: what runs it; without it the workers are warm.
    """
    with Program(PATIENT + (program or warm_workers()), "serve", "--port", "0", "--json", *arguments) as process:
        line = process.stdout.readline()
        assert line, process.communicate()
        yield process, json.loads(line)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert "Traceback" not in err, err


def status(ready: dict[str, Any]) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{ready['metrics_port']}/status.json", timeout=60) as answer:
        return json.loads(answer.read())


def workers_of(process: Program) -> set[int]:
    pids: set[int] = set()
    for task in Path(f"/proc/{process.pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended meanwhile
            pids |= {int(pid) for pid in (task / "children").read_text().split()}
    return pids


def ask(target: str, count: int) -> set[str]:
    """``count`` predictions, each on a connection of its own, so that all workers get some; the versions that answered."""
    versions = set()
    for seed in range(count):
        with InferenceClient(target, timeout=60) as client:
            _, kjt = make_request(seed, 2)
            versions.add(client.lookup(kjt).model_version)
    return versions


def counted(shown: dict[str, Any]) -> int:
    return sum(item["count"] for item in shown["requests"] if (item["method"], item["code"]) == ("Lookup", "OK"))


def test_metrics_are_the_sum_of_the_workers_also_of_one_that_was_killed(archive: Path):
    with serving(str(archive), "--workers", "2", "--metrics-port", "0", *WAITS) as (process, ready):
        target = f"127.0.0.1:{ready['port']}"
        # A worker that does not say within a second how it is is shown as it was: so what is expected is waited for.
        until(lambda: status(ready)["workers"] == 2)
        before = status(ready)
        assert (before["workers"], counted(before)) == (2, 0)
        ask(target, 24)
        until(lambda: counted(status(ready)) == 24)
        shown = status(ready)
        assert counted(shown) == 24
        assert sum(shown["stages"]["lookup"]["counts"]) == 24 + sum(before["stages"]["lookup"]["counts"])
        assert shown["models"][0]["mapped"] == before["models"][0]["mapped"]  # the archive once
        assert len(shown["models"]) == 1
        victim = min(workers_of(process))
        os.kill(victim, signal.SIGKILL)
        until(lambda: victim not in workers_of(process) and len(workers_of(process)) == 2)
        until(lambda: status(ready)["workers"] == 2)
        assert counted(status(ready)) == 24
        ask(target, 6)
        until(lambda: counted(status(ready)) == 30)
        with urllib.request.urlopen(f"http://127.0.0.1:{ready['metrics_port']}/metrics", timeout=60) as answer:
            families = {f.name: f for f in parser.text_string_to_metric_families(answer.read().decode())}
        wanted = {"method": "Lookup", "code": "OK"}.items()
        samples = [s for s in families["recinfer_requests"].samples if wanted <= s.labels.items()]
        assert sum(sample.value for sample in samples if sample.name.endswith("_total")) == 30
        assert families["recinfer_workers"].samples[0].value == 2


def test_changes_reach_all_workers_and_their_successors(store: Path, tmp_path: Path):
    folder = tmp_path / "store"
    shutil.copytree(store, folder)
    shutil.rmtree(folder / "tiny" / "4")
    arguments = ("--model-store", str(folder), "--admin", "--workers", "2", "--metrics-port", "0", *WAITS)
    with serving(*arguments) as (process, ready):
        target = f"127.0.0.1:{ready['port']}"
        shutil.copytree(folder / "tiny" / "3", folder / "tiny" / "4")  # newer than what is served
        with AdminClient(target) as admin:
            admin.apply_delta("tiny", "1.rqd")
            loaded = admin.load("tiny")  # the newest
            assert {name: (v.weight, v.deltas) for name, v in loaded["tiny"].items()} == {"3": (1, 1), "4": (0, 0)}
            admin.apply_delta("tiny", "1.rqd", "4")
            admin.set_weights("tiny", {"3": 50, "4": 50})
            assert ask(target, 40) == {"3", "4"}
            admin.set_default("tiny", "4")
            assert ask(target, 16) == {"4"}
            with pytest.raises(InputError, match=r"'broken\.rqd' is not applied"):
                admin.apply_delta("tiny", "broken.rqd", "4")
            expected = {"3": (0, 1), "4": (1, 1)}
            victims = workers_of(process)
            for victim in victims:
                os.kill(victim, signal.SIGKILL)
            until(lambda: not victims & workers_of(process) and status(ready)["workers"] == 2, 120)
            assert ask(target, 16) == {"4"}
            until(lambda: {m["version"]: (m["weight"], m["deltas"]) for m in status(ready)["models"]} == expected)
            admin.rollback("tiny")
            assert ask(target, 40) == {"3", "4"}
            admin.set_default("tiny", "3")
            admin.undo_delta("tiny", "3")
            assert set(admin.unload("tiny", "4")["tiny"]) == {"3"}
            assert ask(target, 16) == {"3"}
            with pytest.raises(grpc.RpcError) as refused, grpc.insecure_channel(target) as channel:
                channel.unary_unary("/recinfer.v1.Admin/Load")(b"\xff", timeout=60)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def plain(counts: list[int], **more: Any) -> dict[str, Any]:
    histogram = {"bounds": [1.0], "counts": counts, "total": float(sum(counts))}
    requests = [{"method": "Lookup", "code": "OK", "count": counts[0]}]
    answers = {"requests": requests, "latency": {"Lookup": histogram}}
    model = {"name": "m", "version": "1", "mapped": 7, "age": 2.0, "replaced": {"a": 1}, "missing": {"a": 2}, **answers}
    model |= {"known": {"b": 4}, "unknown": {}}
    return {
        "uptime": 3.0,
        "workers": 1,
        "ready": True,
        "load": 0.5,
        **answers,
        "unnamed": answers,
        "security": {"certificate_expiry": float(counts[0]), "rereads": {"tls": {"ok": 1, "failed": 2}}},
        "stages": {"decode": histogram},
        "samples": histogram,
        "queue": {"waiting": 2, "running": 1, "runs": 5, "requests": 9, "samples": 9, "expired": 0, "refused": 1},
        "memory": {"budget": 100, "held": 7, "refused": 2},
        "models": [model],
    } | more


def test_statuses_are_summed():
    merged = merge_statuses([plain([1, 2]), plain([3, 4], uptime=5.0)], [only_counts(plain([10, 0]))])
    assert (merged["uptime"], merged["workers"]) == (5.0, 2)
    assert merge_statuses([plain([1], load=0.2), plain([1], load=0.6)])["load"] == 0.4  # they share one port
    assert merged["requests"] == [{"method": "Lookup", "code": "OK", "count": 14}]
    assert merged["latency"]["Lookup"] == {"bounds": [1.0], "counts": [14, 6], "total": 20.0}
    assert (merged["queue"]["waiting"], merged["queue"]["runs"]) == (4, 15)
    assert merged["memory"] == {"budget": 200, "held": 14, "refused": 6}  # an ended worker holds nothing
    summed = {name: merged[name] for name in ("requests", "latency")}
    assert merged["models"] == [
        {"name": "m", "version": "1", "mapped": 7, "age": 2.0, "replaced": {"a": 3}, "missing": {"a": 6}, **summed}
        | {"known": {"b": 12}, "unknown": {}}
    ]
    assert merged["unnamed"] == summed
    assert merged["security"] == {"certificate_expiry": 1.0, "rereads": {"tls": {"ok": 3, "failed": 6}}}
    nobody = merge_statuses([], [only_counts(plain([1, 0]))])
    assert (nobody["workers"], nobody["models"], nobody["requests"][0]["count"]) == (0, [], 1)
    assert nobody["load"] == 0.0
    assert merge_statuses([])["samples"]["counts"] == [0]


def test_a_shard_is_up_where_all_workers_see_it_so():
    """Requests come to each of them."""

    def asked(*up: bool) -> dict[str, Any]:
        replicas = [{"rank": rank, "address": "a:1", "up": is_up, "outstanding": 1} for rank, is_up in enumerate(up)]
        return plain([1, 2], shards={"calls": {"ok": 1}, "default_rows": {}, "replicas": replicas})

    merged = merge_statuses([asked(True, True, False), asked(True, False, False)])
    assert [replica["up"] for replica in merged["shards"]["replicas"]] == [True, False, False]
    assert merge_statuses([plain([1, 0]), asked(True)])["shards"]["replicas"][0]["up"]


def test_a_worker_that_hangs_is_shown_as_it_was(archive: Path):
    arguments = (str(archive), "--workers", "2", "--metrics-port", "0", *WAITS)
    with serving(*arguments, program=RECINFER) as (process, ready):  # SIGSTOP has to reach the worker
        ask(f"127.0.0.1:{ready['port']}", 12)
        until(lambda: counted(status(ready)) == 12)
        hanging = min(workers_of(process))
        stand_still(hanging)
        try:
            for _ in range(3):  # each within its caller's timeout
                assert counted(status(ready)) == 12
        finally:
            os.kill(hanging, signal.SIGCONT)
