"""Signals that come while a server is yet to load anything, to each kind of server, as process 1 of a container too."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sys
import threading
from pathlib import Path

import pytest

from recinfer.serving.workers.supervisor import Supervisor
from tests.serving.remote.fleet import write_shards
from tests.waiting import until
from tests.warm import RECINFER, Program, warm_workers

KINDS = {
    "server": ["a.rqa"],
    "poll": ["--model-store", "store", "--poll", "60"],
    "config": ["--model-store", "store", "--model-config", "models.toml"],
    "workers": ["--model-store", "store", "--model-config", "models.toml", "--workers", "2"],
    "ranker": ["a.rqa", "--shards", "shards.json"],
    "ranker workers": ["a.rqa", "--shards", "shards.json", "--workers", "2"],
    "shard server": ["a.rqa", "--ranks", "0,1"],
}
RELOADS = [kind for kind in KINDS if kind not in ("server", "shard server")]


@pytest.fixture
def folder(archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the kinds need, and a token file that a server waits for: it is a pipe."""
    shutil.copytree(archive, tmp_path / "store" / "tiny" / "1")
    (tmp_path / "a.rqa").symlink_to(archive)
    (tmp_path / "models.toml").write_text("[models.tiny]\n")
    write_shards(tmp_path / "shards.json", {0: ["127.0.0.1:1"], 1: ["127.0.0.1:1"]})
    os.mkfifo(tmp_path / "token")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def arguments(kind: str) -> list[str]:
    return ["serve", *KINDS[kind], "--token-file", "token", "--port", "0", "--json"]


def writing_end(pipe: Path) -> int:
    """The end of ``pipe`` to write to, once somebody is about to read it."""
    found: list[int] = []

    def opened() -> bool:
        try:
            found.append(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
        except OSError as error:
            assert error.errno == errno.ENXIO  # nobody reads
        return bool(found)

    until(opened)
    return found[0]


@pytest.mark.parametrize("kind", RELOADS)
def test_hangup_while_loading_ends_no_server_that_reloads(kind: str, folder: Path):
    with Program(warm_workers() if "workers" in kind else RECINFER, *arguments(kind)) as process:
        token = writing_end(folder / "token")
        for _ in range(3):
            process.send_signal(signal.SIGHUP)
        os.write(token, b"t" * 20)
        os.close(token)
        try:
            assert "port" in json.loads(process.stdout.readline())
            process.send_signal(signal.SIGHUP)
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0


@pytest.mark.parametrize("kind", ["server", "shard server"])
def test_hangup_ends_a_server_that_reloads_nothing(kind: str, folder: Path):
    with Program(RECINFER, *arguments(kind)) as process:
        token = writing_end(folder / "token")
        process.send_signal(signal.SIGHUP)
        assert process.wait(60) == -signal.SIGHUP
        os.close(token)


# `recinfer` as process 1 of a process namespace of its own; prints its process id outside, and ends as it ends.
_AS_PROCESS_1 = """
import ctypes, os, runpy, signal, sys

NEW_USER, NEW_PROCESSES, DEATH_SIGNAL = 0x10000000, 0x20000000, 1
libc = ctypes.CDLL(None)
if libc.unshare(NEW_PROCESSES) and libc.unshare(NEW_USER | NEW_PROCESSES):
    sys.exit("no namespaces")
one = os.fork()
if one:
    print(one, flush=True)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(one, 0)[1]))
libc.prctl(DEATH_SIGNAL, signal.SIGKILL)
assert os.getpid() == 1
runpy.run_module("recinfer", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("kind", ["server", "config", "workers", "ranker", "shard server"])
def test_sigterm_while_loading_ends_process_1(kind: str, folder: Path):
    with Program(_AS_PROCESS_1, *arguments(kind)) as process:
        one = process.stdout.readline()
        if not one and "no namespaces" in process.communicate()[1]:
            pytest.skip("no process namespaces here")
        token = writing_end(folder / "token")
        os.kill(int(one), signal.SIGTERM)
        os.close(token)  # a read that has not begun when the signal comes is not ended by it
        assert process.wait(60) == 128 + signal.SIGTERM


def test_a_supervisor_passes_a_hangup_on_to_workers_that_serve(tmp_path: Path):
    worker = """
import json, os, pathlib, signal, sys
from multiprocessing.connection import Connection
peer = Connection(0)
signal.signal(signal.SIGHUP, lambda *_: pathlib.Path(sys.argv[1], str(os.getpid())).touch())
peer.send_bytes(json.dumps({"to": json.loads(peer.recv_bytes())["request"], "is": None}).encode())
print(json.dumps({"port": 1}), flush=True)
while True:
    asked = json.loads(peer.recv_bytes())
    peer.send_bytes(json.dumps({"to": asked["request"], "failed": {"code": "INTERNAL", "message": ""}}).encode())
"""
    command = [sys.executable, "-c", worker, str(tmp_path)]
    supervisor = Supervisor(lambda port: command, 2, "127.0.0.1", 0)
    hung_up: list[set[str]] = []

    def ready(_: object) -> None:
        supervisor.hang_up()

    def wait() -> None:
        until(lambda: len(list(tmp_path.iterdir())) == 2)
        hung_up.append({path.name for path in tmp_path.iterdir()} ^ set(map(str, supervisor.pids)))
        supervisor.stop()

    waiting = threading.Thread(target=wait)
    waiting.start()
    supervisor.run(ready)
    waiting.join()
    assert hung_up == [set()]
