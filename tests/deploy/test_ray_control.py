"""A controller and its servers, all real except Ray: servers are children of this process, nodes are loopback addresses."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recinfer.deploy.groups import footprint
from recinfer.deploy.ray import control
from recinfer.deploy.ray.control import Controller
from recinfer.deploy.ray.members import Member, Phase, addresses_by_group, shards_text
from recinfer.deploy.ray.spec import Bounds, Deployment, deployment_of
from recinfer.errors import ConfigError, RecinferError, UnavailableError
from recinfer.serving.client.client import InferenceClient
from tests.deploy.local import LocalEngine
from tests.serving.conftest import build_model, export, make_request

TOKEN = "a-token-of-this-test"
GIB = 1 << 30


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Versions 1 to 3 of a model, each with other weights; a shard file of 3 is broken."""
    folder = tmp_path_factory.mktemp("store")
    (folder / "store" / "tiny").mkdir(parents=True)
    for seed, version in enumerate("123"):
        made = export(build_model(seed), tmp_path_factory.mktemp("made"), "tiny", version, num_dense=3)
        shutil.move(made, folder / "store" / "tiny" / version)
    shard = sorted((folder / "store" / "tiny" / "3" / "shards").iterdir())[-1]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    return folder / "store"


def spec_of(store: Path, **options: Any) -> Deployment:
    found = footprint(store / "tiny" / "1", ranks_per_shard=2)
    return deployment_of(found, store / "tiny" / "1", None, "test", token=TOKEN, **options)


def until(condition: Callable[[], Any], seconds: float = 90.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "not within that time"
        time.sleep(0.05)


class Load:
    """Calls the listed rankers without pause; repeats a call that reaches no server, as recinfer's clients do."""

    def __init__(self, controller: Controller) -> None:
        self._controller, self._over = controller, threading.Event()
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
                targets = self._controller.status()["rankers"]
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


class Running:
    """A deployment of two shard servers and two rankers on three nodes."""

    def __init__(self, store: Path) -> None:
        self.engine = LocalEngine({"127.0.0.1": 8 * GIB, "127.0.0.2": 8 * GIB, "127.0.0.3": 8 * GIB})
        self.spec = spec_of(store)
        self.controller = Controller(self.spec, self.engine)
        self.controller.start()
        self.wait()

    def until(self, condition: Callable[[], Any]) -> None:
        """Wait for a condition; the error shows the state that was there instead."""
        try:
            until(condition)
        except AssertionError as error:
            raise AssertionError(f"{error}: {json.dumps(self.controller.status(), indent=1)}") from None

    def wait(self) -> None:
        self.until(lambda: self.controller.status()["ready"])

    def servers(self, prefix: str = "") -> list[dict[str, Any]]:
        return [each for each in self.controller.status()["servers"] if each["name"].startswith(prefix)]


@pytest.fixture(scope="module")
def running(store: Path) -> Iterator[Running]:
    patch = pytest.MonkeyPatch()
    patch.setattr(control, "_PERIOD_S", 0.2)
    patch.setattr(control, "_RANKER_DRAIN_S", 1.0)
    found = Running(store)
    yield found
    found.controller.down()
    found.engine.close()
    patch.undo()


# One deployment runs through all of these tests, in this order.


def test_it_serves_from_nodes_that_differ(running: Running):
    found = running.controller.status()
    assert [each["name"] for each in found["servers"]] == ["shard-0-0", "shard-0-1", "ranker-0", "ranker-1"]
    for prefix in ("shard", "ranker"):
        assert len({each["node"] for each in running.servers(prefix)}) == 2
    assert all(each["state"] == "serving" and each["version"] == "1" and each["pid"] for each in found["servers"])
    for each in found["servers"]:
        command = Path(f"/proc/{each['pid']}/cmdline").read_bytes().decode()
        assert TOKEN not in command
    with Load(running.controller) as load:
        running.until(lambda: len(load.answers) > 20)
    assert load.failed == [] and set(load.versions) == {"1"}
    with (
        InferenceClient(found["rankers"][0], retries=0, timeout=60) as stranger,
        pytest.raises(RecinferError, match="token"),
    ):
        stranger.lookup(make_request(0, 3)[1])


def test_a_version_rolls_out_and_back(running: Running):
    with Load(running.controller) as load:
        assert running.controller.roll("2") == "2"
        running.until(lambda: load.answers[-1][0] == "2")
        assert running.controller.roll(None) == "1"
        running.until(lambda: load.answers[-1][0] == "1")
        with pytest.raises(RecinferError, match=r"not sound"):
            running.controller.roll("3")
        assert running.controller.status()["version"] == "1"
        assert running.controller.roll("2") == "2"
    assert load.failed == []
    assert set(load.versions) == {"1", "2"} and all(len(values) == 1 for values in load.versions.values())
    running.until(lambda: {each["version"] for each in running.servers("ranker")} == {"2"})
    with pytest.raises(ConfigError, match="model store"):
        alone = replace(running.spec, store=None)
        Controller(alone, LocalEngine({})).roll("2")


def test_killed_servers_come_back_where_they_were_with_the_version_that_is_served(running: Running):
    before = {each["name"]: each for each in running.servers()}
    victims = ("shard-0-0", "ranker-1")
    with Load(running.controller) as load:
        for name in victims:
            os.kill(before[name]["pid"], signal.SIGKILL)
        running.until(lambda: all(each["restarts"] == 1 for each in running.servers() if each["name"] in victims))
        running.wait()
    assert load.failed == [] and set(load.versions) == {"2"}
    after = {each["name"]: each for each in running.servers()}
    for name in victims:
        assert after[name]["address"] == before[name]["address"] and after[name]["pid"] != before[name]["pid"]
    assert after["ranker-1"]["version"] == "2"
    assert after["shard-0-1"]["pid"] == before["shard-0-1"]["pid"]


def test_more_servers_and_fewer_again(running: Running):
    with Load(running.controller) as load:
        running.controller.scale(3, None)
        running.until(lambda: len(running.servers("shard")) == 3)
        running.wait()
        assert len({each["node"] for each in running.servers("shard")}) == 3
        listed = json.loads(running.engine.listed(running.controller._members["ranker-0"]))["ranks"]
        assert listed["0"] == listed["1"] == sorted(each["address"] for each in running.servers("shard"))
        running.controller.scale(1, 1)
        running.until(lambda: len(running.servers()) == 2)
        running.wait()
    assert load.failed == []
    assert len(running.engine.lives) == len(running.engine.places) == 2, "processes and places were given back"
    with pytest.raises(ConfigError, match="replicas"):
        running.controller.scale(0, None)


def test_another_controller_goes_on_and_a_lost_node_is_replaced(running: Running):
    running.controller._stopping.set()
    running.controller._thread.join()
    before = running.servers()
    running.controller = Controller(running.spec, running.engine)
    running.controller.start()
    running.wait()
    assert [each["pid"] for each in running.servers()] == [each["pid"] for each in before]
    assert running.controller.status()["version"] == "2" and running.controller.status()["previous"] == "1"
    host = running.servers("shard")[0]["host"]
    running.engine.lose(host)
    running.until(lambda: running.servers("shard")[0]["host"] not in ("", host))
    running.wait()
    with Load(running.controller) as load:
        running.until(lambda: len(load.answers) > 5)
    assert load.failed == [] and set(load.versions) == {"2"}


def test_server_that_fits_on_no_node_waits_and_status_says_so(running: Running):
    sizes, running.engine.sizes = running.engine.sizes, {host: GIB for host in running.engine.sizes}
    running.controller.scale(2, None)
    running.until(
        lambda: any(
            "no node has resources for shard-0-1 (ranks 0, 1)" in each["why"] for each in running.servers("shard")
        )
    )
    assert not running.controller.status()["ready"]
    running.controller.scale(1, None)
    running.until(lambda: len(running.servers("shard")) == 1)
    running.engine.sizes = sizes


def test_down_ends_all(running: Running):
    pids = [each["pid"] for each in running.servers()]
    running.controller.down()
    assert not running.engine.lives and not running.engine.places
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_load_sets_the_number_of_servers_within_bounds(store: Path):
    """No server runs: the test sets the servers' figures and checks the number of servers."""
    spec = spec_of(store, rankers=Bounds(1, 1, 3), queue_depth=4, cool_down=20.0)
    controller = Controller(spec, LocalEngine({}))
    controller._members = {"ranker-0": Member("ranker-0", None, phase=Phase.serving, host="h", port=1)}
    controller._probes = {"ranker-0": control.Probe(True, True, inside=11.0)}
    for second in range(12):
        controller._follow_load(float(second))
    assert controller._wanted == {0: 2, None: 2}
    with pytest.raises(ConfigError, match="1 to 3"):
        controller.scale(None, 4)


@pytest.mark.parametrize(("busy", "outstanding", "wanted"), [(0.95, 1, 2), (0.6, 1, 1), (0.1, 9, 3)])
def test_shard_servers_grow_when_they_are_busy(store: Path, busy: float, outstanding: int, wanted: int):
    """Shard servers answer small requests as they read them and rankers merge queued ones, so few calls are running."""
    spec = spec_of(store, shards=Bounds(1, 1, 3), queue_depth=4, cool_down=20.0)
    controller = Controller(spec, LocalEngine({}))
    controller._members = {
        "shard-0-0": Member("shard-0-0", 0, Phase.serving, host="h", port=1),
        "ranker-0": Member("ranker-0", None, Phase.serving, host="h", port=2),
    }
    asked = {"replicas": [{"address": "h:1", "outstanding": outstanding}]}
    controller._probes = {
        "shard-0-0": control.Probe(True, True, status={"held": {"busy": busy}}),
        "ranker-0": control.Probe(True, True, status={"shards": asked}),
    }
    assert [server["busy"] for server in controller.status()["servers"]] == [busy, None]
    for second in range(30):
        controller._follow_load(float(second))
    assert controller._wanted[0] == wanted


def test_status_is_ready_once_every_ranker_lists_every_shard_server(store: Path):
    """A serving shard server is listed a moment later; a status in between does not say that all is ready."""
    spec = spec_of(store, shards=Bounds(2, 2, 2), rankers=Bounds(1, 1, 1))
    controller = Controller(spec, LocalEngine({}))
    shards = [Member(f"shard-0-{n}", 0, Phase.serving, host="h", port=n + 1) for n in range(2)]
    ranker = Member("ranker-0", None, Phase.serving, host="h", port=9, life=1)
    controller._members = {member.name: member for member in [*shards, ranker]}
    groups = len(spec.groups)
    for known, ready in (([], False), (shards[:1], False), (shards, True)):
        text = shards_text(spec.groups, addresses_by_group(groups, known, {}))
        controller._written = {} if text is None else {ranker.process: text}
        assert controller.status()["ready"] is ready
