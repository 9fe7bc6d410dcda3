"""``recinfer serve`` over several hosts: shard servers (``--ranks``) and rankers (``--shards``)."""

from __future__ import annotations

import functools
import logging
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recinfer.cli.addresses import show_addresses
from recinfer.cli.console import Output
from recinfer.errors import ArchiveError, ConfigError

if TYPE_CHECKING:
    from recinfer.inference.predictor import Predictor
    from recinfer.serving.server.security import Security
    from recinfer.serving.shards.fan_out import FanOut
    from recinfer.serving.shards.tables import ShardTables
    from recinfer.serving.wire.limits import Limits

__all__ = ["parse_ranks", "serve_ranks", "set_serving_when_reachable", "shard_fan_out", "unchecked", "version_in"]

_log = logging.getLogger(__name__)


def parse_ranks(text: str) -> list[int]:
    """``"0,1"`` or ``"0-3"`` as ranks; raises ConfigError."""
    from recinfer.distributed.planner.plan import MAX_RANKS

    ranks: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", part.strip())
        first, last = (int(found[1]), int(found[2] or found[1])) if found is not None else (0, -1)
        if not first <= last < MAX_RANKS:
            raise ConfigError(f"--ranks: got {text[:80]!r}, expected numbers below {MAX_RANKS}, as in 0,1 or 0-3")
        ranks += range(first, last + 1)
    return sorted(set(ranks))


def serve_ranks(
    ranks: list[int],
    archives: list[Path],
    deltas: list[Path],
    store: Path | None,
    output: Output,
    *,
    host: str,
    port: int,
    metrics_port: int | None,
    security: Security,
    limits: Limits,
    preload: bool,
    lock: bool,
    socket_port: int = 0,
) -> None:
    """Run a shard server until a signal stops it."""
    from recinfer.archive.mapping import name_files_at_sigbus
    from recinfer.serving.engine.store import ModelStore
    from recinfer.serving.server.run import serve
    from recinfer.serving.server.shard_server import ShardServer
    from recinfer.serving.shards.tables import ShardTables

    name_files_at_sigbus()
    if not archives and store is None:
        raise ConfigError("nothing to serve: give archive folders, or --model-store DIR with archives in it")
    tables = ShardTables(ranks, store, preload=preload, lock=lock)
    paths = list(archives)
    for path in archives:
        tables.add(path)
    if store is not None and not archives:
        known = ModelStore(store)
        paths = known.newest_of_all(functools.partial(_added, tables, store), ArchiveError)
    if deltas and len(paths) != 1:
        raise ConfigError(f"--delta: got {len(paths)} archives; a delta applies to exactly one archive")
    if deltas:
        tables.add(paths[0], deltas)

    server = ShardServer(
        tables, host, port, metrics_port=metrics_port, security=security, limits=limits, socket_port=socket_port
    )

    def ready() -> None:
        listed = ", ".join(map(str, tables.ranks))
        held = ", ".join(f"{m.manifest.model} {m.manifest.version}" for m in tables.models()) or "no version yet"
        what, tls = f"ranks {listed} of {held}", security.tls_cert is not None
        show_addresses(output, what, host, server.port, metrics_port=server.metrics_port, tls=tls)
        output.finish(
            {
                "ranks": list(tables.ranks),
                "versions": tables.keys(),
                "host": host,
                "port": server.port,
                "metrics_port": server.metrics_port,
            }
        )

    serve(server, on_ready=ready)
    output.note("stopped")


def _added(tables: ShardTables, store: Path, name: str, version: str) -> Path:
    tables.add(store / name / version)
    return store / name / version


def shard_fan_out(path: Path, security: Security, missing: str | None, max_response_bytes: int) -> FanOut:
    """The fan-out to the shard servers of shards.json; raises ConfigError. ``max_response_bytes``: of a rank's rows for
    one request."""
    from recinfer.serving.shards.fan_out import FanOut
    from recinfer.serving.shards.replicas import ReplicaPool

    pool = ReplicaPool(path, token=security.token, max_response_bytes=max_response_bytes)
    return FanOut(pool, missing=missing)


def unchecked(
    path: Path, fan_out: FanOut, store: Path | None, options: dict[str, Any], deltas: Sequence[Path] = ()
) -> Predictor:
    """A ranker's predictor after ``deltas``, whose golden requests run once its shards answer.

    Raises:
        ArchiveError: manifest, dense part or a delta break a rule.
        ConfigError: shards.json does not list the ranks that the archive is cut for.
    """
    from recinfer.archive.delta import read_delta
    from recinfer.archive.reader import open_archive
    from recinfer.inference.predictor import Predictor
    from recinfer.serving.shards.lookups import MakeLookups

    archive = open_archive(path, ranks=())
    listed, world = fan_out.pool.config.ranks, archive.manifest.world_size
    if sorted(listed) != list(range(world)):
        raise ConfigError(
            f"shards: it lists ranks {', '.join(map(str, listed))}; {path} is cut for {world}, expected 0 to {world - 1}"
        )
    lookups = MakeLookups(fan_out, None if store is None else str(store), wait=False)
    predictor = Predictor(archive, lookups=lookups, **options)
    for delta in deltas:
        predictor.apply(read_delta(delta), check=False)
    lookups.wait = True  # a later delta is applied if all shards have it, else refused
    return predictor


def version_in(store: Path | None, archive: Path) -> str:
    """The version that a model store calls ``archive``, its folder's name; empty if it is in no store."""
    inside = store is not None and archive.resolve().parent.parent == store.resolve()
    return archive.resolve().name if inside else ""


def set_serving_when_reachable(
    predictors: list[Predictor],
    fan_out: FanOut,
    output: Output,
    set_serving: Any,
    stopped: threading.Event,
    look: Callable[[threading.Event], None] = lambda _: None,
) -> None:
    """Start a thread that waits for the shards, replays the golden requests through them and sets the health status
    SERVING.

    Args:
        look: loads the other versions of the store to serve, until its argument is set.
    """
    from recinfer.errors import RecinferError

    def check() -> None:
        for predictor in predictors:
            lookups: Any = predictor.state.lookups
            shown = ""
            while True:
                missing = fan_out.pool.unreachable(lookups.ranks, lookups.spec.key)
                if not missing:
                    break
                where = "; ".join(f"rank {rank}: {fan_out.pool.addresses(rank, lookups.spec.key)}" for rank in missing)
                if where != shown:
                    shown = where
                    output.note(f"not serving yet, waiting for shards: {where}")
                if stopped.wait(0.1):
                    return
            for index in range(predictor.manifest.check.num_requests if predictor.num_deltas else 1):
                predictor.check_request(index)
            predictor.check_merging()
        look(stopped)
        set_serving(True)
        output.note("all shards are there: serving")

    def run() -> None:
        while not stopped.is_set():
            try:
                return check()
            except RecinferError as error:
                output.note(f"not serving: {error}")
                stopped.wait(2.0)

    threading.Thread(target=run, name="recinfer-shards", daemon=True).start()
