"""Golden requests of features with vocabularies: raw ids and strings, of which most are known and some are not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from recinfer.archive.check import Request
from recinfer.archive.manifest import Manifest
from recinfer.columns import strings_of
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from recinfer.vocabulary.strings import StringVocabulary
from recinfer.vocabulary.table import TableVocabulary

__all__ = ["raw_requests", "string_requests"]

_CANDIDATES = 1000
_EVERY = 4


def raw_requests(
    manifest: Manifest, vocabularies: Mapping[tuple[str, str], TableVocabulary], requests: Sequence[Request]
) -> list[Request]:
    """``requests`` with raw ids in place of rows: the id of the row, but unknown ids where no id has the row, and one in four
    everywhere. What the ids program computes ids of stays as it is."""
    if not vocabularies:
        return list(requests)
    program = None if manifest.signature is None else manifest.signature.ids
    of_feature = {
        name: vocabularies[key]
        for name, (table, *_) in manifest.feature_tables.items()
        if (key := (table.module, table.name)) in vocabularies and (program is None or name not in program.features)
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
        raw.append(replace(request, features=_with_values(features, values)))
    return raw


def string_requests(
    manifest: Manifest, vocabularies: Mapping[str, StringVocabulary], requests: Sequence[Request]
) -> list[Request]:
    """``requests`` with strings of the rows: unknown strings where no string has the row, and one in four everywhere.

    The first request stays as it is: it has the last row of each table, which often is no string's.
    """
    counts = {} if manifest.signature is None else manifest.signature.counts
    if not vocabularies or not vocabularies.keys().isdisjoint(counts):  # ids that count others are no names
        return list(requests)
    unknown_of = {name: _unknown_string(vocabulary) for name, vocabulary in vocabularies.items()}
    made = [*requests[:1]]
    for request in requests[1:]:
        features = request.features
        values = features.values().clone()
        edges = features.offset_per_key()
        texts: list[str] = []
        keys = []
        for name, first, stop in zip(features.keys(), edges, edges[1:]):
            if name not in vocabularies:
                continue
            keys.append(name)
            strings = vocabularies[name].strings
            for at in range(first, stop):
                row = int(values[at])
                if row < len(strings) and (at - first + 1) % _EVERY:
                    texts.append(strings[row])
                else:
                    texts.append(unknown_of[name])
                    values[at] = vocabularies[name].unknown_row
        given = strings_of("golden request", texts, tuple(keys))
        made.append(replace(request, features=_with_values(features, values), strings=given))
    return made


def _with_values(features: KeyedJaggedTensor, values: torch.Tensor) -> KeyedJaggedTensor:
    weights = features.weights_or_none()
    return KeyedJaggedTensor(features.keys(), values, weights, lengths=features.lengths(), stride=features.stride())


def _unknown_string(vocabulary: StringVocabulary) -> str:
    """A string that the vocabulary lacks, the same for the same vocabulary."""
    text = "unknown"
    while text in vocabulary.strings:
        text += "?"
    return text


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
