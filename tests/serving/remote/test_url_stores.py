"""Shard servers and a ranker whose model store is behind a URL: each downloads the files of its role, and all give one version."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import recinfer
from recinfer.checkpoint import CheckpointReader
from recinfer.errors import ArchiveError, InputError, NotFoundError, UnavailableError
from recinfer.inference.delta import make_delta
from recinfer.inference.predictor import load
from recinfer.remote.cache import ArchiveCache
from recinfer.remote.store import StoreMirror
from recinfer.serving.client.admin import AdminClient
from recinfer.serving.client.client import InferenceClient
from recinfer.serving.config import ModelsConfig, RoleConfig, ServeConfig
from recinfer.serving.shards.tables import ShardTables
from recinfer.serving.shards.versions import version_key
from tests.serving.remote.fleet import write_shards
from tests.serving.remote.models import Mixed, make_archive, make_request
from tests.serving.test_urls import Storage

GROUPS = ((0,), (1, 2))  # the ranks of each shard server


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two versions of a model with other rows each, cut by rows over three ranks."""
    folder = tmp_path_factory.mktemp("versions")
    return {v: make_archive(folder / v, "row_wise", version=v, seed=int(v)) for v in ("1", "2")}


@pytest.fixture
def bucket(tmp_path: Path, archives: dict[str, Path]) -> Path:
    """A model store with version 1."""
    shutil.copytree(archives["1"], tmp_path / "bucket/mixed/1")
    return tmp_path / "bucket"


@pytest.fixture
def storage(bucket: Path) -> Iterator[Storage]:
    """The store over HTTP."""
    running = Storage(bucket)
    yield running
    running.stop()


def served(storage: Storage, cache: Path, role: RoleConfig, *archives: str, **models: Any) -> ServeConfig:
    """A server of the store with a cache of its own."""
    return ServeConfig(archives, models=ModelsConfig(model_store=storage.url, cache_dir=cache, **models), role=role)


@contextmanager
def fleet(storage: Storage, folder: Path, *archives: str) -> Iterator[tuple[AdminClient, InferenceClient]]:
    """Two shard servers and a ranker; the shard servers have the store alone."""
    with ExitStack() as stack:
        listed = {}
        for ranks in GROUPS:
            config = served(storage, folder / f"shard-{ranks[0]}", RoleConfig(ranks=ranks))
            target = stack.enter_context(recinfer.serve(config)).target
            listed.update({rank: [target] for rank in ranks})
        role = RoleConfig(shards=write_shards(folder / "shards.json", listed))
        config = served(storage, folder / "ranker", role, *archives, admin=True)
        ranker = stack.enter_context(recinfer.serve(config))
        client = stack.enter_context(InferenceClient(ranker.target, timeout=60))
        client.wait_until_ready(60)
        yield stack.enter_context(AdminClient(ranker.target)), client


def answer(archive: Path) -> Tensor:
    """The vectors of an archive in this process."""
    return load(archive).lookup(make_request(6, 3)).pooled.values()


def asked(client: InferenceClient) -> tuple[str, Tensor]:
    """Version and vectors that the ranker gives for the same request."""
    found = client.lookup(make_request(6, 3))
    return found.model_version, found.pooled.values()


def rows_in(cache: Path) -> set[str]:
    """The shard files in a cache."""
    return {path.name for path in cache.glob("archives/*/shards/*")}


def test_a_version_rolls_out_from_a_url(
    storage: Storage, bucket: Path, archives: dict[str, Path], tmp_path: Path
) -> None:
    with fleet(storage, tmp_path) as (admin, client):
        version, vectors = asked(client)
        assert version == "1"
        torch.testing.assert_close(vectors, answer(archives["1"]))
        shutil.copytree(archives["2"], bucket / "mixed/2")
        admin.load("mixed", "2", activate=True)
        version, vectors = asked(client)
        assert version == "2"
        torch.testing.assert_close(vectors, answer(archives["2"]))
    for ranks in GROUPS:
        assert rows_in(tmp_path / f"shard-{ranks[0]}") == {f"rank-0000{rank}.safetensors" for rank in ranks}
        assert not list(tmp_path.glob(f"shard-{ranks[0]}/archives/*/dense"))
    assert not rows_in(tmp_path / "ranker")


def test_a_delta_of_the_store_reaches_the_shards(storage: Storage, bucket: Path, tmp_path: Path) -> None:
    torch.manual_seed(11)
    torch.save(Mixed().state_dict(), tmp_path / "later.pt")
    one, delta = bucket / "mixed/1", tmp_path / "later.rqd"
    make_delta(one, Mixed().to("meta"), CheckpointReader(tmp_path / "later.pt"), delta, progress=False)
    after = load(one)
    after.apply_delta(delta)
    with fleet(storage, tmp_path) as (admin, client):
        shutil.copy(delta, bucket / "mixed/later.rqd")
        admin.apply_delta("mixed", "later.rqd")
        torch.testing.assert_close(asked(client)[1], after.lookup(make_request(6, 3)).pooled.values())
        admin.undo_delta("mixed")
        torch.testing.assert_close(asked(client)[1], answer(one))


def test_an_archive_by_url_has_its_name_in_the_store(
    storage: Storage, bucket: Path, archives: dict[str, Path], tmp_path: Path
) -> None:
    """A ranker that is started with version 0 has shard servers, which serve version 1, prepare it from their store."""
    shutil.copytree(archives["2"], bucket / "mixed/0")  # version 1 is the newest
    with fleet(storage, tmp_path, f"{storage.url}/mixed/0") as (_, client):
        version, vectors = asked(client)
        assert version == "0"
        torch.testing.assert_close(vectors, answer(archives["2"]))


def test_servers_start_again_while_the_storage_does_not_answer(
    storage: Storage, archives: dict[str, Path], tmp_path: Path
) -> None:
    with fleet(storage, tmp_path) as (_, client):
        asked(client)
    for end in ("mixed", "manifest.json", ".safetensors"):
        storage.faults[end] = 503
    storage.faults[""] = 503
    with fleet(storage, tmp_path) as (_, client):
        torch.testing.assert_close(asked(client)[1], answer(archives["1"]))


def test_a_version_that_shards_cannot_download_is_not_switched_to(
    storage: Storage, bucket: Path, archives: dict[str, Path], tmp_path: Path
) -> None:
    with fleet(storage, tmp_path) as (admin, client):
        shutil.copytree(archives["2"], bucket / "mixed/2")
        for fault in (503, "truncate"):
            storage.faults["mixed/2/shards/rank-00002.safetensors"] = fault
            with pytest.raises(
                (InputError, UnavailableError),
                match=r"did not prepare version mixed/2|version mixed/2 .* is not prepared",
            ):
                admin.load("mixed", "2", activate=True)
            assert asked(client)[0] == "1"


def test_a_shard_server_downloads_only_the_content_that_the_ranker_names(
    storage: Storage, bucket: Path, archives: dict[str, Path], tmp_path: Path
) -> None:
    mirror = StoreMirror(
        storage.url, ArchiveCache(tmp_path / "cache"), lambda path: path.endswith(("plan.json", "0.safetensors"))
    )
    mirror.folder.mkdir(parents=True)
    tables = ShardTables((0,), mirror.folder, mirror=mirror)
    keys = {version: ShardTables((0,)).add(archives[version]) for version in archives}
    with pytest.raises(NotFoundError, match=r"mixed/1 of http://.* is not .*; upload it there"):
        tables.prepare(keys["2"], "mixed/1")
    assert not rows_in(tmp_path / "cache")
    tables.prepare(keys["1"], "mixed/1")
    shutil.rmtree(bucket / "mixed/1")
    shutil.copytree(archives["2"], bucket / "mixed/1")  # uploaded again under its name: the mirror is read again
    tables.prepare(keys["2"], "mixed/1")
    assert set(tables.keys()) == {keys["1"], keys["2"]}
    for name in ("../mixed/1", "/mixed/1", "mixed/..", "", "mixed/\0", "mixed/" + "x" * 300):
        with pytest.raises(InputError, match="folder"):
            tables.prepare(version_key("f" * 64), name)
    for name in ("mixed", "a/b/c"):
        with pytest.raises(NotFoundError, match="expected <model>/<version> of http"):
            tables.prepare(version_key("f" * 64), name)


def test_an_unsound_version_of_a_store_by_url_is_passed_over(
    storage: Storage, bucket: Path, archives: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(archives["2"], bucket / "mixed/2")
    storage.faults["mixed/2/plan.json"] = "truncate"
    with fleet(storage, tmp_path) as (_, client):
        assert asked(client)[0] == "1"
    with pytest.raises(ArchiveError, match="F4"):
        StoreMirror(storage.url, ArchiveCache(tmp_path / "ranker")).archive("mixed", "2")


def test_a_cache_keeps_an_archive_while_a_shard_server_has_it(storage: Storage, tmp_path: Path) -> None:
    cache = ArchiveCache(tmp_path / "cache")
    mirror = StoreMirror(storage.url, cache)
    mirror.refresh()
    tables = ShardTables((0, 1, 2), mirror.folder, mirror=mirror)
    held = tables.add_of_store("mixed", "1")
    assert not cache._remove(held.name)
    del tables
    gc.collect()
    assert cache._remove(held.name)
