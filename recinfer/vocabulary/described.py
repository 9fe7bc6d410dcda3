"""The vocabularies of an archive, for `recinfer inspect`."""

from __future__ import annotations

from typing import Any

from recinfer.archive.part import ShownPart
from recinfer.archive.reader import Archive
from recinfer.sizes import size_text
from recinfer.vocabulary.info import StringInfo, VocabularyInfo
from recinfer.vocabulary.opened import read_shapes
from recinfer.vocabulary.strings import read_string_shapes

__all__ = ["shown_strings", "shown_vocabularies", "unknown_text"]


def shown_vocabularies(archive: Archive) -> ShownPart:
    """For each vocabulary its table, number of ids, load, bytes, segments and the rows of unknown ids."""
    entries = [
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
    columns = {
        "table": [info.full_name for info in archive.manifest.vocabularies],
        "ids": [f"{each['ids']:,}" for each in entries],
        **_sizes(entries),
        "segments": [str(each["segments"]) for each in entries],
        "unknown ids read": [str(each["unknown"]) for each in entries],
    }
    numbers = "ids", "rows", "load", "bytes", "segments"
    return ShownPart(VocabularyInfo.key, entries, "vocabularies", columns, numbers)


def shown_strings(archive: Archive) -> ShownPart:
    """For each vocabulary of strings its features, number of strings, load, bytes, the row of unknown strings and examples."""
    entries = [
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
    infos = archive.manifest.string_vocabularies
    columns = {
        "features": [", ".join(info.features) for info in infos],
        "strings": [f"{each['strings']:,}" for each in entries],
        **_sizes(entries),
        "unknown strings read": [str(each["unknown"]) for each in entries],
        "for example": [", ".join(map(repr, list(info.examples)[:3])) for info in infos],
    }
    return ShownPart(StringInfo.key, entries, "vocabularies of strings", columns, ("strings", "rows", "load", "bytes"))


def _sizes(entries: list[dict[str, Any]]) -> dict[str, list[str]]:
    return {
        "rows": [f"{each['rows']:,}" for each in entries],
        "load": [f"{each['load']:.2f}" for each in entries],
        "bytes": [size_text(each["bytes"]) for each in entries],
    }


def unknown_text(info: VocabularyInfo) -> str:
    """The rows that unknown ids read, as text."""
    counts = {min(segment.miss_rows, 2) for segment in info.segments}
    kinds = {0: "no row", 1: "a fixed row", 2: "a hashed row"}
    text = " or ".join(kinds[count] for count in sorted(counts, reverse=True))
    if len(info.segments) > 1:
        return f"{text} of the id's segment"
    first = info.segments[0]
    return f"row {first.miss_row}" if first.miss_rows == 1 else text
