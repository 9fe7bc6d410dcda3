"""Versions loaded and unloaded under load: no request fails, an invalid version is never served, memory is freed."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from recinfer.errors import ArchiveError, ConfigError, InputError, NotFoundError, UnavailableError
from recinfer.inference.predictor import Predictor, load
from recinfer.serving.client.admin import AdminClient
from recinfer.serving.client.client import InferenceClient
from recinfer.serving.engine.registry import ModelRegistry, ServedModel
from recinfer.serving.engine.store import ModelStore
from recinfer.serving.server.server import SERVICE_NAME, Server
from recinfer.serving.wire import codec
from recinfer.serving.wire.proto import admin_pb2 as admin_pb
from tests.caller_threads import CallerThreads
from tests.hostile.damage import fail_in_onnx
from tests.serving.conftest import make_request
from tests.serving.stubs import admin_stub
from tests.warm import RECINFER, Program, run_program


@pytest.fixture
def store(archive: Path, tmp_path: Path) -> Path:
    """tiny/1, tiny/2, tiny/10 (broken: its answers are another model's), other/1."""
    for name in ("tiny/1", "tiny/2", "tiny/10", "other/1"):
        shutil.copytree(archive, tmp_path / name)
    damage(tmp_path / "tiny" / "10")
    return tmp_path


def damage(folder: Path) -> None:
    """Flip one byte in the middle of the largest shard: sizes and structure stay right."""
    shard = max((folder / "shards").iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 0xFF
    shard.write_bytes(data)


@pytest.fixture
def server(store: Path) -> Iterator[Server]:
    with Server({"tiny": load(store / "tiny" / "1")}, admin=ModelStore(store)) as running:
        running.service.registry.add(ServedModel.of("tiny", load(store / "tiny" / "1"), "1"))
        running.service.registry.set_weights("tiny", {"1": 1})
        running.service.registry.remove("tiny", "3")  # the version in the archive's own manifest
        yield running


@pytest.fixture
def admin(server: Server) -> Iterator[Any]:
    with grpc.insecure_channel(server.target) as channel:
        yield admin_stub(channel)


def weights(models: admin_pb.ModelList) -> dict[str, dict[str, int]]:
    return {model.model: {v.version: v.weight for v in model.versions} for model in models.models}


def refused(call: Any, request: Any) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        call(request, timeout=60)
    return caught.value


def test_a_served_version_whose_archive_is_gone_is_not_loaded(server: Server, store: Path, admin: Any):
    admin.Load(admin_pb.LoadRequest(model="tiny", version="2"))
    shutil.rmtree(store / "tiny" / "2")
    caught = refused(admin.Load, admin_pb.LoadRequest(model="tiny", version="2", activate=True))
    assert caught.code() is grpc.StatusCode.NOT_FOUND and "is served, and the store has no archive" in caught.details()
    assert server.service.registry.weights("tiny") == {"1": 1}


def mapped(folder: Path) -> bool:
    return str(folder) in Path(f"/proc/{os.getpid()}/maps").read_text()


class Load(CallerThreads):
    """Callers that predict without pause; counts codes, and versions that answered."""

    def __init__(self, target: str, predictor: Predictor, callers: int = 4) -> None:
        super().__init__(callers)
        self.answers: Counter[str] = Counter()
        self._target, self._predictor = target, predictor
        self._asked = [0] * callers

    def _call(self, number: int) -> None:
        dense, kjt = make_request(number, 3)
        expected = self._predictor.predict(dense, kjt)["output"]
        data = codec.encode_predict_request(dense, kjt)
        with grpc.insecure_channel(self._target) as channel:
            predict = channel.unary_unary(f"/{SERVICE_NAME}/Predict")
            while not self._stop.is_set():
                self._asked[number] += 1
                try:
                    outputs, version = codec.decode_predict_response(predict(data, timeout=60))
                    same = torch.allclose(outputs["output"], expected, rtol=0, atol=1e-6)
                    self.answers[version if same else "wrong"] += 1
                except grpc.RpcError as error:
                    self.answers[error.code().name] += 1

    def wait(self, more: int = 30) -> None:
        goal = self.answers.total() + more
        self._until(lambda: self.answers.total() >= goal)

    def settle(self) -> None:
        """Return when each caller's requests from before this call are answered and counted."""
        goals = [asked + 1 for asked in self._asked]
        self._until(lambda: all(asked >= goal for asked, goal in zip(self._asked, goals)))

    def _until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.005)


def test_swap_canary_and_rollback_under_load(
    server: Server, admin: Any, store: Path, predictor: Predictor, monkeypatch: pytest.MonkeyPatch
):
    with Load(server.target, predictor) as load_:
        load_.wait()
        assert set(load_.answers) == {"1"}
        admin.Load(admin_pb.LoadRequest(model="tiny", version="2"), timeout=60)
        load_.wait()
        assert set(load_.answers) == {"1"}  # loaded, and asked for by name only
        admin.SetDefault(admin_pb.SetDefaultRequest(model="tiny", version="2"), timeout=60)
        load_.settle()
        before = load_.answers["1"]
        load_.wait()
        assert load_.answers["1"] == before
        assert weights(admin.Rollback(admin_pb.RollbackRequest(model="tiny"))) == {"tiny": {"1": 1, "2": 0}}
        load_.settle()
        before = load_.answers["2"]
        load_.wait()
        assert load_.answers["2"] == before
        canary = [admin_pb.VersionWeight(version="1", weight=90), admin_pb.VersionWeight(version="2", weight=10)]
        admin.SetWeights(admin_pb.SetWeightsRequest(model="tiny", weights=canary), timeout=60)
        start = Counter(load_.answers)
        load_.wait(400)
        share = (load_.answers["2"] - start["2"]) / (load_.answers - start).total()
        assert 0.03 < share < 0.2
        admin.SetDefault(admin_pb.SetDefaultRequest(model="tiny", version="2"), timeout=60)
        assert mapped(store / "tiny" / "1")
        monkeypatch.setattr(gc, "collect", None)  # it would delay requests
        gc.disable()
        assert weights(admin.Unload(admin_pb.UnloadRequest(model="tiny", version="1"))) == {"tiny": {"2": 1}}
        load_.wait()
    assert set(load_.answers) == {"1", "2"}, load_.answers
    end = time.monotonic() + 60
    try:
        while mapped(store / "tiny" / "1"):
            assert time.monotonic() < end, "the unloaded version's pages are still mapped"
            time.sleep(0.05)
    finally:
        gc.enable()


def test_a_bad_archive_replaces_nothing(server: Server, admin: Any):
    error = refused(admin.Load, admin_pb.LoadRequest(model="tiny", version="10", activate=True))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "'10' of model 'tiny' is not served" in error.details()
    assert "Traceback" not in error.details()
    assert weights(admin.ListModels(admin_pb.ListModelsRequest())) == {"tiny": {"1": 1}}


def test_an_archive_that_is_given_twice_is_an_error_that_says_so(archive: Path, tmp_path: Path):
    copied = shutil.copytree(archive, tmp_path / "copied")
    for second in (archive, copied):  # of one version as well
        with Program(RECINFER, "serve", archive, second, "--port", 0) as process:
            out, err = process.communicate()
        assert (process.returncode, "listening" in out) == (2, False), err
        text = " ".join(err.split())
        assert "version '3' of model 'tiny' was given twice; give each once" in text
        assert "unload" not in text and "Traceback" not in text


def test_errors_of_impossible_changes(server: Server, admin: Any):
    request = admin_pb.LoadRequest
    for model, version, code in (
        ("tiny", "7", "NOT_FOUND"),
        ("nobody", "1", "NOT_FOUND"),
        ("..", "1", "INVALID_ARGUMENT"),
        ("tiny", "../tiny/2", "NOT_FOUND"),
        ("", "", "INVALID_ARGUMENT"),
    ):
        assert refused(admin.Load, request(model=model, version=version)).code().name == code, (model, version)
    said = refused(admin.Load, request(model="nobody")).details()
    assert said.startswith("model: the store has no version of 'nobody'; it has 'other', 'tiny'"), said
    assert "last one" in refused(admin.Unload, admin_pb.UnloadRequest(model="tiny", version="1")).details()
    assert "nothing to go back to" not in refused(admin.Rollback, admin_pb.RollbackRequest(model="no")).details()


@pytest.mark.parametrize("weights", [{"1": 0.9}, {"1": -1}, {"1": 2**32}])
def test_weights_that_are_no_whole_numbers_are_refused(server: Server, weights: dict[str, float]):
    with AdminClient(server.target) as client, pytest.raises(InputError, match="expected whole numbers"):
        client.set_weights("tiny", weights)


def test_a_model_is_added_and_taken_away(server: Server, admin: Any, predictor: Predictor):
    with (
        grpc.insecure_channel(server.target) as channel,
        InferenceClient(server.target, model="other", timeout=60) as client,
    ):
        health = health_pb2_grpc.HealthStub(channel)
        admin.Load(admin_pb.LoadRequest(model="other"), timeout=60)
        dense, kjt = make_request(1, 2)
        assert torch.equal(client.predict(dense, kjt)["output"], predictor.predict(dense, kjt)["output"])
        check = health_pb2.HealthCheckRequest(service="other")
        assert health.Check(check).status == health_pb2.HealthCheckResponse.SERVING
        admin.Unload(admin_pb.UnloadRequest(model="other", version="1"), timeout=60)
        assert health.Check(check).status != health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(NotFoundError):
            client.predict(dense, kjt)


def test_an_archive_deleted_while_mapped_goes_on(store: Path, predictor: Predictor):
    with Server({"tiny": load(store / "tiny" / "2")}) as server, InferenceClient(server.target, timeout=60) as client:
        shutil.rmtree(store / "tiny" / "2")
        for seed in range(20):
            dense, kjt = make_request(seed, 4)
            assert torch.equal(client.predict(dense, kjt)["output"], predictor.predict(dense, kjt)["output"])


def test_the_service_is_off_unless_asked_for(predictor: Predictor, store: Path):
    with Server({"tiny": predictor}) as server, grpc.insecure_channel(server.target) as channel:
        stub = admin_stub(channel)
        assert refused(stub.ListModels, admin_pb.ListModelsRequest()).code() is grpc.StatusCode.UNIMPLEMENTED
    with pytest.raises(ConfigError, match="one process"):
        Server({"tiny": predictor}, share_port=True, admin=ModelStore(store))


def test_versions_are_listed_the_newest_first(store: Path, tmp_path: Path):
    models = ModelStore(store)
    assert models.models() == ["other", "tiny"]
    assert models.versions("tiny") == ["10", "2", "1"]
    with pytest.raises(ConfigError, match="not a folder"):
        ModelStore(tmp_path / "nothing")


def unsound(folder: Path) -> None:
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text()[:-20])


def test_model_without_a_valid_version_is_skipped_while_another_has_one(store: Path, caplog: pytest.LogCaptureFixture):
    unsound(store / "other" / "1")
    models = ModelStore(store)

    def versions() -> list[tuple[str, str]]:
        return models.newest_of_all(lambda name, version: (name, models.open(name, version) and version))

    assert versions() == [("tiny", "2")]
    assert "other 1 is not served" in caplog.text
    for version in ("1", "2"):
        unsound(store / "tiny" / version)
    with pytest.raises(ConfigError, match=r"model 'other' has no version .*: 1: .*J2.* model 'tiny' .*: 10: .*; 2: "):
        versions()
    assert models.newest_of_all(lambda name, version: models.open(name, version), needed=False) == []


def test_the_command_serves_what_is_sound_of_a_store_and_what_is_named_once(store: Path):
    unsound(store / "other" / "1")
    shutil.rmtree(store / "tiny" / "10")
    (store / "tiny" / "1").rename(store / "tiny" / "3")  # as its manifest says
    for named, weighed in (([], {"tiny": {"3": 1}}), ([store / "tiny" / "3"], {"tiny": {"3": 1}})):
        arguments = ["serve", *named, "--model-store", store, "--admin", "--port", "0", "--json"]
        with Program(RECINFER, *arguments) as process:
            said = json.loads(process.stdout.readline())
            assert "port" in said, said
            with AdminClient(f"127.0.0.1:{said['port']}") as client:
                found = {
                    m: {v: is_.weight for v, is_ in versions.items()} for m, versions in client.list_models().items()
                }
            process.send_signal(signal.SIGTERM)
            process.communicate()
        assert found == weighed


def test_version_whose_dense_program_fails_is_skipped(store: Path, caplog: pytest.LogCaptureFixture):
    fail_in_onnx(store / "tiny" / "2")
    fail_in_onnx(store / "other" / "1")
    models = ModelStore(store)
    served = models.newest_of_all(lambda name, version: (name, models.open(name, version) and version))
    assert served == [("tiny", "1")]
    for what in ("tiny 2", "other 1"):
        assert f"{what} is not served: [C2] golden request 0 fails: " in caplog.text


def test_version_that_raises_is_skipped_with_a_reason(store: Path, caplog: pytest.LogCaptureFixture):
    def opens(model: str, version: str) -> str:
        if version == "1":
            return version
        raise IndexError("pop from an empty list")

    models = ModelStore(store)
    assert models.newest_of_all(opens) == models.newest_of_all(opens, ArchiveError) == ["1", "1"]  # of each model
    assert "tiny 10 is not served: IndexError: pop from an empty list" in caplog.text

    def unavailable(model: str, version: str) -> str:
        raise UnavailableError("no shard server answers")

    with pytest.raises(UnavailableError):  # which is no error of the archive
        models.newest_of_all(unavailable, ArchiveError)


_AS_NOBODY = """
import os, sys, logging
from pathlib import Path
from recinfer.serving.engine.store import ModelStore
logging.basicConfig(stream=sys.stdout, force=True)
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
models = ModelStore(Path(sys.argv[1]))
print(models.models(), models.versions("tiny"))
"""


def test_a_folder_that_may_not_be_read_holds_no_model(archive: Path):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # pytest's own are closed to other users
        store = Path(folder)
        for name in ("lost+found", "tiny/1", "tiny/2"):
            (store / name).mkdir(parents=True)
        for version in ("1", "2"):
            shutil.copy(archive / "manifest.json", store / "tiny" / version)
        store.chmod(0o755)
        for closed in ("lost+found", "tiny/2"):
            (store / closed).chmod(0)
        code, out, err = run_program(_AS_NOBODY, store)
        for closed in ("lost+found", "tiny/2"):
            (store / closed).chmod(0o755)
    assert code == 0, err
    assert out.splitlines()[-1] == "['tiny'] ['1']"
    assert out.count("lost+found cannot be read") == out.count("2 cannot be read") == 1


def test_weights_are_checked(predictor: Predictor):
    registry = ModelRegistry({"tiny": predictor})
    registry.add(ServedModel.of("tiny", predictor, "4"))
    with pytest.raises(NotFoundError, match="'9'"):
        registry.set_weights("tiny", {"9": 1})
    with pytest.raises(InputError, match="at least one above 0"):
        registry.set_weights("tiny", {"3": 0})
    with pytest.raises(InputError, match="has weight 1; set another default first: '4'"):
        registry.remove("tiny", "3")
    with pytest.raises(InputError, match="loaded already"):
        registry.add(ServedModel.of("tiny", predictor, "4"))


def test_the_command_serves_a_store(store: Path):
    with Program(RECINFER, "serve", "--model-store", store, "--admin", "--port", "0", "--json") as process:
        try:
            port = json.loads(process.stdout.readline())["port"]
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                models = admin_stub(channel).ListModels(admin_pb.ListModelsRequest(), timeout=60)
            assert weights(models) == {"other": {"1": 1}, "tiny": {"2": 1}}
        finally:
            process.send_signal(signal.SIGTERM)
        _, err = process.communicate()
        assert process.returncode == 0
        assert "tiny 10 is not served" in err
