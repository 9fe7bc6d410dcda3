"""The vocabularies of an archive as plain data, for `recinfer inspect`."""

from __future__ import annotations

from typing import Any

from recinfer.archive.reader import Archive
from recinfer.vocabulary.info import VocabularyInfo
from recinfer.vocabulary.opened import read_shapes
from recinfer.vocabulary.strings import read_string_shapes

__all__ = ["describe_strings", "describe_vocabularies", "unknown_text"]


def describe_vocabularies(archive: Archive) -> list[dict[str, Any]]:
    """For each vocabulary its table, number of ids, load, bytes, segments and the rows of unknown ids."""
    return [
        {
            "table": info.table,
            "module": info.module,
            "ids": shape.ids,
            "rows": shape.rows,
            "load": round(shape.load, 4),
            "bytes": shape.num_bytes,
            "segments": len(info.segments),
            "input_hash_size": info.input_hash_size,
            "unknown": unknown_text(info),
        }
        for info, shape in read_shapes(archive)
    ]


def describe_strings(archive: Archive) -> list[dict[str, Any]]:
    """For each vocabulary of strings its features, number of strings, load, bytes, the row of unknown strings and examples."""
    return [
        {
            "features": list(info.features),
            "strings": shape.ids,
            "rows": info.rows,
            "load": round(shape.load, 4),
            "bytes": shape.num_bytes,
            "hash": info.hash,
            "seed": info.seed,
            "unknown": f"row {info.unknown}",
            "examples": list(info.examples),
        }
        for info, shape in read_string_shapes(archive)
    ]


def unknown_text(info: VocabularyInfo) -> str:
    """The rows that unknown ids read, as text."""
    counts = {min(segment.miss_rows, 2) for segment in info.segments}
    kinds = {0: "no row", 1: "a fixed row", 2: "a hashed row"}
    text = " or ".join(kinds[count] for count in sorted(counts, reverse=True))
    if len(info.segments) > 1:
        return f"{text} of the id's segment"
    first = info.segments[0]
    return f"row {first.miss_row}" if first.miss_rows == 1 else text
