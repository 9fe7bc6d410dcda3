"""A server's process ends with the process that started it, however that ends, and leaves no file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from recinfer.deploy.ray.process import ServerProcess

GUARD = [sys.executable, "-m", "recinfer.deploy.ray.guard"]
ROOT = Path(__file__).resolve().parents[2]
# Ends well at SIGTERM; says so, and nothing before it can.
POLITE = "import signal,sys,time; signal.signal(15, lambda *_: sys.exit(7)); print('up', flush=True); time.sleep(600)"
STUBBORN = "import signal,time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"


def is_there(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "not within that time"
        time.sleep(0.02)


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Callable[[str], tuple[subprocess.Popen[str], int, Path]]]:
    """Starts a script under a guard: the guard, the script's process id, and the folder that the guard removes."""
    started: list[subprocess.Popen[str]] = []

    def start(script: str) -> tuple[subprocess.Popen[str], int, Path]:
        grace = "0.5" if script == STUBBORN else "60"  # a clean end gets the time that it needs
        folder = tmp_path / "folder"
        folder.mkdir()
        (folder / "shards.json").write_text("{}")
        command = [*GUARD, "--grace", grace, "--folder", str(folder), "--", sys.executable, "-c", script]
        guard = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        started.append(guard)
        assert guard.stdout is not None
        pid = int(guard.stdout.readline().split()[-1].rstrip("}"))
        assert guard.stdout.readline() == "up\n"
        return guard, pid, folder

    yield start
    for guard in started:
        guard.kill()
        guard.wait()
        for stream in (guard.stdin, guard.stdout):
            if stream is not None:
                stream.close()


@pytest.mark.parametrize(("script", "code"), [(POLITE, 7), (STUBBORN, 128 + signal.SIGKILL)])
def test_the_end_of_stdin_ends_the_command(guarded: Callable, script: str, code: int):
    guard, pid, folder = guarded(script)
    guard.stdin.close()
    assert guard.wait(120) == code
    assert not is_there(pid) and not folder.exists()


def test_sigterm_ends_the_command(guarded: Callable):
    guard, pid, folder = guarded(POLITE)
    guard.terminate()
    assert guard.wait(120) == 7 and not is_there(pid) and not folder.exists()


def test_a_killed_guard_takes_the_command_along(guarded: Callable):
    guard, pid, _ = guarded(STUBBORN)
    guard.kill()
    guard.wait(120)
    until(lambda: not is_there(pid))


def test_a_command_whose_guard_is_gone_before_it_begins_does_not_begin():
    code = (
        "import os, subprocess; from functools import partial; from recinfer.deploy.ray.guard import _die_with\n"
        "for pid in (0, os.getpid()):  # nobody's process id, and its own\n"
        "    print(subprocess.Popen(['true'], preexec_fn=partial(_die_with, pid)).wait(60))\n"
    )
    # In a process like a guard's: gRPC's fork handlers may abort while its threads run.
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.split() == [str(128 + signal.SIGKILL), "0"], found.stderr


def test_a_command_that_ends_ends_the_guard(guarded: Callable):
    guard, pid, folder = guarded(POLITE)
    os.kill(pid, signal.SIGKILL)
    assert guard.wait(120) == 128 + signal.SIGKILL and not folder.exists()


def test_a_server_says_why_it_could_not_start(tmp_path: Path):
    process = ServerProcess([str(tmp_path / "none"), "--ranks", "0", "--port", "0"], {})
    assert process.wait(240)
    life = process.look()
    assert not life.running and "none" in life.why and life.port == 0


def test_killing_the_starter_ends_server_and_folder(archive: Path):
    """The starter is killed with SIGKILL, as Ray kills its workers: none of its code runs afterwards."""
    script = (
        "import sys, time\n"
        "from recinfer.deploy.ray.process import ServerProcess\n"
        f"process = ServerProcess([{str(archive)!r}, '--ranks', '0', '--port', '0'], {{}}, None, 'x', 5.0)\n"
        "while not process.look().port:\n"
        "    assert process.look().running, process.look().why\n"
        "    time.sleep(0.05)\n"
        "print(process.look().pid, process.guard_pid, process.look().memory, flush=True)\n"
        "time.sleep(600)\n"
    )
    starter = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert starter.stdout is not None
    with starter:
        said = starter.stdout.readline()
        assert said, "the server ended before it listened"
        server, guard, memory = map(int, said.split())
        assert is_there(server) and is_there(guard) and memory > 50 << 20
        starter.kill()
    until(lambda: not is_there(server) and not is_there(guard))
