"""A shard server's rows: the versions that it has mapped, and the lookup of one request in them.

Shapes: S streams, B samples, N ids.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from recinfer.archive.delta import Delta, patch_rows, read_delta, with_delta
from recinfer.archive.manifest import Manifest
from recinfer.archive.mapping import MappedShards
from recinfer.archive.reader import Archive, open_archive
from recinfer.errors import InputError, NotFoundError, NotPreparedError
from recinfer.quant.bags import BagPlaces
from recinfer.remote.store import StoreMirror
from recinfer.serving.shards._ranks import read_find
from recinfer.serving.shards.messages import (
    PACKED_HEAD,
    decode_part,
    decode_request,
    encode_response,
    part_sizes,
)
from recinfer.serving.shards.rank_modules import module_layouts
from recinfer.serving.shards.rank_structs import PlainFind, PlainPart
from recinfer.serving.shards.rank_tables import FLOAT_BYTES, RankTables
from recinfer.serving.shards.versions import base_of, version_key
from recinfer.serving.wire.limits import Limits

__all__ = ["MAX_VERSIONS", "HostStore", "ShardModel", "ShardTables"]

MAX_VERSIONS = 4
"""Number of versions of a model that stay mapped: the current, the next and the previous version, and the base of a delta.
Rankers may keep more: see :meth:`ShardTables.keep`."""
_WANTED_S = 60.0  # three times the interval at which rankers repeat their wanted versions
_MOST_DIRECT_IDS, _MOST_DIRECT_FLOATS = 1 << 17, 1 << 22  # for more, FBGEMM's operator is worth the cost of its call
_log = logging.getLogger(__name__)


class _Version:
    """One mapped version."""

    def __init__(
        self, key: str, archive: Archive, ranks: Sequence[int], deltas: Sequence[Delta], **mapping: bool
    ) -> None:
        self.key = key
        self.archive = archive
        self.deltas = tuple(deltas)
        manifest = archive.manifest

        def edit(mapped: MappedShards) -> None:
            for delta in deltas:
                patch_rows(mapped, manifest, delta)

        self.mapped = archive.map_shards(ranks, edit=edit if deltas else None, **mapping)
        self.tables = {
            (rank, number): RankTables(layout, layout.ranks[rank], self.mapped)
            for number, layout in enumerate(module_layouts(manifest, archive.plan))
            for rank in ranks
            if rank in layout.ranks
        }


@dataclass(frozen=True)
class ShardModel:
    """A version in a shard server's status."""

    key: str
    manifest: Manifest
    mapped_bytes: int
    deltas: int


class ShardTables:
    """The ranks that this process serves, in every mapped version. Thread-safe.

    Args:
        ranks: the ranks to map.
        store: folder from which versions may be prepared; None: :meth:`add` maps all versions.
        mirror: of a store behind a URL, whose folder is ``store``; versions are downloaded when they are prepared.
        preload, lock: see recinfer.inference.predictor.load.

    Raises:
        InputError: ``ranks`` is empty.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        store: Path | None = None,
        *,
        mirror: StoreMirror | None = None,
        preload: bool = False,
        lock: bool = False,
    ) -> None:
        self.ranks = tuple(sorted(set(ranks)))
        if not self.ranks:
            raise InputError("ranks: got none, expected at least one")
        self._store = None if store is None else HostStore(store, mirror)
        self._mapping = {"preload": preload, "lock": lock}
        self._versions: dict[str, _Version] = {}  # ordered by last use, the latest at the end
        self._wanted: dict[str, float] = {}  # by version, the time.monotonic() until which a ranker wants it
        self._lock = threading.Lock()
        self._preparing = threading.Lock()

    def add(self, path: Path, deltas: Sequence[Path] = ()) -> str:
        """Map an archive, with deltas applied; returns its key. Raises ArchiveError, InputError."""
        archive = open_archive(path, ranks=self.ranks, dense=False)
        return self._add(archive, [read_delta(delta) for delta in deltas]).key

    def add_of_store(self, model: str, version: str) -> Path:
        """Map a version of the store; returns its folder. Raises as :meth:`add` and :meth:`HostStore.archive`."""
        path, release = self._of_host().archive(f"{model}/{version}")
        self._add(self._opened(path, release), ())
        return path

    def keys(self) -> list[str]:
        """The keys of the mapped versions."""
        with self._lock:
            return list(self._versions)

    def models(self) -> list[ShardModel]:
        """The mapped versions, for the status."""
        with self._lock:
            versions = list(self._versions.values())
        return [ShardModel(v.key, v.archive.manifest, v.mapped.buffer.numel(), len(v.deltas)) for v in versions]

    def keep(self, keys: Iterable[str]) -> None:
        """Keep versions that a ranker wants mapped for a minute from now, regardless of MAX_VERSIONS."""
        now = time.monotonic()
        with self._lock:
            still = {key: until for key, until in self._wanted.items() if until > now}
            self._wanted = still | dict.fromkeys(keys, now + _WANTED_S)

    def prepare(self, key: str, folder: str, deltas: Sequence[str] = ()) -> None:
        """Map and check a version, unless it is mapped already.

        Raises:
            NotFoundError: the store has no such folder or file, or another content under that name.
            InputError: a name leads out of the store.
            ArchiveError: a file differs from the manifest or the delta, also by its hash.
        """
        with self._preparing:
            if self._get(key) is not None:
                return
            archive = self._base(key, folder)
            found = [read_delta(self._of_host().delta(name)) for name in deltas]
            if version_key(archive.manifest_sha256, found) != key:
                raise NotFoundError(f"version: {folder} {list(deltas)} of this host's store is not {key}; copy it here")
            self._add(archive, found)

    def find(self, data: bytes, limits: Limits) -> bytes:
        """Answer a serialized ShardRequest.

        Raises:
            InputError: the request does not fit the plan, or a rank's part takes more than ``limits.max_response_bytes``.
            NotPreparedError: the request's version is not mapped.
        """
        answer = self.find_directly(data, limits)
        return self.find_any(data, limits) if answer is None else answer

    def find_directly(self, data: bytes, limits: Limits) -> bytes | None:
        """:meth:`find` for a small request of bags without weights, by the compiled loops; None for any other request."""
        fields = read_find(data)
        if fields is None:
            return None
        request = PlainFind._make(fields)
        version, batch = self._get(request.version), request.batch
        if not request.stored or version is None or batch > limits.max_concurrent * limits.max_batch:
            return None
        answer: list[bytes] = []
        taken = 0
        for part in map(PlainPart._make, request.parts):
            tables = version.tables.get((part.rank, part.module))
            if tables is None or tables.direct is None:
                return None
            bags, floats = batch * tables.num_streams, batch * tables.columns
            taken += FLOAT_BYTES * floats
            if taken > limits.max_response_bytes:  # the sum over all ranks; find_any counts each rank alone
                return None
            if (
                part.ids > _MOST_DIRECT_IDS
                or floats > _MOST_DIRECT_FLOATS
                or part.lengths_size != bags * part.length_bytes
            ):
                return None
            direct = tables.direct
            vectors = direct.pieces.pack(
                direct.steps,
                data,
                BagPlaces(part.lengths_at, part.ids_at, part.ids, part.wide, tables.num_streams, batch),
                tables.columns,
                PACKED_HEAD,
                part.length_bytes,
            )
            if vectors is None:
                return None
            answer.append(vectors)
        return answer[0] if len(answer) == 1 else b"".join(answer)

    def find_any(self, data: bytes, limits: Limits) -> bytes:
        """:meth:`find` for any request, through tensors and FBGEMM's operator."""
        request = decode_request(data, limits)
        version = self._get(request.version)
        if version is None:
            raise NotPreparedError(f"version: {request.version} is not mapped here; here are {', '.join(self.keys())}")
        accepted = []
        taken = dict.fromkeys(self.ranks, 0)
        for part in request.parts:
            tables = version.tables.get((part.rank, part.module))
            if tables is None:
                raise InputError(f"rank {part.rank}: this server has ranks {', '.join(map(str, self.ranks))}")
            ids, offset_bytes = part_sizes(part, tables.num_streams, request.batch)
            # A request that a ranker with the same limits accepts keeps each rank within the limits.
            taken[part.rank] += max(tables.answer_bytes(request.batch, ids), offset_bytes)
            if taken[part.rank] > limits.max_response_bytes:
                raise InputError(
                    f"rank {part.rank}: {request.batch} samples take {taken[part.rank]} bytes or more, expected at most "
                    f"max_response_bytes = {limits.max_response_bytes}: send fewer samples per request"
                )
            accepted.append((part, tables))
        values = []
        for part, tables in accepted:
            values.append(tables.find(decode_part(part, tables.num_streams, request.batch), request.batch))
        return encode_response(values)

    def _base(self, key: str, folder: str) -> Archive:
        with self._lock:
            for version in self._versions.values():
                if not version.deltas and version.key == base_of(key):
                    return version.archive
        path, release = self._of_host().archive(folder, base_of(key))
        archive = self._opened(path, lambda: None)
        if version_key(archive.manifest_sha256) != base_of(key):
            release()
            raise NotFoundError(f"version: {folder} of this host's store is not {base_of(key)}; copy it here")
        return self._opened(path, release, check_hashes=True)

    def _of_host(self) -> HostStore:
        if self._store is None:
            raise NotFoundError("version: this server has no store to prepare versions from; start it with one")
        return self._store

    def _opened(self, path: Path, release: Callable[[], None], *, check_hashes: bool = False) -> Archive:
        """Open this server's ranks of an archive, which is in use until the result is freed."""
        try:
            archive = open_archive(path, ranks=self.ranks, dense=False, check_hashes=check_hashes)
        except BaseException:
            release()
            raise
        weakref.finalize(archive, release)
        return archive

    def _get(self, key: str) -> _Version | None:
        with self._lock:  # other threads add and remove versions
            version = self._versions.pop(key, None)
            if version is not None:
                self._versions[key] = version
            return version

    def _add(self, base: Archive, deltas: Sequence[Delta]) -> _Version:
        archive = base
        for count, delta in enumerate(deltas):
            archive = with_delta(archive, delta, tuple(deltas[:count]))
        key = version_key(base.manifest_sha256, deltas)
        version = _Version(key, archive, self.ranks, deltas, **self._mapping)
        with self._lock:
            self._versions[key] = version
            # Other models' versions stay: rankers of a store use all of its models.
            model, now = archive.manifest.model, time.monotonic()
            mine = [name for name, held in self._versions.items() if held.archive.manifest.model == model]
            for gone in mine[:-MAX_VERSIONS]:
                if self._wanted.get(gone, 0.0) > now:
                    continue
                del self._versions[gone]
                _log.info("version %s is not mapped any more: %d others were used later", gone, MAX_VERSIONS)
        return version


class HostStore:
    """A folder of the host, or the mirror of a store behind a URL, from which files are downloaded. Any thread may call it.

    Args:
        folder: of the store, or of its mirror.
        mirror: of a store behind a URL; it downloads the ranks of this server alone.
    """

    def __init__(self, folder: Path, mirror: StoreMirror | None = None) -> None:
        self._folder = folder
        self._mirror = mirror

    def archive(self, name: str, key: str | None = None) -> tuple[Path, Callable[[], None]]:
        """The archive in the folder ``name`` of the store.

        Args:
            key: the key of its content, see :func:`version_key`; nothing else is downloaded. None: any content.

        Returns:
            Its folder, and the function that ends its use.

        Raises:
            NotFoundError: the store has no such folder, or a mirrored one has another content.
            InputError: the name leads out of the store.
            ArchiveError, ConfigError, UnavailableError: see :meth:`StoreMirror.archive` and :meth:`StoreMirror.refresh`.
        """
        if self._mirror is None:
            return self._inside(name), lambda: None
        model, version = self._two(name)
        if key is not None and self._mirrored_key(name) != key:
            self._mirror.refresh()
            if self._mirrored_key(name) != key:
                raise NotFoundError(f"version: {name} of {self._mirror.url} is not {key}; upload it there")
        cached = self._mirror.archive(model, version)
        return cached.path, cached.release

    def delta(self, name: str) -> Path:
        """The file of a delta, downloaded from a store behind a URL; raises as :meth:`archive`."""
        if self._mirror is None:
            return self._inside(name)
        return self._mirror.delta(*self._two(name))

    def _mirrored_key(self, name: str) -> str | None:
        try:
            manifest = (self._folder / name / "manifest.json").read_bytes()
        except OSError:
            return None
        return version_key(hashlib.sha256(manifest).hexdigest())

    def _two(self, name: str) -> tuple[str, str]:
        """The model and the file or version of a name in a mirrored store."""
        parts = _parts(name)
        if len(parts) != 2:
            assert self._mirror is not None
            raise NotFoundError(
                f"version: got {name[:80]!r}, expected <model>/<version> of {self._mirror.url}; the ranker's archive is not in "
                "the store that this server has"
            )
        self._inside(name, must_exist=False)
        return parts[0], parts[1]

    def _inside(self, name: str, *, must_exist: bool = True) -> Path:
        path = self._folder.joinpath(*_parts(name))
        try:
            leads_out, exists = not path.resolve().is_relative_to(self._folder.resolve()), path.exists()
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            text = f"folder: got {name[:80]!r}... ({len(name)} characters), which is longer than a file's name can be"
            raise InputError(text) from None
        if leads_out:
            raise InputError(f"folder: {name[:80]!r} leads out of the store")
        if must_exist and not exists:
            raise NotFoundError(f"version: the store of this host has no {name[:80]!r}; copy it here")
        return path


def _parts(name: str) -> tuple[str, ...]:
    parts = PurePosixPath(name).parts
    if not parts or any(part in ("..", "/") or "\0" in part for part in parts):
        raise InputError(f"folder: got {name[:80]!r}, expected a path inside the store")
    return parts
