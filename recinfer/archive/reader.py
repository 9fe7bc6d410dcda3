"""Opens an archive and checks every rule of FORMAT.md that needs no hash of a shard file."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from recinfer.archive.manifest import FileInfo, Manifest, shard_path
from recinfer.archive.manifest_rules import read_manifest
from recinfer.archive.mapping import MappedShards, map_shards
from recinfer.archive.paths import file_sha256, open_inside, read_inside, read_manifest_text
from recinfer.archive.rank_files import RankFile, read_rank_file, rects_by_rank
from recinfer.distributed.planner.plan import Plan
from recinfer.errors import ArchiveError, InputError
from recinfer.layout.rect import TilingError
from recinfer.strict_json import loads

__all__ = ["Archive", "open_archive"]


@dataclass(frozen=True)
class Archive:
    """An opened, checked archive.

    Attributes:
        root: the archive's folder.
        manifest: the content of manifest.json.
        plan: the rank of each rectangle of each table.
        rank_files: the checked shard files, one per rank, of the ranks that it was opened for.
        manifest_sha256: SHA-256 of manifest.json, which lists the hashes of all other files; deltas name it as their
            base.
        replaced: files that deltas have replaced, by path; the manifest is then the one after them.
    """

    root: Path
    manifest: Manifest
    plan: Plan
    rank_files: tuple[RankFile, ...]
    manifest_sha256: str = ""
    replaced: Mapping[str, bytes] = field(default_factory=dict)

    def map_shards(
        self,
        ranks: Iterable[int] | None = None,
        preload: bool = False,
        *,
        lock: bool = False,
        copy: bool = False,
        edit: Callable[[MappedShards], None] | None = None,
    ) -> MappedShards:
        """Map the packed tables of some or all ranks into one buffer.

        Args:
            ranks: default all that it was opened for.
            preload: read all pages now.
            lock: keep them in memory.
            copy: use ordinary memory instead of file pages.
            edit: may write to the buffer first; see :func:`recinfer.archive.mapping.map_shards`.

        Raises:
            InputError: a rank that the archive does not have.
        """
        here = {file.rank: file for file in self.rank_files}
        chosen = sorted(here if ranks is None else set(ranks))
        if any(rank not in here for rank in chosen):
            raise InputError(
                f"got ranks {chosen}; the archive has ranks 0 to {self.manifest.world_size - 1}, and was opened with "
                f"ranks {list(here)}"
            )
        files = [here[rank] for rank in chosen]
        return map_shards(self.root, files, preload=preload, lock=lock, copy=copy, edit=edit)

    def read(self, path: str) -> bytes:
        """The bytes of a listed file, after checking their SHA-256.

        Raises:
            ArchiveError: F2 to F5, F7.
        """
        if path in self.replaced:
            return self.replaced[path]
        listed = {file.path: file for file in self.manifest.files}
        if path not in listed:
            raise ArchiveError(f"{path!r} is not a file of this archive", rule="F7")
        return _read_checked(self.root, listed[path])

    def check_hash(self, file: FileInfo) -> None:
        """Raise ArchiveError (F5) unless the file's bytes have the listed SHA-256."""
        with open_inside(self.root, file.path) as opened:
            _compare_hash(file, file_sha256(opened))

    def unlisted_files(self) -> list[str]:
        """Files in the folder that the manifest does not list (rule F6)."""
        listed = {"manifest.json", *(file.path for file in self.manifest.files)}
        found = []
        for folder, _, names in os.walk(self.root):
            found += [(Path(folder) / name).relative_to(self.root).as_posix() for name in names]
        return sorted(set(found) - listed)


def open_archive(
    path: str | os.PathLike[str],
    *,
    check_hashes: bool = False,
    ranks: Iterable[int] | None = None,
    dense: bool = True,
) -> Archive:
    """Open and check an archive.

    Args:
        path: the archive's folder.
        check_hashes: hash the shards too; reads every byte.
        ranks: the ranks whose shard files are wanted, by default all. Other shard files need not be in the folder.
        dense: False to open shards only: the dense part and the golden requests need not be in the folder.

    Raises:
        ArchiveError: the rule that is broken is in ``.rule``.
    """
    root = Path(path)
    text = read_manifest_text(root)
    manifest = read_manifest(text)
    chosen = _chosen(manifest, ranks)
    shards = {shard_path(rank) for rank in range(manifest.world_size)}
    mine = {"plan.json", *map(shard_path, chosen)}
    wanted = [file for file in manifest.files if file.path in mine or (dense and file.path not in shards)]
    for file in wanted:
        with open_inside(root, file.path) as opened:
            size = os.fstat(opened.fileno()).st_size
        if size != file.bytes:
            raise ArchiveError(
                f"{file.path!r} has {size} bytes; expected {file.bytes}; it is truncated or damaged", rule="F4"
            )
    plan = _read_plan(root, manifest)
    digest = hashlib.sha256(text).hexdigest()
    archive = Archive(root, manifest, plan, tuple(_read_rank_files(root, manifest, plan, chosen)), digest)
    if check_hashes:
        for file in wanted:
            archive.check_hash(file)
    return archive


def _chosen(manifest: Manifest, ranks: Iterable[int] | None) -> list[int]:
    """The requested ranks; raises InputError for a rank that the archive lacks."""
    world = manifest.world_size
    chosen = sorted(range(world) if ranks is None else set(ranks))
    if any(not 0 <= rank < world for rank in chosen):
        raise InputError(f"got ranks {chosen}; the archive has {world} ranks, 0 to {world - 1}")
    return chosen


def _compare_hash(file: FileInfo, digest: str) -> None:
    if digest != file.sha256:
        raise ArchiveError(
            f"{file.path!r} has SHA-256 {digest[:16]}...; expected {file.sha256[:16]}...; it was changed or damaged, "
            "copy the archive again",
            rule="F5",
        )


def _read_checked(root: Path, file: FileInfo) -> bytes:
    data = read_inside(root, file.path, file.bytes)
    if len(data) != file.bytes:
        raise ArchiveError(f"{file.path!r} has {len(data)} bytes; expected {file.bytes}", rule="F4")
    _compare_hash(file, hashlib.sha256(data).hexdigest())
    return data


def _read_plan(root: Path, manifest: Manifest) -> Plan:
    listed = next(file for file in manifest.files if file.path == "plan.json")
    data = _read_checked(root, listed)
    loads(data, "plan.json")  # for J1 and J2, which the plan's own reader does not check
    try:
        plan = Plan.from_json(data)
    except TilingError as error:
        raise ArchiveError(f"plan.json: {error}", rule="P4") from None
    except Exception as error:  # any error of the parser means an invalid plan
        raise ArchiveError(f"plan.json: {error}", rule="P1") from None
    if plan.hash != manifest.plan_hash:
        raise ArchiveError(f"plan.json has hash {plan.hash}; plan_hash is {manifest.plan_hash[:80]}", rule="P2")
    _compare_plan(plan, manifest)
    return plan


def _compare_plan(plan: Plan, manifest: Manifest) -> None:
    if plan.world_size != manifest.world_size:
        raise ArchiveError(f"plan for {plan.world_size} ranks; world_size is {manifest.world_size}", rule="P3")
    listed = [(t.module, t.name, t.rows, t.dim, t.precision, t.sharding, list(t.ranks)) for t in manifest.tables]
    planned = [
        (
            t.module,
            t.table,
            t.num_embeddings,
            t.embedding_dim,
            t.precision.value.lower(),
            t.sharding_type,
            sorted(set(t.ranks)),
        )
        for t in plan.tables
    ]
    for mine, theirs in zip(sorted(listed), sorted(planned)):
        if mine != theirs:
            raise ArchiveError(f"the manifest has {mine}; plan.json has {theirs}", rule="P3")
    if len(listed) != len(planned):
        raise ArchiveError(f"the manifest has {len(listed)} tables; plan.json has {len(planned)}", rule="P3")


def _read_rank_files(root: Path, manifest: Manifest, plan: Plan, ranks: Iterable[int]) -> list[RankFile]:
    sizes = {file.path: file.bytes for file in manifest.files}
    rank_files = []
    rects = rects_by_rank(plan)
    for rank in ranks:
        path = shard_path(rank)
        with open_inside(root, path) as file:
            rank_files.append(read_rank_file(file, sizes[path], rects[rank], rank, manifest.plan_hash))
    return rank_files
