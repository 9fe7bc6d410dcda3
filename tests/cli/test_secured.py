"""``lookup``, ``predict`` and ``bench serve`` with TLS, mutual TLS, and a certificate for another name than the target's."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from recinfer.cli.lookup import parse_features
from recinfer.errors import InputError
from recinfer.inference.predictor import Predictor, load
from recinfer.serving.client.admin import AdminClient
from recinfer.serving.client.client import AsyncInferenceClient, InferenceClient
from recinfer.serving.server.security import Security
from recinfer.serving.server.server import Server
from recinfer.serving.wire.loop import run_on_loop
from tests.certificates import certified, need_openssl
from tests.cli.conftest import Exported
from tests.e2e.commands import run_json

NAME = "rankers.example"
FEATURES = {"user": [[3], [7, 9]], "item": [[5], []], "history": [[], [1, 2]], "shop": [[4], [6]]}


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of an authority, and of one certificate of it, of server and caller, that is for ``NAME`` alone."""
    need_openssl()
    return certified(tmp_path_factory.mktemp("tls"), f"DNS:{NAME}")


@pytest.fixture(scope="module")
def predictor(exported: Exported) -> Predictor:
    return load(exported.archive)


@pytest.fixture(scope="module")
def target(predictor: Predictor, tls: Path) -> Iterator[str]:
    """A server behind mutual TLS, by an address that its certificate does not have."""
    security = Security(tls_cert=tls / "cert.pem", tls_key=tls / "key.pem", client_ca=tls / "ca.pem")
    with Server({"tiny": predictor}, security=security) as server:
        yield server.target


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Two samples for ``recinfer predict``."""
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"dense": [[0.5, 1.0, -2.0], [0.0, 0.25, 3.0]], "features": FEATURES}))
    return path


def options(tls: Path, *but: str) -> list[object]:
    """The options for TLS, without those in ``lacking``."""
    all_of_them = {"ca": tls / "ca.pem", "cert": tls / "cert.pem", "key": tls / "key.pem", "name": NAME}
    return [part for name, value in all_of_them.items() if name not in but for part in (f"--tls-{name}", value)]


def test_lookup_and_predict_by_the_name_in_the_certificate(
    predictor: Predictor, target: str, tls: Path, rows: Path, tmp_path: Path
) -> None:
    trusted = ["--target", target, "--timeout", 120, "--wait", 120, *options(tls)]
    texts = ["user=3;7,9", "shop=4;6"]
    found = run_json("lookup", *trusted, *(part for text in texts for part in ("--feature", text)))
    expected = predictor.lookup(parse_features(texts))
    assert set(found["pooled"]) == {"user", "shop"}
    for name, values in found["pooled"].items():
        assert torch.equal(torch.tensor(values), expected[name])

    scores = tmp_path / "scores.csv"
    answer = run_json("predict", *trusted, "--input", rows, "--out", scores)
    dense = torch.tensor(json.loads(rows.read_text())["dense"])
    own = predictor.predict(dense, parse_features(["user=3;7,9", "item=5;", "history=;1,2", "shop=4;6"]))
    for name, values in answer["outputs"].items():
        torch.testing.assert_close(torch.tensor(values), own[name])
    with scores.open() as file:
        assert len(list(csv.DictReader(file))) == answer["rows"] == 2


def test_load_by_the_name_in_the_certificate(target: str, tls: Path) -> None:
    load_ = ["--target", target, "--duration", 0.05, "--timeout", 120, "--wait", 120]
    (level,) = run_json("bench", "serve", *load_, *options(tls))["levels"]
    assert level["requests"] > 0 and level["errors"] == {}


@pytest.mark.parametrize("lacking", [("name",), ("cert", "key"), ("ca", "cert", "key", "name")])
def test_each_tls_option_is_required(lacking: tuple[str, ...], target: str, tls: Path, rows: Path) -> None:
    for verb in (["lookup", "--feature", "user=3"], ["predict", "--input", rows], ["bench", "serve"]):
        error = run_json(*verb, "--target", target, "--timeout", 120, *options(tls, *lacking), code=2)["error"]
        assert (error["type"], target in error["message"]) == ("UnavailableError", True)


def test_name_or_certificate_without_authority_is_an_error(target: str, tls: Path) -> None:
    for lacking, said in ((("ca", "cert", "key"), NAME), (("ca",), "tls_ca"), (("key",), "both or neither")):
        command = ["lookup", "--feature", "user=3", "--target", target, *options(tls, *lacking)]
        error = run_json(*command, code=2)["error"]
        assert error["type"] == "InputError"
        assert said in error["message"]


def test_the_clients_take_the_name_too(target: str, tls: Path) -> None:
    files = {"tls_ca": tls / "ca.pem", "tls_cert": tls / "cert.pem", "tls_key": tls / "key.pem"}
    with InferenceClient(target, timeout=120, tls_name=NAME, **files) as client:
        assert client.get_model().name == "tiny"

    async def ask() -> str:
        async with AsyncInferenceClient(target, timeout=120, tls_name=NAME, **files) as mine:
            return (await mine.get_model()).name

    assert run_on_loop(ask(), timeout=180) == "tiny"
    for kind in (InferenceClient, AsyncInferenceClient, AdminClient):
        with pytest.raises(InputError, match=f"{NAME}.*tls_ca"):
            kind(target, tls_name=NAME)
