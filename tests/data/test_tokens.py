"""Text to tokens to ids, compared with plain Python value by value."""

from __future__ import annotations

import string

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recinfer.data.tokens import hash_tokens, look_up_tokens, parse_tokens, split_tokens
from recinfer.errors import InputError

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
GOLDEN_BUCKETS = [30696, 108254, 275711, 818627, 177828, 634236, 67305]
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=()), max_size=40)


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def bucket(token: str, seed: int, num_buckets: int) -> int:
    """The documented hash, one token at a time."""
    data = token.encode("utf-8", "surrogatepass")
    h = mix((seed + GOLDEN) & MASK)
    for at in range(0, len(data), 8):
        h = (mix(h ^ int.from_bytes(data[at : at + 8].ljust(8, b"\0"), "little")) + GOLDEN) & MASK
    return mix(h ^ len(data)) % num_buckets


@given(st.lists(TEXT, max_size=30), st.integers(0, MASK), st.integers(1, 2**63 - 1))
def test_the_hash_is_the_documented_one(texts: list[str], seed: int, num_buckets: int) -> None:
    tokens = split_tokens(texts, "c")
    expected = [bucket(t, seed, num_buckets) for t in texts if t]
    assert hash_tokens(tokens, seed, num_buckets).tolist() == expected


def test_the_hash_never_changes() -> None:
    """Served models depend on these numbers: a change breaks every checkpoint that uses the hash."""
    texts = ["68fd1e64", "a", "12345678", "123456789", "Ünïcödé", "x" * 100, "7"]
    tokens = split_tokens(texts, "c")
    assert hash_tokens(tokens, 0, 1_000_000).tolist() == GOLDEN_BUCKETS
    assert hash_tokens(tokens, 7, 1_000_000).tolist() != GOLDEN_BUCKETS


def test_a_tokens_hash_does_not_depend_on_its_neighbours() -> None:
    alone = hash_tokens(split_tokens(["abc"], "c"), 3, 999)
    beside = hash_tokens(split_tokens(["x" * 5000, "abc", "", "abcabcabcabc"], "c"), 3, 999)
    assert beside[1] == alone[0]


def test_buckets_are_filled_evenly_and_seeds_are_independent() -> None:
    texts = [f"{i:08x}" for i in range(100_000)]
    tokens = split_tokens(texts, "c")
    first, second = hash_tokens(tokens, 0, 64), hash_tokens(tokens, 1, 64)
    counts = np.bincount(first, minlength=64)
    chi_squared = float(((counts - counts.mean()) ** 2 / counts.mean()).sum())
    assert chi_squared < 63 + 5 * np.sqrt(2 * 63)
    assert abs((first == second).mean() - 1 / 64) < 0.003


@settings(max_examples=200)
@given(
    st.lists(st.text(st.sampled_from(string.ascii_letters + " |,Üß漢😀\n"), max_size=20), max_size=20),
    st.sampled_from([None, " ", "|", ", ", "ab", "😀"]),
)
def test_splitting_is_what_str_split_does(texts: list[str], separator: str | None) -> None:
    tokens = split_tokens(texts, "c", separator)
    expected = [[p for p in (t.split(separator) if separator else [t]) if p] for t in texts]
    assert tokens.counts.tolist() == [len(e) for e in expected]
    assert tokens.strings.tolist() == [p for e in expected for p in e]
    assert tokens.rows.tolist() == [row for row, e in enumerate(expected) for _ in e]
    data = tokens.data.tobytes()
    cut = [data[s : s + n].decode() for s, n in zip(tokens.starts, tokens.lengths)]
    assert cut == tokens.strings.tolist()


def test_no_rows_and_no_tokens() -> None:
    assert split_tokens([], "c").counts.tolist() == []
    assert len(hash_tokens(split_tokens([], "c"), 0, 5)) == 0
    assert split_tokens(["", ""], "c", " ").counts.tolist() == [0, 0]
    assert parse_tokens(split_tokens([""], "c"), "c").tolist() == []


def test_a_nul_character_is_refused() -> None:
    with pytest.raises(InputError, match="column 'c', row 1: holds a NUL"):
        split_tokens(["a", "b\0c"], "c")


def test_a_vocabulary_is_looked_up() -> None:
    tokens = split_tokens(["b a", "", "z b"], "c", " ")
    assert look_up_tokens(tokens, {"a": 0, "b": 1}, 9).tolist() == [1, 0, 9, 1]


def test_numbers_are_parsed() -> None:
    tokens = split_tokens(["7", "-3", "007", "9223372036854775807"], "c")
    assert parse_tokens(tokens, "c").tolist() == [7, -3, 7, 2**63 - 1]
    assert parse_tokens(split_tokens(["7.0", "8", "1e3"], "c"), "c").tolist() == [7, 8, 1000]


@pytest.mark.parametrize("bad", ["x", "1.5", "nan", "inf", "9223372036854775808", "0x10"])
def test_what_is_no_whole_number_is_named(bad: str) -> None:
    with pytest.raises(InputError, match=r"column 'c', row 1: got .*, expected a whole number"):
        parse_tokens(split_tokens(["7", bad, "8"], "c"), "c")


def test_control_characters_are_text_like_any_other() -> None:
    tokens = split_tokens(["a\1b", "", "c\n,d"], "c")
    assert tokens.strings.tolist() == ["a\1b", "c\n,d"]
    assert look_up_tokens(tokens, {"a\1b": 4, "a": 5, "b": 6}, 9).tolist() == [4, 9]
    assert hash_tokens(tokens, 0, 1000).tolist() == [bucket(t, 0, 1000) for t in ("a\1b", "c\n,d")]


def test_the_mark_of_a_separator_may_be_the_separator_and_nothing_else() -> None:
    tokens = split_tokens(["a\1b\1", "c"], "c", "\1")
    assert (tokens.strings.tolist(), tokens.counts.tolist()) == (["a", "b", "c"], [2, 1])
    with pytest.raises(InputError, match=r"column 'c', row 1: holds the character U\+0001"):
        split_tokens(["a,b", "c\1d"], "c", ",")
