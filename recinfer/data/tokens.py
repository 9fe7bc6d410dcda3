"""Splits text columns into tokens and converts tokens to ids: by hash, vocabulary or parsing.

Shapes: ``B`` rows, ``T`` tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from recinfer.errors import InputError

__all__ = ["Tokens", "hash_tokens", "look_up_tokens", "parse_tokens", "split_tokens"]

_ROW_END = "\0"
_TOKEN_END = "\1"
_WORD = 8


@dataclass(frozen=True)
class Tokens:
    """The tokens of a column, concatenated.

    Attributes:
        joined: all text, a NUL between the pieces.
        data: the UTF-8 bytes of ``joined`` (between the pieces of one row a 1, not a 0), and 8 zeros.
        counts: int64 ``[B]``, tokens of each row (empty ones do not count).
        rows: int64 ``[T]``, the row of each token.
        starts, lengths: int64 ``[T]``, each token's bytes in ``joined`` encoded as UTF-8.
        kept: bool, which of the pieces of ``joined`` are tokens.
    """

    joined: str
    data: NDArray[np.uint8]
    counts: NDArray[np.int64]
    rows: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    kept: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.starts)

    @cached_property
    def strings(self) -> NDArray[np.object_]:
        """The tokens as str objects ``[T]``."""
        pieces = self.joined.split(_ROW_END)
        found = np.empty(len(self.kept), dtype=object)
        found[:] = pieces[: len(self.kept)]
        return found[self.kept]


def split_tokens(text: list[str], name: str, separator: str | None = None) -> Tokens:
    """The tokens of each row: the row itself, or its parts between ``separator``, without empty ones.

    Raises:
        InputError: text with a NUL character, which is no text, or to be split and with the character U+0001, which
            takes the separator's place here; names the column and the row.
    """
    joined = _ROW_END.join(text)
    if joined.count(_ROW_END) != max(0, len(text) - 1):
        row = next(i for i, t in enumerate(text) if _ROW_END in t)
        raise InputError(f"column {name!r}, row {row}: holds a NUL character; expected text")
    marked = joined
    if separator is not None:
        if separator != _TOKEN_END and _TOKEN_END in joined:
            row = next(i for i, t in enumerate(text) if _TOKEN_END in t)
            raise InputError(
                f"column {name!r}, row {row}: holds the character U+0001; expected text split by {separator!r}"
            )
        marked = joined.replace(separator, _TOKEN_END)
        joined = marked.replace(_TOKEN_END, _ROW_END)
    encoded = marked.encode("utf-8", "surrogatepass")
    data = np.frombuffer(encoded + bytes(_WORD), dtype=np.uint8)
    if not text:
        none = np.empty(0, dtype=np.int64)
        return Tokens(joined, data, none, none, none, none, np.empty(0, dtype=bool))
    body = data[: len(encoded)]
    is_end = body == 0
    if separator is not None:
        is_end |= body == 1
    ends = np.append(np.flatnonzero(is_end), len(encoded))
    starts = np.concatenate(([0], ends[:-1] + 1))
    row_ends = np.append(body[ends[:-1]] == 0, True)
    rows = np.cumsum(row_ends) - row_ends
    kept = ends > starts
    rows = rows[kept].astype(np.int64)
    counts = np.bincount(rows, minlength=len(text)).astype(np.int64)
    return Tokens(joined, data, counts, rows, starts[kept], (ends - starts)[kept], kept)


def hash_tokens(tokens: Tokens, seed: int, num_buckets: int) -> NDArray[np.int64]:
    """The hash bucket, 0 to ``num_buckets - 1``, of each token: int64 ``[T]``, the same on every machine and version.

    All arithmetic is modulo 2^64. ``mix`` is the finalizer of SplitMix64 (Steele, Lea and Flood, 2014):
    ``x ^= x >> 30; x *= 0xBF58476D1CE4E5B9; x ^= x >> 27; x *= 0x94D049BB133111EB; x ^= x >> 31``.
    A token's UTF-8 bytes are cut into little-endian words of 8 bytes, the last one filled up with zeros. Then
    ``h = mix(seed + 0x9E3779B97F4A7C15)``; for every word ``h = mix(h ^ word) + 0x9E3779B97F4A7C15``; the bucket is
    ``mix(h ^ number of bytes) % num_buckets``.
    """
    golden = np.uint64(0x9E3779B97F4A7C15)
    h = np.full(len(tokens), seed, dtype=np.uint64)
    h = _mix(h + golden)
    windows = np.lib.stride_tricks.sliding_window_view(tokens.data, _WORD)
    active = np.arange(len(tokens))
    done = 0
    while active.size:
        words = np.ascontiguousarray(windows[tokens.starts[active] + done]).view("<u8").reshape(-1).astype(np.uint64)
        left = np.minimum(tokens.lengths[active] - done, _WORD).astype(np.uint64)
        # A shift by 64 bits is undefined, so the words that are whole stay as they are.
        cut = left < _WORD
        words[cut] &= (np.uint64(1) << (left[cut] * np.uint64(8))) - np.uint64(1)
        h[active] = _mix(h[active] ^ words) + golden
        done += _WORD
        active = active[tokens.lengths[active] > done]
    final = _mix(h ^ tokens.lengths.astype(np.uint64))
    return (final % np.uint64(num_buckets)).astype(np.int64)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def look_up_tokens(tokens: Tokens, ids: Mapping[str, int], default: int) -> NDArray[np.int64]:
    """The id of each token, or ``default`` if the vocabulary lacks it: int64 ``[T]``."""
    return np.fromiter(map(ids.get, tokens.strings, repeat(default)), np.int64, len(tokens))


def parse_tokens(tokens: Tokens, name: str) -> NDArray[np.int64]:
    """Each token parsed as a whole number: int64 ``[T]``.

    Raises:
        InputError: a token that spells none, or none that fits 64 bits; names the column, the row and the token.
    """
    try:
        return tokens.strings.astype(np.int64)
    except (ValueError, OverflowError):
        pass
    # A slower path for columns with other spellings: "7.0" is 7, and an error names the wrong token.
    found = np.empty(len(tokens), dtype=np.int64)
    for at, token in enumerate(tokens.strings):
        try:
            number = float(token)
            found[at] = int(token) if number != number or abs(number) > 2**53 else int(number)
            if number != int(number):
                raise ValueError
        except (ValueError, OverflowError):
            raise InputError(
                f"column {name!r}, row {int(tokens.rows[at])}: got {token!r}, expected a whole number of 64 bits"
            ) from None
    return found
