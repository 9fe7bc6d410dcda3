"""What ends a serving process or keeps callers out says so: a mapped file that was cut short, and too many open files."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import signal
import socket
import sys
import urllib.request
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from recinfer.errors import RecinferError
from recinfer.inference.predictor import load
from recinfer.serving.client.client import InferenceClient
from recinfer.serving.server import tuning
from recinfer.serving.shards.lookups import MakeLookups
from tests.serving.conftest import make_request
from tests.serving.remote.fleet import asking, write_shards
from tests.waiting import until
from tests.warm import RECINFER, Program

_LIMIT = 256
_LIMITED = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({_LIMIT // 2}, {_LIMIT}))\n{RECINFER}"
# The client's preface and empty settings: gRPC closes a connection that has not sent them when its handshake times out.
_HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0"


@pytest.mark.parametrize("role", [[], ["--ranks", "0,1"]])
def test_a_server_says_where_sigbus_ended_it(archive: Path, tmp_path: Path, role: list[str]):
    shutil.copytree(archive, tmp_path / "a.rqa")
    with Program(RECINFER, "serve", tmp_path / "a.rqa", *role, "--port", 0, "--json") as process:
        port = json.loads(process.stdout.readline())["port"]
        for shard in (tmp_path / "a.rqa" / "shards").iterdir():
            os.truncate(shard, 0)
        if role:
            with (
                asking(
                    write_shards(tmp_path / "shards.json", {0: [f"127.0.0.1:{port}"], 1: [f"127.0.0.1:{port}"]})
                ) as fan_out,
                pytest.raises(RecinferError),
            ):
                load(archive, lookups=MakeLookups(fan_out)).lookup(make_request(0, 3)[1])
        else:
            with InferenceClient(f"127.0.0.1:{port}", timeout=60) as client, pytest.raises(RecinferError):
                client.lookup(make_request(0, 3)[1])
        _, err = process.communicate()
        assert process.returncode == -signal.SIGBUS
    stack = err.partition("Fatal Python error: Bus error")[2].partition("Current thread")[2]
    assert "/recinfer/" in stack.partition("\n\n")[0], err


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("role", [[], ["--ranks", "0,1"]])
def test_connections_beyond_the_limit_of_open_files_are_told_of_and_keep_no_probe_out(archive: Path, role: list[str]):
    arguments = ["serve", archive, *role, "--port", 0, "--metrics-port", 0, "--json"]
    with Program(_LIMITED, *arguments) as process, ExitStack() as stack:
        said = json.loads(process.stdout.readline())
        limits = Path(f"/proc/{process.pid}/limits").read_text()
        assert [line.split()[3:5] for line in limits.splitlines() if "open files" in line] == [
            [str(_LIMIT), str(_LIMIT)]
        ]
        for _ in range(_LIMIT + 20):
            opened = stack.enter_context(socket.create_connection(("127.0.0.1", said["port"])))
            with suppress(OSError):  # a connection beyond the limit is closed
                opened.sendall(_HTTP2)
        for _ in range(3):
            with urllib.request.urlopen(f"http://127.0.0.1:{said['metrics_port']}/live", timeout=60) as live:
                assert live.status == 200
        log = Path(process._stderr.name)
        until(lambda: f"this process may open {_LIMIT}" in log.read_text())
        process.send_signal(signal.SIGTERM)
        process.communicate()
        assert process.returncode == 0


@pytest.mark.parametrize("limit, most", [(64, 32), (256, 192), (1024, 896)])
def test_connections_may_have_half_of_a_small_limit_of_open_files(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, limit: int, most: int
):
    """Where no file is left, the line has their number: it had that of the connections, 1 of 64."""

    def full(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    async def told() -> None:
        telling = asyncio.ensure_future(tuning.tell_open_files())
        while not caplog.messages:
            await asyncio.sleep(0)
        telling.cancel()

    monkeypatch.setattr(tuning.resource, "getrlimit", lambda _: (limit, limit))
    monkeypatch.setattr(tuning, "_LOOK_S", 0.0)
    assert tuning.most_connections() == most
    with monkeypatch.context() as context:
        context.setattr(tuning, "os", SimpleNamespace(open=full, devnull=os.devnull, O_RDONLY=os.O_RDONLY))
        asyncio.run(told())
    assert caplog.messages[0].startswith(f"{limit} files and connections are open, and this process may open {limit}: ")
