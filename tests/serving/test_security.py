"""Tokens, TLS and mutual TLS on a real server, and no unprotected port on other addresses than loopback."""

from __future__ import annotations

import http.client
import json
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from recinfer.errors import ConfigError, InputError, RecinferError
from recinfer.inference.predictor import Predictor
from recinfer.serving.client.admin import AdminClient
from recinfer.serving.client.client import AsyncInferenceClient, InferenceClient
from recinfer.serving.server.security import Security
from recinfer.serving.server.server import Server
from recinfer.serving.wire.loop import run_on_loop
from recinfer.serving.wire.proto import inference_pb2 as pb
from recinfer.serving.wire.tls import read_token
from tests.certificates import need_openssl, self_signed
from tests.serving.stubs import inference_stub
from tests.warm import RECINFER, run_program

TOKEN = "a-token-of-enough-letters"


def get_model(channel: grpc.Channel, token: str | None = None) -> str:
    metadata = () if token is None else (("authorization", f"Bearer {token}"),)
    return inference_stub(channel).GetModel(pb.GetModelRequest(), metadata=metadata, timeout=60).name


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


def test_calls_without_a_token_are_counted(predictor: Predictor):
    """Calls of unknown methods count under one name."""
    with (
        Server({"tiny": predictor}, security=Security(token=TOKEN)) as server,
        grpc.insecure_channel(server.target) as channel,
    ):
        for path in (
            "/recinfer.v1.Inference/Predict",
            "/inference.GRPCInferenceService/ModelInfer",
            "/a.B/C",
            "/a.B/D",
        ):
            with pytest.raises(grpc.RpcError):
                channel.unary_unary(path)(b"", timeout=60)
        found = {row["method"]: row["count"] for row in server.status()["requests"] if row["code"] == "UNAUTHENTICATED"}
        assert found == {"Predict": 1, "ModelInfer": 1, "other": 2}


def test_other_addresses_than_loopback_need_a_token_or_insecure(predictor: Predictor):
    for host in ("0.0.0.0", "::", "example.com", "10.0.0.1"):
        with pytest.raises(ConfigError, match=r"RECINFER_TOKEN.*--insecure"):
            Server({"tiny": predictor}, host=host)
        Server({"tiny": predictor}, host=host, security=Security(token=TOKEN))
        Server({"tiny": predictor}, host=host, security=Security(insecure=True))
    for host in ("localhost", "::1", "127.0.0.2"):
        Server({"tiny": predictor}, host=host)


def test_inconsistent_options_are_refused(tmp_path: Path):
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
    for nobody_could_send in (f"{TOKEN}\n", f"{TOKEN}\n{TOKEN}", f"{TOKEN}\0"):
        with pytest.raises(ConfigError, match="expected one line"):
            Security(token=nobody_could_send)


def test_a_client_sends_the_token_of_a_file_and_never_says_it(predictor: Predictor):
    with Server({"tiny": predictor}, security=Security(token=TOKEN)) as server:
        with InferenceClient(server.target, token=f"{TOKEN}\n", timeout=60) as client:
            assert client.get_model().name == "tiny"
        for odd in ("\N{LATIN SMALL LETTER E WITH ACUTE}" * 16, f"{TOKEN}\n{TOKEN}"):
            for client_of in (InferenceClient, AsyncInferenceClient, AdminClient):
                with pytest.raises(InputError, match=r"token: got \d+ characters") as caught:
                    client_of(server.target, token=odd)
                assert odd not in str(caught.value)


@pytest.mark.parametrize("header", [b"Bearer \xff\xfe", b"Basic \xc3\xa9", b"Basic \xff", b"Basic /w==", b"Bearer"])
def test_a_header_that_is_no_token_is_no_error_of_the_servers(secured: Server, header: bytes):
    pytest.importorskip("aiohttp", reason="aiohttp is not installed (the serve extra)")
    for port, path in ((secured.http_port, "/v2"), (secured.metrics_port, "/metrics")):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", path, headers={"Authorization": header})
        assert connection.getresponse().status == 401
        connection.close()


@pytest.fixture(scope="module")
def secured(predictor: Predictor) -> Iterator[Server]:
    """All three ports, with a token."""
    with Server({"tiny": predictor}, http_port=0, metrics_port=0, security=Security(token=TOKEN)) as server:
        yield server


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate of its own authority for 127.0.0.1, and one that a client shows."""
    need_openssl()
    return self_signed(tmp_path_factory.mktemp("tls"), ("server", "client", "stranger"), "IP:127.0.0.1")


def test_files_that_are_no_certificates_are_named(certificates: Path, tmp_path: Path):
    """The error is not that of a port that cannot be bound, or of a server that does not answer."""
    cert, key, other = (certificates / name for name in ("server.pem", "server.key", "client.key"))
    junk, locked = tmp_path / "junk.pem", tmp_path / "locked.key"
    junk.write_text("junk")
    lock = ["openssl", "pkcs8", "-topk8", "-in", str(key), "-out", str(locked), "-passout", "pass:secret"]
    subprocess.run(lock, check=True, capture_output=True)
    for wrong in ((junk, key), (cert, junk), (cert, other), (key, cert), (cert, locked)):
        with pytest.raises(ConfigError, match=f"{wrong[0].name} and .*{wrong[1].name} are no certificate"):
            Security(tls_cert=wrong[0], tls_key=wrong[1]).credentials()
        with pytest.raises(InputError, match=f"{wrong[0].name} and .*{wrong[1].name} are no certificate"):
            InferenceClient("127.0.0.1:1", tls_ca=cert, tls_cert=wrong[0], tls_key=wrong[1])
    with pytest.raises(ConfigError, match="key holds no certificate of an authority"):
        Security(tls_cert=cert, tls_key=key, client_ca=other).credentials()
    with pytest.raises(InputError, match=r"junk\.pem holds no certificate"):
        InferenceClient("127.0.0.1:1", tls_ca=str(junk))


def test_certificates_may_be_given_as_text(certificates: Path):
    cert, key = (str(certificates / name) for name in ("server.pem", "server.key"))
    assert Security(tls_cert=cert, tls_key=key, client_ca=cert).credentials() is not None
    for client in (InferenceClient, AdminClient):
        client("127.0.0.1:1", tls_ca=cert, tls_cert=cert, tls_key=key).close()


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


def test_every_port_needs_tls_and_the_token(predictor: Predictor, certificates: Path):
    """TLS and the token on the HTTP and metrics ports too, and in all of recinfer's clients."""
    pytest.importorskip("aiohttp", reason="aiohttp is not installed (the serve extra)")
    security = Security(token=TOKEN, tls_cert=certificates / "server.pem", tls_key=certificates / "server.key")
    context = ssl.create_default_context(cafile=str(certificates / "server.pem"))
    with Server({"tiny": predictor}, security=security, http_port=0, metrics_port=0) as server:
        doors = {server.http_port: "v2/models/tiny", server.metrics_port: "status.json"}
        for port, path in doors.items():
            url = f"https://127.0.0.1:{port}/{path}"
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(url, context=context, timeout=60)
            assert refused.value.code == 401
            asked = urllib.request.Request(url, headers={"Authorization": f"Bearer {TOKEN}"})
            with urllib.request.urlopen(asked, context=context, timeout=60) as answer:
                assert answer.status == 200
            with pytest.raises(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=10)
        ca = certificates / "server.pem"
        with InferenceClient(server.target, token=TOKEN, tls_ca=ca, timeout=60) as client:
            assert client.get_model().name == "tiny"
        with InferenceClient(server.target, tls_ca=ca, timeout=60) as client:
            with pytest.raises(RecinferError, match=r"needs a token.*--token-file"):
                client.get_model()
            assert client.is_ready()
        with (
            InferenceClient(server.target, token=TOKEN, timeout=60) as client,
            pytest.raises(RecinferError, match=r"a server with TLS.*--tls-ca"),
        ):
            client.get_model()

        async def ask() -> str:
            async with AsyncInferenceClient(server.target, token=TOKEN, tls_ca=ca, timeout=60) as mine:
                return (await mine.get_model()).name

        assert run_on_loop(ask(), timeout=90) == "tiny"
        token = certificates / "token"
        token.write_text(TOKEN + "\n")
        ask_it = ["--target", server.target, "--timeout", "60", "--feature", "user=3,7"]
        lookup = [RECINFER, "lookup", *ask_it]
        secret = ["--token-file", token, "--tls-ca", ca, "--json"]
        code, out, err = run_program(*lookup, *secret)
        assert code == 0, err
        assert len(json.loads(out)["pooled"]["user"][0]) == 8
        code, _, err = run_program(*lookup, "--tls-ca", "nothing.pem")
        assert (code, "nothing.pem" in err) == (2, True)
