"""The download of an archive into a volume: complete or absent, and a wrong file is an error."""

from __future__ import annotations

import hashlib
import http.server
import importlib.util
import io
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.docker.test_files import DOCKER


@pytest.fixture
def fetch(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, without its pauses."""
    spec = importlib.util.spec_from_file_location("fetch", DOCKER / "fetch.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    return module


class Files(http.server.ThreadingHTTPServer):
    """A server of files on loopback; ``cut`` bytes are missing at their ends, ``failures`` answers are errors first."""

    files: dict[str, bytes]
    cut = failures = asked = 0


class Handler(http.server.BaseHTTPRequestHandler):
    server: Files

    def do_GET(self) -> None:
        self.server.asked += 1
        data = self.server.files.get(self.path)
        if self.server.failures:
            self.server.failures -= 1
            self.send_error(503)
        elif data is None:
            self.send_error(404)
        else:
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[: len(data) - self.server.cut])

    def log_message(self, format: str, *args: object) -> None:
        """No log."""


@pytest.fixture
def server() -> Iterator[Files]:
    with Files(("127.0.0.1", 0), Handler) as server:
        server.files = {}
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def packed(folder: str, mode: str = "w") -> bytes:
    """A tar of an archive's folder, or of what is in it."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode=mode) as tar:
        for name, size in (("manifest.json", 2), ("shards/rank-0.bin", 200_000)):
            entry = tarfile.TarInfo(f"{folder}{name}")
            entry.size = size
            tar.addfile(entry, io.BytesIO(size * b"{"))
    return target.getvalue()


@pytest.mark.parametrize(("folder", "mode"), [("1/", "w"), ("", "w:gz"), ("store/ctr/1/", "w:gz")])
def test_the_folder_is_the_archive(fetch: ModuleType, server: Files, tmp_path: Path, folder: str, mode: str):
    data = server.files["/ctr.tar"] = packed(folder, mode)
    url, target = f"http://127.0.0.1:{server.server_port}/ctr.tar", tmp_path / "models" / "ctr" / "1"
    server.failures = 2  # the store is tried again
    assert fetch.main([url, str(target), "--sha256", hashlib.sha256(data).hexdigest()]) == 0
    assert (target / "manifest.json").read_bytes() == b"{{"
    assert (target / "shards/rank-0.bin").stat().st_size == 200_000
    assert [path.name for path in target.parent.iterdir()] == ["1"] and target.stat().st_mode & 0o777 == 0o755
    assert fetch.main([url, str(target)]) == 0 and server.asked == 3, "what is there is not downloaded again"


def test_half_an_archive_is_none(fetch: ModuleType, server: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    server.files["/ctr.tar"], server.files["/other.tar"] = packed("1/"), packed("1/").replace(b"manifest", b"manifold")
    url = f"http://127.0.0.1:{server.server_port}"
    for path, more, cut, said in (
        ("ctr.tar", [], 50_000, "ctr.tar"),
        ("ctr.tar", ["--sha256", 64 * "0"], 0, "expected 000"),
        ("none.tar", [], 0, "404"),
        ("other.tar", [], 0, "tar"),
    ):
        server.cut = cut
        assert fetch.main([f"{url}/{path}", str(tmp_path / "1"), *more]) == 1
        assert said in capsys.readouterr().err
        assert not list(tmp_path.iterdir()), path
