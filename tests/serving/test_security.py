"""Who gets in: tokens, TLS and mutual TLS on a real server, and no open door beyond loopback."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from recinfer.errors import ConfigError
from recinfer.inference.predictor import Predictor
from recinfer.serving.proto import inference_pb2 as pb
from recinfer.serving.proto import inference_pb2_grpc
from recinfer.serving.security import Security, read_token
from recinfer.serving.server import Server

TOKEN = "a-token-of-enough-letters"


def get_model(channel: grpc.Channel, token: str | None = None) -> str:
    metadata = () if token is None else (("authorization", f"Bearer {token}"),)
    return inference_pb2_grpc.InferenceStub(channel).GetModel(pb.GetModelRequest(), metadata=metadata, timeout=10).name


def test_a_token_is_needed_but_for_health(predictor: Predictor):
    with (
        Server({"tiny": predictor}, security=Security(token=TOKEN)) as server,
        grpc.insecure_channel(server.target) as channel,
    ):
        assert get_model(channel, TOKEN) == "tiny"
        for wrong in (None, "", "a-token-of-enough-letterz", TOKEN + "x"):
            with pytest.raises(grpc.RpcError) as caught:
                get_model(channel, wrong)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert TOKEN not in caught.value.details()
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.SERVING


def test_beyond_loopback_something_must_say_who_may_call(predictor: Predictor):
    for host in ("0.0.0.0", "::", "example.com", "10.0.0.1"):
        with pytest.raises(ConfigError, match=r"RECINFER_TOKEN.*--insecure"):
            Server({"tiny": predictor}, host=host)
        Server({"tiny": predictor}, host=host, security=Security(token=TOKEN))
        Server({"tiny": predictor}, host=host, security=Security(insecure=True))
    for host in ("localhost", "::1", "127.0.0.2"):
        Server({"tiny": predictor}, host=host)


def test_what_does_not_hold_together_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="at least 16"):
        Security(token="short")
    with pytest.raises(ConfigError, match="both or neither"):
        Security(tls_cert=tmp_path / "a.pem")
    with pytest.raises(ConfigError, match="without a server certificate"):
        Security(client_ca=tmp_path / "a.pem")
    with pytest.raises(ConfigError, match=r"cannot read .*a\.pem"):
        Security(tls_cert=tmp_path / "a.pem", tls_key=tmp_path / "a.pem").credentials()
    (tmp_path / "token").write_text(f"  {TOKEN}\n")
    assert read_token(tmp_path / "token") == TOKEN
    assert TOKEN not in repr(Security(token=TOKEN))


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate of its own authority for 127.0.0.1, and one that a client shows."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    folder = tmp_path_factory.mktemp("tls")
    for name in ("server", "client", "stranger"):
        command = f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN={name}"
        files = ["-keyout", f"{name}.key", "-out", f"{name}.pem", "-addext", "subjectAltName=IP:127.0.0.1"]
        subprocess.run([*command.split(), *files], cwd=folder, check=True, capture_output=True)
    return folder


def credentials(folder: Path, client: str | None = None) -> grpc.ChannelCredentials:
    root = (folder / "server.pem").read_bytes()
    if client is None:
        return grpc.ssl_channel_credentials(root)
    return grpc.ssl_channel_credentials(
        root, (folder / f"{client}.key").read_bytes(), (folder / f"{client}.pem").read_bytes()
    )


def test_tls(predictor: Predictor, certificates: Path):
    security = Security(tls_cert=certificates / "server.pem", tls_key=certificates / "server.key")
    with Server({"tiny": predictor}, security=security) as server:
        with grpc.secure_channel(server.target, credentials(certificates)) as channel:
            assert get_model(channel) == "tiny"
        with grpc.insecure_channel(server.target) as channel, pytest.raises(grpc.RpcError) as caught:
            get_model(channel)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert security.tls_context() is not None


def test_mutual_tls(predictor: Predictor, certificates: Path):
    security = Security(
        tls_cert=certificates / "server.pem",
        tls_key=certificates / "server.key",
        client_ca=certificates / "client.pem",
    )
    with Server({"tiny": predictor}, security=security) as server:
        with grpc.secure_channel(server.target, credentials(certificates, "client")) as channel:
            assert get_model(channel) == "tiny"
        for stranger in (None, "stranger"):
            with grpc.secure_channel(server.target, credentials(certificates, stranger)) as channel:
                with pytest.raises(grpc.RpcError) as caught:
                    get_model(channel)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
