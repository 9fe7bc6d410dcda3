"""A request is answered from one version on all shards, also while versions and deltas roll out."""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from recinfer.archive.reader import open_archive
from recinfer.checkpoint import CheckpointReader
from recinfer.cli.main import app
from recinfer.errors import InputError, NotFoundError, NotPreparedError
from recinfer.inference.delta import make_delta
from recinfer.inference.predictor import Predictor, load
from recinfer.serving.client.admin import AdminClient
from recinfer.serving.client.client import InferenceClient
from recinfer.serving.engine.registry import ModelRegistry, ServedModel
from recinfer.serving.engine.store import ModelStore, StoreManager
from recinfer.serving.server.server import Server
from recinfer.serving.server.shard_server import ShardServer
from recinfer.serving.shards.lookups import MakeLookups
from recinfer.serving.shards.messages import join_request
from recinfer.serving.shards.tables import _WANTED_S, MAX_VERSIONS, ShardTables
from recinfer.serving.wire.limits import Limits
from tests.ports import free_port
from tests.serving.remote.fleet import Process, asking, shard, write_shards
from tests.serving.remote.models import Mixed, make_archive, make_request
from tests.waiting import until

MODEL = "mixed"


@dataclass
class Roll:
    """A ranker with its store and two replicas of ranks 0 and 1 + 2, each host with a store of its own."""

    store: Path
    hosts: list[Path]
    servers: list[ShardServer]
    admin: AdminClient
    client: InferenceClient
    server: Server

    def bring(self, archive: Path, version: str, hosts: list[Path] | None = None) -> None:
        """Copy an archive to the ranker and to hosts (all of them)."""
        for folder in [self.store, *(self.hosts if hosts is None else hosts)]:
            shutil.copytree(archive, folder / MODEL / version)


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two versions of one model, other rows each, cut by rows over three ranks."""
    folder = tmp_path_factory.mktemp("versions")
    return {v: make_archive(folder / v, "row_wise", version=v, seed=int(v)) for v in ("1", "2")}


@contextmanager
def rolling(archives: dict[str, Path], folder: Path) -> Iterator[Roll]:
    store, hosts = folder / "store", [folder / f"host-{n}" for n in range(4)]
    for place in [store, *hosts]:
        shutil.copytree(archives["1"], place / MODEL / "1")
    with ExitStack() as stack:
        servers = []
        for number, host in enumerate(hosts):
            ranks = (0,) if number < 2 else (1, 2)
            servers.append(stack.enter_context(shard(host / MODEL / "1", ranks, f"127.0.0.{number + 1}", store=host)))
        first, second = [s.target for s in servers[:2]], [s.target for s in servers[2:]]
        fan_out = stack.enter_context(asking(write_shards(folder / "s.json", {0: first, 1: second, 2: second})))
        models = ModelStore(store, lookups=MakeLookups(fan_out, str(store)))
        registry = ModelRegistry([ServedModel.of(MODEL, models.open(MODEL, "1"), "1")])
        server = stack.enter_context(Server(registry, admin=StoreManager(registry, models), shards=fan_out))
        admin = stack.enter_context(AdminClient(server.target))
        client = stack.enter_context(InferenceClient(server.target, retries=0, timeout=60))
        yield Roll(store, hosts, servers, admin, client, server)


@contextmanager
def under_load(client: InferenceClient, expected: dict[str, Tensor]) -> Iterator[dict[str, int]]:
    """Callers that look up all the time; counts which version's answer each got: any other is ``"mixed"``."""
    seen: dict[str, int] = {}
    stop = threading.Event()

    def call() -> None:
        request = make_request(6, 3)
        while not stop.is_set():
            try:
                got = client.lookup(request, timeout=60)
                found = [k for k, wanted in expected.items() if torch.allclose(got.pooled.values(), wanted, atol=1e-5)]
                name = found[0] if len(found) == 1 else "mixed"
            except Exception as error:
                name = f"failed: {error}"
            seen[name] = seen.get(name, 0) + 1

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        yield seen
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def answer(archive: Path) -> Tensor:
    return load(archive).lookup(make_request(6, 3)).pooled.values()


def test_a_version_rolls_out_whole_and_back_at_once(archives: dict[str, Path], tmp_path: Path):
    expected = {version: answer(path) for version, path in archives.items()}
    with rolling(archives, tmp_path) as roll:
        roll.bring(archives["2"], "2")
        with under_load(roll.client, expected) as seen:
            until(lambda: seen.get("1", 0) > 50)
            roll.admin.load(MODEL, "2", activate=True)
            until(lambda: seen.get("2", 0) > 50)
            old = seen["1"]
            roll.admin.rollback(MODEL)
            until(lambda: seen["1"] > old + 50)
        assert seen.keys() == {"1", "2"}, seen
        assert all(len(server.tables.keys()) == 2 for server in roll.servers)


def test_nothing_switches_while_a_shard_cannot(archives: dict[str, Path], tmp_path: Path):
    with rolling(archives, tmp_path) as roll:
        roll.bring(archives["2"], "2", roll.hosts[:3])
        with pytest.raises(
            InputError, match=rf"127\.0\.0\.4:\d+ did not prepare version {MODEL}/2 \([0-9a-f]{{12}}\): .* copy it here"
        ):
            roll.admin.load(MODEL, "2", activate=True)
        broken = roll.hosts[3] / MODEL / "2"
        shutil.copytree(archives["2"], broken)
        damaged = broken / "shards" / "rank-00001.safetensors"
        data = bytearray(damaged.read_bytes())
        data[-1] ^= 1
        damaged.write_bytes(data)
        with pytest.raises(InputError, match=r"127\.0\.0\.4:\d+ did not prepare .* SHA-256"):
            roll.admin.load(MODEL, "2", activate=True)
        assert torch.allclose(roll.client.lookup(make_request(6, 3)).pooled.values(), answer(archives["1"]), atol=1e-5)
        shutil.rmtree(broken)
        shutil.copytree(archives["2"], broken)
        roll.admin.load(MODEL, "2", activate=True)
        assert roll.client.lookup(make_request(6, 3)).model_version == "2"


def test_a_delta_rolls_the_same_way(archives: dict[str, Path], tmp_path: Path):
    torch.manual_seed(11)
    changed = Mixed()
    torch.save(changed.state_dict(), tmp_path / "later.pt")
    on_meta = Mixed().to("meta")
    delta = tmp_path / "1.rqd"
    make_delta(archives["1"], on_meta, CheckpointReader(tmp_path / "later.pt"), delta, progress=False)
    after = load(archives["1"])
    after.apply_delta(delta)
    expected = {"1": answer(archives["1"]), "1+1": after.lookup(make_request(6, 3)).pooled.values()}
    with rolling(archives, tmp_path) as roll:
        for place in (roll.store, *roll.hosts[:3]):
            shutil.copy(delta, place / MODEL / "1.rqd")
        with pytest.raises(InputError, match="did not prepare"):
            roll.admin.apply_delta(MODEL, "1.rqd")
        shutil.copy(delta, roll.hosts[3] / MODEL / "1.rqd")
        with under_load(roll.client, expected) as seen:
            until(lambda: seen.get("1", 0) > 30)
            roll.admin.apply_delta(MODEL, "1.rqd")
            until(lambda: seen.get("1+1", 0) > 30)
            old = seen["1"]
            roll.admin.undo_delta(MODEL)
            until(lambda: seen["1"] > old + 30)
        assert seen.keys() == {"1", "1+1"}, seen


def test_a_ranker_starts_with_a_delta_before_its_shards(archives: dict[str, Path], tmp_path: Path):
    store, request = tmp_path / "store", make_request(6, 3)
    shutil.copytree(archives["1"], store / MODEL / "1")
    torch.manual_seed(11)
    torch.save(Mixed().state_dict(), tmp_path / "later.pt")
    delta = store / MODEL / "1.rqd"
    make_delta(store / MODEL / "1", Mixed().to("meta"), CheckpointReader(tmp_path / "later.pt"), delta, progress=False)
    after = load(archives["1"])
    after.apply_delta(delta)
    port, asked = free_port(), free_port()
    shards = write_shards(
        tmp_path / "shards.json", {rank: [f"127.0.0.1:{port}"] for rank in range(3)}, timeout_seconds=5
    )
    arguments = [store / MODEL / "1", "--model-store", store, "--shards", shards, "--delta", delta, "--admin"]
    ranker = Process(*arguments, "--port", str(asked), log=tmp_path / "ranker.log")
    try:
        until(lambda: "waiting for shards" in ranker.said)
        lines = ranker.said.splitlines()
        assert lines[0] == f"listening for {MODEL} 1 on 127.0.0.1:{asked}  (Ctrl-C stops)"
        assert not any("serving" in line and "not serving yet" not in line for line in lines)
        with (
            shard(None, (0, 1, 2), port=port, store=store),
            InferenceClient(f"127.0.0.1:{asked}", timeout=60) as client,
            AdminClient(f"127.0.0.1:{asked}", timeout=60) as admin,
        ):
            client.wait_until_ready(120)
            until(lambda: ranker.said.count("all shards are there: serving") == 1)
            torch.testing.assert_close(client.lookup(request).pooled.values(), after.lookup(request).pooled.values())
            admin.undo_delta(MODEL)
            torch.testing.assert_close(client.lookup(request).pooled.values(), answer(archives["1"]))
            admin.apply_delta(MODEL, "1.rqd")
            torch.testing.assert_close(client.lookup(request).pooled.values(), after.lookup(request).pooled.values())
    finally:
        ranker.close()


def test_replica_that_lost_a_version_gets_it_before_requests(archives: dict[str, Path], tmp_path: Path):
    expected = {version: answer(path) for version, path in archives.items()}
    with rolling(archives, tmp_path) as roll:
        roll.bring(archives["2"], "2")
        roll.admin.load(MODEL, "2", activate=True)
        with under_load(roll.client, expected) as seen:
            until(lambda: seen.get("2", 0) > 30)
            gone = roll.servers[0]
            gone.stop(1.0)
            count = seen["2"]
            until(lambda: seen["2"] > count + 30)
            again = ShardTables((0,), roll.hosts[0])
            again.add(roll.hosts[0] / MODEL / "1")  # as its command line says
            with ShardServer(again, gone.host, gone.port):
                until(lambda: len(again.keys()) == 2)
                count = seen["2"]
                until(lambda: seen["2"] > count + 30)
        assert seen.keys() == {"2"}, seen


def test_only_the_store_is_read_and_few_versions_stay(archives: dict[str, Path], tmp_path: Path):
    store = tmp_path / "store"
    shutil.copytree(archives["1"], store / MODEL / "1")
    shutil.copytree(archives["2"], tmp_path / "elsewhere")
    (store / "link").symlink_to(tmp_path / "elsewhere")
    tables = ShardTables((0,), store)
    first, second = (ShardTables((0,)).add(archives[version]) for version in ("1", "2"))
    for folder in ("../elsewhere", str(tmp_path / "elsewhere"), "link", ""):
        with pytest.raises(InputError, match="store"):
            tables.prepare(second, folder)
    with pytest.raises(NotFoundError, match="is not"):
        tables.prepare(second, f"{MODEL}/1")
    with pytest.raises(NotFoundError, match="no store"):
        ShardTables((0,)).prepare(first, f"{MODEL}/1")
    tables.prepare(first, f"{MODEL}/1")
    with pytest.raises(NotPreparedError, match=second):
        tables.find(join_request(second, 1, []), Limits())
    for number in range(3, 3 + MAX_VERSIONS):
        tables.add(make_archive(tmp_path / str(number), "table_wise", version=str(number), seed=number))
    held = set(tables.keys())
    assert len(held) == MAX_VERSIONS and first not in held


def test_restarted_replica_has_the_requested_one_of_many_versions(tmp_path: Path):
    """More versions are loaded than a shard server keeps; requests go to the oldest."""
    store, count = tmp_path / "store", MAX_VERSIONS + 2
    for number in range(1, count + 1):
        archive = make_archive(tmp_path / str(number), "table_wise", version=str(number), seed=number)
        shutil.copytree(archive, store / MODEL / str(number))
    with ExitStack() as stack:
        server = stack.enter_context(shard(store / MODEL / "1", (0, 1, 2), store=store))
        shards = write_shards(tmp_path / "s.json", {rank: [server.target] for rank in range(3)})
        fan_out = stack.enter_context(asking(shards))
        make = MakeLookups(fan_out, str(store))
        there = [load(store / MODEL / str(number), lookups=make) for number in range(1, count + 1)]
        request = make_request(5)
        expected = there[0].lookup(request).pooled.values()
        (replica,) = fan_out.pool.replicas(0)
        server.stop(0.0)
        until(lambda: not replica.up)
        again = ShardTables((0, 1, 2), store)
        again.add(store / MODEL / str(count))
        stack.enter_context(ShardServer(again, server.host, server.port))
        until(lambda: replica.up)
        torch.testing.assert_close(there[0].lookup(request).pooled.values(), expected)


def test_what_a_ranker_has_loaded_stays_mapped_for_as_long(
    archives: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    ahead = [0.0]  # how far the shards' clock is
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead[0])
    monkeypatch.setattr("recinfer.serving.shards.tables.time", clock)
    monkeypatch.setattr("recinfer.serving.shards.replicas._RENEW_S", 0.0)  # at each look
    others = [make_archive(tmp_path / str(n), "table_wise", version=str(n), seed=n) for n in range(3, 4 + MAX_VERSIONS)]
    with shard(archives["1"], (0, 1, 2)) as server:
        path = write_shards(tmp_path / "s.json", {rank: [server.target] for rank in range(3)})
        with asking(path) as fan_out:
            there = load(archives["1"], lookups=MakeLookups(fan_out))
            key = there.lookups.spec.key  # type: ignore[union-attr]
            ahead[0] += 2 * _WANTED_S  # the first report no longer counts
            until(lambda: server.tables._wanted[key] > clock.monotonic())
            for archive in others:
                server.tables.add(archive)
            held = set(server.tables.keys())
            assert key in held and len(held) == MAX_VERSIONS + 1

        def is_gone() -> bool:
            ahead[0] += 2 * _WANTED_S
            server.tables.add(others[0])
            return key not in set(server.tables.keys())

        until(is_gone)  # no ranker has it loaded any longer


@pytest.mark.parametrize("role", [("--ranks", "0"), ("--shards", "s.json")])
def test_version_that_is_still_copied_is_skipped(
    archives: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: tuple[str, str]
):
    """A server that starts meanwhile serves the version before, as a server of all ranks does."""
    shutil.copytree(archives["1"], tmp_path / "store" / MODEL / "1")
    half = tmp_path / "store" / MODEL / "2"
    half.mkdir()
    shutil.copy(archives["2"] / "manifest.json", half)
    write_shards(tmp_path / "s.json", {rank: ["127.0.0.1:1"] for rank in range(3)})
    served: list[list[str]] = []

    def serve(server: Server | ShardServer, **_: object) -> None:
        if isinstance(server, ShardServer):
            served.append([model.manifest.version for model in server.tables.models()])
        else:
            served.append(list(server.service.registry.versions(MODEL)))

    monkeypatch.setattr("recinfer.serving.server.run.serve", serve)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["serve", "--model-store", "store", *role, "--port", "0"])
    assert done.exit_code == 0, done.output
    assert served == [["1"]]


def test_lookups_find_their_version_while_others_come_and_go(archives: dict[str, Path]):
    """A lookup notes its version as the one used last. It does so in the dict that other threads add to and remove from."""
    tables = ShardTables((0, 1))
    key = tables.add(archives["1"])
    version = tables._versions[key]
    stopped = threading.Event()

    def change() -> None:
        number = 0
        while not stopped.is_set():
            with tables._lock:
                tables._versions[f"{number + 3}"] = version
                tables._versions.pop(f"{number}", None)
            number += 1

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    changing = threading.Thread(target=change)
    changing.start()
    try:
        with ThreadPoolExecutor(2) as pool:
            asked = [pool.submit(lambda: [tables._get(key) for _ in range(20_000)]) for _ in range(2)]
            assert all(found is version for each in asked for found in each.result())
    finally:
        stopped.set()
        changing.join()
        sys.setswitchinterval(interval)


def test_models_do_not_push_each_other_out(archives: dict[str, Path], tmp_path: Path):
    """A shard server of a store of many models holds one version of each, and all of them get requests."""
    tables, keys = ShardTables((0,)), []
    for number in range(MAX_VERSIONS + 2):
        archive = tmp_path / str(number)
        shutil.copytree(archives["1"], archive)
        manifest = archive / "manifest.json"
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "model": f"model-{number}"}))
        keys.append(tables.add(archive))
    assert tables.keys() == keys


def test_replicas_that_were_up_before_a_version_was_wanted_prepare_it(archives: dict[str, Path], tmp_path: Path):
    """A ranker that takes long to open its archive connects first, and finds shards of the version before."""
    for version, archive in archives.items():
        shutil.copytree(archive, tmp_path / "store" / MODEL / version)
    store = tmp_path / "store"
    with (
        shard(store / MODEL / "1", (0, 1, 2), store=store) as server,
        asking(write_shards(tmp_path / "s.json", {rank: [server.target] for rank in range(3)})) as fan_out,
    ):
        there = Predictor(open_archive(store / MODEL / "2"), lookups=MakeLookups(fan_out, str(store), wait=False))
        until(lambda: not fan_out.pool.unreachable(there.lookups.ranks, there.lookups.spec.key))
        request = make_request(5)
        expected = load(archives["2"]).lookup(request).pooled
        torch.testing.assert_close(there.lookup(request).pooled.values(), expected.values())
