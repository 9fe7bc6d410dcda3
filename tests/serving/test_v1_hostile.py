"""3,000 malformed bodies from one seed against a running server: each gets 200 or 400, and memory stays bounded."""

from __future__ import annotations

import copy
import gzip
import http.client
import json
import random
import socket
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from recinfer.inference.predictor import Predictor
from recinfer.serving.server import http_server
from recinfer.serving.server.server import Server
from recinfer.serving.wire.limits import BatchConfig, Limits
from tests.serving.conftest import ROWS
from tests.serving.tasks import COLUMNS, tasks_archive, tasks_predictor
from tests.serving.test_sequences import predictors
from tests.serving.v1 import ask
from tests.waiting import until

pytest.importorskip("aiohttp", reason="aiohttp is not installed (the serve extra)")

__all__ = ["predictors", "tasks_archive", "tasks_predictor"]

MIB = 1 << 20
REQUESTS = 3000
TINY = {name: [1, 2] for name in ROWS} | {"dense": [0.5, 1.0, -2.0]}
TASKS = {"user": [3], "tags": {"ids": [1, 2], "weights": [0.5, 2]}} | dict.fromkeys(COLUMNS, 0.25)
VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 1.0, 1.5, -0.0, 49, 50, 2**31, 2**63 - 1, 2**63, -(2**63) - 1, 10**30, 10**400),
    *(1e38, 1e39, -1e308, float("nan"), float("inf"), "", "1", "NaN", "\ud800", "\0", "ü" * 300, [], {}, [[]], [{}]),
    *(
        [1, 2, 3],
        [1.5],
        ["a"],
        [None],
        [[1]],
        [True],
        {"ids": [1]},
        {"ids": [1], "weights": [1]},
        {"ids": 1, "weights": "a"},
    ),
    *({"weights": [1]}, {"ids": [1, 2], "weights": [1]}, {"ids": {"ids": [1]}}, {"b64": "AAAA"}, list(range(200))),
]
KEYS = [
    "instances",
    "inputs",
    "signature_name",
    "user",
    "dense",
    "tags",
    "ids",
    "weights",
    "",
    "x" * 2000,
    "price",
    "__proto__",
]


def body(chance: random.Random) -> tuple[str, bytes]:
    """A path and a body: a good one, changed in up to four places, as values or as text."""
    model, row = chance.choice(
        [("tiny", TINY), ("tasks", TASKS), ("sequences", {"clicks": [1], "page": 2}), ("weighted", {"tag": 1})]
    )
    rows = [copy.deepcopy(row) for _ in range(chance.choice([1, 1, 2, 5]))]
    document: Any = {"instances": rows}
    if chance.random() < 0.4:
        document = {"inputs": {name: [copy.deepcopy(row[name]) for _ in rows] for name in row}}
    for _ in range(chance.randrange(4)):
        document = _changed(document, chance)
    text = json.dumps(document).encode()
    for _ in range(chance.choice([0, 0, 0, 1, 3])):
        at = chance.randrange(len(text) + 1)
        piece = chance.choice(
            [
                b"",
                b"[" * 2000,
                b'{"user":' * 500,
                b"NaN",
                b"-Infinity",
                b'"',
                b"\xff\xfe",
                b"1e99999",
                b",",
                b"9" * 5000,
            ]
        )
        text = text[:at] + piece + text[at + chance.choice([0, 1, 7]) :]
    version = chance.choice([*[""] * 12, *["/labels/stable"] * 4, "/versions/3", "/labels/%00", "/versions/%ff"])
    return f"{model}{version}:{chance.choice(['predict', 'lookup'])}", text


def _changed(value: Any, chance: random.Random) -> Any:
    if not isinstance(value, dict | list) or not value or chance.random() < 0.15:
        return copy.deepcopy(chance.choice(VALUES))
    if isinstance(value, list):
        at = chance.randrange(len(value))
        return [*value[:at], _changed(value[at], chance), *value[at + 1 :]]
    key = chance.choice(list(value))
    what = chance.random()
    if what < 0.15:
        return {name: one for name, one in value.items() if name != key}
    if what < 0.3:
        return {**value, chance.choice(KEYS): copy.deepcopy(chance.choice(VALUES))}
    return {**value, key: _changed(value[key], chance)}


def test_three_thousand_broken_requests(
    predictor: Predictor, predictors: dict[str, Predictor], tasks_predictor: Predictor
):
    chance, codes = random.Random(26), Counter[int]()
    models = {"tiny": predictor, "tasks": tasks_predictor, **predictors}
    with Server(models, http_port=0, limits=Limits(max_batch=64)) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.http_port or 0, timeout=60)
        for number in range(REQUESTS):
            path, text = body(chance)
            connection.request("POST", f"/v1/models/{path}", text)
            answer = connection.getresponse()
            found = json.loads(answer.read())
            codes[answer.status] += 1
            assert answer.status in (200, 400, 404), (number, path, text[:2000], found)
            if answer.status != 200:
                assert found.keys() == {"error"} and found["error"], (number, path, text[:2000], found)
        connection.close()
        until(lambda: server.budget.held == 0)  # an answer is held until it was sent, and so until after it has come
        assert ask(server, "tiny:predict", {"instances": [TINY]})[0] == 200
    assert codes[200] > 200 and codes[400] > 1000, codes


@pytest.fixture
def server(predictor: Predictor) -> Iterator[Server]:
    """A server whose budget is of 32 MiB; all of it is free again at the end of each test."""
    limits = Limits(max_message_bytes=64 * MIB, memory_budget_bytes=32 * MIB)
    with Server({"tiny": predictor}, limits=limits, http_port=0) as running:
        yield running
        until(lambda: running.budget.held == 0)


def begin(stack: ExitStack, server: Server, num_bytes: int) -> socket.socket:
    """A connection on which a request of so many bytes has begun."""
    connection = stack.enter_context(socket.create_connection(("127.0.0.1", server.http_port or 0), timeout=60))
    head = f"POST /v1/models/tiny:lookup HTTP/1.1\r\nHost: x\r\nContent-Length: {num_bytes}\r\n\r\n"
    connection.sendall(head.encode() + b"{")
    return connection


def test_a_body_is_counted_before_it_is_read(server: Server):
    with ExitStack() as stack:
        begin(stack, server, 20 * MIB)
        until(lambda: server.budget.held == 20 * MIB)
        said = begin(stack, server, 9 * MIB).recv(4096)
        assert said.startswith(b"HTTP/1.1 429 ") and b"\r\nRetry-After: 1\r\n" in said
        assert server.stats.requests()["V1Lookup", "RESOURCE_EXHAUSTED"] == 1
        assert begin(stack, server, 65 * MIB).recv(4096).startswith(b"HTTP/1.1 413 ")
        assert ask(server, "tiny:lookup", {"instances": [{"user": 3}]})[0] == 200  # small calls have their reserve


def test_what_json_becomes_is_counted(server: Server):
    """A body of 1 MiB is 25 MiB with Python's objects; another large call is under way, so it is refused, packed or not."""
    large = b'{"instances": [{"user": [' + b"1," * (MIB // 2) + b"1]}]}"
    with ExitStack() as stack:
        begin(stack, server, 4 * MIB)
        until(lambda: server.budget.held == 4 * MIB)
        for data, headers in ((large, {}), (gzip.compress(large), {"Content-Encoding": "gzip"})):
            code, found, answer = ask(server, "tiny:lookup", data, **headers)
            assert (code, found["Retry-After"]) == (429, "1") and "memory budget" in answer["error"]
    until(lambda: server.budget.held == 0)
    assert ask(server, "tiny:lookup", large)[0] == 200


@pytest.mark.parametrize("path", ["v1/models/tiny:lookup", "v2/models/tiny/infer"])
def test_json_that_becomes_more_than_the_whole_budget_is_refused_unread(server: Server, path: str):
    """Parsed, 30 MiB take 720 MiB and block the interpreter for a second, in which no other call is answered."""
    for num_bytes in (2 * MIB, 30 * MIB):
        connection = http.client.HTTPConnection("127.0.0.1", server.http_port or 0, timeout=60)
        connection.request("POST", f"/{path}", b"[" + b"1," * (num_bytes // 2))
        answer = connection.getresponse()
        said = json.loads(answer.read())["error"]
        connection.close()
        assert answer.status == 413, said
        assert "bytes of JSON, expected at most 1342177" in said and "--memory-budget-mib" in said and "gRPC" in said
    assert server.stats.requests()["V1Lookup" if "v1" in path else "ModelInfer", "RESOURCE_EXHAUSTED"] == 2


@pytest.mark.parametrize("path", ["/docs/swagger-ui-bundle.js", "/openapi.json", "/v1/models/tiny/metadata"])
def test_what_is_shown_is_counted_until_it_was_sent(server: Server, path: str, monkeypatch: pytest.MonkeyPatch):
    """The viewer has 1.5 MB, and any caller may request it and not read the response."""
    if path.startswith("/docs"):
        pytest.importorskip("swagger_ui", reason="swagger-ui-py is not installed (the serve extra)")
    held: list[int] = []
    send = http_server._send

    async def looking(request: Any, answer: Any) -> None:
        held.append(server.budget.held - len(answer.body))
        await send(request, answer)

    monkeypatch.setattr(http_server, "_send", looking)
    with urllib.request.urlopen(f"http://127.0.0.1:{server.http_port}{path}", timeout=60) as answer:
        assert answer.status == 200 and answer.read()
    assert held == [0]


def test_full_queue_is_an_error_with_a_time_to_retry(predictor: Predictor):
    with Server({"tiny": predictor}, http_port=0, batching=BatchConfig(max_queue=1)) as server:
        assert server.scheduler is not None
        server.scheduler.queue.enter()  # as a queued request does
        code, headers, answer = ask(server, "tiny:predict", {"instances": [TINY]})
        assert (code, headers["Retry-After"]) == (429, "1") and "requests waiting" in answer["error"]
        server.scheduler.queue.leave(1)
        assert ask(server, "tiny:predict", {"instances": [TINY]})[0] == 200
