"""Compressed bodies over HTTP: the numbers of plain ones, and never more memory than a plain one may take."""

from __future__ import annotations

import gzip
import http.client
import json
import tracemalloc
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from recinfer.errors import InputError
from recinfer.inference.predictor import Predictor
from recinfer.serving.server.compression import TooLargeError, unpack
from recinfer.serving.server.server import Server
from recinfer.serving.wire.limits import Limits
from tests.serving.conftest import make_request

pytest.importorskip("aiohttp", reason="aiohttp is not installed (the serve extra)")
triton = pytest.importorskip("tritonclient.http", reason="tritonclient[http] is not installed (the dev extra)")

MOST = 1 << 20
ENCODINGS = ("gzip", "deflate")


@pytest.fixture(scope="module")
def server(predictor: Predictor) -> Iterator[Server]:
    """A server with both HTTP ports, that takes bodies of a MiB."""
    with Server({"tiny": predictor}, limits=Limits(max_message_bytes=MOST), http_port=0, metrics_port=0) as running:
        yield running


def pack(data: bytes, encoding: str) -> bytes:
    return gzip.compress(data, 1) if encoding == "gzip" else zlib.compress(data, 1)


def asked() -> dict[str, Any]:
    """A lookup as JSON."""
    tensor = {"name": "user", "datatype": "INT64", "shape": [2], "data": [3, 7]}
    return {"inputs": [tensor], "outputs": [{"name": "user.embedding"}]}


def ask(
    port: int | None, body: bytes, encoding: str, method: str = "POST", path: str = "/v2/models/tiny/infer"
) -> tuple[int, bytes]:
    """Status and body of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port or 0, timeout=120)
    try:
        connection.request(method, path, body, {"Content-Encoding": encoding} if encoding else {})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("batch", [1, 500])
def test_tritonclient_may_compress(server: Server, predictor: Predictor, encoding: str, batch: int):
    dense, kjt = make_request(batch, batch)
    arrays: dict[str, np.ndarray] = {"dense": dense.numpy()}
    for key, value in kjt.to_dict().items():
        arrays[f"{key}.values"] = value.values().numpy()
        arrays[f"{key}.lengths"] = value.lengths().numpy().astype(np.int32)
    datatypes = {"int64": "INT64", "int32": "INT32", "float32": "FP32"}
    inputs = []
    for name, array in arrays.items():
        inputs.append(triton.InferInput(name, list(array.shape), datatypes[array.dtype.name]))
        inputs[-1].set_data_from_numpy(array)
    client = triton.InferenceServerClient(f"127.0.0.1:{server.http_port}")
    found = client.infer("tiny", inputs, request_compression_algorithm=encoding)
    client.close()
    expected = predictor.predict(dense, kjt)["output"].numpy()
    np.testing.assert_allclose(found.as_numpy("output"), expected, rtol=0, atol=1e-6)


def test_a_body_of_just_the_limit_is_taken_and_of_a_byte_more_is_not(server: Server):
    body = json.dumps(asked()).encode()
    plain = ask(server.http_port, body, "")
    assert plain[0] == 200
    for encoding in ENCODINGS:
        full = body + b" " * (MOST - len(body))
        assert ask(server.http_port, pack(full, encoding), encoding) == plain
        code, answer = ask(server.http_port, pack(full + b" ", encoding), encoding)
        assert (code, str(MOST) in json.loads(answer)["error"]) == (413, True)


WHOLE = pack(b"[" * 5000, "gzip")
BROKEN: dict[str, tuple[bytes, str, str]] = {
    "cut": (WHOLE[:-9], "gzip", "ends too early"),
    "without its sum": (WHOLE[:-3], "gzip", "ends too early"),
    "nothing": (b"", "gzip", "ends too early"),
    "junk behind": (WHOLE + b"x", "gzip", "behind"),
    "much junk behind": (WHOLE + bytes(1 << 18), "gzip", "behind"),
    "two streams": (WHOLE * 2, "gzip", "behind"),
    "wrong sum": (WHOLE[:-8] + bytes(8), "gzip", "cannot be read"),
    "no deflate": (b"[1, 2]", "deflate", "cannot be read"),
    "no gzip": (zlib.compress(b"{}"), "gzip", "cannot be read"),
    "unknown": (b"{}", "br", "expected gzip or deflate"),
    "twice": (gzip.compress(WHOLE), "gzip, gzip", "expected gzip or deflate"),
}


@pytest.mark.parametrize("case", list(BROKEN))
def test_a_body_that_is_not_what_it_says_is_refused(server: Server, case: str):
    body, encoding, words = BROKEN[case]
    code, answer = ask(server.http_port, body, encoding)
    assert (code, words in json.loads(answer)["error"]) == (400, True), answer


def bomb(encoding: str, mebibytes: int) -> bytes:
    """So many MiB of spaces, packed."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31 if encoding == "gzip" else 15)
    return b"".join(packer.compress(b" " * MOST) for _ in range(mebibytes)) + packer.flush()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_bomb_takes_no_more_memory_than_a_plain_body(server: Server, encoding: str):
    packed = bomb(encoding, 64)
    assert len(packed) < MOST  # or it would be refused for what it is
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        with ThreadPoolExecutor(8) as pool:
            codes = list(pool.map(lambda _: ask(server.http_port, packed, encoding)[0], range(24)))
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert set(codes) == {413}
    assert peak < 16 * MOST, f"{peak >> 20} MiB"
    assert ask(server.http_port, json.dumps(asked()).encode(), "")[0] == 200


def test_no_other_port_or_path_unpacks_anything(server: Server):
    packed = bomb("gzip", 64)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        assert ask(server.metrics_port, packed, "gzip", "GET", "/metrics")[0] == 200
        assert ask(server.metrics_port, packed, "gzip", "POST", "/metrics")[0] == 405
        assert ask(server.http_port, packed, "gzip", "GET", "/v2/health/live")[0] == 200
        assert ask(server.http_port, packed, "gzip", "POST", "/v2/nothing")[0] == 404
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert peak < 8 * MOST, f"{peak >> 20} MiB"


@pytest.mark.parametrize("size", [0, 1, 1000, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 3_000_000])
def test_unpacking_in_pieces_gives_the_whole(size: int):
    data = np.random.default_rng(size).integers(0, 3, size, np.uint8).tobytes()
    for packed in (pack(data, "gzip"), pack(data, "deflate"), zlib.compress(data, 1, -15)):
        encoding = "gzip" if packed[:2] == b"\x1f\x8b" else "deflate"
        assert unpack(packed, encoding, size) == data
        if size:
            with pytest.raises(TooLargeError):
                unpack(packed, encoding, size - 1)
        with pytest.raises(InputError, match=r"too early|cannot be read"):
            unpack(packed[:-1], encoding, size)
