"""Serves an archive from an S3 server on loopback, kills the server while it downloads, and shows that no half archive is served.

    python tools/url_trial.py --kills 20

Needs recinfer with the extras cpu, onnx, serve and remote, and moto's S3 server: ``pip install 'moto[server]'``.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
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
    options = parser.parse_args()
    if shutil.which("moto_server") is None:
        sys.exit("moto_server is not on PATH: pip install 'moto[server]'")
    with tempfile.TemporaryDirectory(prefix="recinfer-url-") as folder:
        run(Path(folder), options.kills, options.rows, random.Random(options.seed))


def run(folder: Path, kills: int, rows: int, chance: random.Random) -> None:
    archive = build(folder / "model.rqa", rows)
    port = free_port()
    moto = subprocess.Popen(
        ["moto_server", "-H", "127.0.0.1", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        upload(archive, port)
        whole = trial(folder, port, kills, chance)
    finally:
        moto.terminate()
        moto.wait()
    print(f"{kills} kills during a download, {whole} half archives served; the last run served a verified archive")
    sys.exit(whole != 0)


def build(path: Path, rows: int) -> Path:
    table = EmbeddingBagConfig(name="t_item", embedding_dim=_DIM, num_embeddings=rows, feature_names=[_FEATURE])
    model = DLRM(EmbeddingBagCollection([table]), 1, [8, _DIM], [8, 1])
    ids = KeyedJaggedTensor.from_lengths_sync([_FEATURE], torch.tensor([1, 2, 3]), torch.tensor([1, 1, 1]))
    recinfer.export(model, (torch.rand(3, 1), ids), path)
    print(f"{path.name}: {sum(p.stat().st_size for p in path.rglob('*') if p.is_file()) >> 20} MiB")
    return path


def upload(archive: Path, port: int) -> None:
    import s3fs

    os.environ.update(
        AWS_ACCESS_KEY_ID="key", AWS_SECRET_ACCESS_KEY="secret", AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}"
    )
    files = s3fs.S3FileSystem(skip_instance_cache=True)
    end = time.monotonic() + 60
    while True:
        try:
            files.mkdir("models")
            break
        except Exception:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)
    for path in archive.rglob("*"):
        if path.is_file():
            files.put_file(str(path), f"models/ranker/{path.relative_to(archive)}")


def trial(folder: Path, port: int, kills: int, chance: random.Random) -> int:
    """Kill ``kills`` servers at random moments of their downloads; returns how many caches held half an archive as a whole one."""
    cache, half, killed = folder / "cache", 0, 0
    command = [
        sys.executable,
        "-m",
        "recinfer",
        "serve",
        "s3://models/ranker",
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
