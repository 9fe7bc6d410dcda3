"""A server's process gets SIGTERM when the thread or process that started it ends, however that ends."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from recinfer.deploy.ray.child import main
from recinfer.deploy.ray.process import ServerProcess
from recinfer.deploy.ray.records import Server

ROOT = Path(__file__).resolve().parents[2]
START = (
    "import os, signal, subprocess, sys, threading, time\n"
    # A signal that comes just before a sleep begins is handled after it, so the sleeps are short.
    'POLITE = \'import signal,sys,time; signal.signal(15, lambda *_: sys.exit(7)); print("up", flush=True); '
    "[time.sleep(0.1) for _ in range(6000)]'\n"
    "found = []\n"
    "def start():\n"
    "    command = [sys.executable, '-m', 'recinfer.deploy.ray.child', str(os.getpid()), sys.executable, '-c', POLITE]\n"
    "    found.append(subprocess.Popen(command, stdout=subprocess.PIPE))\n"
    "    assert found[0].stdout.readline() == b'up\\n'\n"
)


def is_there(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "not within that time"
        time.sleep(0.02)


def test_the_end_of_the_thread_that_started_it_ends_the_command():
    code = START + "made = threading.Thread(target=start); made.start(); made.join(); sys.exit(found[0].wait(60))"
    assert subprocess.run([sys.executable, "-c", code], timeout=120, cwd=ROOT, check=False).returncode == 7


def test_a_killed_starter_ends_the_command():
    code = START + "start(); print(found[0].pid, flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT) as starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        assert is_there(pid)
        starter.kill()
    until(lambda: not is_there(pid))


def test_a_command_whose_starter_is_gone_before_it_begins_does_not_begin():
    code = "import sys; from recinfer.deploy.ray.child import main; sys.exit(main(0, ['/bin/false']))"
    done = subprocess.run([sys.executable, "-c", code], timeout=60, check=False, cwd=ROOT)
    assert done.returncode == 128 + 15 and main.__doc__


def test_a_server_says_why_it_could_not_start(tmp_path: Path):
    process = ServerProcess([str(tmp_path / "none"), "--ranks", "0", "--port", "0"], {})
    server = Server("shard-0-0", 0)
    until(lambda: not process.look(server))
    assert "none" in server.why and server.port == 0


def test_a_server_stops_when_it_is_asked_to_and_is_killed_when_it_does_not(archive: Path):
    arguments = [str(archive), "--ranks", "0", "--port", "0", "--metrics-port", "0"]
    servers = {ServerProcess(arguments, {}): Server(f"shard-0-{n}", 0) for n in range(2)}
    for process, server in servers.items():
        until(lambda process=process, server=server: process.look(server) and server.metrics_port > 0)
        assert server.memory > 50 << 20
    polite, killed = servers
    assert polite.stop(120) and not polite.look(servers[polite])
    assert not killed.stop(0.0) and not killed.look(servers[killed])
    assert servers[killed].why == "was killed by signal 9"
