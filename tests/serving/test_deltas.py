"""Deltas applied and undone by the admin service under load: every answer is that of one state, and none is lost."""

from __future__ import annotations

import copy
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import torch

from recinfer.checkpoint import CheckpointReader
from recinfer.errors import InputError, NotFoundError, RecinferError, UnavailableError
from recinfer.inference.delta import make_delta
from recinfer.inference.predictor import load
from recinfer.serving.client.admin import AdminClient
from recinfer.serving.engine.registry import ModelRegistry, ServedModel
from recinfer.serving.engine.store import ModelStore, StoreManager, restore
from recinfer.serving.server.server import SERVICE_NAME, Server
from recinfer.serving.wire import codec
from tests.caller_threads import CallerThreads
from tests.serving.conftest import build_archive, build_model, make_request, replace_archive

STATES = 3  # the archive, and two deltas in a row


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny/3, the same archive as tiny/4, and deltas 1.rqd, 2.rqd (after it) and broken.rqd."""
    folder = tmp_path_factory.mktemp("store")
    work = tmp_path_factory.mktemp("work")
    archive = build_archive(work)
    model, after = build_model(), []
    for number in range(1, STATES):
        model = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.3 * torch.randn_like(parameter)
        torch.save(model.state_dict(), work / f"{number}.pt")
        delta = work / f"{number}.rqd"
        make_delta(archive, model, CheckpointReader(work / f"{number}.pt"), delta, after=after, progress=False)
        after.append(delta)
    for version in ("3", "4"):
        shutil.copytree(archive, folder / "tiny" / version)
    for delta in after:
        shutil.copy(delta, folder / "tiny")
    data = bytearray(after[0].read_bytes())
    data[len(data) // 2] ^= 0xFF
    (folder / "tiny" / "broken.rqd").write_bytes(data)
    return folder


@pytest.fixture(scope="module")
def server(store: Path) -> Iterator[Server]:
    with Server({"tiny": load(store / "tiny" / "3")}, admin=ModelStore(store)) as running:
        yield running


@pytest.fixture
def admin(server: Server) -> Iterator[AdminClient]:
    with AdminClient(server.target) as client:
        yield client
        while client.list_models()["tiny"]["3"].deltas:
            client.undo_delta("tiny", "3")


class Load(CallerThreads):
    """Callers that predict and look up without end; counts answers by the state that they are of, and errors."""

    def __init__(self, target: str, store: Path, callers: int = 3) -> None:
        super().__init__(callers)
        self.answers: Counter[str] = Counter()
        self._target = target
        predictor = load(store / "tiny" / "3")
        self._requests = [make_request(seed, 3) for seed in range(callers)]
        self._expected: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in range(callers)]
        for number in range(STATES):
            if number:
                predictor.apply_delta(store / "tiny" / f"{number}.rqd")
            for expected, (dense, kjt) in zip(self._expected, self._requests):
                found = predictor.lookup(kjt).pooled
                assert found is not None
                expected.append((predictor.predict(dense, kjt)["output"], found.values().clone()))

    def _call(self, number: int) -> None:
        dense, kjt = self._requests[number]
        data = codec.encode_predict_request(dense, kjt), codec.encode_lookup_request(kjt)
        with grpc.insecure_channel(self._target) as channel:
            calls = [channel.unary_unary(f"/{SERVICE_NAME}/{name}") for name in ("Predict", "Lookup")]
            turn = 0
            while not self._stop.is_set():
                turn = 1 - turn
                try:
                    answer = calls[turn](data[turn], timeout=60)
                except grpc.RpcError as error:
                    self.answers[error.code().name] += 1
                    continue
                if turn:
                    pooled, *_ = codec.decode_lookup_response(answer)
                    assert pooled is not None
                    got = pooled.values()
                else:
                    got = codec.decode_predict_response(answer)[0]["output"]
                states = [
                    str(state)
                    for state, known in enumerate(self._expected[number])
                    if torch.allclose(got, known[turn], rtol=0, atol=1e-6)
                ]
                self.answers[states[0] if len(states) == 1 else f"a mixture ({states})"] += 1

    def wait(self, state: int, more: int = 20) -> None:
        """Return when ``more`` answers of ``state`` have come."""
        goal, end = self.answers[str(state)] + more, time.monotonic() + 120
        while self.answers[str(state)] < goal:
            assert time.monotonic() < end, self.answers
            time.sleep(0.005)


def test_apply_and_undo_under_load(server: Server, admin: AdminClient, store: Path):
    with Load(server.target, store) as load_:
        load_.wait(0)
        for _ in range(3):
            assert admin.apply_delta("tiny", "1.rqd")["tiny"]["3"].deltas == 1
            load_.wait(1)
            assert admin.apply_delta("tiny", "2.rqd", "3")["tiny"]["3"].deltas == 2
            load_.wait(2)
            assert admin.undo_delta("tiny")["tiny"]["3"].deltas == 1
            load_.wait(1)
            assert admin.undo_delta("tiny")["tiny"]["3"].deltas == 0
            load_.wait(0)
    assert set(load_.answers) == {"0", "1", "2"}, load_.answers


def test_delta_that_does_not_fit_changes_nothing(admin: AdminClient, store: Path):
    for name, kind, words in (
        ("7.rqd", NotFoundError, r"the store has no '7.rqd' of model 'tiny'; it has 1.rqd, 2.rqd, broken.rqd"),
        ("3", NotFoundError, "no '3'"),
        ("../tiny/1.rqd", InputError, "expected the name of a folder|expected the name"),
        ("2.rqd", InputError, r"'2.rqd' is not applied to tiny 3: .*X6"),
        ("broken.rqd", InputError, "'broken.rqd' is not applied to tiny 3"),
    ):
        with pytest.raises(kind, match=words) as caught:
            admin.apply_delta("tiny", name)
        assert "Traceback" not in str(caught.value)
        assert admin.list_models()["tiny"]["3"].deltas == 0
    with pytest.raises(InputError, match="no delta is applied"):
        admin.undo_delta("tiny")
    with pytest.raises(NotFoundError, match="'9'"):
        admin.apply_delta("tiny", "1.rqd", "9")
    with pytest.raises(NotFoundError, match="'nobody'"):
        admin.apply_delta("nobody", "1.rqd")


def test_one_version_has_a_delta_and_another_has_not(admin: AdminClient):
    admin.load("tiny", "4")
    try:
        admin.apply_delta("tiny", "1.rqd", "4")
        assert {name: v.deltas for name, v in admin.list_models()["tiny"].items()} == {"3": 0, "4": 1}
        admin.set_weights("tiny", {"3": 90, "4": 10})
        with pytest.raises(InputError, match="requests go to '3' and '4'; name one"):
            admin.apply_delta("tiny", "1.rqd")
        assert {name: v.weight for name, v in admin.rollback("tiny")["tiny"].items()} == {"3": 1, "4": 0}
        admin.set_default("tiny", "4")
        admin.set_default("tiny", "3")
        admin.set_default("tiny", "3")  # a caller that lost the answer calls again
        assert {name: v.weight for name, v in admin.rollback("tiny")["tiny"].items()} == {"3": 0, "4": 1}
        admin.set_default("tiny", "3")
    finally:
        assert set(admin.unload("tiny", "4")["tiny"]) == {"3"}


def test_restart_restores_all_but_missing_or_replaced_archives(
    store: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    shutil.copytree(store, tmp_path, dirs_exist_ok=True)
    models = ModelStore(tmp_path)
    manager = StoreManager(ModelRegistry([ServedModel.of("tiny", models.open("tiny", "4"), "4")]), models)
    manager.load("tiny", "3")
    manager.apply_delta("tiny", "3", "1.rqd")
    manager.registry.set_weights("tiny", {"3": 10, "4": 90})
    state = manager.state()

    def restored() -> dict[str, int]:
        registry = ModelRegistry(restore(state, [], models))
        again = StoreManager(registry, models, state)
        assert [entry for entry in state.versions if entry in again.state().versions] == [*again.state().versions]
        return registry.weights("tiny")

    assert restored() == {"3": 10, "4": 90}
    other = (tmp_path / "tiny" / "2.rqd").read_bytes()
    (tmp_path / "tiny" / "1.rqd").unlink()
    assert restored() == {"4": 90}
    assert "tiny 3 is not served by this process: delta: the store has no '1.rqd'" in caplog.text
    (tmp_path / "tiny" / "1.rqd").write_bytes(other)
    assert restored() == {"4": 90}
    shutil.rmtree(tmp_path / "tiny" / "3")
    assert restored() == {"4": 90}
    replace_archive(tmp_path / "tiny" / "4")
    with pytest.raises(
        UnavailableError, match=r"'tiny' is not on disk any more as .*: 4: \[X5\] the archive on disk .*; 3: "
    ):
        restored()


def test_client_names_what_is_missing(store: Path):
    with (
        Server({"tiny": load(store / "tiny" / "3")}) as server,
        AdminClient(server.target) as client,
        pytest.raises(RecinferError, match="--admin"),
    ):
        client.list_models()
    with pytest.raises(UnavailableError, match="is the server running"):
        AdminClient(server.target, timeout=60).list_models()
