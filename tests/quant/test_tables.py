"""The compiled pooled lookup: FBGEMM's sums bit for bit, and errors for places outside the tables."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from recinfer.layout.rect import Rect
from recinfer.modules.embedding_configs import DataType, PoolingType
from recinfer.quant import _tables as tables
from recinfer.quant.bags import BagPlaces
from recinfer.quant.buffers import Buffers, Placed, allocate
from recinfer.quant.formats.registry import row_format
from recinfer.quant.packing import pack_rows
from recinfer.quant.rows import PACKED_TYPES, row_bytes, unpack_rows
from recinfer.quant.tbe import TableBatch

ROWS = 90


def fbgemm_batch(reads: list[Placed], pooling: PoolingType, buffers: Buffers) -> TableBatch:
    """FBGEMM's operator over the tables; of rows that it lacks, over the same values in FP32."""
    if all(row_format(read.data_type).fbgemm for read in reads):
        return TableBatch(reads, pooling, buffers)
    wide = [replace(read, data_type=DataType.FP32) for read in reads]
    values, placed = allocate(wide, torch.device("cpu"))
    for read, there in zip(reads, placed, strict=True):
        values.write(there, unpack_rows(buffers.rows(read), read.rect.cols, read.data_type).view(torch.uint8))
    return TableBatch(placed, pooling, values)


class Case:
    """Tables of some widths in one buffer, bags for them, and the bytes of a request."""

    def __init__(
        self, types: list[DataType], widths: list[int], batch: int, longest: int, pooling: PoolingType, wide: bool
    ) -> None:
        torch.manual_seed(batch + longest)
        parts, pieces, slots, steps = [], [], [], []
        offset = column = 0
        for f, width in enumerate(widths):
            data_type = types[f % len(types)]
            packed = pack_rows(torch.randn(ROWS, width), data_type)
            slots.append(Placed(Rect(0, 0, ROWS, 0, width, f"t{f}"), data_type, offset))
            mean = int(pooling is PoolingType.MEAN)
            pieces.append((offset, ROWS, row_bytes(width, data_type), width, row_format(data_type).code, mean))
            steps.append((f, f, column))
            column += width
            offset += packed.numel()
            parts.append(packed.view(-1))
        self.buffer = torch.cat(parts)
        lengths = torch.randint(0, longest + 1, (len(widths) * batch,), dtype=torch.int32)
        self.ids = torch.randint(0, ROWS, (int(lengths.sum()),), dtype=torch.int64 if wide else torch.int32)
        self.offsets = torch.cat([torch.zeros(1), lengths.cumsum(0)]).to(self.ids.dtype)
        self.op = fbgemm_batch(slots, pooling, Buffers(self.buffer))
        self.data = b"odd" + lengths.numpy().tobytes() + self.ids.numpy().tobytes()
        self.asked: dict[str, Any] = {
            "buffer": self.buffer.numpy(),
            "pieces": np.array(pieces, np.int64),
            "steps": np.array(steps, np.int64),
            "data": self.data,
            "bags": BagPlaces(3, 3 + 4 * len(lengths), len(self.ids), wide, len(widths), batch),
            "columns": column,
            "into": b"head",
        }

    def pool(self, **changed: Any) -> Any:
        bags = {name: changed.pop(name) for name in BagPlaces._fields if name in changed}
        return tables.pool(*(self.asked | {"bags": self.bags._replace(**bags)} | changed).values())

    @property
    def bags(self) -> BagPlaces:
        bags: BagPlaces = self.asked["bags"]
        return bags


@pytest.mark.parametrize("pooling", [PoolingType.SUM, PoolingType.MEAN])
@pytest.mark.parametrize("types", [[t] for t in PACKED_TYPES] + [[DataType.INT8, DataType.INT4, DataType.FP16]])
@pytest.mark.parametrize(
    "widths, batch, longest, wide",
    [
        ([8, 16, 32, 64, 128], 7, 5, True),
        ([4, 12, 20, 260, 36], 3, 40, False),
        ([28, 76, 132, 204, 396], 4, 6, True),
        ([16, 16], 1, 0, True),
        ([16], 300, 1, True),
    ],
)
def test_sums_are_those_of_fbgemm(
    types: list[DataType], widths: list[int], batch: int, longest: int, wide: bool, pooling: PoolingType
) -> None:
    case = Case(types, widths, batch, longest, pooling, wide)
    expected = case.op(case.ids, case.offsets).numpy()
    answer = case.pool()
    assert answer[:4] == b"head"
    assert np.array_equal(np.frombuffer(answer, np.float32, offset=4).reshape(batch, sum(widths)), expected)
    into = np.full((batch, sum(widths)), np.nan, np.float32)
    assert case.pool(into=into) is True
    assert np.array_equal(into, expected)


@pytest.mark.parametrize("types", [[DataType.INT8, DataType.INT4, DataType.FP16], [DataType.FP32]])
@pytest.mark.parametrize("longest, wide", [(1, True), (9, False)])
def test_a_part_of_the_samples_is_those_rows_of_the_whole(types: list[DataType], longest: int, wide: bool) -> None:
    case = Case(types, [8, 20, 16], 11, longest, PoolingType.MEAN, wide)
    whole = np.frombuffer(case.pool(), np.float32, offset=4).reshape(11, 44)
    for first, samples in ((0, 11), (0, 4), (4, 7), (10, 1), (11, 0), (3, 0)):
        into = np.full((samples, 44), np.nan, np.float32)
        assert case.pool(into=into, length_bytes=4, first=first, samples=samples) is True
        assert np.array_equal(into, whole[first : first + samples])
        assert case.pool(length_bytes=4, first=first, samples=samples) == b"head" + into.tobytes()
    for first, samples in ((-1, 2), (12, 0), (5, 7), (0, 12), (1, -1), (0, -2), (-(2**63), -1), (1, 2**63 - 1)):
        with pytest.raises(ValueError, match="pool: "):
            case.pool(length_bytes=4, first=first, samples=samples)


def test_a_context_goes_with_every_sample() -> None:
    case = Case([DataType.INT8, DataType.FP16], [8, 16, 20], 5, 4, PoolingType.MEAN, True)
    whole = np.frombuffer(case.pool(), np.float32, offset=4).reshape(5, 44)
    first, last = int(case.offsets[5]), int(case.offsets[6])  # the bag of key 1, sample 0
    lengths_at = 3 + 4 * 5
    steps = case.asked["steps"]
    mine, others = steps[1:2].copy(), steps[[0, 2]]
    mine[0, 0] = 0
    mine_at = case.bags.ids_at + 8 * first
    bags = BagPlaces(lengths_at, mine_at, last - first, True, 1, 1)
    expected = whole.copy()
    expected[:, 8:24] = whole[0, 8:24]
    more: dict[str, Any] = {"steps": others, "length_bytes": 4, "first": 0, "samples": -1}
    for asked in (more, more | {"samples": 5}, more | {"first": 2, "samples": 3}, more | {"samples": 0}):
        rows = expected[asked["first"] :][: asked["samples"]] if asked["samples"] >= 0 else expected
        assert case.pool(**asked, context=(mine, bags)) == b"head" + rows.tobytes()
    assert case.pool(**more, context=None) is not None
    changed: list[dict[str, Any]] = [
        {"lengths_at": -1},
        {"lengths_at": len(case.data)},
        {"ids_at": len(case.data) - 8 * (last - first) + 1},
        {"ids": 2**62},
        {"ids": -1},
        {"keys": 2**61},
        {"keys": -1},
        {"batch": 2},
        {"batch": 0},
    ]
    outside = [(steps + np.array([0, 0, 37]), bags), (steps + np.array([0, 2, 0]), bags)]
    for wrong in [*((mine, bags._replace(**change)) for change in changed), *outside]:
        with pytest.raises(ValueError, match=r"(pool|bags): "):
            case.pool(**more, context=wrong)
    for broken in ((), (1,), 5, (mine, ()), (mine, 5)):
        with pytest.raises((TypeError, SystemError)):
            case.pool(**more, context=broken)
    assert case.pool(**more, context=(mine, bags._replace(ids=last - first + 1))) is None


def test_of_other_samples_no_id_is_looked_at() -> None:
    case = Case([DataType.INT8], [8], 6, 1, PoolingType.SUM, True)
    data = bytearray(case.data)
    data[3:27] = np.ones(6, np.int32).tobytes()
    data[27:] = np.array([0, 1, 2, 3, ROWS, 5]).tobytes()
    changed = {"data": bytes(data), "ids": 6, "length_bytes": 4}
    assert case.pool(**changed, first=0, samples=4) is not None
    assert case.pool(**changed, first=5, samples=1) is not None
    assert case.pool(**changed, first=3, samples=2) is None
    assert case.pool(**changed | {"ids": 5}, first=0, samples=1) is None


def test_ids_of_no_row_and_lengths_of_other_ids_get_no_answer() -> None:
    case = Case([DataType.INT8], [8, 16], 4, 3, PoolingType.SUM, True)
    for bad in (-1, ROWS, 2**40, -(2**63)):
        ids = case.ids.clone()
        ids[len(ids) // 2] = bad
        data = case.data[: case.bags.ids_at] + ids.numpy().tobytes()
        assert case.pool(data=data) is None
    for at, bad in ((3, -1), (3, 2**31 - 1), (7, 0x7F000000)):
        data = bytearray(case.data)
        data[at : at + 4] = int(bad).to_bytes(4, "little", signed=True)
        assert case.pool(data=bytes(data)) is None
    assert case.pool(ids=case.bags.ids - 1) is None


def test_places_outside_the_tables_are_refused() -> None:
    case = Case([DataType.INT8], [8, 16], 4, 3, PoolingType.SUM, True)
    pieces, steps = case.asked["pieces"], case.asked["steps"]

    def with_one(array: np.ndarray, at: tuple[int, int], value: int) -> np.ndarray:
        changed = array.copy()
        changed[at] = value
        return changed

    wrong: list[dict[str, Any]] = [
        {"lengths_at": -1},
        {"lengths_at": len(case.data)},
        {"ids_at": len(case.data) - 8 * case.bags.ids + 1},
        {"ids": 2**62},
        {"ids": -1},
        {"batch": 2**62},
        {"batch": 0},
        {"keys": 2**61},
        {"columns": 23},
        {"columns": 2**62},
        {"into": np.zeros((4, 23), np.float32)},
        *({"pieces": with_one(pieces, (1, 0), value)} for value in (-1, 2**62, len(case.buffer) - 1)),
        *({"pieces": with_one(pieces, (1, 1), value)} for value in (-1, 2**62, ROWS + 1)),
        *({"pieces": with_one(pieces, (1, 2), value)} for value in (0, -1, 19)),
        *({"pieces": with_one(pieces, (1, 3), value)} for value in (0, -1, 2**62)),
        {"pieces": with_one(pieces, (1, 4), 7)},
        *({"steps": with_one(steps, (1, 0), value)} for value in (-1, 2)),
        *({"steps": with_one(steps, (1, 1), value)} for value in (-1, 2)),
        *({"steps": with_one(steps, (1, 2), value)} for value in (-1, 9, 2**62)),
    ]
    for change in wrong:
        with pytest.raises(ValueError, match=r"(pool|bags): "):
            case.pool(**change)
    read_only = np.zeros((4, 24), np.float32)
    read_only.flags.writeable = False
    with pytest.raises((ValueError, BufferError)):
        case.pool(into=read_only)


def test_every_half_has_its_value_in_whole_vectors_and_behind_them() -> None:
    halves = torch.arange(65540, dtype=torch.int32).to(torch.int16).view(torch.float16).view(-1, 20)
    count = len(halves)
    data = np.ones(count, np.int32).tobytes() + np.arange(count, dtype=np.int64).tobytes()
    piece = np.array([(0, count, 40, 20, row_format(DataType.FP16).code, 0)], np.int64)
    into = np.empty((count, 20), np.float32)
    bags = BagPlaces(0, 4 * count, count, True, 1, count)
    step = np.zeros((1, 3), np.int64)
    assert tables.pool(halves.view(torch.uint8).numpy(), piece, step, data, bags, 20, into) is True
    np.testing.assert_array_equal(into, halves.float().numpy())  # a NaN equals a NaN
