"""Groups an archive's ranks into shard servers and computes the memory that each server needs."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path

from recinfer.archive.paths import FORMAT, FileInfo, read_manifest_text, shard_path
from recinfer.errors import ArchiveError, ConfigError
from recinfer.excerpts import excerpt
from recinfer.strict_json import build, loads

__all__ = ["Footprint", "RankGroup", "check_label", "dns_label", "footprint", "mebibytes"]

MIB = 1 << 20
_SHARD_OVERHEAD = 768 * MIB  # Python, torch, FBGEMM and gRPC, and requests under way
_RANKER_OVERHEAD = 1024 * MIB  # the same and onnxruntime
_DENSE_COPIES = 3  # the file, the session's copy of its weights, and what runs of it hold
_LABEL = 40  # characters of a DNS label's 63; the rest is for the suffix "-shard-NNN-NNN"
_DNS = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


@dataclass(frozen=True)
class _Files:
    """The part of a manifest that a footprint needs. A whole Manifest needs torch, which a host that deploys may lack."""

    format: str
    model: str
    version: str
    world_size: int
    files: tuple[FileInfo, ...]

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ArchiveError(
                f"manifest.json has the format {excerpt(repr(self.format))}; expected {FORMAT!r}", rule="M1"
            )
        listed = {file.path for file in self.files}
        ranks = range(min(self.world_size, len(listed) + 1))  # more ranks than files lack one
        missing = [shard_path(rank) for rank in ranks if shard_path(rank) not in listed]
        if missing or not ranks:
            odd = f"lists no {missing[0]}" if missing else f"has world_size {self.world_size}"
            raise ArchiveError(
                f"manifest.json {odd}; expected a shard file for each rank: copy the archive again", rule="F7"
            )


@dataclass(frozen=True)
class RankGroup:
    """The ranks of one shard server.

    Attributes:
        number: from 0.
        ranks: ascending.
        table_bytes: size of their shard files, which are mapped as they are.
    """

    number: int
    ranks: tuple[int, ...]
    table_bytes: int

    @property
    def memory_bytes(self) -> int:
        """Memory of a server with one version mapped, in bytes."""
        return self.table_bytes + _SHARD_OVERHEAD

    @property
    def memory_limit_bytes(self) -> int:
        """Memory of a server with two versions mapped, as during a rollout, in bytes."""
        return 2 * self.table_bytes + _SHARD_OVERHEAD + 256 * MIB

    @property
    def listed(self) -> str:
        """The ranks as an argument of ``recinfer serve --ranks``."""
        return ",".join(map(str, self.ranks))


@dataclass(frozen=True)
class Footprint:
    """The servers that an archive needs and their memory.

    Attributes:
        model: name of the model in the manifest.
        version: the folder's name if the archive is at ``<model>/<version>``, as in a store; else the manifest's.
        groups: of ranks, all of them once.
        ranker_bytes: memory of a ranker with one version.
        ranker_limit_bytes: the same with two.
    """

    model: str
    version: str
    groups: tuple[RankGroup, ...]
    ranker_bytes: int
    ranker_limit_bytes: int


def footprint(archive: Path, ranks_per_shard: int = 1) -> Footprint:
    """Compute the footprint from an archive's manifest; no other file is read.

    Args:
        archive: its folder; other files need not be in it.
        ranks_per_shard: consecutive ranks that one shard server holds.

    Raises:
        ArchiveError: the folder is not an archive.
        ConfigError: ranks_per_shard is below 1.
    """
    if ranks_per_shard < 1:
        raise ConfigError(f"ranks per shard server: got {ranks_per_shard}, expected at least 1")
    manifest = _read(archive)
    sizes = {file.path: file.bytes for file in manifest.files}
    groups = []
    for number, first in enumerate(range(0, manifest.world_size, ranks_per_shard)):
        ranks = tuple(range(first, min(first + ranks_per_shard, manifest.world_size)))
        groups.append(RankGroup(number, ranks, sum(sizes[shard_path(rank)] for rank in ranks)))
    dense, where = _DENSE_COPIES * _dense_bytes(manifest), archive.resolve()
    return Footprint(
        manifest.model,
        where.name if where.parent.name == manifest.model else manifest.version,
        tuple(groups),
        dense + _RANKER_OVERHEAD,
        2 * dense + _RANKER_OVERHEAD + 256 * MIB,
    )


def _read(archive: Path) -> _Files:
    raw = loads(read_manifest_text(archive), "manifest.json")
    return build(_Files, {key.name: raw[key.name] for key in fields(_Files) if key.name in raw}, "manifest")


def _dense_bytes(manifest: _Files) -> int:
    return sum(file.bytes for file in manifest.files if file.path.startswith("dense/"))


def dns_label(name: str) -> str:
    """A name as a DNS label (RFC 1123), short enough for the suffixes of object names; raises ConfigError if nothing
    remains."""
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:_LABEL].strip("-")
    if not label:
        raise ConfigError(f"name: got {name[:80]!r}, expected letters or digits; give --name")
    return label


def check_label(what: str, value: str | None) -> None:
    """Raises ConfigError unless ``value`` is None or a DNS label (RFC 1123)."""
    if value is not None and not _DNS.fullmatch(value):
        raise ConfigError(f"{what}: got {value[:80]!r}, expected a DNS label: a-z, 0-9 and '-', at most 63")


def mebibytes(count: int) -> str:
    """A number of bytes in Kubernetes' notation, rounded up, ``"512Mi"``."""
    return f"{-(-count // MIB)}Mi"
