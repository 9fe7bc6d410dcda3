"""A real server process under faults: malformed messages, clock jumps, clients that stall or disconnect."""

from __future__ import annotations

import asyncio
import http.client
import json
import mmap
import os
import random
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import IO, Any

import grpc
import grpc.aio
import pytest
import torch

from recinfer.inference.predictor import Predictor
from recinfer.serving.client.client import InferenceClient
from recinfer.serving.server.open_inference_grpc import SERVICE_NAME as OPEN_INFERENCE
from recinfer.serving.server.server import SERVICE_NAME, Server
from recinfer.serving.wire import codec
from recinfer.serving.wire.limits import BatchConfig
from recinfer.serving.wire.proto import inference_pb2 as pb
from recinfer.serving.wire.proto import open_inference_pb2 as oip
from tests.ports import free_port
from tests.serving.conftest import make_request
from tests.serving.supervised import Load
from tests.serving.test_batching import hold
from tests.serving.test_hostile import BLAME, mutations
from tests.waiting import until
from tests.warm import WarmPopen

aiohttp = pytest.importorskip("aiohttp", reason="aiohttp is not installed (the serve extra)")
from recinfer.serving.server.http_site import HttpSite  # noqa: E402
from recinfer.serving.wire.loop import run_on_loop  # noqa: E402

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

REFUSED = {code.name for code in BLAME} | {"UNIMPLEMENTED"}


# `recinfer`, but a stop lets requests run for as long as they take on a slow machine.
PATIENT = """
import functools
from recinfer.serving.server import run
run.serve = functools.partial(run.serve, grace=120.0)
from recinfer.cli.main import main
main()
"""


@contextmanager
def serving(
    archive: Path, *arguments: str, program: tuple[str, str] = ("-m", "recinfer"), **environment: str
) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """``recinfer serve`` of the archive in its own process, and the JSON that it printed when it was ready; forked from a warm
    interpreter, unless its environment has to be there when it starts."""
    command = [sys.executable, *program, "serve", str(archive), "--port", "0", "--json", *arguments]
    with tempfile.TemporaryFile("w+") as log:  # a pipe that nobody reads would stop a server that writes too much
        start: Any = subprocess.Popen if environment else WarmPopen
        process = start(command, stdout=subprocess.PIPE, stderr=log, text=True, env=os.environ | environment)
        try:
            line = process.stdout.readline()
            assert line, told(log)
            yield process, json.loads(line)
            process.send_signal(signal.SIGTERM)
            assert process.wait(180) == 0, told(log)
            assert "Traceback" not in told(log), told(log)
            assert len(told(log)) < 10_000, told(log)  # malformed requests must not fill the disk with log lines
        finally:
            process.kill()
            process.communicate()


def told(log: IO[str]) -> str:
    log.seek(0)
    return log.read()


def memory_mib(process: subprocess.Popen[str]) -> float:
    """Memory of the process that is not mapped from files (RssAnon), in MiB."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


def answers_well(target: str, predictor: Predictor) -> None:
    dense, kjt = make_request(99, 5)
    with InferenceClient(target, timeout=60) as client:
        client.wait_until_ready(60)
        assert torch.equal(client.lookup(kjt).pooled.values(), predictor.lookup(kjt).pooled.values())
        torch.testing.assert_close(
            client.predict(dense, kjt)["output"], predictor.predict(dense, kjt)["output"], rtol=0, atol=1e-6
        )


# -- ten thousand malformed messages -----------------------------------------------------------------------------------


def nonsense(rng: random.Random, seed: int) -> list[tuple[str, bytes]]:
    """About a hundred calls by full name: those of test_hostile, and the Open Inference Protocol's, contexts and raw rows."""
    calls = [(f"/{SERVICE_NAME}/{call}", data) for call, data in mutations(seed)]
    dense, kjt = make_request(seed, 2, keys=["item", "shop"])
    good = pb.PredictRequest.FromString(codec.encode_predict_request(dense, kjt, context=make_request(seed, 1)[1]))
    for _ in range(4):
        message = pb.PredictRequest.FromString(good.SerializeToString())
        message.context.batch_size = rng.choice([-1, 0, 2, 2**31 - 1])
        message.context.lengths = rng.randbytes(rng.choice([0, 3, 8, 4096]))
        calls.append((f"/{SERVICE_NAME}/Predict", message.SerializeToString()))
        raw = pb.PredictRequest(raw=rng.randbytes(rng.choice([1, 8, 500])))
        calls.append((f"/{SERVICE_NAME}/Predict", raw.SerializeToString()))
    infer = f"/{OPEN_INFERENCE}/ModelInfer"
    for _ in range(12):
        request = oip.ModelInferRequest(model_name=rng.choice(["tiny", "nobody", ""]))
        for _ in range(rng.randrange(1, 4)):
            tensor = request.inputs.add(
                name=rng.choice(["user", "user.values", "user.lengths", "user.weights", "dense", "x" * 2000]),
                datatype=rng.choice(["INT64", "INT32", "FP32", "BYTES", ""]),
                shape=rng.choice([[1], [-1], [2**62, 2**62], [], [0], [3, 5], [1] * 100]),
            )
            if rng.random() < 0.3:
                tensor.contents.int64_contents.extend([rng.randrange(-5, 2**62)] * rng.randrange(5))
        if rng.random() < 0.7:
            request.raw_input_contents.extend(rng.randbytes(rng.choice([0, 1, 8, 64])) for _ in request.inputs)
        data = request.SerializeToString()
        calls.append((infer, data[: rng.randrange(len(data))] if rng.random() < 0.2 else data))
    # A length prefix of gigabytes, and an invalid tag.
    calls += [(infer, b"\x0a\xff\xff\xff\xff\x0f"), (infer, b"\x2a\xfe\xff\xff\xff\x07ab"), (infer, b"\x07\x07")]
    return calls


async def flood(target: str, calls: list[tuple[str, bytes]]) -> Counter[str]:
    """The answers to the calls, sixteen at a time; details of refusals are checked."""
    codes: Counter[str] = Counter()
    turns = iter(calls)
    async with grpc.aio.insecure_channel(target) as channel:

        async def caller() -> None:
            for path, data in turns:
                try:
                    await channel.unary_unary(path)(data, timeout=60)
                    codes["OK"] += 1
                except grpc.aio.AioRpcError as error:
                    codes[error.code().name] += 1
                    details = error.details() or ""
                    assert error.code().name in REFUSED, (path, data, error.code(), details)
                    assert len(details) < 2000, path
                    assert not any(word in details for word in ("Traceback", ".py", "site-packages")), details

        await asyncio.gather(*(caller() for _ in range(16)))
    return codes


async def flood_http(port: int, count: int, rng: random.Random) -> Counter[int]:
    codes: Counter[int] = Counter()
    base = f"http://127.0.0.1:{port}/v2/models/"
    async with aiohttp.ClientSession() as session:
        for _ in range(count):
            good = json.dumps({"inputs": [{"name": "user", "datatype": "INT64", "shape": [1], "data": [99]}]}).encode()
            body = rng.choice(
                [
                    rng.randbytes(rng.randrange(200)),
                    good[: rng.randrange(len(good))],
                    b"[" * 5000,
                    b'{"inputs": 3}',
                    b'{"inputs": [{"name": "user", "datatype": "INT64", "shape": [-1], "data": [1e400]}]}',
                    b'{"inputs": [{"name": "user", "datatype": "INT64", "shape": [9], "parameters": {"binary_data_size": 72}}]}',
                ]
            )
            headers = rng.choice([{}, {"Inference-Header-Content-Length": rng.choice(["-1", "9999", "x", "2"])}])
            path = rng.choice(["tiny/infer", "nobody/infer", "tiny/versions/9/infer", "%00/infer"])
            async with session.post(base + path, data=body, headers=headers) as answer:
                codes[answer.status] += 1
                assert answer.status in (400, 404, 413), (path, body, headers, await answer.text())
                assert b"Traceback" not in await answer.read()
    return codes


def garbage(port: int, rng: random.Random) -> None:
    """Bytes that are no HTTP of any version, on a connection of their own."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        start = rng.choice(
            [b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"POST /v2 HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n"]
        )
        frame = struct.pack(">I", rng.randrange(1 << 24))[1:] + rng.randbytes(6)
        connection.sendall(start + frame + rng.randbytes(rng.randrange(400)))


def test_ten_thousand_malformed_messages(archive: Path, predictor: Predictor):
    rng = random.Random(7)
    http = free_port()
    # One heap: what the threads of the moment took does not stay in heaps of their own.
    with serving(archive, "--http-port", str(http), MALLOC_ARENA_MAX="1") as (process, ready):
        target = f"127.0.0.1:{ready['port']}"
        calls: list[tuple[str, bytes]] = []
        for seed in range(1000):
            calls += nonsense(rng, seed)
            if len(calls) > 8_700:
                break
        first, more = calls[: len(calls) // 2], calls[len(calls) // 2 :]
        codes = asyncio.run(flood(target, first))
        http_codes = asyncio.run(flood_http(http, 500, rng))
        before = memory_mib(process)  # memory that each kind of message takes only once is taken by now
        codes += asyncio.run(flood(target, more))
        http_codes += asyncio.run(flood_http(http, 500, rng))
        for number in range(400):
            garbage(ready["port"] if number % 2 else http, rng)
        assert codes.total() + http_codes.total() + 400 >= 10_000
        assert codes["OK"] < codes.total() // 4
        answers_well(target, predictor)
        grown = memory_mib(process) - before
        assert grown < 12, f"{grown:.1f} MiB more after {len(more)} messages that it has not had before"


# -- the wall clock ----------------------------------------------------------------------------------------------------

SHIFTED_CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
static long shift(void) {
    static volatile long *at;
    if (!at) {
        void *found = mmap(0, sizeof(long), PROT_READ, MAP_SHARED, open(getenv("SHIFT_FILE"), O_RDONLY), 0);
        at = found;
    }
    return *at;
}
int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, now);
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) now->tv_sec += shift();
    return result;
}
int gettimeofday(struct timeval *now, void *zone) {
    struct timespec fine;
    clock_gettime(CLOCK_REALTIME, &fine);
    now->tv_sec = fine.tv_sec;
    now->tv_usec = fine.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *now) {
    struct timespec fine;
    clock_gettime(CLOCK_REALTIME, &fine);
    if (now) *now = fine.tv_sec;
    return fine.tv_sec;
}
"""


def test_jumps_of_the_clock_change_nothing(archive: Path, tmp_path: Path, predictor: Predictor):
    """The server's wall clock, also of its C++ libraries, jumps by days: no deadline, delay or age depends on it."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler, to give one process another wall clock")
    (tmp_path / "clock.c").write_text(SHIFTED_CLOCK)
    library = tmp_path / "clock.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, tmp_path / "clock.c", "-ldl"], check=True)
    (tmp_path / "shift").write_bytes(bytes(8))
    probe = subprocess.run(
        [sys.executable, "-c", "import time; print(time.time())"],
        env=os.environ | {"LD_PRELOAD": str(library), "SHIFT_FILE": str(shifted(tmp_path, 10**6))},
        capture_output=True,
        text=True,
        check=True,
    )
    assert float(probe.stdout) > time.time() + 900_000  # else this would test nothing
    shifted(tmp_path, 0)
    arguments = ("--metrics-port", "0")
    preload = {"LD_PRELOAD": str(library), "SHIFT_FILE": str(tmp_path / "shift")}
    with serving(archive, *arguments, **preload) as (_, ready):
        target = f"127.0.0.1:{ready['port']}"
        with Load(target, 4) as load:
            for shift in (86_400, -3 * 86_400, 40 * 365 * 86_400, 0, 1, -1):
                shifted(tmp_path, shift)
                goal = load.codes.get("OK", 0) + 40
                until(lambda goal=goal: load.codes.get("OK", 0) > goal)
                with urllib.request.urlopen(
                    f"http://127.0.0.1:{ready['metrics_port']}/status.json", timeout=60
                ) as page:
                    status = json.loads(page.read())
                assert (
                    0 <= status["models"][0]["age"] < 3600 and 0 <= status["uptime"] < 3600
                )  # no latency includes a day
                assert status["queue"]["expired"] == 0
        assert set(load.codes) == {"OK"}, load.codes
        answers_well(target, predictor)


def shifted(folder: Path, seconds: int) -> Path:
    """Set the clock of the processes that read the file."""
    with (folder / "shift").open("r+b") as file, mmap.mmap(file.fileno(), 8) as memory:
        memory[:] = struct.pack("<q", seconds)
    return folder / "shift"


# -- the end of a server -----------------------------------------------------------------------------------------------


def test_sigterm_ends_what_was_begun(archive: Path):
    """Forty large requests are in the server when the signal comes: each gets its answer, and new callers get none."""
    dense, kjt = make_request(0, 12_000)
    data = codec.encode_predict_request(dense, kjt)
    # The default budget of 256 MiB may refuse the last of them, if they come faster than they are answered.
    options = ("--metrics-port", "0", "--memory-budget-mib", "2048")
    with serving(archive, *options, program=("-c", PATIENT)) as (process, ready):
        url = f"http://127.0.0.1:{ready['metrics_port']}/status.json"
        with grpc.insecure_channel(f"127.0.0.1:{ready['port']}") as channel:
            predict = channel.unary_unary(f"/{SERVICE_NAME}/Predict")
            calls = [predict.future(data, timeout=120) for _ in range(40)]

            def inside() -> int:
                with urllib.request.urlopen(url, timeout=60) as page:
                    status = json.loads(page.read())
                answered = sum(item["count"] for item in status["requests"])
                return status["queue"]["waiting"] + status["queue"]["running"] + answered

            until(lambda: inside() >= 40 or all(call.done() for call in calls))
            process.send_signal(signal.SIGTERM)
            assert {len(codec.decode_predict_response(call.result())[0]["output"]) for call in calls} == {12_000}

            def is_refused() -> bool:
                """Once the signal has been seen, which may be after the last answer."""
                try:
                    predict(data, timeout=60)
                except grpc.RpcError as error:
                    assert error.code() is grpc.StatusCode.UNAVAILABLE
                    return True
                return False

            until(is_refused)
        assert process.wait(180) == 0


# -- clients that stall or disconnect ----------------------------------------------------------------------------------


def test_disconnected_http_caller_frees_its_place(predictor: Predictor, monkeypatch: pytest.MonkeyPatch):
    begun, go_on = hold(predictor, monkeypatch)
    config = BatchConfig(max_queue=2)
    with Server({"tiny": predictor}, threads=1, batching=config, http_port=0) as server:
        assert server.scheduler is not None
        batcher = server.scheduler
        with grpc.insecure_channel(server.target) as channel, ExitStack() as stack:
            running = channel.unary_unary(f"/{SERVICE_NAME}/Lookup").future(
                codec.encode_lookup_request(make_request(0, 4000)[1]), timeout=90
            )
            assert begun.wait(60)
            body = json.dumps(
                {
                    "inputs": [{"name": "user", "datatype": "INT64", "shape": [1], "data": [3]}],
                    "parameters": {"method": "lookup"},
                }
            ).encode()
            head = f"POST /v2/models/tiny/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            for _ in range(2):
                connection = stack.enter_context(socket.create_connection(("127.0.0.1", server.http_port)))
                connection.sendall(head + body)
            until(lambda: batcher.state.waiting == 2)
            stack.close()
            until(lambda: batcher.state.waiting == 0)
            go_on.set()
            assert running.result()


def test_a_hundred_stalled_clients_do_not_affect_others(archive: Path, predictor: Predictor):
    """Connections that say nothing, half a greeting, half a header, half a body, and calls without a request."""
    http = free_port()
    with (
        serving(archive, "--http-port", str(http), MALLOC_ARENA_MAX="1") as (process, ready),
        ExitStack() as stack,
    ):
        target = f"127.0.0.1:{ready['port']}"
        answers_well(target, predictor)
        before, threads = memory_mib(process), len(os.listdir(f"/proc/{process.pid}/task"))
        starts = [
            (ready["port"], b""),
            (ready["port"], b"PRI * HTTP/2.0\r\n"),
            (ready["port"], b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(5)),
            (http, b""),
            (http, b"POST /v2/models/tiny/infer HTTP/1.1\r\nHost: x\r\n"),
            (http, b"POST /v2/models/tiny/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 60000000\r\n\r\n{"),
        ]
        for number in range(120):
            port, data = starts[number % len(starts)]
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60)).sendall(data)
        gone = threading.Event()
        stack.callback(gone.set)
        channel = stack.enter_context(grpc.insecure_channel(target))
        lookup = channel.stream_unary(f"/{SERVICE_NAME}/Lookup")
        for _ in range(1100):  # more than one connection may have open
            lookup.future(never(gone))
        with Load(target, 2) as load:
            until(lambda: load.codes.get("OK", 0) > 100)
        assert set(load.codes) == {"OK"}
        answers_well(target, predictor)
        # gRPC takes a few more for a while when none of its own gets a core.
        until(lambda: len(os.listdir(f"/proc/{process.pid}/task")) <= threads + 4)
        assert memory_mib(process) - before < 64


def never(gone: threading.Event) -> Iterator[bytes]:
    """Requests of a call that sends none."""
    gone.wait(600)
    yield from ()


def test_a_silent_http_connection_is_closed():
    app = aiohttp.web.Application()

    async def answer(request: Any) -> Any:
        return aiohttp.web.Response(text="here")

    app.router.add_get("/", answer)
    whole = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    site = HttpSite(app, "127.0.0.1", 0, header_s=0.3, idle_s=0.5)
    run_on_loop(site.start())
    try:
        for data in (b"", b"GET / HTTP/1.1\r\nHost:", whole + b"GET / HT"):
            until_closed(site.port, data)
    finally:
        run_on_loop(site.stop(1.0))
    # With a timeout for headers that also a machine that pauses does not exceed before it has read one.
    app = aiohttp.web.Application()
    app.router.add_get("/", answer)
    site = HttpSite(app, "127.0.0.1", 0, header_s=60.0, idle_s=0.5)
    run_on_loop(site.start())
    try:
        assert until_closed(site.port, whole).endswith(b"here")
    finally:
        run_on_loop(site.stop(1.0))


def test_an_http_connection_is_kept_for_the_next_request():
    app = aiohttp.web.Application()

    async def answer(request: Any) -> Any:
        return aiohttp.web.Response(text="here")

    app.router.add_get("/", answer)
    site = HttpSite(app, "127.0.0.1", 0, header_s=60.0, idle_s=60.0)
    run_on_loop(site.start())
    try:
        connection = http.client.HTTPConnection("127.0.0.1", site.port, timeout=60)
        with closing(connection):
            connection.connect()
            own = connection.sock.getsockname()
            for _ in range(2):
                connection.request("GET", "/")
                assert connection.getresponse().read() == b"here"
                assert connection.sock is not None and connection.sock.getsockname() == own
    finally:
        run_on_loop(site.stop(1.0))


def until_closed(port: int, data: bytes) -> bytes:
    """Send ``data``; what the other end says until it closes the connection, which it has to."""
    said = b""
    with socket.create_connection(("127.0.0.1", port), timeout=90) as connection:
        connection.sendall(data)
        try:
            while got := connection.recv(4096):
                said += got
        except ConnectionResetError:
            pass
    return said


def test_half_a_greeting_is_closed(predictor: Predictor, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("recinfer.serving.server.grpc_methods._HANDSHAKE_MS", 500)
    with Server({"tiny": predictor}) as server:
        until_closed(server.port, b"PRI * HTTP/2.0\r\n")  # which gRPC by itself does after 120 s
        answers_well(server.target, predictor)


def test_old_connections_are_replaced_without_a_failure(predictor: Predictor, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("recinfer.serving.server.grpc_methods._AGE_MS", 300)
    with Server({"tiny": predictor}) as server:
        with Load(server.target, 3) as load:
            end = time.monotonic() + 3
            until(lambda: time.monotonic() > end and load.codes.get("OK", 0) > 100)
        assert set(load.codes) == {"OK"}, load.codes
