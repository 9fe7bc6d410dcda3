"""The index of ids against numpy: built, probed, changed, and refused when its file is damaged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from recinfer.vocabulary._index import remap, remap_bytes

from recinfer.errors import ArchiveError, InputError
from recinfer.vocabulary.index import (
    _BUCKET,
    HEADER_BYTES,
    IdIndex,
    build_index,
    open_index,
    segment_array,
    segment_block,
)
from recinfer.vocabulary.table import Segment, TableVocabulary, even_segments
from tests.vocabulary.made import MAX, MIN, UNUSUAL, expected_rows, murmur3, vocabulary


def tables_of(index: IdIndex, made: TableVocabulary, segments: NDArray[np.int64]) -> NDArray[np.uint64]:
    shape = index.shape
    block = segment_block(made.segments, made.input_hash_size)
    place = index.buckets.ctypes.data, shape.sections, shape.section_buckets, shape.seed
    return np.array([(*place, segments.ctypes.data, len(segments), block)], np.uint64)


def rows_of(index: IdIndex, made: TableVocabulary, ids: NDArray) -> tuple[NDArray[np.int64], list[int]]:
    """The rows, and the numbers of hits and misses."""
    counters, out = np.zeros((1, 2), np.int64), np.full(len(ids), -7)
    segments = segment_array(made.segments)
    remap(tables_of(index, made, segments), np.array([[0, 0]]), counters, ids, np.array([0, len(ids)]), out)
    return out, counters[0].tolist()


def queries(made: TableVocabulary, count: int, seed: int = 1) -> NDArray[np.int64]:
    """Known ids, unknown ones of the range, any ids, and the unusual ones."""
    rng = np.random.default_rng(seed)
    known = rng.choice(made.ids, count // 2) if len(made.ids) else np.zeros(0, np.int64)
    near = rng.integers(0, made.input_hash_size or MAX, count // 4, np.int64)
    far = rng.integers(MIN, MAX, count - len(known) - len(near), np.int64)
    return rng.permutation(np.concatenate((known, near, far, np.array(UNUSUAL, np.int64))))


CASES = {
    "one segment": {"rows": 300_000},
    "segments": {"rows": 120_000, "segments": 4, "input_hash_size": 2**40},
    "an uneven range": {"rows": 3_001, "segments": 3, "input_hash_size": 2**63 - 1},
    "in turns": {"rows": 3_001, "segments": 7},
    "hashed": {"rows": 50_000, "segments": 4, "input_hash_size": 10**12, "hashed": True},
    "without a row": {
        "rows": 100,
        "segments": (Segment(0, 60, 0, 0), Segment(60, 40, 70, 30)),
        "input_hash_size": 1000,
    },
    "nearly empty": {"rows": 1000, "full": 0.007},
    "every row": {"rows": 1000, "full": 1.0},
    "one row": {"rows": 1, "full": 1.0},
    "empty": {"rows": 5, "full": 0.0},
}


@pytest.mark.parametrize("case", CASES)
def test_every_id_gets_its_row(case: str, tmp_path: Path) -> None:
    made = vocabulary(**CASES[case])  # type: ignore[arg-type]
    index = build_index(made)
    index.check(case, made.segments, made.input_hash_size)
    ids = queries(made, 50_000)
    expected = expected_rows(made, ids)
    found, (hits, misses) = rows_of(index, made, ids)
    assert np.array_equal(found, expected)
    assert hits == np.isin(ids, made.ids).sum() and hits + misses == len(ids)
    narrow = ids[(ids >= -(2**31)) & (ids < 2**31)].astype(np.int32)
    assert np.array_equal(rows_of(index, made, narrow)[0], expected_rows(made, narrow.astype(np.int64)))
    path = tmp_path / "index"
    path.write_bytes(index.shape.header() + index.buckets.tobytes())
    for writable in (False, True):
        with path.open("rb") as file:
            mapped = open_index(file, "index", made.num_rows, writable=writable)
        mapped.check("index", made.segments, made.input_hash_size)
        assert mapped.shape == index.shape and np.array_equal(rows_of(mapped, made, ids)[0], expected)
    order = np.argsort(made.ids)
    entries = index.entries()
    assert np.array_equal(entries[0], made.ids[order]) and np.array_equal(entries[1], made.rows[order])


def test_an_id_takes_at_most_16_bytes() -> None:
    for count in (20_000, 30_011, 41_999, 65_536, 100_003, 160_001):
        made = vocabulary(count, full=1.0)
        shape = build_index(made).shape
        assert shape.num_bytes / count <= 16.1 and 0.79 < shape.load <= 0.85


def test_most_ids_are_in_their_home_bucket() -> None:
    made = vocabulary(50_000, full=1.0)
    index = build_index(made)
    buckets = index.buckets.view(_BUCKET)
    homes = _homes(index, made.ids)
    at_home = (buckets["ids"][homes] == made.ids[:, None]).any(1)
    assert at_home.mean() > 0.85


def _homes(index: IdIndex, ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """The home bucket of each id, see V6 of FORMAT.md."""
    shape = index.shape
    with np.errstate(over="ignore"):
        x = ids.view(np.uint64) ^ np.uint64(shape.seed)
        x = (x ^ x >> np.uint64(33)) * np.uint64(0xFF51AFD7ED558CCD)
        x = (x ^ x >> np.uint64(33)) * np.uint64(0xC4CEB9FE1A85EC53)
        x = x ^ x >> np.uint64(33)
    section = (x >> np.uint64(32)) * np.uint64(shape.sections) >> np.uint64(32)
    return (section * np.uint64(shape.section_buckets) + (x & np.uint64(shape.section_buckets - 1))).astype(np.int64)


def test_a_full_index_is_larger_rather_than_endless() -> None:
    """Ids that have the same two buckets at every size go under another seed."""
    made = vocabulary(64, full=1.0)
    index = build_index(made)
    assert index.shape.load < 1
    index.check("index", made.segments, 0)


def test_the_hash_of_unknown_ids_is_fbgemms() -> None:
    pytest.importorskip("fbgemm_gpu")
    ids = torch.from_numpy(np.concatenate((np.random.default_rng(0).integers(MIN, MAX, 10_000), UNUSUAL)))
    identities = torch.full((1_000_003, 1), -7)
    found, _ = torch.ops.fbgemm.zero_collision_hash(ids, identities, 1, True, -1, True)
    assert np.array_equal(found.numpy(), (murmur3(ids.numpy()) % np.uint64(1_000_003)).astype(np.int64))


def test_changes_take_ids_out_and_put_others_in() -> None:
    made = vocabulary(20_000, segments=2, input_hash_size=2**30)
    index = build_index(made)
    rng = np.random.default_rng(3)
    now = dict(zip(made.ids.tolist(), made.rows.tolist()))
    for _ in range(20):
        gone = rng.choice(np.array(list(now)), 1000, replace=False)
        free = rng.permutation([now.pop(int(id)) for id in gone])
        later = {}
        for row in free.tolist():  # a new id of the row's segment, or one whose row moves
            low = 0 if row < 10_000 else 2**29
            id = int(rng.integers(low, low + 2**29))
            if id not in now and id not in later:
                later[id] = row
        now |= later
        ids = np.array([*gone, *(id for id in later if id not in gone)], np.int64)
        changed = index.changed(ids, np.array([now.get(int(id), -1) for id in ids], np.int64))
        assert changed is not None
        index = changed
        index.check("changed", made.segments, made.input_hash_size)
        assert index.shape.ids == len(now)
    expected = TableVocabulary(
        np.array(list(now), np.int64),
        np.array(list(now.values()), np.int64),
        20_000,
        made.segments,
        made.input_hash_size,
    )
    asked = np.concatenate((queries(expected, 50_000), made.ids))
    assert np.array_equal(rows_of(index, made, asked)[0], expected_rows(expected, asked))


@pytest.mark.parametrize("rows", [5, 64, 5000])
def test_a_vocabulary_that_grows_to_an_id_for_each_row_fits(rows: int) -> None:
    full = vocabulary(rows, full=1.0, seed=4)
    few = TableVocabulary(full.ids[:2], full.rows[:2], rows, full.segments, full.input_hash_size)
    index = build_index(few)
    for part in np.array_split(np.arange(2, rows), 3):
        changed = index.changed(full.ids[part], full.rows[part])
        assert changed is not None
        index = changed
    index.check("index", full.segments, full.input_hash_size)
    assert index.shape.ids == rows and np.array_equal(rows_of(index, full, full.ids)[0], full.rows)


def test_more_ids_than_slots_do_not_fit() -> None:
    made = vocabulary(100, full=0.5)
    index = build_index(made)
    ids = np.arange(10**6, 10**6 + 1000)
    assert index.changed(ids, np.arange(1000)) is None


def test_several_keys_and_bytes() -> None:
    one, two = vocabulary(500, segments=2, input_hash_size=2**40), vocabulary(70, hashed=True, seed=5)
    indexes = [build_index(made) for made in (one, two)]
    segments = [segment_array(made.segments) for made in (one, two)]
    tables = np.concatenate([tables_of(*each) for each in zip(indexes, (one, two), segments)])
    keys = np.array([[1, 0], [-1, -1], [0, 2], [1, 3]])
    batch = 3
    rng = np.random.default_rng(0)
    for longest, dtype in ((1, np.int64), (2, np.int32), (400, np.int64)):
        lengths = rng.integers(0, longest + 1, (4, batch)).astype(np.int32)
        edges = np.concatenate(([0], lengths.sum(1).cumsum()))
        parts = [rng.choice(made.ids, n) for made, n in zip((two, one, one, two), lengths.sum(1))]
        ids = np.concatenate(parts).astype(dtype)
        wide = ids.astype(np.int64)
        pieces = [wide[edges[k] : edges[k + 1]] for k in range(4)]
        expected = np.concatenate(
            [expected_rows(two, pieces[0]), pieces[1], expected_rows(one, pieces[2]), expected_rows(two, pieces[3])]
        )
        counters, out = np.zeros((4, 2), np.int64), np.empty(len(ids), np.int64)
        remap(tables, keys, counters, ids, edges, out)
        assert np.array_equal(out, expected)
        assert counters.sum(1).tolist() == [len(pieces[0]), 0, len(pieces[2]), len(pieces[3])]
        data = b"head" + lengths.tobytes() + b"x" + ids.tobytes()
        again = np.zeros_like(counters)
        places = batch, 4, len(ids), 5 + lengths.nbytes, dtype is np.int64
        assert remap_bytes(tables, keys, again, data, *places) == lengths.tobytes() + expected.tobytes()
        assert np.array_equal(again, counters)
        for wrong in (lengths + 1, np.where(lengths == lengths.max(), -lengths, lengths)):
            if wrong.sum() != len(ids) or (wrong < 0).any():
                data = b"head" + wrong.astype(np.int32).tobytes() + b"x" + ids.tobytes()
                assert remap_bytes(tables, keys, again, data, *places) is None
    with pytest.raises(ValueError, match="places outside"):
        remap_bytes(tables, keys, again, b"short", batch, 0, 5, 0, True)
    with pytest.raises(ValueError, match="do not fit"):
        remap(tables, keys, again, ids, np.array([0, 5, 4, 8, len(ids)]), out)


# ---------------------------------------------------------------- data and files that are refused


def table(ids: list[int], rows: list[int], **more: object) -> TableVocabulary:
    options = {"num_rows": 10, "segments": even_segments(10, 1), "input_hash_size": 0} | more
    return TableVocabulary(np.array(ids, np.int64), np.array(rows, np.int64), **options)  # type: ignore[arg-type]


HALVES = even_segments(10, 2)


@pytest.mark.parametrize(
    "given, message",
    [
        (table([1, 2, 1], [0, 1, 2]), r"ids 1 occur more than once"),
        (table([1, 2], [3, 3]), "rows 3 belong to more than one id"),
        (table([1], [10]), "id 1 has row 10; the table has 10 rows"),
        (table([1], [-1]), "id 1 has row -1"),
        (table(list(range(11)), list(range(11))), "11 ids for a table of 10 rows"),
        (table([1, 2], [0]), "2 ids and 1 rows"),
        (table([1], [7], segments=HALVES, input_hash_size=100), "row 7 of segment 1, but is an id of segment 0"),
        (table([], [], segments=(Segment(0, 6, 5), Segment(5, 5, 9))), "without gap or overlap"),
        (table([], [], segments=(Segment(0, 5, 5), Segment(5, 5, 9))), "segment 0, rows 0 to 4: unknown ids read"),
        (table([], [], segments=(Segment(0, 5, 4),)), "segments have 5 rows; the table has 10"),
        (table([], [], segments=()), "0 segments"),
        (table([], [], input_hash_size=-1), "input_hash_size is -1"),
    ],
)
def test_bad_vocabularies(given: TableVocabulary, message: str) -> None:
    with pytest.raises(InputError, match=f"^item: .*{message}"):
        given.check("item")


def _set(data: bytearray, offset: int, value: int, size: int = 8) -> None:
    data[offset : offset + size] = value.to_bytes(size, "little", signed=value < 0)


def damaged(index: IdIndex, change: str) -> bytes:
    """The file of an index, damaged."""
    data = bytearray(index.shape.header() + index.buckets.tobytes())
    each = np.frombuffer(bytes(data), np.uint8)[HEADER_BYTES:].reshape(-1, 64)
    full = int(np.flatnonzero(each[:, 60] >= 2)[0])
    at = HEADER_BYTES + 64 * full
    sections, section_buckets, ids, rows = 8, 16, 24, 32
    if change == "size no power of two":
        _set(data, section_buckets, 3)
    elif change == "no sections":
        _set(data, sections, 0)
    elif change == "many sections":
        _set(data, sections, 2**40)
    elif change == "truncated":
        del data[-64:]
    elif change == "truncated header":
        del data[40:]
    elif change == "magic":
        data[0] ^= 1
    elif change == "more in the header":
        data[60] = 1
    elif change == "other rows":
        _set(data, rows, index.shape.rows + 1)
    elif change == "load 1":
        _set(data, ids, index.shape.buckets * 5)
    elif change == "more ids than rows":
        _set(data, ids, index.shape.rows + 1)
    elif change == "fewer ids":
        _set(data, ids, index.shape.ids - 1)
    elif change == "six slots":
        data[at + 60] = 6
    elif change == "a mark":
        data[at + 61] = 2
    elif change == "spare bytes":
        data[at + 63] = 1
    elif change == "row outside":
        _set(data, at + 40, index.shape.rows, 4)
    elif change == "row twice":
        data[at + 44 : at + 48] = data[at + 40 : at + 44]
    elif change == "lost id":
        _set(data, at, int.from_bytes(data[at : at + 8], "little", signed=True) ^ 0x10101)
    elif change == "twice":
        data[at + 8 : at + 16] = data[at : at + 8]
    elif change == "unmarked":
        for number in range(len(each)):
            data[HEADER_BYTES + 64 * number + 61] = 0
    else:
        raise AssertionError(change)
    return bytes(data)


@pytest.mark.parametrize(
    "change, rule",
    [
        ("size no power of two", "V3"),
        ("no sections", "V3"),
        ("many sections", "V3"),
        ("truncated", "V3"),
        ("truncated header", "V3"),
        ("magic", "V3"),
        ("more in the header", "V3"),
        ("other rows", "V4"),
        ("load 1", "V4"),
        ("more ids than rows", "V4"),
        ("fewer ids", "V4"),
        ("six slots", "V5"),
        ("a mark", "V5"),
        ("spare bytes", "V5"),
        ("row outside", "V6"),
        ("row twice", "V6"),
        ("lost id", "V6"),
        ("twice", "V6"),
        ("unmarked", "V6"),
    ],
)
def test_damaged_files(change: str, rule: str, tmp_path: Path) -> None:
    made = vocabulary(5000)
    path = tmp_path / "00000.index"
    path.write_bytes(damaged(build_index(made), change))
    with pytest.raises(ArchiveError) as caught, path.open("rb") as file:
        open_index(file, path.name, 5000).check(path.name, made.segments, made.input_hash_size)
    assert caught.value.rule == rule and str(caught.value).startswith(f"[{rule}] 00000.index")


def test_an_id_in_another_segments_rows(tmp_path: Path) -> None:
    made = vocabulary(5000, segments=2, input_hash_size=2**40)
    index = build_index(made)
    swapped = (Segment(0, 100, 99), Segment(100, 4900, 4999))
    with pytest.raises(ArchiveError, match=r"^\[V6\] x: bucket .* not a row of the id's segment"):
        index.check("x", swapped, made.input_hash_size)
