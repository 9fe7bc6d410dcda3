"""Shard servers with a token and mutual TLS, and a ranker of two workers: real processes, certificates made here."""

from __future__ import annotations

import json
import re
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from recinfer.errors import RecinferError
from recinfer.inference.predictor import load
from recinfer.serving.client.client import InferenceClient
from recinfer.serving.server.security import Security
from recinfer.serving.shards.lookups import MakeLookups
from tests.certificates import need_openssl, self_signed
from tests.ports import free_port
from tests.serving.conftest import make_request
from tests.serving.remote.fleet import Process, asking, shard, write_shards
from tests.serving.supervised import WAITS
from tests.waiting import until

TOKEN = "a-token-of-enough-letters"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of the shards, for another name than their address, and one that a ranker shows."""
    need_openssl()
    folder = self_signed(tmp_path_factory.mktemp("tls"), ("shard", "ranker"), "DNS:shards.example")
    (folder / "token").write_text(TOKEN)
    return folder


def test_mutual_tls_and_a_token(archive: Path, certificates: Path, tmp_path: Path):
    security = Security(
        token=TOKEN,
        tls_cert=certificates / "shard.pem",
        tls_key=certificates / "shard.key",
        client_ca=certificates / "ranker.pem",
    )
    spoken = {
        "tls_ca": str(certificates / "shard.pem"),
        "tls_name": "shards.example",
        "tls_cert": str(certificates / "ranker.pem"),
        "tls_key": str(certificates / "ranker.key"),
        "token_file": str(certificates / "token"),
    }
    features = make_request(1, 5)[1]
    expected = load(archive).lookup(features).pooled.values()
    with ExitStack() as stack:
        shards = [stack.enter_context(shard(archive, [rank], security=security)) for rank in (0, 1)]
        ranks = {rank: [server.target] for rank, server in enumerate(shards)}
        fan_out = stack.enter_context(asking(write_shards(tmp_path / "shards.json", ranks, **spoken)))
        found = load(archive, lookups=MakeLookups(fan_out)).lookup(features).pooled.values()
        assert torch.equal(found, expected)
        for replica in fan_out.pool.everyone():  # lookups are encrypted too
            assert replica._connection._transport.get_extra_info("cipher") is not None
        for lacking in (("tls_name",), ("tls_cert", "tls_key"), ("tls_ca", "tls_name", "tls_cert", "tls_key")):
            less = {key: value for key, value in spoken.items() if key not in lacking}
            stranger = stack.enter_context(asking(write_shards(tmp_path / "less.json", ranks, **less), ready=False))
            with pytest.raises(RecinferError, match="no living replica"):
                load(archive, lookups=MakeLookups(stranger, wait=False))


def test_workers_share_a_port_and_the_shards(archive: Path, tmp_path: Path):
    features = make_request(2, 4)[1]
    expected = load(archive).lookup(features).pooled.values()
    with ExitStack() as stack:
        shards = [stack.enter_context(shard(archive, [rank])) for rank in (0, 1)]
        path = write_shards(tmp_path / "shards.json", {rank: [s.target] for rank, s in enumerate(shards)})
        port = free_port()
        arguments = [archive, "--shards", path, "--workers", "2", *WAITS, "--port", str(port), "--json"]
        ranker = Process(*arguments, log=tmp_path / "ranker.log")
        stack.callback(ranker.close)
        until(lambda: re.search(r'"port".*\n', ranker.said) is not None)
        assert json.loads(next(line for line in ranker.said.splitlines() if '"port"' in line))["port"] == port
        for _ in range(6):  # a connection each, so that both workers get requests
            with InferenceClient(f"127.0.0.1:{port}", timeout=60) as client:
                client.wait_until_ready(60)  # this worker has its shards
                assert torch.equal(client.lookup(features).pooled.values(), expected)
        ranker.kill(signal.SIGTERM)
        assert ranker.process.returncode == 0
