"""The vocabularies of an archive, as its manifest lists them, and their rules V1 and V2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from recinfer.errors import ArchiveError
from recinfer.vocabulary.table import Segment, TableVocabulary, check_segments

__all__ = ["VocabularyInfo", "check_vocabularies", "index_path", "info_of"]


@dataclass(frozen=True)
class VocabularyInfo:
    """The vocabulary of one table; its ids are in the index file at the same place among the index files.

    ``input_hash_size`` and ``segments``: see :class:`recinfer.vocabulary.table.TableVocabulary`.
    """

    module: str
    table: str
    input_hash_size: int
    segments: tuple[Segment, ...]

    @property
    def full_name(self) -> str:
        """``module.table``, for messages."""
        return f"{self.module}.{self.table}" if self.module else self.table

    @property
    def drops(self) -> bool:
        """Whether unknown ids of some segment have no row."""
        return any(not segment.miss_rows for segment in self.segments)


def index_path(number: int) -> str:
    """The archive path of the index of the vocabulary ``number``, in the manifest's order."""
    return f"vocabulary/{number:05d}.index"


def info_of(module: str, table: str, vocabulary: TableVocabulary) -> VocabularyInfo:
    """The manifest's entry for a vocabulary."""
    return VocabularyInfo(module, table, vocabulary.input_hash_size, vocabulary.segments)


def check_vocabularies(
    infos: Sequence[VocabularyInfo],
    rows: Mapping[tuple[str, str], int],
    readers: Mapping[str, Sequence[tuple[str, str]]],
    missing: Mapping[str, str | int],
    sequences: frozenset[str],
) -> None:
    """Raise ArchiveError unless rules V1 and V2 hold.

    Args:
        rows: (module, table) -> its rows.
        readers: feature -> the tables that it reads.
        missing: feature -> its policy.
        sequences: paths of sequence modules.
    """
    keys = [(info.module, info.table) for info in infos]
    if len(set(keys)) != len(keys) or not rows.keys() >= set(keys):
        raise ArchiveError(f"vocabularies {keys[:5]}; expected tables of the archive, each once", rule="V1")
    for info in infos:
        if problem := check_segments(info.segments, rows[info.module, info.table], info.input_hash_size):
            raise ArchiveError(f"vocabulary of table {info.full_name!r}: {problem}", rule="V1")
        if info.drops and info.module in sequences:
            raise ArchiveError(
                f"vocabulary of table {info.full_name!r}: unknown ids have no row, but a sequence has a row for each id",
                rule="V2",
            )
    with_vocabulary = set(keys)
    for feature, tables in readers.items():
        if with_vocabulary.isdisjoint(tables):
            continue
        if len(tables) > 1:
            raise ArchiveError(
                f"feature {feature!r} reads {len(tables)} tables, and one of them has a vocabulary; expected that table alone, "
                "since an id has one row then",
                rule="V2",
            )
        if missing.get(feature) not in (None, "reject", "empty"):
            raise ArchiveError(
                f"feature {feature!r}: missing is {missing[feature]!r}; expected 'reject' or 'empty', since its table has a "
                "vocabulary",
                rule="V2",
            )
