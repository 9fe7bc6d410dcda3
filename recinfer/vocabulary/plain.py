"""Plain vocabularies of an export, by feature: of strings, from the feature contract or as given, and of 64-bit ids, as given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from recinfer.archive.leaves import find_leaves
from recinfer.data.tokens import Tokens
from recinfer.data.transforms import Vocabulary
from recinfer.errors import ArchiveError, ConfigError
from recinfer.excerpts import some
from recinfer.vocabulary.strings import StringRows, StringVocabulary, check_rows
from recinfer.vocabulary.table import Segment, TableVocabulary

if TYPE_CHECKING:
    from torch import nn

    from recinfer.archive.manifest import Manifest
    from recinfer.data.contract import FeatureContract

__all__ = ["check_unchanged", "id_vocabularies", "indexed_contract", "string_vocabularies"]


def string_vocabularies(
    manifest: Manifest, contract: FeatureContract | None, given: Mapping[str, StringVocabulary | Sequence[str]]
) -> dict[str, StringVocabulary]:
    """The vocabulary of each feature whose requests may have strings: those in ``given``, and those of the contract.

    Raises:
        ConfigError: a feature that the model lacks, whose ids are raw, or of which the contract has a vocabulary too.
        InputError: a string that occurs twice, or no strings.
    """
    found = {}
    for feature in () if contract is None else contract.sparse:
        made = feature.transform
        if isinstance(made, Vocabulary) and feature.name not in manifest.raw_features:
            found[feature.name] = StringVocabulary(made.tokens, made.out_of_vocabulary)
    for name, strings in given.items():
        if name not in manifest.request_features:
            raise ConfigError(
                f"vocabularies: the model has no feature {name!r}; its features are {some(list(manifest.request_features), 20)}"
            )
        if name in manifest.raw_features:
            raise ConfigError(
                f"vocabularies: the table of feature {name!r} has a vocabulary of raw ids; give it one of the two"
            )
        if name in found:
            raise ConfigError(f"vocabularies: the feature contract has one of feature {name!r}; leave the feature out")
        vocabulary = strings if isinstance(strings, StringVocabulary) else StringVocabulary(tuple(strings))
        rows = min((table.rows for table in manifest.feature_tables.get(name, ())), default=vocabulary.rows)
        if vocabulary.rows > rows:
            raise ConfigError(
                f"vocabularies: feature {name!r} has {len(vocabulary.strings)} strings, and unknown ones read row "
                f"{vocabulary.unknown_row}; its table has {rows} rows. Leave strings out, or give unknown strings a row "
                "of the table"
            )
        found[name] = vocabulary
    return found


def id_vocabularies(
    model: nn.Module, given: Mapping[str, NDArray[np.int64]], contract: FeatureContract | None
) -> dict[tuple[str, str], TableVocabulary]:
    """(module path, table) -> the vocabulary of the table that each feature reads: its ids have the rows of their positions, and all
    others the row behind them.

    Args:
        model: its tables may be on meta.
        given: feature -> its ids, int64 ``[N]``, each once; N below the table's rows.
        contract: the feature contract of the export.

    Raises:
        ConfigError: a feature that no table reads, or several; two features of one table; too many ids; a contract, which has rows of
            the feature.
    """
    found: dict[tuple[str, str], TableVocabulary] = {}
    leaves = find_leaves(model)
    for feature, ids in given.items():
        if contract is not None:
            raise ConfigError(
                f"vocabulary of feature {feature!r}: the feature contract makes rows of its values, not raw ids; leave one of the two "
                "out"
            )
        tables = [(leaf.path, config) for leaf in leaves for config in leaf.configs if feature in config.feature_names]
        if len(tables) != 1:
            raise ConfigError(f"vocabulary of feature {feature!r}: {len(tables)} tables read it; expected one")
        ((path, config),) = tables
        if (path, config.name) in found:
            raise ConfigError(
                f"vocabulary of feature {feature!r}: another feature has one of table {config.name!r}, too"
            )
        rows = config.num_embeddings
        if len(ids) >= rows:
            raise ConfigError(
                f"vocabulary of feature {feature!r}: {len(ids)} ids; its table {config.name!r} has {rows} rows, of which unknown ids read "
                "the one behind the last id's"
            )
        segments = (Segment(0, rows, len(ids)),)
        found[path, config.name] = TableVocabulary(ids, np.arange(len(ids), dtype=np.int64), rows, segments)
    return found


def indexed_contract(contract: FeatureContract, strings: StringRows) -> FeatureContract:
    """The contract whose vocabularies read the archive's indexes.

    Raises:
        ArchiveError: V9, for a vocabulary that is not the index's.
    """
    sparse = []
    for feature in contract.sparse:
        made = feature.transform
        if not isinstance(made, Vocabulary) or feature.name not in strings.features:
            sparse.append(feature)
            continue
        own = StringVocabulary(made.tokens, made.out_of_vocabulary)
        _check_same(strings, feature.name, own, f"the contract's vocabulary of feature {feature.name!r}")
        sparse.append(replace(feature, transform=_Indexed(made, strings, feature.name)))
    return replace(contract, sparse=tuple(sparse))


def check_unchanged(strings: StringRows, given: Mapping[str, StringVocabulary]) -> None:
    """Raise ConfigError, for a delta, unless the vocabulary of each feature is that of the archive's index."""
    for feature, vocabulary in given.items():
        what = f"the vocabulary of feature {feature!r}"
        if feature not in strings.features:
            raise ConfigError(f"{what}: the archive has no strings of it; export this checkpoint as a new version")
        try:
            _check_same(strings, feature, vocabulary, what)
        except ArchiveError as error:
            raise ConfigError(
                f"{str(error).partition('] ')[2]}: a delta leaves strings as they are; export this checkpoint as a new version"
            ) from None


def _check_same(strings: StringRows, feature: str, own: StringVocabulary, where: str) -> None:
    info, shape = strings.info(feature)
    if shape.ids != len(own.strings) or info.unknown != own.unknown_row:
        raise ArchiveError(
            f"{where} has {len(own.strings)} strings, and unknown ones read row {own.unknown_row}; the index has {shape.ids} "
            f"strings and row {info.unknown}",
            rule="V9",
        )
    check_rows(strings, feature, own.strings, range(len(own.strings)), where, "V9")


class _Indexed(Vocabulary):
    """A vocabulary of the contract whose ids are those of an archive's index; it makes no index of its own."""

    _strings: StringRows
    _feature: str

    def __init__(self, made: Vocabulary, strings: StringRows, feature: str) -> None:
        self.__dict__.update(tokens=made.tokens, out_of_vocabulary=made.out_of_vocabulary)
        self.__dict__.update(_strings=strings, _feature=feature)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and (self.tokens, self.out_of_vocabulary) == (
            other.tokens,
            other.out_of_vocabulary,
        )

    __hash__ = Vocabulary.__hash__

    def ids(self, tokens: Tokens, name: str) -> NDArray[np.int64]:
        """The row of each token, int64 ``[T]``."""
        return self._strings.rows_of(self._feature, tokens.data, tokens.starts, tokens.lengths)
