"""A ranker follows its model store: a version is served once its shards have it too."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from recinfer.errors import ConfigError
from recinfer.serving.app.running import RunningServer
from recinfer.serving.app.shards import ShardService
from recinfer.serving.config import ModelsConfig, RoleConfig, ServeConfig
from recinfer.serving.engine.poll import StorePoller
from recinfer.serving.engine.store import served_state
from recinfer.serving.wire.loop import run_on_loop
from tests.serving.remote.fleet import shard, write_shards
from tests.serving.remote.models import make_request
from tests.serving.remote.test_versions import MODEL, Roll, answer, archives, rolling
from tests.waiting import replace_text, until

__all__ = ["archives"]


def poller_of(roll: Roll) -> StorePoller:
    def change(call: str, data: bytes) -> bytes:
        async def made() -> bytes:
            return await roll.server.admin_calls[call](data)

        return run_on_loop(made(), timeout=120)

    return StorePoller(roll.store, change, lambda: served_state(roll.server.service.registry), is_ranker=True)


def found(roll: Roll) -> tuple[str, torch.Tensor]:
    got = roll.client.lookup(make_request(6, 3))
    return got.model_version, got.pooled.values()


def test_a_version_is_tried_until_all_shards_have_it(
    archives: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    with rolling(archives, tmp_path) as roll, caplog.at_level(logging.WARNING, logger="recinfer"):
        poller = poller_of(roll)
        poller.poll()
        roll.bring(archives["2"], "2", roll.hosts[:3])
        for _ in range(3):
            poller.poll()
        assert found(roll)[0] == "1"
        (said,) = [record.getMessage() for record in caplog.records if f"Load of {MODEL} 2" in record.getMessage()]
        assert not [record for record in caplog.records if "refused" in record.getMessage()]
        assert "127.0.0.4" in said and "tried again at the next look" in said

        shutil.copytree(archives["2"], roll.hosts[3] / MODEL / "2")  # no file of the ranker's changes
        poller.poll()
        version, vectors = found(roll)
        assert version == "2" and torch.allclose(vectors, answer(archives["2"]), atol=1e-5)

        shutil.rmtree(roll.store / MODEL / "2")
        poller.poll()
        version, vectors = found(roll)
        assert version == "1" and torch.allclose(vectors, answer(archives["1"]), atol=1e-5)
        assert list(roll.server.service.registry.versions(MODEL)) == ["1"]


@pytest.fixture
def store(archives: dict[str, Path], tmp_path: Path) -> Path:
    """Versions 1 and 2."""
    for version, archive in archives.items():
        shutil.copytree(archive, tmp_path / "store" / MODEL / version)
    return tmp_path / "store"


def models_of(store: Path, choice: str) -> ModelsConfig:
    """Versions of ``store`` by a file with ``choice``."""
    file = store.with_name("models.toml")
    replace_text(file, f"[models.{MODEL}]\n{choice}\n")
    return ModelsConfig(model_store=store, model_config=file)


@pytest.mark.parametrize(
    ("choice", "version"),
    [
        ('versions = ["1"]', "1"),
        ("versions = {latest = 2}", "2"),
        ('weights = {"1" = 1}', "1"),
        ('weights = {"1" = 0, "2" = 1}', "2"),
        ('labels = {old = "1"}', "2"),
    ],
)
def test_a_shard_server_begins_with_a_chosen_version(store: Path, choice: str, version: str):
    config = ServeConfig(models=models_of(store, choice), role=RoleConfig(ranks=(0, 1)))
    service = ShardService(config, config.security.read())
    assert [held.manifest.version for held in service.server.tables.models()] == [version]


def test_a_shard_server_refuses_a_bad_file(store: Path):
    config = ServeConfig(models=models_of(store, 'versions = ["3"]'), role=RoleConfig(ranks=(0, 1)))
    with pytest.raises(ConfigError, match="names version '3'"):
        ShardService(config, config.security.read())
    with pytest.raises(ConfigError, match="give --model-store"):
        ServeConfig(models=ModelsConfig(model_config=Path("models.toml")), role=RoleConfig(ranks=(0, 1)))


@pytest.fixture
def shards(archives: dict[str, Path], tmp_path: Path) -> Iterator[Path]:
    """shards.json of a shard server whose store has version 1 alone."""
    host = tmp_path / "host"
    shutil.copytree(archives["1"], host / MODEL / "1")
    with shard(host / MODEL / "1", (0, 1, 2), store=host) as server:
        yield write_shards(tmp_path / "shards.json", {rank: [server.target] for rank in range(3)})


def test_a_ranker_begins_with_a_version_that_requests_go_to(
    store: Path, shards: Path, caplog: pytest.LogCaptureFixture
):
    """Its shard servers lack the newer one."""
    config = ServeConfig(models=models_of(store, 'weights = {"1" = 1}'), role=RoleConfig(shards=shards))
    with RunningServer(config) as ranker:
        until(lambda: ranker.status()["ready"])
        assert [model["version"] for model in ranker.status()["models"]] == ["1"]
        assert any(f"Load of {MODEL} 2 failed" in record.getMessage() for record in caplog.records)


def test_a_ranker_waits_no_more_for_a_version_that_the_file_drops(store: Path, shards: Path):
    models = replace(models_of(store, 'weights = {"2" = 1}'), poll=0.1)
    said: list[str] = []
    with RunningServer(ServeConfig(models=models, role=RoleConfig(shards=shards)), said.append) as ranker:
        until(lambda: said)
        assert "waiting for shards: rank 0" in said[0] and not ranker.status()["ready"]
        models_of(store, 'versions = ["1"]')
        until(lambda: ranker.status()["ready"])
        assert [model["version"] for model in ranker.status()["models"]] == ["1"]
