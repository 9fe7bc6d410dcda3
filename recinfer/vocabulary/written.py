"""The parts of an archive or a delta that vocabularies of a checkpoint make."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from recinfer.archive.part import Changes, DeltaPart, PendingChanges, Tensors, digest
from recinfer.archive.reader import Archive
from recinfer.errors import ConfigError
from recinfer.excerpts import some
from recinfer.vocabulary.index import IdIndex, build_index
from recinfer.vocabulary.info import DeltaVocabulary, VocabularyInfo, info_of
from recinfer.vocabulary.opened import open_indexes
from recinfer.vocabulary.table import TableVocabulary

__all__ = ["Vocabularies", "index_files", "vocabulary_changes", "vocabulary_infos"]

Vocabularies = Mapping[tuple[str, str], TableVocabulary]
"""(module path, table) -> its vocabulary."""


def vocabulary_infos(vocabularies: Vocabularies) -> tuple[VocabularyInfo, ...]:
    """The manifest's entries; raises InputError for data that is no vocabulary."""
    infos = []
    for (module, table), vocabulary in vocabularies.items():
        info = info_of(module, table, vocabulary)
        vocabulary.check(f"vocabulary of table {info.full_name!r}")
        infos.append(info)
    return tuple(infos)


def index_files(vocabularies: Vocabularies) -> Iterator[tuple[str, bytes]]:
    """(path, bytes) of each index, of vocabularies in the manifest's order."""
    for number, vocabulary in enumerate(vocabularies.values()):
        index = build_index(vocabulary)
        yield VocabularyInfo.path(number), b"".join((index.shape.header(), index.buckets.tobytes()))


def vocabulary_changes(archive: Archive, applied: Sequence[Changes], vocabularies: Vocabularies) -> PendingChanges:
    """The changes from an archive with deltas applied to the vocabularies of a new checkpoint.

    Raises:
        ConfigError: other tables have vocabularies, or one has other segments or rows of unknown ids.
    """
    opened = open_indexes(archive, applied)
    keys = {(info.module, info.table) for info, _ in opened}
    if keys != vocabularies.keys():
        odd = [".".join(part for part in key if part) for key in sorted(keys ^ vocabularies.keys())]
        raise ConfigError(
            f"tables with a vocabulary differ between the archive and the checkpoint: {some(odd)}; export this checkpoint as a new "
            "version"
        )
    changes: list[tuple[DeltaPart, Tensors]] = []
    for info, index in opened:
        now = vocabularies[info.module, info.table]
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
            "than the archive's; export this checkpoint as a new version"
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
