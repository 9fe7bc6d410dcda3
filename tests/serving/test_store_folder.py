"""Model stores as disks have them: folders that cannot be read, odd names, lost mounts, files that change while they are mapped."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import tempfile
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from recinfer.errors import UnavailableError
from recinfer.inference.predictor import load
from recinfer.serving.client.admin import AdminClient
from recinfer.serving.engine.admin import SET_FAULT
from recinfer.serving.engine.registry import ModelRegistry, ServedModel
from recinfer.serving.engine.store import ModelStore
from recinfer.serving.engine.store_folder import StoreFolder, natural
from recinfer.serving.server.server import Server
from recinfer.serving.wire.loop import run_on_loop
from tests.serving.conftest import build_model, export
from tests.serving.test_polling import Followed, errors, messages, put
from tests.serving.v1 import get
from tests.warm import RECINFER, Program, run_program, warm_workers

NO_UTF8 = os.fsdecode(b"2\xff")


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Archives of different weights."""
    folder = tmp_path_factory.mktemp("kinds")
    return [export(build_model(n), folder / str(n), "tiny", "x") for n in range(2)]


@pytest.fixture
def store(kinds: list[Path], tmp_path: Path) -> Path:
    """tiny/1 alone, in files of its own."""
    shutil.copytree(kinds[0], tmp_path / "store" / "tiny" / "1")
    return tmp_path / "store"


@pytest.fixture
def followed(store: Path) -> Followed:
    return Followed(store, load(store / "tiny" / "1"), "1")


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return messages(caplog, logging.WARNING)


@pytest.mark.parametrize(("first", "second"), [("1", "01"), ("v1.0", "v1.00"), ("2", "002")])
def test_equal_numbers_are_ordered_by_name_and_not_by_the_folder(first: str, second: str, tmp_path: Path):
    orders = []
    for names in ((first, second), (second, first)):
        folder = tmp_path / names[0]
        for name in names:
            (folder / "tiny" / name).mkdir(parents=True)
            (folder / "tiny" / name / "manifest.json").write_text("{}")
        orders.append((ModelStore(folder).versions("tiny"), list(StoreFolder(folder).versions("tiny").readable)))
    newest = max(first, second)
    assert orders[0] == orders[1] == ([newest, min(first, second)],) * 2
    assert natural(newest) > natural(min(first, second))


@pytest.mark.parametrize("name", [NO_UTF8, "2\\3"])
def test_a_name_that_no_request_can_have_is_passed_over(
    name: str, followed: Followed, store: Path, kinds: list[Path], caplog: pytest.LogCaptureFixture
):
    followed.poll()
    shutil.copytree(kinds[1], store / "tiny" / name)
    shutil.copytree(kinds[1], store / name / "1")
    put(kinds[1], store, 3)
    for _ in range(2):
        assert followed.poll() == (["1", "3"], {"3": 1})
    assert errors(caplog) == []
    said = warnings(caplog)
    assert len(set(said)) == 2 and all("has a name that no request can have" in line for line in said)
    assert len(said) == 3  # the one of the model's folder by the poller and by the store that loads
    assert ModelStore(store).models() == ["tiny"] and ModelStore(store).versions("tiny") == ["3", "1"]


_UNREADABLE = """
import encodings.utf_8_sig, os, shutil, sys
from pathlib import Path
store, other = Path(sys.argv[1]), Path(sys.argv[2])
import logging
logging.basicConfig(stream=sys.stdout, force=True, format="LOG %(message)s")
from recinfer.inference.predictor import load
from recinfer.serving.engine.poll import StorePoller
from tests.serving.test_polling import Followed
Followed(store, load(store / "tiny" / "1"), "1").poll()  # imports what this user may read
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)

def copy(version):
    shutil.copytree(other, store / "tiny" / version)
    return store / "tiny" / version

config = store / "models.toml"
followed = Followed(store, load(store / "tiny" / "1"), "1")
followed.poll()
copy("2").chmod(0)
copy("3")
print(followed.poll())
shutil.rmtree(store / "tiny" / "1")
print(followed.poll())
config.write_text("[models.tiny]\\nversions = {latest = 1}\\n")
print(StorePoller(store, None, None, config).choice("tiny").latest)
(store / "tiny" / "2").chmod(0o755)
print(followed.poll())
(store / "tiny" / "3").chmod(0)  # which is served
print(followed.poll())
(store / "tiny" / "3").chmod(0o755)
shard = next((copy("4") / "shards").iterdir())
shard.chmod(0)
print(followed.poll())
print(followed.poll())
shard.chmod(0o644)
print(followed.poll())
(copy("5") / "shards").chmod(0)
print(followed.poll())
(store / "tiny" / "5" / "shards").chmod(0o755)
print(followed.poll())
"""


def test_a_folder_that_cannot_be_read_holds_nothing_else_up(kinds: list[Path]):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # pytest's own are closed to other users
        store, other = Path(folder) / "store", Path(folder) / "other"
        shutil.copytree(kinds[0], store / "tiny" / "1")
        shutil.copytree(kinds[1], other)
        Path(folder).chmod(0o755)
        if os.getuid() == 0:  # to whom no folder is closed
            for path in (store, *store.rglob("*")):
                os.chown(path, 65534, 65534)
        code, out, err = run_program(_UNREADABLE, store, other)
    assert code == 0, err
    said = [line for line in out.splitlines() if not line.startswith("LOG")]
    assert said == [
        "(['1', '3'], {'3': 1})",
        "(['3'], {'3': 1})",
        "1",
        "(['2', '3'], {'3': 1})",
        "(['2', '3'], {'3': 1})",
        "(['2', '3'], {'3': 1})",
        "(['2', '3'], {'3': 1})",
        "(['2', '3', '4'], {'4': 1})",
        "(['2', '3', '4'], {'4': 1})",
        "(['2', '3', '4', '5'], {'5': 1})",
    ]
    assert out.count("tiny/2 cannot be read") == 3  # by each of the three that look
    assert out.count("Load of tiny 4 failed") == out.count("Load of tiny 5 failed") == 1


def test_a_lost_mount_unloads_nothing(
    followed: Followed, store: Path, kinds: list[Path], caplog: pytest.LogCaptureFixture
):
    shutil.copytree(kinds[1], store / "two" / "1")
    followed.poll()
    names = followed.registry.names
    assert names() == ["tiny", "two"]
    away = store.with_name("away")
    store.rename(away)
    followed.poll()
    store.mkdir()  # a mount point
    for _ in range(2):
        followed.poll()
        assert names() == ["tiny", "two"]
    assert sum("has no version of any model" in line for line in errors(caplog)) == 1
    store.rmdir()
    known = ModelStore(away)
    away.rename(store)
    with pytest.raises(UnavailableError, match="cannot be read"):
        known.models()
    followed.poll()
    (store / "two").rename(away)
    (store / "two").mkdir()  # the mount point of one model
    for _ in range(2):
        followed.poll()
        assert names() == ["tiny", "two"]
    assert sum("remove the folder to unload the model" in line for line in errors(caplog)) == 1
    (store / "two").rmdir()
    followed.poll()
    assert names() == ["tiny"]


def test_files_that_are_changed_in_place_make_health_bad_until_they_are_back(
    followed: Followed, store: Path, kinds: list[Path], caplog: pytest.LogCaptureFixture
):
    followed.poll()
    followed.poll()
    shard = next((store / "tiny" / "1" / "shards").iterdir())
    before = shard.read_bytes()
    os.utime(shard)  # no other content
    followed.poll()
    assert followed.registry.faulty() == set() and errors(caplog) == []
    with shard.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(bytes([before[-1] ^ 1]))
    for _ in range(2):
        followed.poll()
        assert followed.registry.faulty() == {"tiny"}
    (line,) = errors(caplog)
    assert f"{shard} was changed in place" in line
    with shard.open("r+b") as file:
        file.write(before)
    followed.poll()
    assert followed.registry.faulty() == set()
    shutil.copytree(kinds[1], store / "tiny" / "1", dirs_exist_ok=True)  # all files, the manifest too
    followed.poll()
    assert followed.registry.faulty() == {"tiny"}
    shutil.copytree(kinds[1], store / "tiny" / "2")
    followed.poll()
    shutil.rmtree(store / "tiny" / "1")
    assert followed.poll() == (["2"], {"2": 1})
    assert followed.registry.faulty() == set()


def test_a_fault_is_in_readiness_and_in_the_health_of_its_model(archive: Path):
    registry = ModelRegistry([ServedModel.of("tiny", load(archive), version) for version in ("1", "2")])
    store = archive.parent
    with (
        Server(registry, http_port=0, admin=ModelStore(store)) as server,
        grpc.insecure_channel(server.target) as channel,
    ):

        def note(why: str) -> tuple[int, int]:
            call = server.admin_calls[SET_FAULT]
            fault = json.dumps({"model": "tiny", "version": "1", "why": why}).encode()
            run_on_loop(call(fault))  # type: ignore[arg-type]
            health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="tiny"))
            return get(server, "/v2/health/ready")[0], health.status

        def versions(path: str) -> list[tuple[str, str, str, str]]:
            """What V1 says of them."""
            found = get(server, f"/v1/models/tiny{path}")[2]["model_version_status"]
            return [(each["version"], each["state"], *each["status"].values()) for each in found]

        fine, bad = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
        sound = [(version, "AVAILABLE", "OK", "") for version in ("1", "2")]
        lost = ("1", "UNKNOWN", "DATA_LOSS", "a file changed")
        assert note("") == (200, fine)
        assert versions("") == sound
        assert note("a file changed") == (503, bad)
        assert versions("") == [lost, sound[1]]
        assert (versions("/versions/1"), versions("/versions/2")) == ([lost], [sound[1]])
        assert note("") == (200, fine)
        assert versions("") == sound
        with pytest.raises(grpc.RpcError) as refused:  # nobody else's call
            channel.unary_unary(f"/recinfer.v1.Admin/{SET_FAULT}")(b"{}", timeout=60)
        assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("workers", [1, 2])
def test_a_server_that_answers_has_all_configured_versions_labels_and_weights(
    store: Path, kinds: list[Path], workers: int
):
    put(kinds[1], store, 2)
    put(kinds[0], store, 3)
    config = store.parent / "models.toml"
    config.write_text('[models.tiny]\nversions = "all"\nlabels = {old = "1"}\nweights = {"2" = 3, "3" = 1}\n')
    arguments = [
        "serve",
        "--model-store",
        store,
        "--model-config",
        config,
        "--admin",
        "--workers",
        workers,
        "--port",
        0,
        "--json",
    ]
    with Program(RECINFER if workers == 1 else warm_workers(), *arguments) as process:
        try:
            said = json.loads(process.stdout.readline())
            assert said["serving"] == ["tiny 3", "tiny 2", "tiny 1"], said
            with AdminClient(f"127.0.0.1:{said['port']}") as client:
                found = client.list_models()["tiny"]
                assert {version: (is_.weight, is_.labels) for version, is_ in found.items()} == {
                    "3": (1, ()),
                    "2": (3, ()),
                    "1": (0, ("old",)),
                }
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
