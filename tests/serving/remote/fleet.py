"""Shard servers and rankers for tests: in this process, or as processes of their own that can be killed."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from recinfer.inference.predictor import Predictor, load
from recinfer.serving.server.shard_server import ShardServer
from recinfer.serving.shards.fan_out import FanOut
from recinfer.serving.shards.lookups import MakeLookups
from recinfer.serving.shards.replicas import ReplicaPool
from recinfer.serving.shards.tables import ShardTables
from tests.ports import free_port
from tests.waiting import replace_text, stand_still, until
from tests.warm import RECINFER, Program, warm_workers


def write_shards(path: Path, ranks: Mapping[int, Sequence[str]], **settings: Any) -> Path:
    """shards.json at ``path``; nothing is given up because the machine is busy, unless ``settings`` say otherwise."""
    settings = {"timeout_seconds": 60.0, **settings}
    document = {"format": "recinfer.shards", "version": 1, "ranks": {str(r): list(a) for r, a in ranks.items()}}
    replace_text(path, json.dumps({**document, "settings": settings}))
    return path


def allowing_default_rows(archive: Path, out: Path) -> Path:
    """``archive`` with a manifest that allows default rows where a shard is missing."""
    shutil.copytree(archive, out)
    path = out / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "missing_shards": "default_rows"}))
    return out


@contextmanager
def shard(archive: Path | None, ranks: Sequence[int], host: str = "127.0.0.1", **options: Any) -> Iterator[ShardServer]:
    """A shard server in this process."""
    tables = ShardTables(ranks, options.pop("store", None))
    if archive is not None:
        tables.add(archive)
    with ShardServer(tables, host, options.pop("port", None) or free_port(host), **options) as server:
        yield server


@contextmanager
def asking(path: Path, *, ready: bool = True, **options: Any) -> Iterator[FanOut]:
    """A fan-out to what ``path`` lists; ``ready``: once all of them are up."""
    fan_out = FanOut(ReplicaPool(path), **options)
    try:
        if ready:
            until(lambda: all(replica.up for replica in fan_out.pool.everyone()))
        yield fan_out
    finally:
        fan_out.pool.close()


@contextmanager
def remote(archive: Path, groups: Sequence[Sequence[int]], folder: Path, **settings: Any) -> Iterator[Predictor]:
    """``archive`` through shard servers in this process, one for each group of ranks."""
    with ExitStack() as stack:
        ranks: dict[int, list[str]] = {}
        for number, group in enumerate(groups):
            server = stack.enter_context(shard(archive, group, f"127.0.0.{number + 1}"))
            for rank in group:
                ranks.setdefault(rank, []).append(server.target)
        fan_out = stack.enter_context(asking(write_shards(folder / "shards.json", ranks, **settings)))
        yield load(archive, lookups=MakeLookups(fan_out))


_LOGGED = """
import os, sys

log = os.open(sys.argv.pop(1), os.O_WRONLY | os.O_APPEND)
for number in (1, 2):
    os.dup2(log, number)
"""


class Process:
    """``recinfer serve`` with some arguments, as a process of its own; its output is kept."""

    def __init__(self, *arguments: str | Path, log: Path) -> None:
        self.log = log
        log.touch()
        program = warm_workers() if "--workers" in arguments else RECINFER
        self.process = Program(_LOGGED + program, log, "serve", *arguments)

    @property
    def said(self) -> str:
        """What it has printed."""
        return self.log.read_text()

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal; after SIGKILL and SIGTERM wait for its end, after SIGSTOP until it stands still."""
        if number is signal.SIGSTOP:
            stand_still(self.process.pid)
            return
        self.process.send_signal(number)
        if number in (signal.SIGKILL, signal.SIGTERM):
            self.process.wait(60)

    def close(self) -> None:
        """Kill it, also if it is stopped."""
        self.process.close()
