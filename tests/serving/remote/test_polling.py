"""A ranker follows its model store: a version is served once its shards have it too."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch

from recinfer.serving.engine.poll import StorePoller
from recinfer.serving.engine.store import served_state
from recinfer.serving.wire.loop import run_on_loop
from tests.serving.remote.models import make_request
from tests.serving.remote.test_versions import MODEL, Roll, answer, archives, rolling

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
