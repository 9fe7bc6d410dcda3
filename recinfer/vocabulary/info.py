"""The vocabularies of an archive, as its manifest lists them, and their rules V1, V2 and V7."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from recinfer.errors import ArchiveError
from recinfer.excerpts import excerpt
from recinfer.vocabulary.table import MAX_VOCABULARY_ROWS, Segment, TableVocabulary, check_segments

__all__ = [
    "MAX_EXAMPLES",
    "StringInfo",
    "VocabularyInfo",
    "check_strings",
    "check_vocabularies",
    "index_path",
    "info_of",
    "string_index_path",
]

MAX_EXAMPLES = 16
"""Most known strings that a manifest lists per vocabulary of strings."""
_MAX_SEED = 2**64 - 1


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


@dataclass(frozen=True)
class StringInfo:
    """The vocabulary of strings of some features; its keys are in the index file at the same place among those of strings.

    Attributes:
        features: features of requests whose ids may be strings.
        hash: the hash that makes the 64-bit key of a string.
        seed: the first half of the hash's key; the second half is 0.
        rows: strings become rows below it.
        unknown: the row of unknown strings.
        examples: some known strings and their rows.
    """

    features: tuple[str, ...]
    hash: Literal["siphash-2-4"]
    seed: int
    rows: int
    unknown: int
    examples: dict[str, int]

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The only segment of its index."""
        return (Segment(0, self.rows, self.unknown),)


def index_path(number: int) -> str:
    """The archive path of the index of the vocabulary ``number``, in the manifest's order."""
    return f"vocabulary/{number:05d}.index"


def string_index_path(number: int) -> str:
    """The archive path of the index of the vocabulary of strings ``number``, in the manifest's order."""
    return f"vocabulary/strings-{number:05d}.index"


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


def check_strings(infos: Sequence[StringInfo], rows: Mapping[str, int | None], raw: frozenset[str]) -> None:
    """Raise ArchiveError unless rule V7 holds.

    Args:
        rows: feature of requests -> rows of the smallest table that it reads, None without one.
        raw: features of tables with a vocabulary of raw ids.
    """

    def refuse(place: int, message: str) -> ArchiveError:
        return ArchiveError(f"string_vocabularies[{place}]: {message}", rule="V7")

    seen: set[str] = set()
    for place, info in enumerate(infos):
        if not info.features or len(set(info.features)) != len(info.features):
            raise refuse(place, f"features {list(info.features)[:5]}; expected at least one, each once")
        for feature in info.features:
            if feature not in rows or feature in seen or feature in raw:
                raise refuse(
                    place,
                    f"feature {excerpt(repr(feature))}; expected a feature of requests, in one entry, whose tables have no "
                    "vocabulary of raw ids",
                )
            most = rows[feature]
            if most is not None and info.rows > most:
                raise refuse(place, f"{info.rows} rows for feature {feature!r}, which reads a table of {most} rows")
        seen.update(info.features)
        if not 1 <= info.rows <= MAX_VOCABULARY_ROWS or not 0 <= info.unknown < info.rows:
            raise refuse(
                place,
                f"{info.rows} rows, unknown strings read row {info.unknown}; expected 1 to {MAX_VOCABULARY_ROWS} rows and one "
                "of them",
            )
        if not 0 <= info.seed <= _MAX_SEED:
            raise refuse(place, f"seed {info.seed}; expected 0 to 2^64 - 1")
        if len(info.examples) > MAX_EXAMPLES:
            raise refuse(place, f"{len(info.examples)} examples; expected at most {MAX_EXAMPLES}")
