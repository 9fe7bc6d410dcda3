"""The parts of id steps in ``manifest.json`` and ``delta.json``: the only place of this package that names them."""

from __future__ import annotations

from dataclasses import dataclass

from recinfer.vocabulary.info import DeltaVocabulary, StringInfo, VocabularyInfo

__all__ = ["DeltaParts", "ManifestParts"]


@dataclass(frozen=True, kw_only=True)
class ManifestParts:
    """The keys of :class:`recinfer.archive.manifest.Manifest` that belong to id steps, each of a :class:`recinfer.archive.part.Part`."""

    vocabularies: tuple[VocabularyInfo, ...] = ()
    string_vocabularies: tuple[StringInfo, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DeltaParts:
    """The keys of :class:`recinfer.archive.delta.DeltaInfo` that belong to id steps, each of a :class:`recinfer.archive.part.DeltaPart`."""

    vocabularies: tuple[DeltaVocabulary, ...] = ()
