"""Certificates, authorities and tokens that change while a server, a ranker and clients run; bad files change nothing."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import os
import shutil
import signal
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import grpc
import pytest

from recinfer.errors import ConfigError, RecinferError
from recinfer.inference.predictor import Predictor, load
from recinfer.serving.client import credentials
from recinfer.serving.client.admin import AdminClient
from recinfer.serving.client.client import AsyncInferenceClient, InferenceClient
from recinfer.serving.config import SecurityConfig
from recinfer.serving.server import security as security_module
from recinfer.serving.server.security import Security
from recinfer.serving.server.server import Server
from recinfer.serving.shards.lookups import MakeLookups
from recinfer.serving.wire.followed_files import FollowedFiles
from recinfer.serving.wire.loop import run_on_loop
from recinfer.serving.wire.tls import expiry_of
from tests.certificates import certified, need_openssl, self_signed
from tests.rotating import Callers, Files
from tests.serving.conftest import make_request
from tests.serving.remote.fleet import asking, shard, write_shards
from tests.serving.supervised import WAITS
from tests.waiting import replace_bytes, replace_text, until
from tests.warm import Program, warm_workers

pytest.importorskip("aiohttp", reason="aiohttp is not installed (the serve extra)")

OLD, NEW = "the-old-token-of-24-chars", "the-new-token-of-24-chars"


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks at the files every few milliseconds."""
    monkeypatch.setattr(security_module, "_LOOK_S", 0.02)
    monkeypatch.setattr(credentials, "_LOOK_S", 0.02)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two authorities, each with a certificate for 127.0.0.1."""
    need_openssl()
    return [certified(tmp_path_factory.mktemp("made"), "IP:127.0.0.1") for _ in range(2)]


def test_no_request_fails_while_everything_is_rotated(predictor: Predictor, tmp_path: Path):
    need_openssl()
    files = Files(tmp_path)
    security = files.security()
    with Server({"tiny": predictor}, http_port=0, security=security) as server:
        callers = Callers(server, files, 4, make_request(1, 2)[1])
        with callers.sending():
            for _ in range(2):
                files.swap(security, callers.clients)
    assert list(callers.counts) == ["OK"], callers.counts
    assert all(outcomes["ok"] >= 6 for outcomes in security.figures()["rereads"].values())  # two swaps of three steps


def uses(security: Security, folder: Path) -> bool:
    """Whether the server has read the certificates in ``folder``, one file after the other."""
    found = security._live.tls
    read = [(folder / name).read_bytes() for name in ("cert.pem", "key.pem", "ca.pem")]
    return found is not None and [found.chain, found.key, found.authority or read[2]] == read


def failures(server: Server) -> int:
    return int(server._security.figures()["rereads"]["tls"]["failed"])


def context_of(folder: Path, *, certificate: bool = True) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    if certificate:
        context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return context


def ask(port: int | None, path: str, context: ssl.SSLContext) -> tuple[int, bytes]:
    connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=60, context=context)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def install(folder: Path, into: Path) -> None:
    """One file after the other."""
    for name in ("ca.pem", "cert.pem", "key.pem"):
        shutil.copy(folder / name, into / name)


@pytest.fixture
def mutual(predictor: Predictor, made: list[Path], tmp_path: Path) -> Iterator[tuple[Server, Path]]:
    """A server with client certificates of the first authority, and the folder of its files."""
    install(made[0], tmp_path)
    security = Security(tls_cert=tmp_path / "cert.pem", tls_key=tmp_path / "key.pem", client_ca=tmp_path / "ca.pem")
    with Server({"tiny": predictor}, http_port=0, metrics_port=0, security=security) as server:
        yield server, tmp_path


def channel_with(server: Server, folder: Path) -> grpc.Channel:
    root, key, chain = ((folder / name).read_bytes() for name in ("ca.pem", "key.pem", "cert.pem"))
    return grpc.secure_channel(server.target, grpc.ssl_channel_credentials(root, key, chain))


CHECK = "/grpc.health.v1.Health/Check"


def test_old_connections_stay_and_new_ones_need_the_new_authority(mutual: tuple[Server, Path], made: list[Path]):
    server, folder = mutual
    security = server._security
    kept = http.client.HTTPSConnection("127.0.0.1", server.http_port, timeout=60, context=context_of(made[0]))
    kept.request("GET", "/v1/models")
    assert kept.getresponse().read()
    with channel_with(server, made[0]) as channel:
        channel.unary_unary(CHECK)(b"", timeout=60)
        install(made[1], folder)
        until(lambda: uses(security, folder))
        for port in (server.http_port, server.metrics_port):
            assert ask(port, "/ready", context_of(made[1]))[0] == 200
            with pytest.raises(ssl.SSLError):  # it does not know the server's new certificate
                ask(port, "/ready", context_of(made[0]))
        mixed = ssl.create_default_context(cafile=str(made[1] / "ca.pem"))
        mixed.load_cert_chain(made[0] / "cert.pem", made[0] / "key.pem")
        with pytest.raises((ssl.SSLError, ConnectionError, http.client.RemoteDisconnected)):
            ask(server.http_port, "/v1/models", mixed)  # the server does not know the client's old authority
        with channel_with(server, made[1]) as new:
            new.unary_unary(CHECK)(b"", timeout=60)
        with channel_with(server, made[0]) as old, pytest.raises(grpc.RpcError):
            old.unary_unary(CHECK)(b"", timeout=2)
        channel.unary_unary(CHECK)(b"", timeout=60)
    kept.request("GET", "/v1/models")
    assert kept.getresponse().status == 200
    kept.close()


def test_probes_need_no_client_certificate(mutual: tuple[Server, Path], made: list[Path]):
    server, _ = mutual
    bare, full = context_of(made[0], certificate=False), context_of(made[0])
    for port, closed in ((server.http_port, "/v1/models"), (server.metrics_port, "/metrics")):
        for path in ("/ready", "/live"):
            assert ask(port, path, bare)[0] == 200
        status, body = ask(port, closed, bare)
        assert status == 401 and b"got no client certificate" in body
        assert ask(port, closed, full)[0] == 200


def test_a_certificate_that_does_not_fit_its_key_changes_nothing(
    mutual: tuple[Server, Path], made: list[Path], caplog: pytest.LogCaptureFixture
):
    server, folder = mutual
    replace_bytes(folder / "cert.pem", (made[1] / "cert.pem").read_bytes())  # a part of it would be another failure
    until(lambda: failures(server) >= 1)
    until(lambda: "the certificates stay as they were: TLS: " in caplog.text)
    assert ask(server.http_port, "/v1/models", context_of(made[0]))[0] == 200
    text = ask(server.metrics_port, "/metrics", context_of(made[0]))[1].decode()
    assert 'recinfer_security_rereads_total{files="tls",outcome="failed"} 1.0' in text
    expiry = next(line for line in text.splitlines() if line.startswith("recinfer_certificate_expiry_seconds "))
    assert 86_400 < float(expiry.split()[1]) <= 90 * 86_400  # the certificates of the tests last 90 days
    install(made[1], folder)
    until(lambda: uses(server._security, folder))
    before = failures(server)
    assert ask(server.http_port, "/v1/models", context_of(made[1]))[0] == 200
    (folder / "key.pem").unlink()
    until(lambda: failures(server) > before)
    assert "the certificates stay as they were: cannot read" in caplog.text
    assert ask(server.http_port, "/v1/models", context_of(made[1]))[0] == 200


# -- tokens


def test_the_end_of_a_reported_failure_is_in_the_log(caplog: pytest.LogCaptureFixture):
    """Also where the file is again as it was, so that nothing changes."""
    files: FollowedFiles[bytes] = FollowedFiles("tokens", logging.getLogger("recinfer.test"))

    def use(content: bytes) -> None:
        if not content:
            raise ConfigError("token: got 0 lines")

    for content in (b"one", b"", b"", b"", b"one", b"one"):
        files.look(lambda content=content: content, use)
    failed, ended = (record for record in caplog.records if record.name == "recinfer.test")
    assert failed.getMessage() == "the tokens stay as they were: token: got 0 lines"
    assert (ended.levelname, ended.getMessage()) == ("WARNING", "the tokens are those in use again")


def test_either_of_two_tokens_is_taken_and_a_bad_file_changes_nothing(
    predictor: Predictor, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    path = tmp_path / "token"
    path.write_text(f"{OLD}\n")
    security = Security(token_file=path)
    _, features = make_request(1, 2)
    with (
        Server({"tiny": predictor}, security=security) as server,
        InferenceClient(server.target, token=OLD, timeout=60) as old,
        InferenceClient(server.target, token=NEW, timeout=60) as new,
        InferenceClient(server.target, token_file=path, timeout=60) as following,
    ):
        old.lookup(features)
        with pytest.raises(RecinferError, match="needs a token"):
            new.lookup(features)
        replace_text(path, f"{OLD}\n{NEW}\n")
        until(lambda: security.tokens == (OLD, NEW))
        for client in (old, new, following):
            client.lookup(features)
        for number, bad in enumerate(("", "\n\n", "short\n", f"{OLD}\n{NEW}\n{OLD}\n"), 1):
            replace_text(path, bad)
            until(lambda number=number: security.figures()["rereads"]["token"]["failed"] >= number)
            for client in (
                old,
                new,
                *([] if bad == "short\n" else [following]),
            ):  # a client takes a token of any length
                client.lookup(features)
        replace_text(path, f"{NEW}\n")
        until(lambda: security.tokens == (NEW,))
        until(lambda: following._credentials.changed() or NEW in str(following._credentials.metadata))
        following.lookup(features)
        with pytest.raises(RecinferError, match="needs a token"):
            old.lookup(features)
    assert "the tokens stay as they were: " in caplog.text and "got 0 lines with a token" in caplog.text
    levels = [record.levelname for record in caplog.records if "the tokens were read again" in record.getMessage()]
    assert levels == ["INFO", "WARNING"]  # the end of a reported failure is shown where the failure is
    assert OLD not in caplog.text and NEW not in caplog.text


def test_a_token_file_without_a_token_is_an_error_at_start(tmp_path: Path):
    (tmp_path / "token").write_text("\n")
    with pytest.raises(ConfigError, match="got 0 lines with a token, expected one, or two while callers change"):
        Security(token_file=tmp_path / "token")
    for client in (InferenceClient, AsyncInferenceClient, AdminClient):
        with pytest.raises(ConfigError, match="holds no token"):
            client("127.0.0.1:1", token_file=tmp_path / "token")
        with pytest.raises(RecinferError, match="expected one of them"):
            client("127.0.0.1:1", token=OLD, token_file=tmp_path / "token")


def test_the_asyncio_client_follows_its_files(predictor: Predictor, made: list[Path], tmp_path: Path):
    install(made[0], tmp_path)
    path = tmp_path / "token"
    path.write_text(OLD)
    security = Security(tls_cert=tmp_path / "cert.pem", tls_key=tmp_path / "key.pem", token_file=path)
    _, features = make_request(1, 2)

    async def calls(target: str) -> None:
        async with AsyncInferenceClient(target, token_file=path, tls_ca=tmp_path / "ca.pem", timeout=60) as client:
            await client.lookup(features)
            first = client._channel
            path.write_text(NEW)
            install(made[1], tmp_path)
            while security.tokens != (NEW,) or not uses(security, tmp_path):
                await asyncio.sleep(0.02)
            while client._channel is first:  # a call before the client's next look may have the old token
                with suppress(RecinferError):
                    await client.lookup(features)
            while client._credentials._files.used[path] != NEW.encode():
                client._credentials.changed()
            await client.lookup(features)

    with Server({"tiny": predictor}, security=security) as server:
        run_on_loop(calls(server.target), timeout=120)


# -- rankers


def test_a_ranker_follows_the_shard_servers_files(
    archive: Path, made: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        "recinfer.serving.shards.replicas._SWITCH_S", 3600.0
    )  # old connections stay until the new are up
    server_files, ranker_files = tmp_path / "server", tmp_path / "ranker"
    for folder in (server_files, ranker_files):
        folder.mkdir()
        install(made[0], folder)
        (folder / "token").write_text(OLD)
    security = Security(
        tls_cert=server_files / "cert.pem",
        tls_key=server_files / "key.pem",
        client_ca=server_files / "ca.pem",
        token_file=server_files / "token",
    )
    settings = {
        "token_file": str(ranker_files / "token"),
        "tls_ca": str(ranker_files / "ca.pem"),
        "tls_cert": str(ranker_files / "cert.pem"),
        "tls_key": str(ranker_files / "key.pem"),
    }
    _, features = make_request(1, 2)
    with shard(archive, (0, 1), security=security) as server:
        listed = write_shards(tmp_path / "shards.json", {0: [server.target], 1: [server.target]}, **settings)
        with asking(listed) as fan_out:
            predictor = load(archive, lookups=MakeLookups(fan_out))
            expected = predictor.lookup(features)
            failed: list[Exception] = []
            ends = threading.Event()

            def send() -> None:
                while not ends.is_set():
                    try:
                        predictor.lookup(features)
                    except Exception as error:
                        failed.append(error)

            caller = threading.Thread(target=send)
            caller.start()
            try:
                both = b"".join((one / "ca.pem").read_bytes() for one in made)
                for folder in (server_files, ranker_files):
                    (folder / "ca.pem").write_bytes(both)
                    (folder / "token").write_text(f"{OLD}\n{NEW}\n")
                until(lambda: security.tokens == (OLD, NEW) and uses(security, server_files))
                before = fan_out.pool.everyone()
                until(lambda: fan_out.pool._credentials.files[0] == both)
                for folder in (server_files, ranker_files):
                    (folder / "token").write_text(f"{NEW}\n{OLD}\n")
                    for name in ("cert.pem", "key.pem"):
                        shutil.copy(made[1] / name, folder / name)
                until(lambda: security.tokens == (NEW, OLD) and uses(security, server_files))
                until(lambda: fan_out.pool._credentials.token == NEW and fan_out.pool.everyone()[0] not in before)
                until(lambda: all(replica.up for replica in fan_out.pool.everyone()))
                (ranker_files / "token").write_text("")
                until(lambda: "holds no token" in fan_out.pool._last_error)
                assert fan_out.pool._credentials.token == NEW
            finally:
                ends.set()
                caller.join()
            assert not failed, failed[:3]
            assert (predictor.lookup(features).pooled.values() == expected.pooled.values()).all()


# -- processes


def test_a_worker_falls_back_on_the_supervisors_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "token").write_text(NEW)
    config = SecurityConfig(token_file=tmp_path / "token")
    monkeypatch.setenv("RECINFER_TOKEN", OLD)
    assert config.read(worker=True).tokens == config.read().tokens == (NEW,)
    (tmp_path / "token").write_text("")
    assert config.read(worker=True).tokens == (OLD,)
    with pytest.raises(ConfigError, match="got 0 lines"):
        config.read()


def test_the_command_follows_its_files_and_survives_sighup(archive: Path, tmp_path: Path):
    path = tmp_path / "token"
    path.write_text(OLD)
    _, features = make_request(1, 2)
    arguments = ["--port", 0, "--json", "--token-file", path, "--workers", 2, *WAITS]
    with Program(warm_workers(), "serve", archive, *arguments) as process:
        try:
            target = f"127.0.0.1:{json.loads(process.stdout.readline())['port']}"
            path.write_text(NEW)
            process.send_signal(signal.SIGHUP)

            def answered(token: str) -> bool:
                with InferenceClient(target, token=token, timeout=60) as client:
                    try:
                        client.lookup(features)
                    except RecinferError as error:
                        assert "needs a token" in str(error)
                        return False
                    return True

            until(lambda: all(answered(NEW) for _ in range(8)))
            until(lambda: not any(answered(OLD) for _ in range(8)))
            assert process.returncode is None
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait() == 0


# -- expiry


def test_expiry_is_that_of_the_first_certificate_to_expire(made: list[Path], tmp_path: Path):
    chain = (made[0] / "cert.pem").read_bytes() + (made[0] / "ca.pem").read_bytes()
    shown = subprocess.run(["openssl", "x509", "-noout", "-enddate"], input=chain, capture_output=True, check=True)
    expected = ssl.cert_time_to_seconds(shown.stdout.decode().strip().removeprefix("notAfter="))
    assert abs(expiry_of(chain) - expected) <= 600 and expiry_of((made[0] / "cert.pem").read_bytes()) == expected
    later = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    later += ["-days", "36500", "-subj", "/CN=a", "-keyout", str(tmp_path / "key"), "-out", str(tmp_path / "pem")]
    subprocess.run(later, check=True, capture_output=True)
    assert expiry_of((tmp_path / "pem").read_bytes()) > 2**32  # a GeneralizedTime, of 2050 and later
    for junk in (b"", b"junk", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"):
        with pytest.raises(ConfigError, match="holds no certificate whose validity can be read"):
            expiry_of(junk)


@pytest.mark.parametrize(("days", "says"), [(3.0, "expires in 3.0 days"), (-3.0, "expired 3.0 days ago")])
def test_a_certificate_that_expires_soon_is_a_log_line_at_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, days: float, says: str
):
    need_openssl()
    self_signed(tmp_path, ("server",), "IP:127.0.0.1")
    security = Security(tls_cert=tmp_path / "server.pem", tls_key=tmp_path / "server.key")
    monkeypatch.setattr(security_module, "expiry_of", lambda pem: time.time() + days * 86_400 + 60)
    security.credentials()
    assert says in caplog.text
    assert security.figures()["certificate_expiry"] == pytest.approx(days * 86_400, abs=3600)
    assert os.listdir(tmp_path)
