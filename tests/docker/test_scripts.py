"""The containers' scripts, run for real outside a container: they start, the healthcheck answers, SIGTERM drains."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from recinfer import env
from recinfer.deploy.objects import BUSY_METRIC, LOAD_METRIC, QUEUE_METRIC
from recinfer.inference.predictor import load
from recinfer.serving.client.client import InferenceClient
from recinfer.serving.server.security import Security
from recinfer.serving.server.server import Server
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from tests.certificates import need_openssl, self_signed
from tests.docker.test_files import DOCKER, ROOT
from tests.ports import free_port
from tests.serving.conftest import build_archive, build_model, export
from tests.serving.remote.fleet import write_shards
from tests.waiting import until
from tests.warm_shell import warm_tools

TOKEN = "a-token-of-a-test-0123456789"
FEATURES = ["user", "item", "history", "shop"]


@dataclass
class Running:
    """A server that a script started."""

    process: subprocess.Popen[bytes]
    port: int
    metrics: int
    log: Path

    def healthy(self) -> bool:
        """The result of the image's HEALTHCHECK."""
        return check(self.port).returncode == 0

    def wait(self) -> None:
        """Wait until it is healthy."""
        end = time.monotonic() + 240
        # A healthcheck is a process of its own, which takes a core from a server that is not listening yet.
        while not (_listens(self.port) and self.healthy()):
            assert self.process.poll() is None and time.monotonic() < end, self.log.read_text()
            time.sleep(0.2)

    def scrape(self) -> str:
        """Its metrics, asked for as Prometheus does: with the token."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.metrics}/metrics")
        request.add_header("Authorization", f"Bearer {TOKEN}")
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read().decode()


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=60):
        return True
    return False


def check(port: int, **variables: object) -> subprocess.CompletedProcess[str]:
    """The image's healthcheck, on a port of this machine."""
    environment = {"RECINFER_PORT": str(port), "PATH": os.environ["PATH"]} | {k: str(v) for k, v in variables.items()}
    command = [sys.executable, DOCKER / "healthcheck.py"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``recinfer`` for the PATH, as images have it."""
    folder = tmp_path_factory.mktemp("tools")
    (folder / "recinfer").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m recinfer "$@"\n')
    (folder / "recinfer").chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def warm() -> Path:
    """The same, but ``recinfer`` is forked from an interpreter that has imported what takes long."""
    return warm_tools()


@contextmanager
def script(name: str, tools: Path, log: Path, **variables: str) -> Iterator[Running]:
    """A script of docker/, with loopback for its address."""
    port, metrics = free_port(), free_port()
    environment = env.child_environment(
        PATH=f"{tools}{os.pathsep}{os.environ['PATH']}",
        PYTHONPATH=str(ROOT),
        OMP_NUM_THREADS="1",
        RECINFER_HOST="127.0.0.1",
        RECINFER_PORT=str(port),
        RECINFER_METRICS_PORT=str(metrics),
        **variables,
    )
    with log.open("wb") as file:
        process = subprocess.Popen([DOCKER / name], env=environment, stdout=file, stderr=subprocess.STDOUT, cwd=tools)
    try:
        yield Running(process, port, metrics, log)
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def fleet(warm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Running]]:
    """A shard server for each of two ranks, and a ranker, as the compose file starts them."""
    folder = tmp_path_factory.mktemp("fleet")
    archive = build_archive(folder)
    (folder / "token").write_text(TOKEN + "\n")
    common = {"RECINFER_ARCHIVE": str(archive), "RECINFER_TOKEN_FILE": str(folder / "token")}
    with ExitStack() as stack:
        started: dict[str, Running] = {}
        for rank in (0, 1):
            more = {**common, "RECINFER_MODEL_STORE": str(folder), "RECINFER_RANKS": str(rank)}
            log = folder / f"shard-{rank}.log"
            started[f"shard-{rank}"] = stack.enter_context(script("shard.sh", warm, log, **more))
        ranks = {rank: [f"127.0.0.1:{started[f'shard-{rank}'].port}"] for rank in (0, 1)}
        shards = str(write_shards(folder / "shards.json", ranks))
        ranker = stack.enter_context(script("ranker.sh", warm, folder / "ranker.log", **common, RECINFER_SHARDS=shards))
        started["ranker"] = ranker
        for server in started.values():
            server.wait()
        yield started


def ask(client: InferenceClient) -> torch.Tensor:
    """One request."""
    ids = KeyedJaggedTensor(
        ["user", "item", "history", "shop"], torch.tensor([1, 2, 3, 4]), lengths=torch.ones(4).long()
    )
    pooled = client.lookup(ids).pooled
    assert pooled is not None
    return pooled.values()


def named(expression: str) -> set[str]:
    """The recinfer metrics of a PromQL expression."""
    return set(re.findall(r"\brecinfer_[a-z_]+", expression))


def test_every_metric_that_is_named_is_one_of_a_running_server(fleet: dict[str, Running]):
    yaml = pytest.importorskip("yaml", reason="PyYAML reads the rules")
    with InferenceClient(f"127.0.0.1:{fleet['ranker'].port}", token=TOKEN, timeout=60) as client:
        ask(client)
    by_role = {role: fleet[name].scrape() for role, name in (("shard", "shard-0"), ("ranker", "ranker"))}
    text = "".join(by_role.values())
    # Metric families, which are listed before their first sample: a counter of refusals may have no sample yet.
    exported = set(re.findall(r"^(recinfer_[a-z_]+?)(?:\{| )", text, flags=re.MULTILINE))
    exported |= {name for name, kind in re.findall(r"^# TYPE (recinfer_\S+) (\S+)", text, flags=re.MULTILINE)}
    dashboard = json.loads((DOCKER / "grafana/dashboards/recinfer.json").read_text())
    rules = yaml.safe_load((DOCKER / "prometheus/rules.yml").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    expressions += [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    wanted = set().union(*map(named, expressions))
    assert len(wanted) > 12 and not wanted - exported, wanted - exported
    # Where a role is given, it is a server of that role that has the metric.
    for role, found in by_role.items():
        for expression in expressions:
            for name in re.findall(rf'\b(recinfer_[a-z_]+)\{{role="{role}"', expression):
                assert re.search(rf"^{name}\b", found, flags=re.MULTILINE), (role, name)
    # The autoscalers' gauges.
    for found in by_role.values():
        assert re.search(rf"^{LOAD_METRIC} [0-9.]+$", found, flags=re.MULTILINE)
    assert re.search(rf"^{QUEUE_METRIC} [0-9.]+$", by_role["ranker"], flags=re.MULTILINE)
    assert re.search(rf"^{BUSY_METRIC} [0-9.]+$", by_role["shard"], flags=re.MULTILINE)


def test_metrics_need_the_token(fleet: dict[str, Running]):
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"http://127.0.0.1:{fleet['ranker'].metrics}/metrics", timeout=60)


def test_healthcheck_fails_without_a_server():
    done = check(free_port())
    assert done.returncode == 1 and "UNAVAILABLE" in done.stderr


def test_the_healthcheck_knows_ipv6_and_shows_a_certificate(tmp_path: Path):
    archive = build_archive(tmp_path)
    with Server({"tiny": load(archive)}, "::1") as server:
        for host in ("::1", "[::1]"):  # a check gives up after three seconds
            until(lambda host=host: check(server.port, RECINFER_HOST=host).returncode == 0)
    need_openssl()
    tls = self_signed(tmp_path, ("server", "client"), "IP:127.0.0.1")
    mine = {"RECINFER_TLS_CERT": tls / "client.pem", "RECINFER_TLS_KEY": tls / "client.key"}
    security = Security(tls_cert=tls / "server.pem", tls_key=tls / "server.key", client_ca=tls / "client.pem")
    with Server({"tiny": load(archive)}, security=security) as server:
        until(lambda: check(server.port, RECINFER_TLS_CA=tls / "server.pem", **mine).returncode == 0)
        assert check(server.port, RECINFER_TLS_CA=tls / "server.pem").returncode == 1
        done = check(server.port, RECINFER_TLS_CA=tls / "server.pem", RECINFER_TLS_KEY=tls / "client.key")
        assert done.returncode == 1 and "RECINFER_TLS_CERT" in done.stderr


def test_sigterm_drains_each(fleet: dict[str, Running]):
    for name in ("ranker", "shard-0", "shard-1"):
        server = fleet[name]
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0, server.log.read_text()
        assert "stopped" in server.log.read_text()
        assert not server.healthy()


def test_one_process_and_a_ranker_that_waits(tools: Path, warm: Path, tmp_path: Path):
    archive = build_archive(tmp_path)
    with script("serve.sh", tools, tmp_path / "log", RECINFER_ARCHIVE=str(archive), RECINFER_TOKEN=TOKEN) as server:
        server.wait()
        with InferenceClient(f"127.0.0.1:{server.port}", token=TOKEN, timeout=60) as client:
            assert ask(client).shape[0] == 1
    shards = write_shards(tmp_path / "shards.json", {rank: [f"127.0.0.1:{free_port()}"] for rank in (0, 1)})
    more = {"RECINFER_ARCHIVE": str(archive), "RECINFER_SHARDS": str(shards)}
    with script("ranker.sh", warm, tmp_path / "waits", **more) as ranker:
        end = time.monotonic() + 240
        while "waiting for shards" not in (tmp_path / "waits").read_text():
            assert ranker.process.poll() is None and time.monotonic() < end
            time.sleep(0.2)
        while "NOT_SERVING" not in (done := check(ranker.port)).stderr:  # a check gives up after three seconds
            assert ranker.process.poll() is None and time.monotonic() < end, done
        assert done.returncode == 1


def test_rankers_of_two_versions_at_one_set_of_shards(warm: Path, tmp_path: Path):
    """A roll-out as manifests and compose do it: shard servers keep running, and rankers of the next version start."""
    store = tmp_path / "store"
    for version, seed in (("1", 0), ("2", 1)):
        (tmp_path / version).mkdir()
        store.mkdir(exist_ok=True)
        export(build_model(seed), tmp_path / version, "ctr", version).rename(store / version)
    common = {"RECINFER_MODEL_STORE": str(store), "RECINFER_TOKEN": TOKEN}
    with ExitStack() as stack:
        shards = [
            stack.enter_context(
                script(
                    "shard.sh",
                    warm,
                    tmp_path / f"shard-{rank}",
                    RECINFER_ARCHIVE=str(store / had),
                    RECINFER_RANKS=str(rank),
                    **common,
                )
            )
            for rank, had in ((0, "1"), (1, "2"))  # in the middle of it
        ]
        listed = write_shards(tmp_path / "shards.json", {r: [f"127.0.0.1:{s.port}"] for r, s in enumerate(shards)})
        more = {"RECINFER_SHARDS": str(listed), "RECINFER_TOKEN": TOKEN}
        rankers = [
            stack.enter_context(
                script("ranker.sh", warm, tmp_path / f"ranker-{v}", RECINFER_ARCHIVE=str(store / v), **more)
            )
            for v in ("1", "2")
        ]
        answers = []
        for ranker in rankers:
            ranker.wait()
            with InferenceClient(f"127.0.0.1:{ranker.port}", token=TOKEN, timeout=60) as client:
                client.wait_until_ready(240)  # it listens before its shards are there
                answers.append(ask(client))
        for server in (*shards, *rankers):
            server.process.send_signal(signal.SIGTERM)
    assert not torch.equal(*answers)
    ids = KeyedJaggedTensor(FEATURES, torch.tensor([1, 2, 3, 4]), lengths=torch.ones(4).long())
    for version, answer in zip(("1", "2"), answers):
        assert torch.equal(load(store / version).lookup(ids).pooled.values(), answer)


@pytest.mark.parametrize(("name", "missing"), [("serve.sh", "RECINFER_ARCHIVE"), ("shard.sh", "RECINFER_RANKS")])
def test_a_script_names_the_variable_that_it_lacks(name: str, missing: str, tools: Path, tmp_path: Path):
    with script(name, tools, tmp_path / "log") as server:
        assert server.process.wait(60) != 0
    assert missing in (tmp_path / "log").read_text()


def test_beyond_loopback_a_token_is_needed(warm: Path, tmp_path: Path):
    archive = str(tmp_path / "none.rqa")
    environment = {"PATH": f"{warm}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [DOCKER / "serve.sh"],
        env={**environment, "RECINFER_ARCHIVE": archive},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 2 and "0.0.0.0" in done.stderr and "token" in done.stderr
