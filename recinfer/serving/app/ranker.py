"""A ranker's side of its shard servers: its fan-out, predictors without tables, and the wait for the shards."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from recinfer.archive.delta import read_delta
from recinfer.archive.reader import open_archive
from recinfer.errors import ConfigError, RecinferError
from recinfer.inference.predictor import Predictor
from recinfer.remote.store import StoreMirror
from recinfer.serving.app.service import Report
from recinfer.serving.config import ServeConfig
from recinfer.serving.engine.store import ModelStore
from recinfer.serving.server.security import Security
from recinfer.serving.shards.fan_out import FanOut
from recinfer.serving.shards.lookups import MakeLookups, RemoteLookups
from recinfer.serving.shards.replicas import ReplicaPool

__all__ = ["fan_out_of", "lookups_of_store", "ranker_predictor", "serve_when_reachable", "version_in"]

_LOOK_S, _TRY_AGAIN_S = 0.1, 2.0


def fan_out_of(config: ServeConfig, security: Security) -> FanOut | None:
    """The fan-out to the shard servers of shards.json; None for a server that is no ranker. Raises ConfigError."""
    role = config.role
    if role.shards is None:
        return None
    pool = ReplicaPool(
        role.shards,
        token=lambda: next(iter(security.tokens), None),
        max_response_bytes=config.limits.max_response_bytes,
    )
    return FanOut(pool, missing=role.missing_shards)


def lookups_of_store(
    fan_out: FanOut, store: Path | None, mirror: StoreMirror | None, *, wait: bool = True
) -> MakeLookups:
    """Makes lookups of archives on shard servers, which find the archives in their own store, or by their own mirror of it."""
    folder = None if store is None else str(store)
    if mirror is None:
        return MakeLookups(fan_out, folder, wait=wait)
    return MakeLookups(fan_out, folder, wait=wait, folder_of=mirror.folder_of)


def ranker_predictor(path: Path, fan_out: FanOut, store: ModelStore | None, deltas: Sequence[Path] = ()) -> Predictor:
    """A ranker's predictor after ``deltas``, whose golden requests run once its shards answer.

    Args:
        store: the model store, from which shard servers prepare the archive.

    Raises:
        ArchiveError: manifest, dense part or a delta break a rule.
        ConfigError: shards.json does not list the ranks that the archive is cut for.
    """
    archive = open_archive(path, ranks=())
    listed, world = fan_out.pool.config.ranks, archive.manifest.world_size
    if sorted(listed) != list(range(world)):
        raise ConfigError(
            f"shards: it lists ranks {', '.join(map(str, listed))}; {path} is cut for {world}, expected 0 to {world - 1}"
        )
    folder, mirror = (None, None) if store is None else (store.folder, store.mirror)
    lookups = lookups_of_store(fan_out, folder, mirror, wait=False)
    predictor = Predictor(archive, lookups=lookups)
    for delta in deltas:
        predictor.apply(read_delta(delta), check=False)
    lookups.wait = True  # a later delta is applied if all shards have it, else refused
    return predictor


def version_in(store: ModelStore | None, archive: Path) -> str:
    """The version that a model store calls ``archive``, its folder's name; empty if it is in no store."""
    if store is None:
        return ""
    if store.mirror is not None:
        found = store.mirror.folder_of(hashlib.sha256((archive / "manifest.json").read_bytes()).hexdigest())
        return "" if found is None else found.rpartition("/")[2]
    inside = archive.resolve().parent.parent == store.folder.resolve()
    return archive.resolve().name if inside else ""


def serve_when_reachable(
    predictors: Callable[[], list[Predictor]],
    fan_out: FanOut,
    report: Report,
    set_serving: Callable[[bool], None],
    stopped: threading.Event,
    look: Callable[[threading.Event], None],
) -> threading.Thread:
    """Start a thread that waits for the shards, replays the golden requests through them and sets the health status
    SERVING.

    Args:
        predictors: returns those of the served versions, which change while the server follows its store.
        look: loads the other versions of the store to serve, until its argument is set.
    """

    def check() -> None:
        if not _wait_for_shards(predictors, fan_out, report, stopped):
            return
        for predictor in predictors():
            for index in range(predictor.manifest.check.num_requests if predictor.num_deltas else 1):
                predictor.check_request(index)
            predictor.check_merging()
        look(stopped)
        if stopped.is_set():
            return
        set_serving(True)
        report("all shards are there: serving")

    def run() -> None:
        while not stopped.is_set():
            try:
                return check()
            except RecinferError as error:
                report(f"not serving: {error}")
                stopped.wait(_TRY_AGAIN_S)

    thread = threading.Thread(target=run, name="recinfer-shards", daemon=True)
    thread.start()
    return thread


def _wait_for_shards(
    predictors: Callable[[], list[Predictor]], fan_out: FanOut, report: Report, stopped: threading.Event
) -> bool:
    """Wait until each rank of the predictors has a replica; returns False if ``stopped`` is set first."""
    shown = ""
    while missing := [at for predictor in predictors() for at in _unreachable(predictor, fan_out)]:
        where = "; ".join(missing)
        if where != shown:
            shown = where
            report(f"not serving yet, waiting for shards: {where}")
        if stopped.wait(_LOOK_S):
            return False
    return True


def _unreachable(predictor: Predictor, fan_out: FanOut) -> list[str]:
    """The ranks of a predictor without a replica, each with the addresses that were tried."""
    lookups = predictor.state.lookups
    assert isinstance(lookups, RemoteLookups), "a ranker's rows are on shard servers"
    key = lookups.spec.key
    return [
        f"rank {rank}: {fan_out.pool.addresses(rank, key)}" for rank in fan_out.pool.unreachable(lookups.ranks, key)
    ]
