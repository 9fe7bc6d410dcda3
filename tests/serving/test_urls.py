"""Archives and model stores behind a URL: a storage on loopback that stops, lies, refuses and truncates."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import recinfer
from recinfer.errors import ArchiveError, ConfigError, NotFoundError, RecinferError, UnavailableError
from recinfer.remote import cache as cache_module
from recinfer.remote.cache import ArchiveCache
from recinfer.remote.location import Location
from recinfer.remote.store import StoreMirror
from recinfer.serving.client.admin import AdminClient
from recinfer.serving.config import ModelsConfig, RoleConfig, ServeConfig
from tests.serving.conftest import make_request, replace_archive
from tests.waiting import until


class Storage:
    """Files of a folder over HTTP, with the faults of real storages.

    Attributes:
        faults: path's end -> the fault: a status, "truncate", or "no ranges".
        reads: paths that were read.
        held: reads of shard files wait for it.
    """

    def __init__(self, folder: Path) -> None:
        self.faults: dict[str, int | str] = {}
        self.reads: list[str] = []
        self.held = threading.Event()
        self.held.set()
        storage = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                path = folder / self.path.strip("/")
                fault = next((f for end, f in storage.faults.items() if self.path.rstrip("/").endswith(end)), None)
                if isinstance(fault, int):
                    return self.send_error(fault)
                if not path.exists():
                    return self.send_error(404)
                if path.is_dir():
                    data = "".join(
                        f'<a href="{p.name}{"/" * p.is_dir()}">x</a>' for p in sorted(path.iterdir())
                    ).encode()
                else:
                    data = path.read_bytes()
                status, size, asked = 200, len(data), self.headers.get("Range")
                if self.command == "GET" and path.is_file():
                    storage.reads.append(self.path)
                    if "rank-" in self.path:
                        storage.held.wait()
                if fault == "truncate":
                    data = data[: len(data) // 2]
                if asked and fault != "no ranges":
                    first, last = asked.partition("=")[2].split("-")
                    status, data = 206, data[int(first) : int(last or size) + 1]
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                if fault != "no ranges":
                    self.send_header("Accept-Ranges", "bytes")
                    self.send_header("Content-Range", f"bytes 0-{max(len(data) - 1, 0)}/{size}")
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(data)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self.held.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def bucket(tmp_path: Path, archive: Path) -> Path:
    """A folder with one archive, at ``one`` and as version 1 of a model store."""
    folder = tmp_path / "bucket"
    shutil.copytree(archive, folder / "one")
    shutil.copytree(archive, folder / "store/tiny/1")
    return folder


@pytest.fixture
def storage(bucket: Path) -> Iterator[Storage]:
    """The folder over HTTP."""
    running = Storage(bucket)
    yield running
    running.stop()


@pytest.fixture
def cache(tmp_path: Path) -> ArchiveCache:
    """An empty cache."""
    return ArchiveCache(tmp_path / "cache")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(cache_module, "_CHUNK", 1000)


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_an_archive_by_url_answers_like_its_folder(storage: Storage, archive: Path, tmp_path: Path) -> None:
    dense, features = make_request(4, 3)
    models = ModelsConfig(cache_dir=tmp_path / "cache")
    with (
        recinfer.serve(ServeConfig((f"{storage.url}/one",), models=models)) as server,
        server.client(timeout=60) as client,
    ):
        found = client.predict(dense, features)["output"]
        assert files_of(Path(server.config.folders[0])) == files_of(archive)
    with recinfer.serve(archive) as server, server.client(timeout=60) as client:
        assert (client.predict(dense, features)["output"] == found).all()


def test_a_cached_archive_is_not_downloaded_again(storage: Storage, cache: ArchiveCache) -> None:
    cache.archive(Location(f"{storage.url}/one"))
    first = len(storage.reads)
    cache.archive(Location(f"{storage.url}/store/tiny/1"))
    assert {path.rpartition("/")[2] for path in storage.reads[first:]} == {"manifest.json"}


def test_a_role_downloads_the_files_that_it_reads(storage: Storage, tmp_path: Path) -> None:
    from recinfer.serving.app.remote_archives import with_local_archives

    def names(role: RoleConfig, folder: str) -> set[str]:
        config = ServeConfig((f"{storage.url}/one",), models=ModelsConfig(cache_dir=tmp_path / folder), role=role)
        local, held = with_local_archives(config, lambda _: None)
        assert len(held) == 1
        return set(files_of(local.folders[0]))

    shards = {f"shards/rank-0000{rank}.safetensors" for rank in (0, 1)}
    every = names(RoleConfig(), "whole")
    assert names(RoleConfig(ranks=(1,)), "shard") == {"manifest.json", "plan.json", "shards/rank-00001.safetensors"}
    assert names(RoleConfig(shards=tmp_path / "shards.json"), "ranker") == every - shards


def test_a_download_goes_on_where_it_stopped(storage: Storage, cache: ArchiveCache, archive: Path) -> None:
    storage.faults["rank-00001.safetensors"] = 503
    with pytest.raises(UnavailableError, match=r"rank-00001.* cannot be read"):
        cache.archive(Location(f"{storage.url}/one"))
    assert not list(cache.folder.glob("archives/*/manifest.json"))
    storage.faults.clear()
    before = list(storage.reads)
    found = cache.archive(Location(f"{storage.url}/one"))
    assert files_of(found.path) == files_of(archive)
    again = {path for path in storage.reads[len(before) :] if path in before}
    assert again <= {"/one/manifest.json", *(path for path in before if "rank-" in path)}
    assert not list(cache.folder.glob("parts/*"))


@pytest.mark.parametrize(
    ("fault", "error", "text"),
    [
        (403, ConfigError, "may not be read with the credentials"),
        (404, NotFoundError, "plan.json does not exist"),
        (500, UnavailableError, "cannot be read"),
        ("truncate", ArchiveError, r"\[F4\] .*plan.json: got .* the file is truncated"),
    ],
)
def test_a_fault_of_the_storage_is_one_sentence(
    storage: Storage, cache: ArchiveCache, fault: int | str, error: type[RecinferError], text: str
) -> None:
    storage.faults["plan.json"] = fault
    with pytest.raises(error, match=text):
        cache.archive(Location(f"{storage.url}/one"))
    storage.faults.clear()
    cache.archive(Location(f"{storage.url}/one"))


def test_a_storage_without_ranges_serves_whole_files(storage: Storage, cache: ArchiveCache, archive: Path) -> None:
    for name in ("plan.json", ".safetensors", "model.pt2", "model.onnx"):
        storage.faults[name] = "no ranges"
    assert files_of(cache.archive(Location(f"{storage.url}/one")).path) == files_of(archive)


def test_changed_bytes_are_refused_and_fetched_anew(bucket: Path, cache: ArchiveCache) -> None:
    shard = bucket / "one/shards/rank-00000.safetensors"
    sound = shard.read_bytes()
    shard.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    with pytest.raises(ArchiveError, match=r"\[F5\] .*rank-00000"):
        cache.archive(Location(f"file://{bucket}/one"))
    shard.write_bytes(sound)
    cache.archive(Location(f"file://{bucket}/one"))


def test_a_bad_url_is_one_sentence(tmp_path: Path, cache: ArchiveCache) -> None:
    with pytest.raises(NotFoundError, match=r"nothing has no manifest.json; expected the folder of an archive"):
        cache.archive(Location(f"file://{tmp_path}/nothing"))
    with pytest.raises(ConfigError, match="nosuch://x"):
        Location("nosuch://x/y")
    with pytest.raises(UnavailableError, match=r"http://127\.0\.0\.1:1/one/manifest.json cannot be read"):
        cache.archive(Location("http://me:secret@127.0.0.1:1/one"))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ConfigError, match=r"recinfer\[remote\]"):
        Location("s3://bucket/x")


def test_the_cache_stays_below_its_bound(bucket: Path, tmp_path: Path) -> None:
    shutil.copytree(bucket / "one", bucket / "two")
    replace_archive(bucket / "two")
    size = sum(p.stat().st_size for p in (bucket / "one").rglob("*") if p.is_file())
    cache = ArchiveCache(tmp_path / "cache", size + size // 2)
    one = cache.archive(Location(f"file://{bucket}/one"))
    with pytest.raises(ConfigError, match=r"room for .* beside the archives in use; its bound is .*--cache-bytes"):
        cache.archive(Location(f"file://{bucket}/two"))
    one.release()
    two = cache.archive(Location(f"file://{bucket}/two"))
    assert two.path.is_dir() and not one.path.exists()


def test_a_full_disk_is_one_sentence(bucket: Path, cache: ArchiveCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 0))  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"needs .*, and the disk of .* has 0 .*--cache-dir"):
        cache.archive(Location(f"file://{bucket}/one"))


_DOWNLOAD = textwrap.dedent("""
    import sys
    from pathlib import Path
    from recinfer.remote import cache, location
    cache._CHUNK = 1000
    found = cache.ArchiveCache(Path(sys.argv[1]), report=lambda text: print(text, flush=True))
    print(found.archive(location.Location(sys.argv[2])).path, flush=True)
""")


def start_download(folder: Path, url: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _DOWNLOAD, str(folder), url]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)


def test_two_processes_share_a_download_and_a_killed_one_is_continued(
    storage: Storage, tmp_path: Path, archive: Path
) -> None:
    folder, url = tmp_path / "cache", f"{storage.url}/one"
    storage.held.clear()
    first = start_download(folder, url)
    until(lambda: any("rank-" in path for path in storage.reads))
    second = start_download(folder, url)
    assert second.stdout is not None
    assert "another process downloads" in second.stdout.readline()
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    assert not list(folder.glob("archives/*/manifest.json")), "half an archive has no manifest"
    storage.held.set()
    found = Path(second.stdout.readline().strip())
    assert second.wait() == 0
    assert files_of(found) == files_of(archive)
    assert storage.reads.count("/one/plan.json") <= 2


def test_a_store_by_url_is_followed(bucket: Path, storage: Storage, tmp_path: Path) -> None:
    models = ModelsConfig(model_store=f"{storage.url}/store", poll=0.05, admin=True, cache_dir=tmp_path / "cache")
    with recinfer.serve(ServeConfig(models=models)) as server, AdminClient(server.target) as admin:

        def served() -> set[str]:
            return set(admin.list_models()["tiny"])

        assert served() == {"1"}
        shutil.copytree(bucket / "one", bucket / "store/tiny/.2")
        replace_archive(bucket / "store/tiny/.2")
        (bucket / "store/tiny/.2").rename(bucket / "store/tiny/2")
        until(lambda: served() == {"1", "2"})
        shutil.rmtree(bucket / "store/tiny/1")
        until(lambda: served() == {"2"})


def test_a_store_that_does_not_answer_changes_nothing(bucket: Path, storage: Storage, cache: ArchiveCache) -> None:
    mirror = StoreMirror(f"{storage.url}/store", cache)
    mirror.refresh()
    seen = files_of(mirror.folder)
    storage.faults["store"] = 503
    with pytest.raises(UnavailableError):
        mirror.refresh()
    assert files_of(mirror.folder) == seen
    mirror.archive("tiny", "1")
    storage.faults["tiny/1/manifest.json"] = 503
    mirror.archive("tiny", "1")  # from the cache alone
    storage.faults = {"manifest.json": 503}
    shutil.rmtree(bucket / "store/tiny/1")
    storage.faults = {}
    shutil.copytree(bucket / "one", bucket / "store/other/1")
    mirror.refresh()
    assert set(files_of(mirror.folder)) == {".stamps.json", "other/1/manifest.json"}


def test_a_damaged_version_is_downloaded_once(
    bucket: Path, storage: Storage, cache: ArchiveCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = bucket / "store/tiny/1/shards/rank-00000.safetensors"
    sound = shard.read_bytes()
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    mirror = StoreMirror(f"{storage.url}/store", cache)
    mirror.refresh()
    for _ in range(2):
        with pytest.raises(ArchiveError, match="F5"):
            mirror.archive("tiny", "1")
    size = shard.stat().st_size
    assert storage.reads.count("/store/tiny/1/shards/rank-00000.safetensors") <= -(-size // 1000)
    shard.write_bytes(sound)  # uploaded again under the same manifest
    with pytest.raises(ArchiveError, match="F5"):
        mirror.archive("tiny", "1")
    monkeypatch.setattr("recinfer.remote.store._AGAIN_S", 0.0)
    mirror.archive("tiny", "1")


def test_a_damaged_version_that_is_uploaded_again_is_read_at_once(bucket: Path, cache: ArchiveCache) -> None:
    """Where the storage tells hashes or times of files; ten minutes were an operator's first wait before."""
    shard = bucket / "store/tiny/1/shards/rank-00000.safetensors"
    sound = shard.read_bytes()
    shard.write_bytes(sound[:1000])
    mirror = StoreMirror(f"file://{bucket}/store", cache)
    mirror.refresh()
    for _ in range(3):
        with pytest.raises(ArchiveError, match="the file is truncated: upload the archive again"):
            mirror.archive("tiny", "1")
    shard.write_bytes(sound)
    mirror.archive("tiny", "1")


def test_a_damaged_version_of_unchanged_files_is_not_read_at_each_look(
    bucket: Path, cache: ArchiveCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = bucket / "store/tiny/1/shards/rank-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    mirror = StoreMirror(f"file://{bucket}/store", cache)
    mirror.refresh()
    reads: list[str] = []
    read_range = Location.read_range

    def counted(location: Location, path: str, start: int, end: int | None) -> bytes:
        reads.append(path)
        return read_range(location, path, start, end)

    monkeypatch.setattr(Location, "read_range", counted)
    for _ in range(2):  # the second call downloads with the stamps of the files known
        with pytest.raises(ArchiveError, match="F5"):
            mirror.archive("tiny", "1")
    reads.clear()
    with pytest.raises(ArchiveError, match="F5"):
        mirror.archive("tiny", "1")
    assert not reads


def test_a_delta_uploaded_anew_is_downloaded_anew(bucket: Path, storage: Storage, cache: ArchiveCache) -> None:
    mirror = StoreMirror(f"{storage.url}/store", cache)
    delta = bucket / "store/tiny/one.rqd"
    for text in (b"first", b"other"):  # of one size
        delta.write_bytes(text)
        assert mirror.delta("tiny", "one.rqd").read_bytes() == text


def test_settings_that_do_not_go_together() -> None:
    with pytest.raises(ConfigError, match="--cache-bytes: got 0"):
        ModelsConfig(cache_bytes=0)
    config = ServeConfig(("s3://b/one",), models=ModelsConfig(model_store="s3://b/store", cache_dir=Path("/c")))
    again = ServeConfig.from_json(json.dumps(json.loads(config.to_json())))
    assert again.models.store == config.models.store and again.models.store_url == "s3://b/store"
