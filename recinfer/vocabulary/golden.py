"""Golden requests of tables with vocabularies: raw ids, of which most are known and some are not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from recinfer.archive.check import Request
from recinfer.archive.manifest import Manifest
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from recinfer.vocabulary.table import TableVocabulary

__all__ = ["raw_requests"]

_CANDIDATES = 1000
_EVERY = 4


def raw_requests(
    manifest: Manifest, vocabularies: Mapping[tuple[str, str], TableVocabulary], requests: Sequence[Request]
) -> list[Request]:
    """``requests`` with raw ids in place of rows: the id of the row, but unknown ids where no id has the row, and one in four
    everywhere."""
    if not vocabularies:
        return list(requests)
    of_feature = {
        name: vocabularies[key]
        for name, (table, *_) in manifest.feature_tables.items()
        if (key := (table.module, table.name)) in vocabularies
    }
    ids_of = {name: _ids_by_row(vocabulary) for name, vocabulary in of_feature.items()}
    unknown_of = {name: _unknown(vocabulary) for name, vocabulary in of_feature.items()}
    raw = []
    for request in requests:
        features = request.features
        values = features.values().clone()
        edges = features.offset_per_key()
        for name, first, stop in zip(features.keys(), edges, edges[1:]):
            if name in ids_of:
                rows = values[first:stop]
                known, ids = ids_of[name]
                other = unknown_of[name][torch.arange(first, stop) % len(unknown_of[name])]
                stays = known[rows] & (torch.arange(1, len(rows) + 1) % _EVERY > 0)
                values[first:stop] = torch.where(stays, ids[rows], other)
        weights = features.weights_or_none()
        kjt = KeyedJaggedTensor(features.keys(), values, weights, lengths=features.lengths(), stride=features.stride())
        raw.append(replace(request, features=kjt))
    return raw


def _ids_by_row(vocabulary: TableVocabulary) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether an id has the row ``[rows]``, and that id, int64 ``[rows]``."""
    known, ids = np.zeros(vocabulary.num_rows, np.bool_), np.zeros(vocabulary.num_rows, np.int64)
    known[vocabulary.rows] = True
    ids[vocabulary.rows] = vocabulary.ids
    return torch.from_numpy(known), torch.from_numpy(ids)


def _unknown(vocabulary: TableVocabulary) -> torch.Tensor:
    """Ids that the vocabulary lacks, the same for the same vocabulary: of all values and of the range of its ids."""
    limits = np.iinfo(np.int64)
    rng = np.random.default_rng(0)
    near = rng.integers(0, vocabulary.input_hash_size or limits.max, _CANDIDATES, np.int64)
    far = rng.integers(limits.min, limits.max, _CANDIDATES, np.int64)
    drawn = np.concatenate((np.array([-1, limits.min, limits.max], np.int64), np.stack((near, far), 1).reshape(-1)))
    return torch.from_numpy(drawn[~np.isin(drawn, vocabulary.ids)])
