"""A deployment with mutual TLS whose certificates name no address: servers, rankers' calls, the agents' reads of metrics."""

from __future__ import annotations

import json
import shutil
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import torch
from typer.testing import CliRunner

from recinfer.cli.main import app
from recinfer.deploy.groups import footprint
from recinfer.deploy.ray import probe, replica
from recinfer.deploy.ray.probe import Prober
from recinfer.deploy.ray.process import ServerProcess
from recinfer.deploy.ray.records import Server
from recinfer.deploy.ray.rollout import roll
from recinfer.deploy.ray.spec import Bounds, Deployment, deployment_of
from recinfer.deploy.ray.tls import Tls, missing_files
from recinfer.errors import ConfigError
from recinfer.inference.predictor import load
from recinfer.serving.server.security import Security
from recinfer.serving.server.server import SERVICE_NAME
from recinfer.serving.server.shard_server import ShardServer
from recinfer.serving.shards.tables import ShardTables
from recinfer.serving.wire import codec
from tests.certificates import certified, need_openssl
from tests.deploy.local import Running, until
from tests.serving.conftest import make_request

NAME = "servers.example"
TOKEN = "a-token-of-this-test"


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    """One authority, and one certificate of it that is for ``NAME`` alone."""
    need_openssl()
    folder = certified(tmp_path_factory.mktemp("tls"), f"DNS:{NAME}")
    cert, key, ca = (str(folder / name) for name in ("cert.pem", "key.pem", "ca.pem"))
    return Tls(cert, key, ca, client_ca=ca, name=NAME)


@pytest.fixture(scope="module")
def store(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Versions 1 and 2, which are the same."""
    folder = tmp_path_factory.mktemp("store")
    for version in "12":
        shutil.copytree(archive, folder / "tiny" / version)
    return folder


def spec_of(store: Path, tls: Tls | None) -> Deployment:
    one = Bounds(1, 1, 1)
    archive = store / "tiny" / "1"
    found = footprint(archive, ranks_per_shard=2)
    return deployment_of(found, archive, None, "test", token=TOKEN, shards=one, rankers=one, tls=tls)


@pytest.fixture
def running(store: Path, tls: Tls, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    """One shard server and one ranker that serve. No server is taken for dead, however busy the machine is."""
    monkeypatch.setattr(replica, "_PERIOD_S", 0.2)
    monkeypatch.setattr(replica, "_RANKER_DRAIN_S", 0.1)
    monkeypatch.setattr(replica, "_MISSES", 1 << 30)
    monkeypatch.setattr(probe, "_TIMEOUT_S", 60.0)
    found = Running(spec_of(store, tls))
    try:
        for group in (0, None):
            found.start(group)
        found.wait()
        yield found
    finally:
        found.close()


def test_a_deployment_behind_mutual_tls(running: Running, archive: Path, tls: Tls):
    shard, ranker = running.status()["servers"]
    assert (shard["role"], ranker["role"]) == ("shard", "ranker") and not shard["restarts"] + ranker["restarts"]
    assert ranker["version"] == "1", "which its agent read from its metrics, through TLS"
    features = make_request(1, 5)[1]
    options = [("grpc.ssl_target_name_override", NAME)]
    pem = grpc.ssl_channel_credentials(*(Path(file).read_bytes() for file in (tls.ca, tls.key, tls.cert)))
    with grpc.secure_channel(ranker["address"], pem, options=options) as channel:
        ask = channel.unary_unary(f"/{SERVICE_NAME}/Lookup")
        data = codec.encode_lookup_request(features)
        pooled = codec.decode_lookup_response(ask(data, metadata=(("authorization", f"Bearer {TOKEN}"),), timeout=60))[
            0
        ]
    expected = load(archive).lookup(features).pooled
    assert pooled is not None and expected is not None and torch.equal(pooled.values(), expected.values())

    for address in (shard["address"], ranker["address"]):  # no connection without TLS or without a certificate
        alone = grpc.ssl_channel_credentials(Path(tls.ca).read_bytes())
        for stranger in (grpc.insecure_channel(address), grpc.secure_channel(address, alone, options=options)):
            with stranger, pytest.raises(grpc.RpcError) as refused:
                stranger.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=60)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{ranker['metrics_port']}/status.json", timeout=60)

    assert roll(running.records, running.spec.name, "2") == "2", "admin calls go through TLS as well"
    until(lambda: running.status()["servers"][1]["version"] == "2")
    assert not sum(server["restarts"] for server in running.status()["servers"])


def test_a_server_is_read_with_the_right_files_alone(store: Path, tls: Tls, tmp_path: Path):
    security = Security(tls_cert=Path(tls.cert), tls_key=Path(tls.key), client_ca=Path(tls.ca), token=TOKEN)
    other = str(Path(tls.ca).with_name("other.pem"))
    with ShardServer(ShardTables([0]), metrics_port=0, security=security) as server:
        assert server.metrics_port
        found = Server("shard-0-0", 0, host="127.0.0.1", metrics_port=server.metrics_port)
        assert Prober(spec_of(store, tls)).look(found)
        for known in (replace(tls, name=None), replace(tls, ca=other), replace(tls, client_ca=None), None):
            with pytest.raises(OSError):
                Prober(spec_of(store, known)).look(found)
    gone = replace(tls, ca=str(tmp_path / "gone.pem"))
    assert missing_files(gone.files) == [gone.ca]
    with pytest.raises(ConfigError, match=r"cannot read .*gone\.pem"):
        Prober(spec_of(store, gone))


def test_a_server_without_its_certificate_says_so(store: Path, tls: Tls, tmp_path: Path):
    spec = spec_of(store, replace(tls, cert=str(tmp_path / "gone.pem")))
    process = ServerProcess(spec.arguments(0, "1", "127.0.0.1"), spec.environment())
    server = Server("shard-0-0", 0)
    until(lambda: not process.look(server))
    assert "cannot read" in server.why and "gone.pem" in server.why


def test_arguments_of_servers_and_rankers(store: Path, tls: Tls):
    spec = spec_of(store, tls)
    for group in (0, None):
        said = spec.arguments(group, "1", "127.0.0.1")
        assert [said[said.index(name) + 1] for name in ("--tls-cert", "--tls-key", "--tls-client-ca")] == [
            tls.cert,
            tls.key,
            tls.ca,
        ]
    assert spec.settings() == {"tls_ca": tls.ca, "tls_cert": tls.cert, "tls_key": tls.key, "tls_name": NAME}
    plain = replace(tls, client_ca=None, name=None)
    assert replace(spec, tls=plain).settings() == {"tls_ca": tls.ca}, "nobody asks for a ranker's certificate"
    assert "--tls-client-ca" not in replace(spec, tls=plain).arguments(0, "1", "127.0.0.1")
    assert replace(spec, tls=None).settings() == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tls-cert", "c.pem", "--tls-key", "k.pem"], "--tls-ca missing"),
        (["--tls-ca", "a.pem"], "--tls-cert and --tls-key missing"),
        (["--tls-client-ca", "a.pem"], "missing"),
        (["--tls-name", "a"], "missing"),
    ],
)
def test_options_that_lack_another(archive: Path, options: list[str], message: str):
    done = CliRunner().invoke(app, ["deploy", str(archive), "--ray", "127.0.0.1:1", *options, "--json"])
    assert done.exit_code == 2 and message in json.loads(done.stdout.splitlines()[-1])["error"]["message"]


def test_paths_are_made_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    found = Tls.of(Path("c.pem"), Path("k.pem"), None, Path("a.pem"), None)
    assert found == Tls(*(str(tmp_path / name) for name in ("c.pem", "k.pem", "a.pem")))
    assert Tls.of(None, None, None, None, None) is None
    with pytest.raises(ConfigError, match="absolute"):
        Tls("c.pem", "/k.pem", "/a.pem")
