"""Answers with rows as the tables store them: unpacked, they equal the floats of a plain answer bit for bit."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recinfer.quant._tables import pack
from recinfer.serving.shards._ranks import join

from recinfer.archive.reader import open_archive
from recinfer.inference.bags import bags_of
from recinfer.modules.embedding_configs import DataType, PoolingType
from recinfer.quant.bags import BagPlaces
from recinfer.quant.rows import PACKED_TYPES
from recinfer.serving.shards import tables as tables_module
from recinfer.serving.shards.messages import decode_response, join_request
from recinfer.serving.shards.rank_modules import ModuleLayout, module_layouts
from recinfer.serving.shards.rank_structs import PACKED_ANSWER, RankAnswer, is_packed
from recinfer.serving.shards.split import ModuleSplit
from recinfer.serving.shards.tables import ShardTables
from recinfer.serving.wire.limits import Limits
from recinfer.serving.wire.proto import shards_pb2 as pb
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from tests.quant.test_tables import Case
from tests.serving.mutations import mutated
from tests.serving.remote.models import KINDS, unpacked
from tests.serving.remote.models import make_archive as make_mixed
from tests.serving.remote.test_direct import make_archive, make_request, requests


def packed_by(case: Case, **changed: Any) -> bytes | None:
    bags = {name: changed.pop(name) for name in BagPlaces._fields if name in changed}
    answer = pack(*(case.asked | {"into": b"", "bags": case.bags._replace(**bags)} | changed).values())
    if answer is None:
        return None
    at = size = shift = 0
    while True:
        size |= (answer[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if answer[at - 1] < 0x80:
            break
    assert len(answer) == at + size
    return bytes(answer[at:])


def pairs_for(case: Case, wanted: set[int] | None = None) -> np.ndarray:
    pieces, steps = case.asked["pieces"], case.asked["steps"]
    return np.array(
        [(p[3], p[4], s[2] if wanted is None or i in wanted else -1, 0) for i, (p, s) in enumerate(zip(pieces, steps))],
        np.int64,
    )


def joined(case: Case, packed: bytes, pairs: np.ndarray, *, times: int = 1) -> np.ndarray:
    batch, columns = case.bags.batch, case.asked["columns"]
    out = np.full((batch, columns), np.nan, np.float32)
    nothing = np.empty(0, np.int64)
    assert (
        join(
            [RankAnswer(packed, PACKED_ANSWER, pairs)] * times,
            nothing,
            b"",
            BagPlaces(0, 0, 0, False, 0, batch),
            columns,
            out,
        )
        is True
    )
    return out


@pytest.mark.parametrize("types", [[t] for t in PACKED_TYPES] + [[DataType.INT8, DataType.INT4, DataType.FP16]])
@pytest.mark.parametrize(
    "widths, batch, longest, wide",
    [
        ([8, 16, 32, 64, 128], 7, 1, True),
        ([4, 12, 20, 260, 36], 67, 1, False),
        ([1, 7, 30, 75, 131], 9, 1, True),
        ([16, 16, 8], 200, 1, True),
        ([16, 4], 5, 6, False),
        ([16, 16], 3, 0, True),
        ([16], 1, 1, True),
    ],
)
def test_what_is_unpacked_is_what_is_pooled(
    types: list[DataType], widths: list[int], batch: int, longest: int, wide: bool
) -> None:
    for pooling in (PoolingType.SUM, PoolingType.MEAN):
        case = Case(types, widths, batch, longest, pooling, wide)
        pooled = np.full((batch, sum(widths)), np.nan, np.float32)
        assert case.pool(into=pooled) is True
        packed = packed_by(case)
        assert packed is not None
        assert np.array_equal(joined(case, packed, pairs_for(case)), pooled)
        some = joined(case, packed, pairs_for(case, {0}))
        assert np.array_equal(some[:, : widths[0]], pooled[:, : widths[0]])
        assert not some[:, widths[0] :].any()
        pairs = pairs_for(case)
        pairs[:, 3] = 1
        assert np.array_equal(joined(case, packed, pairs, times=2), pooled + pooled)
        if longest == 1 and DataType.FP32 not in types:
            assert len(packed) <= len(widths) + pooled.nbytes
        if longest == 0:
            assert packed == bytes(len(widths))


def test_ids_and_places_out_of_range() -> None:
    case = Case([DataType.INT8], [8, 16], 4, 1, PoolingType.SUM, True)
    for bad in (-1, 90, 2**40, -(2**63)):
        ids = case.ids.clone()
        ids[len(ids) // 2] = bad
        assert packed_by(case, data=case.data[: case.bags.ids_at] + ids.numpy().tobytes()) is None
    assert packed_by(case, ids=case.bags.ids - 1) is None
    with pytest.raises(ValueError, match="places outside"):
        packed_by(case, ids=2**62)
    with pytest.raises(TypeError, match="expected bytes"):
        packed_by(case, into=np.zeros((4, 24), np.float32))


def test_random_bytes_instead_of_packed_rows() -> None:
    case = Case([DataType.INT8, DataType.INT4], [8, 16, 20], 70, 1, PoolingType.SUM, True)
    packed, pairs = packed_by(case), pairs_for(case)
    assert packed is not None
    for wrong in (
        b"",
        packed[:-1],
        packed + b"\0",
        packed[:2],
        b"\7" + packed[1:],
        bytes([3, 3, 3]),
        b"\2" + packed[1:],
    ):
        with pytest.raises(ValueError, match="not of the rows that it has"):
            joined(case, wrong, pairs)
    for place, value in (((0, 0), 0), ((0, 0), 2**62), ((1, 1), 7), ((1, 2), 29), ((1, 2), -2)):
        changed = pairs.copy()
        changed[place] = value
        with pytest.raises(ValueError, match="columns outside the answer"):
            joined(case, packed, changed)
    generator = random.Random(2)
    for data in mutated(generator, [packed], 2_000):  # whatever the result, nothing beyond them is read
        with suppress(ValueError):
            joined(case, data, pairs)


# -- a shard's answers ------------------------------------------------------------------------------------------------


def layout_of(archive: Path) -> ModuleLayout:
    opened = open_archive(archive, ranks=())
    (layout,) = module_layouts(opened.manifest, opened.plan)
    return layout


def shard_request(layout: ModuleLayout, request: KeyedJaggedTensor, rank: int, key: str) -> bytes | None:
    sections = ModuleSplit(0, layout).split(bags_of(request))
    if rank not in sections:
        return None
    return join_request(key, request.stride(), [sections[rank].parts])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", [DataType.INT8, DataType.INT4, DataType.FP32])
def test_a_shards_packed_answer_is_its_plain_one(tmp_path: Path, kind: str, precision: DataType) -> None:
    archive = make_archive(tmp_path, kind, precision)
    layout = layout_of(archive)
    packed_bytes = plain_bytes = 0
    for rank in layout.ranks:
        tables = ShardTables((rank,))
        key = tables.add(archive)
        for request in requests():
            data = shard_request(layout, request, rank, key)
            if data is None:
                continue
            answer = tables.find(data, Limits())
            (found,) = decode_response(answer)
            (expected,) = decode_response(tables.find_any(data, Limits()))
            assert is_packed(found) and not is_packed(expected)
            assert pb.ShardResponse.FromString(answer).packed == [found.tobytes()]
            assert np.array_equal(unpacked(found, layout, rank, request.stride()).reshape(-1), expected)
            packed_bytes, plain_bytes = packed_bytes + found.nbytes, plain_bytes + expected.nbytes
    assert packed_bytes < plain_bytes


def test_a_shard_that_cannot_pack_sends_floats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a shard server that is older than packed answers, or gets too large a request."""
    archive = make_archive(tmp_path, "table_wise")
    layout = layout_of(archive)
    tables = ShardTables(tuple(layout.ranks))
    key = tables.add(archive)
    rank = next(iter(layout.ranks))
    data = shard_request(layout, make_request(9_000, 1, longest=1), rank, key)
    assert data is not None
    (found,) = decode_response(tables.find(data, Limits()))
    assert is_packed(found)
    monkeypatch.setattr(tables_module, "_MOST_DIRECT_IDS", 9_000)
    (found,) = decode_response(tables.find(data, Limits()))
    assert not is_packed(found)
    assert found.dtype == np.float32


def test_packed_rows_of_a_module_that_is_not_pooled_are_refused(tmp_path: Path) -> None:
    opened = open_archive(make_mixed(tmp_path, "table_wise"), ranks=())
    (number, layout), *_ = (
        (number, layout)
        for number, layout in enumerate(module_layouts(opened.manifest, opened.plan))
        if not layout.pooled
    )
    split = ModuleSplit(number, layout)
    ones = KeyedJaggedTensor(["f", "g"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1], dtype=torch.int32))
    sections = split.split(bags_of(ones))
    assert not any(split.fits(rank, sections[rank], 1, np.zeros(3, np.uint8)) for rank in sections)


def test_mutated_messages_for_packed_answers(tmp_path: Path, num_mutated: int) -> None:
    archive = make_archive(tmp_path, "grid_shard")
    layout = layout_of(archive)
    rank = next(iter(layout.ranks))
    tables = ShardTables((rank,))
    key = tables.add(archive)
    starts = [
        found
        for batch, longest in ((1, 1), (2, 4), (70, 1))
        if (found := shard_request(layout, make_request(batch, batch, longest=longest), rank, key))
    ]
    answered = 0
    for data in mutated(random.Random(5), starts, num_mutated):
        found = tables.find_directly(data, Limits())
        if found is None:
            continue
        arrays = decode_response(found)
        if len(arrays) != 1 or not is_packed(arrays[0]):
            continue
        answered += 1
        batch = pb.ShardRequest.FromString(data).batch_size
        (expected,) = decode_response(tables.find_any(data, Limits()))
        assert np.array_equal(unpacked(arrays[0], layout, rank, batch).reshape(-1), expected)
    assert answered > num_mutated // 100
