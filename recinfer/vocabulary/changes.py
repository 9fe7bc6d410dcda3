"""Changes of a vocabulary from one checkpoint to the next, as a delta stores them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from recinfer.errors import ConfigError
from recinfer.vocabulary.index import IdIndex
from recinfer.vocabulary.info import VocabularyInfo, info_of
from recinfer.vocabulary.table import TableVocabulary

__all__ = ["changed_ids"]


def changed_ids(
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
