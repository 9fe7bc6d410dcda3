"""The parts of an archive or a delta that vocabularies make, for an export."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from recinfer.archive.check import Request
from recinfer.archive.manifest import Manifest
from recinfer.archive.part import Changes, DeltaPart, PendingChanges, Tensors, digest
from recinfer.archive.reader import Archive
from recinfer.errors import ConfigError
from recinfer.excerpts import some
from recinfer.vocabulary.golden import raw_requests, string_requests
from recinfer.vocabulary.index import IdIndex, build_index
from recinfer.vocabulary.info import DeltaVocabulary, StringInfo, VocabularyInfo, info_of
from recinfer.vocabulary.managed_collisions import vocabularies_of
from recinfer.vocabulary.opened import open_indexes
from recinfer.vocabulary.plain import check_unchanged, id_vocabularies, string_vocabularies
from recinfer.vocabulary.strings import StringRows, StringVocabulary, string_indexes
from recinfer.vocabulary.table import TableVocabulary

if TYPE_CHECKING:
    from torch import nn

    from recinfer.checkpoint import CheckpointReader
    from recinfer.data.contract import FeatureContract

__all__ = ["Vocabularies", "WrittenParts", "vocabulary_changes", "written_parts"]

Vocabularies = (
    Mapping[str, StringVocabulary | Sequence[str] | NDArray[np.int64]] | Mapping[tuple[str, str], TableVocabulary]
)
"""The vocabularies that a caller gives, by feature or by table.

Feature -> its strings or its ids, int64 ``[N]``, each with the row of its position; or a vocabulary of strings. All other strings or
ids read the row behind the last one's. (Module path, table) -> the table's vocabulary of ids.
"""


@dataclass(frozen=True)
class WrittenParts:
    """The vocabularies of an archive that is being written.

    Attributes:
        entries: of the manifest.
        vocabularies: of tables whose ids are raw.
        strings: of features whose ids may be strings.
        string_indexes: of these vocabularies, one for equal ones.
    """

    entries: tuple[VocabularyInfo | StringInfo, ...]
    vocabularies: Mapping[tuple[str, str], TableVocabulary]
    strings: Mapping[str, StringVocabulary]
    string_indexes: Sequence[IdIndex]

    def files(self) -> Iterator[tuple[str, bytes]]:
        """(path, bytes) of each index."""
        indexes = chain(map(build_index, self.vocabularies.values()), self.string_indexes)
        numbers: Counter[str] = Counter()
        for entry, index in zip(self.entries, indexes):
            yield entry.path(numbers[entry.key]), b"".join((index.shape.header(), index.buckets.tobytes()))
            numbers[entry.key] += 1

    def requests(self, manifest: Manifest, requests: Sequence[Request]) -> list[Request]:
        """Golden requests as callers send them: with raw ids and strings in place of rows."""
        return string_requests(manifest, self.strings, raw_requests(manifest, self.vocabularies, requests))


def written_parts(
    manifest: Manifest,
    model: nn.Module,
    checkpoint: CheckpointReader,
    contract: FeatureContract | None,
    vocabularies: Vocabularies | None,
) -> WrittenParts:
    """The vocabularies of an export; see :func:`recinfer.inference.export.export_archive` for ``vocabularies``.

    Args:
        manifest: without the vocabularies.

    Raises:
        ConfigError, InputError, CheckpointError: vocabularies that do not fit the model or the checkpoint.
    """
    raw, given = _given(model, checkpoint, contract, vocabularies)
    infos = []
    for (module, table), vocabulary in raw.items():
        info = info_of(module, table, vocabulary)
        vocabulary.check(f"vocabulary of table {info.full_name!r}")
        infos.append(info)
    strings = string_vocabularies(manifest.with_parts(infos), contract, given)
    texts = string_indexes(strings)
    return WrittenParts((*infos, *(info for info, _ in texts)), raw, strings, [index for _, index in texts])


def _given(
    model: nn.Module, checkpoint: CheckpointReader, contract: FeatureContract | None, vocabularies: Vocabularies | None
) -> tuple[dict[tuple[str, str], TableVocabulary], dict[str, Any]]:
    """The vocabularies of raw ids, of the model's managed collisions and as given, and the given ones of strings."""
    given: Mapping[Any, Any] = vocabularies or {}
    tables = {key: value for key, value in given.items() if isinstance(value, TableVocabulary)}
    ids = {key: value for key, value in given.items() if isinstance(value, np.ndarray) and value.dtype.kind in "iu"}
    strings = {key: value for key, value in given.items() if key not in tables and key not in ids}
    return {**vocabularies_of(model, checkpoint), **id_vocabularies(model, ids, contract), **tables}, strings


def vocabulary_changes(
    archive: Archive,
    applied: Sequence[Changes],
    model: nn.Module,
    checkpoint: CheckpointReader,
    vocabularies: Vocabularies | None,
    strings: StringRows | None,
) -> PendingChanges:
    """The changes from an archive with deltas applied to the vocabularies of a new checkpoint.

    Args:
        strings: the archive's, which a delta does not change.
        vocabularies: as :func:`written_parts` takes them.

    Raises:
        ConfigError: other tables have vocabularies, one has other segments or rows of unknown ids, or other strings.
    """
    raw, given = _given(model, checkpoint, None, vocabularies)
    if given:
        assert strings is not None
        check_unchanged(strings, string_vocabularies(archive.manifest, None, given))
    opened = open_indexes(archive, applied)
    keys = {(info.module, info.table) for info, _ in opened}
    if keys != raw.keys():
        odd = [".".join(part for part in key if part) for key in sorted(keys ^ raw.keys())]
        raise ConfigError(
            f"tables with a vocabulary differ between the archive and the checkpoint: {some(odd)}; give the vocabularies that the "
            "export was given, or export this checkpoint as a new version"
        )
    changes: list[tuple[DeltaPart, Tensors]] = []
    for info, index in opened:
        now = raw[info.module, info.table]
        now.check(f"vocabulary of table {info.full_name!r}")
        ids, rows = _changed_ids(info, index, now)
        if len(ids):
            entry = DeltaVocabulary(info.module, info.table, len(ids), digest(ids), digest(rows))
            changes.append((entry, (ids, rows)))
    return PendingChanges(tuple(changes))


def _changed_ids(
    info: VocabularyInfo, index: IdIndex, now: TableVocabulary
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The ids, ascending, whose row differs between the index and the vocabulary ``now``, and their rows, -1 without one.

    Raises:
        ConfigError: the vocabulary has other segments or rows of unknown ids, which a delta cannot change.
    """
    if info_of(info.module, info.table, now) != info:
        raise ConfigError(
            f"the vocabulary of table {info.full_name!r} has another input_hash_size, or other segments or rows of unknown ids, "
            "than the archive's (a list needs as many ids as there); export this checkpoint as a new version"
        )
    old_ids, old_rows = index.entries()
    order = np.argsort(now.ids)
    ids, rows = now.ids[order], now.rows[order]
    gone = np.isin(old_ids, ids, assume_unique=True, invert=True)
    at = np.searchsorted(old_ids, ids)
    same = np.zeros(len(ids), np.bool_)
    inside = at < len(old_ids)
    same[inside] = (old_ids[at[inside]] == ids[inside]) & (old_rows[at[inside]] == rows[inside])
    changed = np.concatenate((old_ids[gone], ids[~same]))
    new_rows = np.concatenate((np.full(int(gone.sum()), -1, np.int64), rows[~same]))
    order = np.argsort(changed)
    return changed[order], new_rows[order]
