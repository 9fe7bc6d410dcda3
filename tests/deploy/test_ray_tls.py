"""A deployment with mutual TLS whose certificates name no address: servers, and rankers' calls."""

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

from recinfer.cli.deploy_options import Action, DeployOptions, ManifestOptions, RayOptions, ServerOptions
from recinfer.cli.deploy_ray import spec_of_options
from recinfer.cli.main import app
from recinfer.deploy.ray import application
from recinfer.deploy.ray.spec import Deployment
from recinfer.errors import RecinferError
from recinfer.inference.predictor import load
from recinfer.serving.server.server import SERVICE_NAME
from recinfer.serving.wire import codec
from tests.certificates import certified, need_openssl
from tests.deploy.local import Running, choose, until
from tests.serving.conftest import make_request

NAME = "servers.example"
TOKEN = "a-token-of-this-test"


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an authority, and of a certificate of it that is for ``NAME`` alone."""
    need_openssl()
    return certified(tmp_path_factory.mktemp("tls"), f"DNS:{NAME}")


@pytest.fixture(scope="module")
def store(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Versions 1 and 2, which are the same; the file chooses 1."""
    folder = tmp_path_factory.mktemp("store")
    for version in "12":
        shutil.copytree(archive, folder / "tiny" / version)
    choose(folder / "models.toml", "1", "1")
    return folder


def options_of(pem: Path, mutual: bool = True) -> DeployOptions:
    """The command's options with all files of ``pem``."""
    cert, key, ca = (pem / name for name in ("cert.pem", "key.pem", "ca.pem"))
    files = RayOptions(tls_cert=cert, tls_key=key, tls_ca=ca, tls_client_ca=ca if mutual else None, tls_name=NAME)
    servers = ServerOptions(replicas=1, rankers=1, ranks_per_shard=2)
    return DeployOptions(ray=files, action=Action(), k8s=ManifestOptions(), servers=servers)


def spec_of(store: Path, pem: Path) -> Deployment:
    made = spec_of_options(store / "tiny" / "1", options_of(pem))
    config = store / "models.toml"
    return replace(made, security=replace(made.security, token=TOKEN), model_config=config)


@pytest.fixture
def running(store: Path, pem: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Running]:
    """One shard server and one ranker that serve."""
    monkeypatch.setattr(application, "_PERIOD_S", 0.2)
    monkeypatch.setattr(application, "_DELISTED_S", 0.1)
    found = Running(spec_of(store, pem), tmp_path)
    try:
        for kind in ("shard-0", "ranker"):
            found.start(kind)
        found.wait()
        yield found
    finally:
        found.close()


def test_a_deployment_behind_mutual_tls(running: Running, archive: Path, store: Path, pem: Path):
    shard, ranker = running.status()["servers"]
    assert (shard["role"], ranker["role"]) == ("shard", "ranker") and not shard["restarts"] + ranker["restarts"]
    assert ranker["version"] == "1"
    features = make_request(1, 5)[1]
    options = [("grpc.ssl_target_name_override", NAME)]
    files = [(pem / name).read_bytes() for name in ("ca.pem", "key.pem", "cert.pem")]
    with grpc.secure_channel(ranker["address"], grpc.ssl_channel_credentials(*files), options=options) as channel:
        ask = channel.unary_unary(f"/{SERVICE_NAME}/Lookup")
        data = codec.encode_lookup_request(features)
        pooled = codec.decode_lookup_response(ask(data, metadata=(("authorization", f"Bearer {TOKEN}"),), timeout=60))[
            0
        ]
    expected = load(archive).lookup(features).pooled
    assert pooled is not None and expected is not None and torch.equal(pooled.values(), expected.values())

    for address in (shard["address"], ranker["address"]):  # no connection without TLS or without a certificate
        alone = grpc.ssl_channel_credentials(files[0])
        for stranger in (grpc.insecure_channel(address), grpc.secure_channel(address, alone, options=options)):
            with stranger, pytest.raises(grpc.RpcError) as refused:
                stranger.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=60)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{ranker['metrics_port']}/status.json", timeout=60)

    choose(store / "models.toml", "12", "2")
    until(lambda: running.status()["servers"][1]["version"] == "2")
    assert not sum(server["restarts"] for server in running.status()["servers"])


def test_a_server_without_its_certificate_says_so(store: Path, pem: Path, tmp_path: Path):
    spec = spec_of(store, pem)
    gone = tmp_path / "gone.pem"
    running = Running(replace(spec, security=replace(spec.security, tls_cert=gone)), tmp_path)
    with pytest.raises(RecinferError, match=r"^on 127\.0\.0\.1: .*cannot read .*gone\.pem"):
        running.start("shard-0")


def test_settings_of_servers_and_rankers(store: Path, pem: Path):
    spec = spec_of(store, pem)
    cert, key, ca = (pem / name for name in ("cert.pem", "key.pem", "ca.pem"))
    shown = {"tls_cert": str(cert), "tls_key": str(key)}
    assert spec.clients == {"tls_ca": str(ca), "tls_name": NAME, **shown}
    assert spec.config(spec.kinds[0], "127.0.0.1", 0, pem).security == spec.security
    plain = spec_of_options(store / "tiny" / "1", options_of(pem, mutual=False))
    assert plain.clients == {"tls_ca": str(ca), "tls_name": NAME}, "nobody asks for a ranker's certificate"
    none = DeployOptions(ray=RayOptions(), action=Action(), k8s=ManifestOptions(), servers=ServerOptions())
    assert spec_of_options(store / "tiny" / "1", none).clients == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tls-cert", "c.pem", "--tls-key", "k.pem"], "and --tls-ca"),
        (["--tls-ca", "a.pem"], "expected --tls-cert"),
        (["--tls-client-ca", "a.pem"], "expected --tls-cert"),
        (["--tls-name", "a"], "expected --tls-cert"),
    ],
)
def test_options_that_lack_another(archive: Path, options: list[str], message: str):
    done = CliRunner().invoke(app, ["deploy", str(archive), "--ray", "127.0.0.1:1", *options, "--json"])
    assert done.exit_code == 2 and message in json.loads(done.stdout.splitlines()[-1])["error"]["message"]


def test_paths_are_made_absolute(archive: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    files = {option: Path(f"{option}.pem") for option in ("tls_cert", "tls_key", "tls_ca")}
    options = DeployOptions(
        ray=RayOptions(**files), action=Action(), k8s=ManifestOptions(), servers=ServerOptions(), name="one"
    )
    made = spec_of_options(archive, options)
    found = (made.security.tls_cert, made.security.tls_key, Path(made.clients["tls_ca"]))
    assert found == tuple(tmp_path / file for file in files.values())
