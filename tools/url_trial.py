"""Serves an archive from a storage on loopback, kills the server while it downloads, and shows that no half archive is served.

    python tools/url_trial.py --kills 20
    python tools/url_trial.py --storage gs --kills 5 --rows 300000

Needs recinfer with the extras cpu, onnx, serve and remote, and a storage: ``pip install 'moto[server]'`` for s3,
``pip install gcp-storage-emulator`` for gs. The web server of http is Python's own; with no-ranges it sends whole files only.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch

import recinfer
from recinfer.archive.manifest_rules import read_manifest
from recinfer.models.dlrm import DLRM
from recinfer.modules.embedding_configs import EmbeddingBagConfig
from recinfer.modules.embedding_modules import EmbeddingBagCollection
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

_DIM, _FEATURE = 64, "item"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="kills by SIGKILL during downloads")
    parser.add_argument("--rows", type=int, default=3_000_000, help="rows of the table, 68 bytes each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--storage", choices=STORAGES, default="s3")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="recinfer-url-") as name:
        folder = Path(name)
        archive = build(folder / "model.rqa", options.rows)
        with STORAGES[options.storage](archive) as url:
            whole = trial(folder, url, options.kills, random.Random(options.seed))
    print(
        f"{options.kills} kills during a download from {url}, {whole} half archives served; the last run served a verified archive"
    )
    sys.exit(whole != 0)


def build(path: Path, rows: int) -> Path:
    table = EmbeddingBagConfig(name="t_item", embedding_dim=_DIM, num_embeddings=rows, feature_names=[_FEATURE])
    model = DLRM(EmbeddingBagCollection([table]), 1, [8, _DIM], [8, 1])
    ids = KeyedJaggedTensor.from_lengths_sync([_FEATURE], torch.tensor([1, 2, 3]), torch.tensor([1, 1, 1]))
    recinfer.export(model, (torch.rand(3, 1), ids), path)
    print(f"{path.name}: {sum(p.stat().st_size for p in path.rglob('*') if p.is_file()) >> 20} MiB")
    return path


@contextmanager
def s3(archive: Path) -> Iterator[str]:
    """The archive's URL in moto's S3 server."""
    if shutil.which("moto_server") is None:
        sys.exit("moto_server is not on PATH: pip install 'moto[server]'")
    port = free_port()
    os.environ.update(
        AWS_ACCESS_KEY_ID="key", AWS_SECRET_ACCESS_KEY="secret", AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}"
    )
    with running(["moto_server", "-H", "127.0.0.1", "-p", str(port)]):
        yield upload(archive, "s3")


@contextmanager
def gs(archive: Path) -> Iterator[str]:
    """The archive's URL in an emulator of Google Cloud Storage."""
    port = free_port()
    os.environ["STORAGE_EMULATOR_HOST"] = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "gcp_storage_emulator", "start", "--host", "127.0.0.1", "--port", str(port), "-M"]
    with running([*command, "--default-bucket", "models"]):
        yield upload(archive, "gs")


@contextmanager
def http(archive: Path, *, ranges: bool = True) -> Iterator[str]:
    """The archive's URL on a web server."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = archive / self.path.removeprefix("/ranker/")
            if not path.is_file():
                return self.send_error(404)
            first, last, asked = 0, path.stat().st_size - 1, self.headers.get("Range") if ranges else None
            if asked:
                first, last = (int(part) for part in asked.partition("=")[2].split("-"))
                last = min(last, path.stat().st_size - 1)
            self.send_response(206 if asked else 200)
            self.send_header("Content-Length", str(last + 1 - first))
            if asked:
                self.send_header("Content-Range", f"bytes {first}-{last}/{path.stat().st_size}")
            self.end_headers()
            if self.command == "GET":
                with path.open("rb") as file, suppress(ConnectionError):  # the killed server reads no more
                    file.seek(first)
                    self.wfile.write(file.read(last + 1 - first))

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/ranker"
    finally:
        server.shutdown()
        server.server_close()


STORAGES = {"s3": s3, "gs": gs, "http": http, "no-ranges": functools.partial(http, ranges=False)}


@contextmanager
def running(command: list[str]) -> Iterator[None]:
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.terminate()


def upload(archive: Path, scheme: str) -> str:
    """Copy the archive into the bucket ``models``; returns its URL."""
    import fsspec

    end = time.monotonic() + 300
    while True:
        try:
            files = fsspec.filesystem(scheme, skip_instance_cache=True)
            if not files.exists("models"):
                files.mkdir("models")
            break
        except Exception:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)
    for path in archive.rglob("*"):
        if path.is_file():
            files.put_file(str(path), f"models/ranker/{path.relative_to(archive)}")
    return f"{scheme}://models/ranker"


def trial(folder: Path, url: str, kills: int, chance: random.Random) -> int:
    """Kill ``kills`` servers at random moments of their downloads; returns how many caches held half an archive as a whole one."""
    cache, half, killed = folder / "cache", 0, 0
    command = [
        sys.executable,
        "-m",
        "recinfer",
        "serve",
        url,
        "--port",
        "0",
        "--cache-dir",
        str(cache),
    ]
    while killed < kills:
        server = subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            had = size_of(cache)
            while server.poll() is None and size_of(cache) <= had and not is_whole(cache):
                time.sleep(0.01)
            time.sleep(chance.uniform(0, 0.8))
            was_ready = is_whole(cache)
            server.send_signal(signal.SIGKILL)
        finally:
            server.kill()
            server.communicate()
        killed += not was_ready
        wrong = half_archives(cache)
        half += len(wrong)
        state = "whole" if was_ready else f"kill {killed}"
        print(f"{state}: {size_of(cache) >> 20} MiB in the cache {' '.join(wrong)}", flush=True)
        if was_ready:
            shutil.rmtree(cache, ignore_errors=True)
    server = subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    print(server.stdout.readline().strip())
    server.terminate()
    server.communicate()
    for root in cache.glob("archives/*"):
        recinfer.verify(root)
    return half


def is_whole(cache: Path) -> bool:
    return any(cache.glob("archives/*/manifest.json"))


def size_of(cache: Path) -> int:
    return sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())


def half_archives(cache: Path) -> list[str]:
    """Archives with a manifest, of which a file is missing or has another size."""
    wrong = []
    for manifest in cache.glob("archives/*/manifest.json"):
        for file in read_manifest(manifest.read_bytes()).files:
            path = manifest.parent / file.path
            if not path.is_file() or path.stat().st_size != file.bytes:
                wrong.append(str(path))
    return wrong


def free_port() -> int:
    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        return int(tried.getsockname()[1])


if __name__ == "__main__":
    main()
