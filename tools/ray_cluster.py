"""The cluster of tools/ray_trial.py: raylets on one machine, each with its own address, that can be started and
killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["HEAD", "MEMORY", "NODES", "Cluster", "listening", "wait"]

HEAD, NODES, MEMORY = "127.0.0.1:6379", 3, 8_000_000_000


class Cluster:
    """Three raylets on one machine, each with its own address."""

    def __init__(self, folder: Path) -> None:
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._folder = folder
        self._head = ["--head", "--port=6379", "--include-dashboard=false", f"--temp-dir={folder / 'r'}"]
        for number in range(NODES):
            self.begin(f"127.0.0.{number + 1}")

    def begin(self, host: str) -> None:
        """Start the node with this address, and wait until it is ready."""
        which = self._head if host == "127.0.0.1" else [f"--address={HEAD}"]
        sizes = ["--num-cpus=16", f"--memory={MEMORY}", "--object-store-memory=80000000", "--disable-usage-stats"]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *which, f"--node-ip-address={host}"]
        path = self._folder / f"{host}.log"
        with path.open("wb") as log:
            self.nodes[host] = subprocess.Popen([*command, *sizes, "--block"], stdout=log, stderr=log)
        wait(lambda: b"Ray runtime started" in path.read_bytes(), 600, f"the node {host}")

    def kill(self, host: str) -> int:
        """Kill all processes of a node at once, as on a power failure; returns their number."""
        gone = [*descendants(self.nodes[host].pid), self.nodes[host].pid]
        for pid in gone:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.nodes.pop(host).wait()
        return len(gone)


def descendants(pid: int) -> list[int]:
    """All descendant processes of a process."""
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            stat = (folder / "stat").read_text()
            parents.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(folder.name))
    found = [pid]
    for each in found:
        found += parents.get(each, [])
    return found[1:]


def listening(port: int) -> bool:
    """Whether a process listens on a port, on any address."""
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return any(line[3] == "0A" and int(line[1].rpartition(":")[2], 16) == port for line in lines)


def wait(condition: Callable[[], bool], seconds: float, what: str = "") -> float:
    """Wait for ``condition``; returns the seconds, raises after ``seconds``."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > seconds:
            raise TimeoutError(f"{what or condition}: not within {seconds} s")
        time.sleep(0.1)
    return time.monotonic() - start
