"""Proxies of the environment: rankers use none, and a client's error names the variable of the one that gRPC used."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from recinfer.errors import UnavailableError
from recinfer.inference.predictor import Predictor, load
from recinfer.serving.client.admin import AdminClient
from recinfer.serving.client.client import AsyncInferenceClient, InferenceClient
from recinfer.serving.client.torchserve import TorchServeClient
from recinfer.serving.shards.lookups import MakeLookups
from tests.ports import free_port
from tests.serving.conftest import make_request
from tests.serving.remote.fleet import asking, shard, write_shards

VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy", "no_grpc_proxy", "no_proxy")


class Proxy:
    """Closes every connection once it has read what is to be connected.

    Attributes:
        asked: the first line of each connection.
    """

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.asked: list[bytes] = []
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection = self._socket.accept()[0]
            except OSError:  # closed
                return
            with connection:
                self.asked.append(connection.recv(4096).partition(b"\r\n")[0])

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    proxy = Proxy()
    yield proxy
    proxy.close()


@pytest.mark.parametrize("variable", ["grpc_proxy", "https_proxy", "http_proxy"])
def test_a_ranker_uses_no_proxy(
    variable: str, proxy: Proxy, archive: Path, predictor: Predictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(variable, proxy.url)
    features = make_request(0, 3)[1]
    with shard(archive, (0, 1)) as server:
        path = write_shards(tmp_path / "shards.json", {rank: [server.target] for rank in (0, 1)})
        with asking(path) as fan_out:
            found = load(archive, lookups=MakeLookups(fan_out)).lookup(features)
    assert torch.equal(found.pooled.values(), predictor.lookup(features).pooled.values())
    assert proxy.asked == []


PROXY = "the proxy"
CASES: dict[str, dict[str, str]] = {
    "none": {},
    "grpc_proxy": {"grpc_proxy": PROXY},
    "https_proxy": {"https_proxy": PROXY},
    "http_proxy": {"http_proxy": PROXY},
    "the first counts": {"http_proxy": PROXY, "grpc_proxy": PROXY},
    "an empty one": {"http_proxy": ""},
    "an empty one first": {"grpc_proxy": "", "http_proxy": PROXY},
    "no_proxy": {"http_proxy": PROXY, "no_proxy": "127.0.0.1"},
    "no_proxy of others": {"http_proxy": PROXY, "no_proxy": "localhost,10.0.0.0/8"},
    "no_proxy by network": {"http_proxy": PROXY, "no_proxy": "localhost, 127.0.0.0/8"},
    "no_proxy by its end": {"http_proxy": PROXY, "no_proxy": ".0.0.1"},
    "no_proxy of all": {"http_proxy": PROXY, "no_proxy": "*"},  # which is no name's end
    "no_proxy of nothing": {"http_proxy": PROXY, "no_proxy": ","},
    "no_proxy is empty": {"http_proxy": PROXY, "no_proxy": ""},
    "no_grpc_proxy": {"grpc_proxy": PROXY, "no_grpc_proxy": "127.0.0.1"},
    "no_grpc_proxy counts more": {"grpc_proxy": PROXY, "no_grpc_proxy": "localhost", "no_proxy": "127.0.0.1"},
}


@pytest.mark.parametrize("case", CASES)
def test_an_error_names_the_variable_whose_proxy_grpc_used(case: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch):
    for name, value in CASES[case].items():
        monkeypatch.setenv(name, proxy.url if value == PROXY else value)
    target = f"127.0.0.1:{free_port()}"  # where nobody listens
    with InferenceClient(target, retries=0, timeout=60) as client, pytest.raises(UnavailableError) as refused:
        client.get_model()
    used = next((name for name in VARIABLES[:3] if CASES[case].get(name)), "") if proxy.asked else ""
    assert set(proxy.asked) <= {f"CONNECT {target} HTTP/1.1".encode(), f"CONNECT {target} HTTP/1.0".encode()}
    assert ("through the proxy of" in str(refused.value)) == bool(proxy.asked), refused.value
    assert f"through the proxy of {used}," in str(refused.value) or not used
    assert bool(proxy.asked) == (case not in UNUSED)


UNUSED = {
    *("none", "an empty one", "an empty one first"),
    *("no_proxy", "no_proxy by network", "no_proxy by its end", "no_grpc_proxy"),
}


def _asynchronous(target: str) -> None:
    async def ask() -> None:
        async with AsyncInferenceClient(target, retries=0, timeout=60) as client:
            await client.get_model()

    asyncio.run(ask())


def _with(client: Any, call: Callable[[Any], object]) -> None:
    with client:
        call(client)


@pytest.mark.parametrize(
    "ask",
    [
        _asynchronous,
        lambda target: _with(AdminClient(target, timeout=60), lambda client: client.list_models()),
        lambda target: _with(TorchServeClient(target, "tiny", timeout=60), lambda c: c.lookup(make_request(0, 1)[1])),
    ],
    ids=["asynchronous", "admin", "TorchServe"],
)
def test_every_client_names_it(ask: Callable[[str], None], proxy: Proxy, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("http_proxy", proxy.url)
    with pytest.raises(UnavailableError, match="through the proxy of http_proxy, "):
        ask(f"127.0.0.1:{free_port()}")
    assert proxy.asked
