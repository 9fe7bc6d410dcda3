"""A server that polls its model store: versions appear and disappear under load, and a config file selects them."""

from __future__ import annotations

import asyncio
import json
import logging
import logging.handlers
import os
import re
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import torch

from recinfer.errors import ConfigError, InputError, NotFoundError
from recinfer.inference.predictor import Predictor, load
from recinfer.serving.client import AsyncInferenceClient, InferenceClient
from recinfer.serving.client.admin import AdminClient
from recinfer.serving.engine import poll
from recinfer.serving.engine.admin import AdminService
from recinfer.serving.engine.change_log import show_changes
from recinfer.serving.engine.model_config import parse_model_config, read_text
from recinfer.serving.engine.poll import StorePoller
from recinfer.serving.engine.registry import ModelRegistry, ServedModel
from recinfer.serving.engine.store import ModelStore, StoreManager
from recinfer.serving.server.security import Security
from recinfer.serving.server.server import SERVICE_NAME, Server
from recinfer.serving.wire import codec
from recinfer.serving.wire.loop import run_on_loop
from recinfer.serving.wire.proto import admin_pb2 as admin_pb
from recinfer.serving.wire.proto import inference_pb2 as pb
from tests.caller_threads import CallerThreads
from tests.certificates import need_openssl, self_signed
from tests.e2e.commands import run_json
from tests.serving.conftest import build_model, export, make_request
from tests.serving.paths import decoded
from tests.serving.supervised import PATIENT, WAITS
from tests.serving.test_models import damage
from tests.waiting import until
from tests.warm import Program, warm_workers

NUM_KINDS, NUM_VERSIONS, NUM_CALLERS = 5, 50, 4


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Archives of different vectors: neighbouring versions never answer alike. Their dense parts are two by turns."""
    folder = tmp_path_factory.mktemp("kinds")
    models = [build_model(number % 2) for number in range(NUM_KINDS)]
    for number, model in enumerate(models):
        torch.manual_seed(number)
        for bag in model.sparse_arch.embedding_bag_collection.embedding_bags.values():
            torch.nn.init.uniform_(bag.weight, -1, 1)
    return [export(model, folder / str(number), "tiny", "x") for number, model in enumerate(models)]


def put(archive: Path, store: Path, version: int | str) -> None:
    """Hard links below a hidden name, then the version's name: it appears whole."""
    hidden = store / "tiny" / f".{version}"
    shutil.copytree(archive, hidden, copy_function=os.link)
    hidden.rename(store / "tiny" / str(version))


class Followed:
    """A registry that follows a store, without a server."""

    def __init__(self, store: Path, predictor: Predictor, version: str, config: Path | None = None) -> None:
        self.registry = ModelRegistry([ServedModel.of("tiny", predictor, version)])
        manager = StoreManager(self.registry, ModelStore(store))
        self.calls = AdminService(manager).calls()
        self.poller = StorePoller(store, self.change, manager.state, config)

    def change(self, call: str, data: bytes) -> bytes:
        return asyncio.run(self.calls[call](data))  # type: ignore[arg-type]

    def poll(self) -> tuple[list[str], dict[str, int]]:
        self.poller.poll()
        return sorted(self.registry.versions("tiny")), self.registry.weights("tiny")


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look takes files that were written just now."""
    monkeypatch.setattr(poll, "_SETTLED_S", 0.0)


@pytest.fixture
def store(kinds: list[Path], tmp_path: Path) -> Path:
    """tiny/1 alone."""
    put(kinds[0], tmp_path / "store", 1)
    return tmp_path / "store"


@pytest.fixture
def followed(store: Path) -> Followed:
    return Followed(store, load(store / "tiny" / "1"), "1")


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return messages(caplog, logging.ERROR)


def messages(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    """recinfer's own of that level: asyncio may log at any time what another test has left."""
    found = [record for record in caplog.records if record.levelno == level and record.name.startswith("recinfer")]
    return [record.getMessage() for record in found]


class Callers(CallerThreads):
    """Threads that predict until they are stopped; each answer is compared with that of the version that it names."""

    def __init__(self, target: str, kinds: list[Path]) -> None:
        super().__init__(NUM_CALLERS)
        self.answers: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._target = target
        self._predictors = [load(kind) for kind in kinds]
        self._counts = [0] * NUM_CALLERS
        self._turn = threading.Condition()

    def _call(self, number: int) -> None:
        dense, kjt = make_request(number, 3)
        expected = [predictor.predict(dense, kjt)["output"] for predictor in self._predictors]
        data = codec.encode_predict_request(dense, kjt)
        with grpc.insecure_channel(self._target) as channel:
            predict = channel.unary_unary(f"/{SERVICE_NAME}/Predict")
            while not self._stop.is_set():
                try:
                    outputs, version = codec.decode_predict_response(predict(data, timeout=120))
                    if torch.allclose(outputs["output"], expected[int(version) % NUM_KINDS], rtol=0, atol=1e-6):
                        self.answers[version] += 1
                    else:
                        self.wrong.append(f"version {version}")
                except Exception as error:
                    self.wrong.append(repr(error))
                with self._turn:
                    self._counts[number] += 1
                    self._turn.notify_all()

    def wait(self, more: int) -> None:
        """Until each has asked ``more`` times from now on."""
        with self._turn:
            goals = [count + more for count in self._counts]
            assert self._turn.wait_for(lambda: all(c >= g for c, g in zip(self._counts, goals)), timeout=300)


@pytest.fixture
def served(store: Path) -> Iterator[tuple[Server, StorePoller]]:
    """A server on tiny/1, and what polls for it."""
    registry = ModelRegistry([ServedModel.of("tiny", load(store / "tiny" / "1"), "1")])
    manager = StoreManager(registry, ModelStore(store))
    with Server(registry, admin=manager) as server:

        def change(call: str, data: bytes) -> bytes:
            async def made() -> bytes:
                return await server.admin_calls[call](data)

            return run_on_loop(made(), timeout=120)

        yield server, StorePoller(store, change, manager.state)


def test_50_versions_come_and_go_while_callers_ask(served: tuple[Server, StorePoller], store: Path, kinds: list[Path]):
    server, poller = served
    poller.poll()
    put(kinds[0], store, 5)
    shutil.rmtree(store / "tiny" / "1")
    poller.poll()
    with Callers(server.target, kinds) as callers:
        for version in range(6, 6 + NUM_VERSIONS):
            put(kinds[version % NUM_KINDS], store, version)
            poller.poll()
            callers.wait(2)
            shutil.rmtree(store / "tiny" / str(version - 1))
            poller.poll()
            callers.wait(2)
    assert callers.wrong == []
    assert len(callers.answers) >= NUM_VERSIONS
    assert list(server.service.registry.versions("tiny")) == [str(5 + NUM_VERSIONS)]


def test_a_newer_version_becomes_the_default_and_an_older_one_does_not(
    followed: Followed, store: Path, kinds: list[Path]
):
    assert followed.poll() == (["1"], {"1": 1})
    put(kinds[1], store, 10)
    put(kinds[2], store, 9)
    assert followed.poll() == (["1", "10", "9"], {"10": 1})
    shutil.rmtree(store / "tiny" / "10")
    assert followed.poll() == (["1", "9"], {"9": 1})


def test_changes_by_an_operator_stay(followed: Followed, store: Path, kinds: list[Path]):
    put(kinds[1], store, 2)
    followed.poll()
    followed.registry.rollback("tiny")
    assert followed.poll() == (["1", "2"], {"1": 1})
    followed.registry.remove("tiny", "2")
    assert followed.poll() == (["1"], {"1": 1})


def test_a_bad_version_is_logged_once_and_tried_again_when_it_changes(
    followed: Followed, store: Path, kinds: list[Path], caplog: pytest.LogCaptureFixture
):
    shutil.copytree(kinds[1], store / "tiny" / "2")
    damage(store / "tiny" / "2")
    for _ in range(3):
        assert followed.poll() == (["1"], {"1": 1})
    assert len([line for line in errors(caplog) if "Load of tiny 2" in line]) == 1
    assert len([record for record in caplog.records if "tiny 2" in record.getMessage()]) == 1  # in no other form either
    shutil.copytree(kinds[1], store / "tiny" / "2", dirs_exist_ok=True)
    assert followed.poll() == (["1", "2"], {"2": 1})


def test_a_folder_that_is_being_copied_is_served_when_it_is_whole(followed: Followed, store: Path, kinds: list[Path]):
    files = sorted(
        (path for path in kinds[1].rglob("*") if path.is_file()), key=lambda path: path.name != "manifest.json"
    )
    for path in files:  # the manifest first, the worst order
        assert followed.poll() == (["1"], {"1": 1})
        to = store / "tiny" / "2" / path.relative_to(kinds[1])
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, to)
    assert followed.poll() == (["1", "2"], {"2": 1})


def test_another_content_under_a_served_version_is_refused_once(
    followed: Followed, store: Path, kinds: list[Path], caplog: pytest.LogCaptureFixture
):
    followed.poll()
    shutil.rmtree(store / "tiny" / "1")
    put(kinds[1], store, 1)
    for _ in range(2):
        assert followed.poll() == (["1"], {"1": 1})
    (line,) = errors(caplog)
    assert "is served, and the archive in the store is another one by now" in line


def test_the_last_version_stays_when_it_disappears(followed: Followed, store: Path, kinds: list[Path]):
    followed.poll()
    shutil.rmtree(store / "tiny")
    assert followed.poll() == (["1"], {"1": 1})
    put(kinds[2], store, 0)
    assert followed.poll() == (["0"], {"0": 1})


def test_a_store_that_cannot_be_read_unloads_nothing(followed: Followed, store: Path, caplog: pytest.LogCaptureFixture):
    followed.poll()
    store.rename(store.with_name("elsewhere"))
    for _ in range(2):
        assert followed.poll() == (["1"], {"1": 1})
    assert len([line for line in errors(caplog) if "cannot be read" in line]) == 1


def test_a_version_that_is_no_part_of_the_store_is_left_alone(store: Path, kinds: list[Path]):
    followed = Followed(store, load(kinds[3]), "10")
    assert followed.poll() == (["1", "10"], {"10": 1})
    shutil.rmtree(store / "tiny" / "1")
    put(kinds[1], store, 2)
    assert followed.poll()[0] == ["10", "2"]


def test_a_config_may_have_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "models.toml").write_text("[models.tiny]\n", encoding="utf-8-sig")
    assert list(parse_model_config(read_text(tmp_path / "models.toml"), "models.toml")) == ["tiny"]


def test_a_config_that_was_written_just_now_waits_for_the_next_poll(
    store: Path, kinds: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    put(kinds[2], store, 2)
    config = store.parent / "models.toml"
    config.write_text('[models.tiny]\nversions = ["1", "2"]\n')
    followed = Followed(store, load(store / "tiny" / "1"), "1", config)
    monkeypatch.setattr(poll, "_SETTLED_S", 1e6)
    for half in ('[models.tiny]\nversions = ["1"]\n', '[models.tiny]\nversions = ["1'):
        config.write_text(half)
        assert followed.poll()[0] == ["1", "2"] and not errors(caplog)
    config.write_text('[models.tiny]\nversions = ["1"]\n')
    os.utime(config, (0, 0))
    assert followed.poll()[0] == ["1"]
    config.write_text('[models.tiny]\nversions = ["2"]\n')
    followed.poller.poll("config")  # SIGHUP
    assert followed.poll()[0] == ["2"]


def test_a_config_says_versions_labels_and_weights(store: Path, kinds: list[Path], caplog: pytest.LogCaptureFixture):
    for version in (2, 3):
        put(kinds[version], store, version)
    config = store.parent / "models.toml"
    config.write_text('[models.tiny]\nversions = {latest = 2}\nlabels = {stable = "2", canary = "3"}\n')
    with config.open("a") as file:
        file.write('weights = {"2" = 90, "3" = 10}\n')
    followed = Followed(store, load(store / "tiny" / "3"), "3", config)
    assert followed.poll() == (["2", "3"], {"2": 90, "3": 10})
    assert followed.registry.resolve_label("tiny", "stable") == "2"
    good = config.read_text()
    for bad, said in (
        (good.replace('"2", canary', '"7", canary'), "names version '7'"),
        (good + "[models.none]\n", "has no version of it"),
        ("models = 3", "expected `models` alone"),
        (good.replace("latest = 2", "latest = 0"), "with N from 1"),
        (good.replace("= 90", "= -90"), "whole number from 0"),
        ("[models", "Expected"),
    ):
        config.write_text(bad)
        caplog.clear()
        for _ in range(2):
            assert followed.poll() == (["2", "3"], {"2": 90, "3": 10})
        (line,) = errors(caplog)
        assert "keeps the configuration it has" in line and said in line
        with pytest.raises(ConfigError, match=said):
            Followed(store, load(store / "tiny" / "3"), "3", config)
    caplog.clear()
    config.write_text('[models.tiny]\nversions = ["1"]\nlabels = {stable = "1"}')
    assert followed.poll() == (["1"], {"1": 1})
    assert [record.levelname for record in caplog.records if "is taken over" in record.getMessage()] == ["WARNING"]
    assert followed.registry.labels("tiny") == {"stable": "1"}


def test_labels_are_set_once_whatever_other_versions_are_unloaded(
    store: Path, kinds: list[Path], caplog: pytest.LogCaptureFixture
):
    for version in (2, 3, 4):
        put(kinds[version], store, version)
    config = store.parent / "models.toml"
    config.write_text('[models.tiny]\nversions = "all"\nlabels = {stable = "2", canary = "4"}\nweights = {"4" = 1}\n')
    followed = Followed(store, load(store / "tiny" / "1"), "1", config)

    def unloaded(version: str) -> int:
        """How often labels have been set once ``version`` is unloaded and some polls are over."""
        away = store / f".{version}"
        (store / "tiny" / version).rename(away)
        for _ in range(3):
            assert version not in followed.poll()[0]
        return sum(record.getMessage().startswith("SetLabels tiny") for record in caplog.records)

    with caplog.at_level(logging.INFO):
        followed.poll()
        assert followed.registry.labels("tiny") == {"stable": "2", "canary": "4"}
        assert [unloaded("1"), unloaded("3")] == [1, 1]
        assert unloaded("2") == 1  # it has a label, which goes with it
        assert followed.registry.labels("tiny") == {"canary": "4"}
        (store / ".2").rename(store / "tiny" / "2")
        followed.poll()
        assert followed.registry.labels("tiny") == {"stable": "2", "canary": "4"}


def test_a_load_again_is_fine_and_labels_are_names_of_versions(store: Path, kinds: list[Path]):
    put(kinds[1], store, 2)
    followed = Followed(store, load(store / "tiny" / "1"), "1")
    request = admin_pb.LoadRequest(model="tiny", version="2", activate=True).SerializeToString()
    for _ in range(2):
        followed.change("Load", request)
        assert followed.registry.weights("tiny") == {"2": 1}
    registry = followed.registry
    registry.set_labels("tiny", {"stable": "1"})
    assert registry.get("tiny", label="stable").version == registry.resolve_label("", "stable") == "1"
    with pytest.raises(NotFoundError, match="label: got 'x' of model 'tiny', expected one of 'stable'"):
        registry.resolve_label("tiny", "x")
    with pytest.raises(InputError, match="expected one of them"):
        registry.get("tiny", "1", "stable")
    registry.rollback("tiny")
    registry.set_weights("tiny", {"2": 1})
    registry.remove("tiny", "1")
    assert registry.labels("tiny") == {}


def test_a_request_may_say_a_label(served: tuple[Server, StorePoller], store: Path, kinds: list[Path]):
    server, poller = served
    put(kinds[1], store, 2)
    poller.poll()
    server.service.registry.set_labels("tiny", {"stable": "1", "canary": "2"})
    dense, kjt = make_request(0, 3)
    request = codec.parse(pb.PredictRequest, codec.encode_predict_request(dense, kjt))
    for label, version in (("stable", "1"), ("canary", "2")):
        request.label = label
        answer = decoded(server.service, "Predict", request.SerializeToString())
        assert codec.parse(pb.PredictResponse, answer).model_version == version

    async def ask(label: str) -> str:
        async with AsyncInferenceClient(server.target, label=label, timeout=60) as mine:
            return (await mine.get_model()).version

    for label, version in (("stable", "1"), ("canary", "2")):
        with InferenceClient(server.target, label=label, timeout=60) as client:
            assert client.lookup(kjt).model_version == version
            with InferenceClient(server.target, version=version, timeout=60) as same:
                assert torch.equal(client.predict(dense, kjt)["output"], same.predict(dense, kjt)["output"])
            assert client.get_model().version == version
        assert asyncio.run(ask(label)) == version
    with pytest.raises(InputError, match="expected one of them"):
        InferenceClient(server.target, version="1", label="stable")


def test_changes_are_in_the_log(followed: Followed, store: Path, kinds: list[Path], monkeypatch: pytest.MonkeyPatch):
    put(kinds[1], store, 2)
    # Only this handler: `serve` in this process, in another test, leaves its own on the logger.
    handler = logging.handlers.BufferingHandler(100)
    log = logging.getLogger("recinfer.changes")
    monkeypatch.setattr(log, "handlers", [handler])
    monkeypatch.setattr(log, "propagate", False)
    level = log.level
    log.setLevel(logging.INFO)
    try:
        followed.poll()
        request = admin_pb.RollbackRequest(model="tiny", change=admin_pb.Change(reason="clicks\nfell", who="CN=ann"))
        followed.change("Rollback", request.SerializeToString())
        with pytest.raises(NotFoundError):
            followed.change("Unload", admin_pb.UnloadRequest(model="tiny", version="9").SerializeToString())
    finally:
        log.setLevel(level)
    loaded, rolled, refused = handler.buffer
    assert loaded.getMessage() == "Load tiny 2 and made the default, by model store, reason: poll"
    assert rolled.getMessage() == "Rollback tiny, by CN=ann, reason: clicks fell"
    assert (rolled.change, rolled.model, rolled.who, rolled.reason) == ("Rollback", "tiny", "CN=ann", "clicks fell")  # type: ignore[attr-defined]
    assert "refused: version: got '9'" in refused.getMessage() and refused.levelno == logging.WARNING


def test_lines_of_text_have_their_times(capsys: pytest.CaptureFixture[str]):
    """Warnings too; FBGEMM's import gives the root logger a handler that writes none."""
    show_changes()
    logging.getLogger("recinfer.changes").info("Load tiny 2")
    logging.getLogger("recinfer.serving.shards.replica").warning("a shard is gone")
    logging.getLogger("recinfer.serving.shards.replica").info("not shown")
    changed, warned = capsys.readouterr().err.splitlines()
    time = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}"
    assert re.fullmatch(f"{time} Load tiny 2", changed)
    assert re.fullmatch(f"{time} WARNING a shard is gone", warned)


def test_workers_follow_their_supervisor_and_admin_verbs_reach_all(store: Path, kinds: list[Path]):
    """The command: two workers, a store that is looked at, and the verbs of `recinfer admin`."""
    serve = [
        "serve",
        "--model-store",
        str(store),
        "--poll",
        "0.05",
        "--workers",
        "2",
        "--admin",
        "--port",
        "0",
        "--json",
        *WAITS,
    ]
    with Program(PATIENT + warm_workers(), *serve) as process:
        try:
            target = f"127.0.0.1:{json.loads(process.stdout.readline())['port']}"

            def admin(*arguments: str) -> dict[str, dict[str, int]]:
                found = run_json("admin", *arguments, "--target", target)["models"]
                return {m["model"]: {v["version"]: v["weight"] for v in m["versions"]} for m in found}

            put(kinds[1], store, 2)
            with AdminClient(target) as client:
                until(lambda: "2" in client.list_models()["tiny"])
            of_tiny = ("--model", "tiny", "--reason", "a test")
            assert admin("list") == {"tiny": {"1": 0, "2": 1}}
            assert admin("load", *of_tiny, "--version", "2") == {"tiny": {"1": 0, "2": 1}}
            assert admin("weights", *of_tiny, "--weight", "1=9", "--weight", "2=1") == {"tiny": {"1": 9, "2": 1}}
            assert admin("default", *of_tiny, "--version", "1") == {"tiny": {"1": 1, "2": 0}}
            assert admin("rollback", *of_tiny) == {"tiny": {"1": 9, "2": 1}}
            assert admin("rollback", *of_tiny) == {"tiny": {"1": 1, "2": 0}}
            assert admin("unload", *of_tiny, "--version", "2") == {"tiny": {"1": 1}}
            assert admin("status") == {"tiny": {"1": 1}}
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0


def test_the_log_names_the_subject_of_a_certificate(store: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    need_openssl()
    folder = self_signed(tmp_path, ("server", "client"), "IP:127.0.0.1")
    cert, key, authority = (folder / name for name in ("server.pem", "server.key", "client.pem"))
    security = Security(tls_cert=cert, tls_key=key, client_ca=authority)
    of_client = {"tls_ca": cert, "tls_cert": authority, "tls_key": folder / "client.key"}
    models = [ServedModel.of("tiny", load(store / "tiny" / "1"), "1")]
    with (
        Server(models, admin=ModelStore(store), security=security) as server,
        AdminClient(server.target, **of_client) as admin,  # type: ignore[arg-type]
        caplog.at_level(logging.INFO, logger="recinfer.changes"),
    ):
        admin.load("tiny", "1", reason="who am I")
    (line,) = [record.getMessage() for record in caplog.records if record.name == "recinfer.changes"]
    assert "CN=client" in line and line.endswith("reason: who am I")
