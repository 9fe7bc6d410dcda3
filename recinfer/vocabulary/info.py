"""The vocabularies of an archive and their changes in a delta, as the JSON of both lists them; rules V1, V2, V7 and X9."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from recinfer.archive.part import DeltaPart, Model, Part, Tensors
from recinfer.errors import ArchiveError
from recinfer.excerpts import excerpt
from recinfer.vocabulary.table import MAX_VOCABULARY_ROWS, Segment, TableVocabulary, check_segments

__all__ = ["MAX_EXAMPLES", "DeltaVocabulary", "StringInfo", "VocabularyInfo", "info_of"]

MAX_EXAMPLES = 16
"""Most known strings that a manifest lists per vocabulary of strings."""
_MAX_SEED = 2**64 - 1


@dataclass(frozen=True)
class VocabularyInfo(Part):
    """The vocabulary of one table; its ids are in the index file at the same place among the index files.

    ``input_hash_size`` and ``segments``: see :class:`recinfer.vocabulary.table.TableVocabulary`.
    """

    key: ClassVar[str] = "vocabularies"

    module: str
    table: str
    input_hash_size: int
    segments: tuple[Segment, ...]

    @classmethod
    def path(cls, number: int) -> str:
        """The archive path of the index of the vocabulary ``number``, in the manifest's order."""
        return f"vocabulary/{number:05d}.index"

    @classmethod
    def check(cls, entries: Sequence[VocabularyInfo], model: Model) -> None:
        """Raise ArchiveError unless rules V1 and V2 hold."""
        _check_vocabularies(entries, model)

    def raw_features(self, model: Model) -> Collection[str]:
        """The features of the table."""
        key = self.module, self.table
        return [name for table in model.tables if (table.module, table.name) == key for name in table.features]

    @property
    def full_name(self) -> str:
        """``module.table``, for messages."""
        return f"{self.module}.{self.table}" if self.module else self.table

    @property
    def drops(self) -> bool:
        """Whether unknown ids of some segment have no row."""
        return any(not segment.miss_rows for segment in self.segments)


@dataclass(frozen=True)
class StringInfo(Part):
    """The vocabulary of strings of some features; its keys are in the index file at the same place among those of strings.

    Attributes:
        features: features of requests whose ids may be strings.
        hash: the hash that makes the 64-bit key of a string.
        seed: the first half of the hash's key; the second half is 0.
        rows: strings become rows below it.
        unknown: the row of unknown strings.
        examples: some known strings and their rows.
    """

    key: ClassVar[str] = "string_vocabularies"

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

    @classmethod
    def path(cls, number: int) -> str:
        """The archive path of the index of the vocabulary of strings ``number``, in the manifest's order."""
        return f"vocabulary/strings-{number:05d}.index"

    @classmethod
    def check(cls, entries: Sequence[StringInfo], model: Model) -> None:
        """Raise ArchiveError unless rule V7 holds."""
        _check_strings(entries, model)

    def string_features(self) -> Mapping[str, Collection[str]]:
        """Each feature with the examples."""
        return dict.fromkeys(self.features, self.examples)


@dataclass(frozen=True)
class DeltaVocabulary(DeltaPart):
    """Changed ids of the vocabulary of one table, ascending, and their rows, -1 without one."""

    key: ClassVar[str] = "vocabularies"

    module: str
    table: str
    ids: int
    ids_sha256: str
    rows_sha256: str

    def tensors(self) -> dict[str, tuple[int, str]]:
        """See :class:`recinfer.archive.part.DeltaPart`."""
        return {"ids": (self.ids, self.ids_sha256), "id_rows": (self.ids, self.rows_sha256)}

    @classmethod
    def check(cls, changes: Sequence[tuple[DeltaVocabulary, Tensors]]) -> None:
        """Raise ArchiveError for what breaks rule X9 in itself."""
        seen: set[tuple[str, str]] = set()
        for entry, (ids, rows) in changes:
            kept = np.sort(rows[rows >= 0])
            if (
                (entry.module, entry.table) in seen
                or (ids[1:] <= ids[:-1]).any()
                or (rows < -1).any()
                or (kept[1:] == kept[:-1]).any()
            ):
                raise ArchiveError(
                    f"vocabulary of table {entry.table[:80]!r}: listed twice, its ids do not ascend, or two ids get one row",
                    rule="X9",
                )
            seen.add((entry.module, entry.table))

    def check_fit(self, tensors: Tensors, model: Model) -> None:
        """Raise ArchiveError if the archive has no such vocabulary, or no such row."""
        infos = [info for part in model.parts for info in part if isinstance(info, VocabularyInfo)]
        if (self.module, self.table) not in {(info.module, info.table) for info in infos}:
            raise ArchiveError(f"table {self.table[:80]!r} of the archive has no vocabulary", rule="X9")
        highest = int(tensors[1].max())
        rows = next(table.rows for table in model.tables if (table.module, table.name) == (self.module, self.table))
        if highest >= rows:
            raise ArchiveError(
                f"vocabulary of table {self.table!r}: an id gets row {highest}; the table has {rows}", rule="X9"
            )


def info_of(module: str, table: str, vocabulary: TableVocabulary) -> VocabularyInfo:
    """The manifest's entry for a vocabulary."""
    return VocabularyInfo(module, table, vocabulary.input_hash_size, vocabulary.segments)


def _check_vocabularies(infos: Sequence[VocabularyInfo], model: Model) -> None:
    rows = {(table.module, table.name): table.rows for table in model.tables}
    missing = {feature.name: feature.missing for feature in model.features}
    sequences = {module.path for module in model.modules if module.kind == "sequence"}
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
    for feature, tables in model.feature_tables.items():
        if with_vocabulary.isdisjoint((table.module, table.name) for table in tables):
            continue
        if len(tables) > 1:
            raise ArchiveError(
                f"feature {feature!r} reads {len(tables)} tables, and one of them has a vocabulary; expected that table alone, "
                "since an id has one row then: give the other table the same ids under the name of another feature",
                rule="V2",
            )
        if missing.get(feature) not in (None, "reject", "empty"):
            raise ArchiveError(
                f"feature {feature!r}: missing is {missing[feature]!r}; expected 'reject' or 'empty', since its table has a "
                "vocabulary",
                rule="V2",
            )


def _check_strings(infos: Sequence[StringInfo], model: Model) -> None:
    rows = {name: min(table.rows for table in tables) for name, tables in model.feature_tables.items()}

    def refuse(place: int, message: str) -> ArchiveError:
        return ArchiveError(f"string_vocabularies[{place}]: {message}", rule="V7")

    seen: set[str] = set()
    for place, info in enumerate(infos):
        if not info.features or len(set(info.features)) != len(info.features):
            raise refuse(place, f"features {list(info.features)[:5]}; expected at least one, each once")
        for feature in info.features:
            if feature not in model.request_features or feature in seen or feature in model.raw_features:
                raise refuse(
                    place,
                    f"feature {excerpt(repr(feature))}; expected a feature of requests, in one entry, whose tables have no "
                    "vocabulary of raw ids",
                )
            most = rows.get(feature)
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
