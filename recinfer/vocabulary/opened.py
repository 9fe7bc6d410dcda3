"""The indexes of an opened archive, with the changes of deltas."""

from __future__ import annotations

from collections.abc import Sequence

from recinfer.archive.part import Changes
from recinfer.archive.paths import open_inside
from recinfer.archive.reader import Archive
from recinfer.errors import ArchiveError
from recinfer.vocabulary.index import IdIndex, IndexShape, open_index
from recinfer.vocabulary.info import DeltaVocabulary, VocabularyInfo

__all__ = ["open_indexes", "read_shapes"]


def open_indexes(archive: Archive, deltas: Sequence[Changes] = ()) -> list[tuple[VocabularyInfo, IdIndex]]:
    """Map and check the index of each vocabulary, in the manifest's order.

    Args:
        archive: its index files are mapped as they are, shared with other processes.
        deltas: the applied deltas, whose changes are made in memory of this process.

    Raises:
        ArchiveError: V3 to V6, or X9 for changes that do not fit into an index.
    """
    rows = {(t.module, t.name): t.rows for t in archive.manifest.tables}
    opened = []
    for number, info in enumerate(archive.manifest.vocabularies):
        changes = [
            tensors
            for delta in deltas
            for entry, tensors in delta.parts
            if isinstance(entry, DeltaVocabulary) and (entry.module, entry.table) == (info.module, info.table)
        ]
        path = VocabularyInfo.path(number)
        with open_inside(archive.root, path) as file:
            index = open_index(file, path, rows[info.module, info.table], writable=bool(changes))
        index.check(path, info.segments, info.input_hash_size)
        for ids, new_rows in changes:
            changed = index.changed(ids, new_rows)
            if changed is None:
                raise ArchiveError(
                    f"the delta adds more ids to {path} than fit into it; export the checkpoint as a new version",
                    rule="X9",
                )
            index = changed
        if changes:
            try:
                index.check(path, info.segments, info.input_hash_size)
            except ArchiveError as error:
                raise ArchiveError(f"with the delta applied, {str(error).partition('] ')[2]}", rule="X9") from None
        opened.append((info, index))
    return opened


def read_shapes(archive: Archive) -> list[tuple[VocabularyInfo, IndexShape]]:
    """The sizes of each index, from its header alone."""
    rows = {(t.module, t.name): t.rows for t in archive.manifest.tables}
    shapes = []
    for number, info in enumerate(archive.manifest.vocabularies):
        with open_inside(archive.root, VocabularyInfo.path(number)) as file:
            shapes.append((info, open_index(file, VocabularyInfo.path(number), rows[info.module, info.table]).shape))
    return shapes
