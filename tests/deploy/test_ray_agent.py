"""Agents and their servers, all real except Ray: servers run in this process, nodes are loopback addresses."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from recinfer.deploy.ray import application, client, spec
from recinfer.deploy.ray.spec import Deployment, Kind
from recinfer.errors import RecinferError, UnavailableError
from recinfer.serving.client.admin import AdminClient
from recinfer.serving.client.client import InferenceClient
from recinfer.serving.config import SecurityConfig
from tests.deploy.local import Running, choose, until
from tests.serving.conftest import build_model, export, make_request

pytestmark = pytest.mark.nightly

TOKEN = "a-token-of-this-test"
SHARDS, RANKERS = Kind("shard-0", (0, 1), 0, 70), Kind("ranker", (), 0, 40)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Versions 1 to 3 of a model, each with other weights; a shard file of 3 is broken. The file chooses 1."""
    folder = tmp_path_factory.mktemp("store")
    (folder / "store" / "tiny").mkdir(parents=True)
    for seed, version in enumerate("123"):
        made = export(build_model(seed), tmp_path_factory.mktemp("made"), "tiny", version)
        shutil.move(made, folder / "store" / "tiny" / version)
    shard = sorted((folder / "store" / "tiny" / "3" / "shards").iterdir())[-1]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    choose(folder / "store" / "models.toml", "1", "1")
    return folder / "store"


def spec_of(store: Path, shards: Kind = SHARDS, rankers: Kind = RANKERS) -> Deployment:
    archive = store / "tiny" / "1"
    security = SecurityConfig(TOKEN)
    return Deployment("tiny", "tiny", archive, (shards, rankers), store / "models.toml", security=security)


class Load:
    """Calls the listed rankers without pause; repeats a call that reaches no server, as recinfer's clients do."""

    def __init__(self, running: Running) -> None:
        self._running, self._over = running, threading.Event()
        self.failed: list[str] = []
        self.answers: list[tuple[str, float]] = []  # version, first value
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Load:
        self._thread.start()
        until(lambda: self.answers or self.failed)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        clients: dict[str, InferenceClient] = {}
        request = make_request(0, 3)[1]
        turn = 0
        while not self._over.is_set():
            turn += 1
            for attempt in range(4):
                targets = self._running.status()["rankers"]
                target = targets[(turn + attempt) % len(targets)] if targets else ""
                client = clients.get(target) or InferenceClient(target, token=TOKEN, retries=0, timeout=60)
                clients[target] = client
                try:
                    got = client.lookup(request)
                    assert got.pooled is not None
                    self.answers.append((got.model_version, float(got.pooled.values()[0, 0])))
                    break
                except UnavailableError as error:
                    if attempt == 3:
                        self.failed.append(str(error))
                    time.sleep(0.2)
                except RecinferError as error:
                    self.failed.append(str(error))
                    break
        for client in clients.values():
            client.close()

    @property
    def versions(self) -> dict[str, set[float]]:
        """The answers of each version."""
        found: dict[str, set[float]] = {}
        for version, value in self.answers:
            found.setdefault(version, set()).add(value)
        return found


@pytest.fixture(scope="module")
def running(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Two shard servers and two rankers, each pair on two nodes."""
    patch = pytest.MonkeyPatch()
    patch.setattr(application, "_PERIOD_S", 0.2)
    patch.setattr(application, "_DELISTED_S", 1.0)
    patch.setattr(spec, "_POLL_S", 0.2)
    found = Running(spec_of(store), tmp_path_factory.mktemp("lists"))
    patch.setattr(client, "Records", lambda: found.records)
    for kind in ("shard-0", "ranker"):
        for host in ("127.0.0.1", "127.0.0.2"):
            found.start(kind, host)
    try:
        found.wait()
        yield found
    finally:
        found.close()
        patch.undo()


# One deployment runs through all of these tests, in this order.


def test_it_serves_with_its_token(running: Running):
    found = running.status()
    assert [each["name"] for each in found["servers"]] == ["shard-0-0", "shard-0-1", "ranker-0", "ranker-1"]
    assert all(each["state"] == "serving" and each["version"] == "1" and each["pid"] for each in found["servers"])
    with Load(running) as load:
        until(lambda: len(load.answers) > 20)
    assert load.failed == [] and set(load.versions) == {"1"}
    with (
        InferenceClient(found["rankers"][0], retries=0, timeout=60) as stranger,
        pytest.raises(RecinferError, match="token"),
    ):
        stranger.lookup(make_request(0, 3)[1])


def versions_of(running: Running) -> set[str]:
    """The versions to which rankers send requests."""
    return {each["version"] for each in running.servers("ranker").values()}


def test_rankers_follow_the_file(running: Running, store: Path):
    def loaded(address: str) -> set[str]:
        with AdminClient(address, token=TOKEN) as admin:
            return set(admin.list_models()["tiny"])

    config, rankers = store / "models.toml", client.rankers()
    with Load(running) as load:
        for versions, served in (("12", "2"), ("12", "1"), ("123", "1"), ("12", "2")):
            choose(config, versions, served)
            until(lambda now=served: versions_of(running) == {now} and load.answers[-1][0] == now)
            until(lambda: [loaded(address) for address in rankers] == [{"1", "2"}] * 2)
        with (
            AdminClient(rankers[0], token=TOKEN) as admin,
            pytest.raises(RecinferError, match="not sound"),
        ):
            admin.load("tiny", "3")
    assert load.failed == [] and client.rankers() == rankers
    assert set(load.versions) == {"1", "2"} and all(len(values) == 1 for values in load.versions.values())
    assert running.status()["version"] == "2"


def test_lost_servers_come_back_where_they_were_with_the_version_that_is_served(running: Running, store: Path):
    """Also where the archive of the deployment is gone, and a version that no server can load is newer."""
    choose(store / "models.toml", "23", "2")
    (store / "tiny" / "1").rename(store / "tiny" / ".1")
    before = running.servers()
    victims = {"shard-0-0": "shard-0", "ranker-1": "ranker"}
    with Load(running) as load:
        for name, kind in victims.items():
            running.lose(name)
            assert name not in running.servers() and not running.status()["ready"]
            assert running.start(kind, before[name]["host"]).server.name == name
        running.wait()
    assert load.failed == [] and set(load.versions) == {"2"}
    after = running.servers()
    for name in victims:
        assert after[name]["restarts"] == 1 and after[name]["address"] == before[name]["address"]
        assert after[name]["version"] == "2"


def test_more_servers_and_fewer_again(running: Running):
    with Load(running) as load:
        running.start("shard-0", "127.0.0.3")
        shards = sorted(each["address"] for each in running.servers("shard").values())
        text = (running.folder / "recinfer-tiny-ranker-0.json").read_text
        until(lambda: json.loads(text())["ranks"]["0"] == shards)
        running.stop("shard-0-1")
        assert running.servers("shard")["shard-0-2"]["state"] == "serving" and len(running.servers()) == 4
        running.stop("ranker-1")
        running.stop("shard-0-0")
        until(lambda: len(json.loads(text())["ranks"]["0"]) == 1)
    assert load.failed == []


def test_a_server_that_cannot_start_says_why_and_where(running: Running, store: Path):
    choose(store / "models.toml", "2", "9")
    with pytest.raises(UnavailableError, match=r"^on 127.0.0.1: models.toml: .* names version '9'"):
        running.start("shard-0")


# ---------------------------------------------------------------- a server's state, without servers


@pytest.mark.parametrize("least", [1, 2])
def test_a_deployment_with_fewer_servers_is_not_ready(store: Path, tmp_path: Path, least: int):
    shards, rankers = replace(SHARDS, least=1, ceiling=3), replace(RANKERS, least=least)
    running = Running(spec_of(store, shards, rankers), tmp_path)
    running.records.alive |= {"actor-0", "actor-1"}
    for number, kind in enumerate(("shard-0", "ranker")):
        server, _ = running.records.claim("tiny", kind, f"actor-{number}", "h")
        assert not running.status()["ready"], "it starts"
        server.state, server.port = "serving", 1 + number
        running.records.write("tiny", server)
    found = running.status()
    assert found["ready"] is (least == 1) and found["rankers"] == ["h:2"]
    assert [each["state"] for each in found["servers"]] == ["serving", "serving"]
    server.state, server.why = "starting", "not serving yet, waiting for shards: rank 0"
    running.records.write("tiny", server)
    assert (running.status()["ready"], running.status()["why"]) == (False, [f"ranker-0 on h: {server.why}"])
    running.records.alive.remove("actor-0")
    assert [each["name"] for each in running.status()["servers"]] == ["ranker-0"]
