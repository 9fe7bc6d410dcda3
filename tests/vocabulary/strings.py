"""An archive whose features take strings, and the same requests with strings and with the rows that they read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from recinfer.archive.reader import Archive
from recinfer.vocabulary.strings import StringVocabulary
from tests.archive.models import NUM_DENSE, RANKER_ROWS, make_archive

ITEMS = StringVocabulary(tuple(f"item {n}" if n % 3 else f"Ünïcödé-{n}" for n in range(1199)), unknown=7)
CITIES = StringVocabulary(("paris", "New York", "", "東京", "a\0b", "x" * 1_000_000, *(f"city{n}" for n in range(290))))
"""Also an empty string, a NUL and a string of 1 MB; unknown strings read row 296."""
STRINGS = {"f_item": ITEMS, "f_hist": ITEMS, "f_cat": CITIES}
UNUSUAL = ("", "paris\0", "PARIS", "\0", "item", "y" * 1_000_000, b"\xff\xfe", b"\xc3", "item 1")


def string_archive(folder: Path, **options: object) -> Archive:
    return make_archive(folder, vocabularies=STRINGS, **options)[1]


def row_of(vocabulary: StringVocabulary, string: str | bytes) -> int:
    text = string.decode("utf-8", "surrogateescape") if isinstance(string, bytes) else string
    return vocabulary.strings.index(text) if text in vocabulary.strings else vocabulary.unknown_row


def both_requests(
    batch: int, seed: int, plain: bool = False
) -> tuple[NDArray[np.float32], dict[str, list[list[str]]], dict[str, list[list[int]]]]:
    """Dense numbers, features with strings and the features with their rows; ``plain``: no string that JSON lacks, none that is long."""
    rng = np.random.default_rng(seed)
    strings: dict[str, list[list[str]]] = {}
    rows: dict[str, list[list[int]]] = {}
    for name, limit in RANKER_ROWS.items():
        sizes = rng.integers(0, 4, batch)
        if name not in STRINGS:
            rows[name] = strings[name] = [rng.integers(0, limit, size).tolist() for size in sizes]  # type: ignore[assignment]
            continue
        known = STRINGS[name].strings
        pool: list[str | bytes] = [*(known[at] for at in rng.integers(0, len(known), 50)), *UNUSUAL]
        if plain:
            pool = [one for one in pool if isinstance(one, str) and len(one) < 1000]
        strings[name] = [[pool[at] for at in rng.integers(0, len(pool), size)] for size in sizes]  # type: ignore[misc]
        rows[name] = [[row_of(STRINGS[name], one) for one in bag] for bag in strings[name]]
    return rng.normal(size=(batch, NUM_DENSE)).astype(np.float32), strings, rows
