"""The Triton kernel's device cache of rows in host memory: equal bits, which rows it has, and when it is emptied."""

from __future__ import annotations

import copy
import itertools
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from recinfer.layout.rect import Rect
from recinfer.modules.embedding_configs import DataType, PoolingType
from recinfer.quant.buffers import Buffers, Memory, Placed, allocate
from recinfer.quant.rows import PACKED_TYPES

pytest.importorskip("triton", reason="Triton is not installed: pip install 'recinfer[triton]'")
from recinfer.quant import row_cache
from recinfer.quant.triton_batch import TritonBatch
from recinfer.quant.triton_lookup import Read, TritonTables
from tests.matrix import by_pairs
from tests.quant.test_triton import DEVICE, MEAN, NONE, ROWS, SUM, bags, packed

CPU = torch.device("cpu")


def in_memory(tables: list[tuple[DataType, int, Memory]], alignment: int = 16) -> tuple[Buffers, list[Placed]]:
    """Tables of ``ROWS`` rows in a near buffer and a host buffer."""
    wanted = [Placed(Rect(0, 0, ROWS, 0, dim, f"t{i}"), kind) for i, (kind, dim, _) in enumerate(tables)]
    near, placed = allocate(wanted, DEVICE, alignment)
    far = allocate(wanted, CPU, alignment)[0].near
    buffers = Buffers(near.near, far.pin_memory() if DEVICE.type == "cuda" else far, alignment)
    placed = [replace(spot, memory=memory) for spot, (_, _, memory) in zip(placed, tables)]
    for number, (spot, (kind, dim, _)) in enumerate(zip(placed, tables)):
        buffers.write(spot, packed(kind, dim, number))
    return buffers, placed


def uncached(placed: list[Placed]) -> list[Placed]:
    return [replace(spot, memory="managed") if spot.memory == "cached" else spot for spot in placed]


def sizes(monkeypatch: pytest.MonkeyPatch, slots: int) -> None:
    monkeypatch.setattr(row_cache, "LOAD_FACTOR", slots / ROWS)


def to_device(*tensors: Tensor | None) -> list[Any]:
    return [None if tensor is None else tensor.to(DEVICE) for tensor in tensors]


def rows_in(lookup: TritonTables) -> list[int]:
    """The cached rows, each checked to be the bytes that host memory has."""
    assert lookup.cache is not None
    found = []
    for placed in dict.fromkeys(read.placed for read in lookup.reads if read.placed.memory == "cached"):
        start, first, slots = lookup.cache.fields(placed)
        at = start + lookup.buffers.near.data_ptr() - lookup.cache._rows.data_ptr()
        width = placed.row_bytes(lookup.buffers.row_alignment)
        kept = lookup.cache._rows[at : at + slots * width].view(slots, width).cpu()
        for slot, row in enumerate(lookup.cache.tags[first : first + slots].tolist()):
            if row >= 0:
                assert torch.equal(kept[slot], lookup.buffers.rows(placed)[row].cpu())
                found.append(row)
    return found


@pytest.mark.parametrize(
    ("pooling", "data_type", "slots"), by_pairs([SUM, MEAN, NONE], PACKED_TYPES, [5, ROWS], step=3)
)
def test_a_lookup_through_the_cache_gives_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, data_type: DataType, pooling: PoolingType, slots: int
) -> None:
    """Tables in all three memories in one launch; later lookups have hits, misses, and rows that lose their slot.

    By day each type has both numbers of slots; tests/quant/test_triton.py has each type with each pooling, without a cache.
    """
    sizes(monkeypatch, slots)
    dim, alignment = (20, 1) if slots < ROWS else (264, 16)
    memories: list[Memory] = ["near", "cached", "managed", "cached"]
    buffers, placed = in_memory([(data_type, dim, memory) for memory in memories], alignment)
    order = [0, 1, 2, 3, 1]  # two keys read one table
    placed = [placed[n] for n in order]
    lookup = TritonTables([Read(spot, key, pooling) for key, spot in enumerate(placed)], buffers)
    plain = TritonTables([Read(spot, key, pooling) for key, spot in enumerate(uncached(placed))], buffers)
    assert plain.cache is None and lookup.cache is not None and len(lookup.cache) == 2 * slots
    seen: list[set[int]] = []
    for seed in range(3):
        ids, offsets, weights = to_device(*bags(5, 4, seed))
        given = weights if pooling is SUM else None
        outs = []
        for each in (lookup, plain):
            bad = each.new_counter()
            if each.pooled:
                outs.append(each(ids, offsets, given, batch=4, bad=bad))
            else:
                outs.append(torch.cat(each.rows(ids, offsets, batch=4, bad=bad, edges=offsets[::4].tolist())))
        assert torch.equal(*outs)
        seen.append(set(rows_in(lookup)))
    lost = [before - after for before, after in itertools.pairwise(seen)]
    assert all(before & after for before, after in itertools.pairwise(seen)) and (slots == ROWS or any(lost))
    assert len(set().union(*seen)) >= min(2 * slots, 4)


def test_a_hot_row_stays_and_cold_ones_do_not_take_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes(monkeypatch, 1)
    buffers, (placed,) = in_memory([(DataType.INT8, 8, "cached")])
    batch = TritonBatch([placed], SUM, buffers)

    def ask(*ids: int) -> list[int]:
        batch.forward(*to_device(torch.tensor(ids), torch.tensor([0, len(ids)])))
        return rows_in(batch._lookup)

    assert ask(7) == [7]
    for _ in range(5):
        assert ask(7) == [7]
    for cold in range(10, 15):
        assert ask(cold) == [7] and ask(7) == [7]
    for _ in range(40):  # what is no longer asked for loses its slot, however often it was asked for before
        ask(7)
    assert any(ask(9) == [9] for _ in range(20))


def test_slots_are_used_evenly() -> None:
    hashed = row_cache._slot.fn  # plain arithmetic
    for slots in (1, 7, 200, 2**31 - 1):
        found = [hashed(row, slots) for row in range(1000)]
        assert min(found) >= 0 and max(found) < slots
    assert len({hashed(row, 1000) for row in range(1000)}) > 600


def test_ids_out_of_range_take_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes(monkeypatch, ROWS)
    buffers, placed = in_memory([(DataType.INT8, 8, "cached"), (DataType.INT4, 8, "cached")])
    lookup = TritonTables([Read(spot, key) for key, spot in enumerate(placed)], buffers)
    plain = TritonTables([Read(spot, key) for key, spot in enumerate(uncached(placed))], buffers)
    ids, offsets = to_device(torch.tensor([-1, 2**40, 5, 29, ROWS, 36]), torch.tensor([0, 3, 6]))
    for _ in range(2):
        bad = lookup.new_counter()
        got = lookup(ids, offsets, batch=1, bad=bad)
        assert torch.equal(got, plain(ids, offsets, batch=1, bad=plain.new_counter())) and bad.tolist() == [2, 1]
    assert set(rows_in(lookup)) <= {5, 29, 36} and 5 in rows_in(lookup)


@pytest.mark.parametrize("by", ["write", "forget_cached"])
def test_rows_that_were_written_are_not_stale(by: str) -> None:
    buffers, (placed,) = in_memory([(DataType.FP32, 4, "cached")])
    batch = TritonBatch([placed], SUM, buffers)
    ids, offsets = to_device(torch.tensor([3, 4, 3]), torch.tensor([0, 1, 2, 3]))
    for turn in range(3):
        new = packed(DataType.FP32, 4, 100 + turn)
        if by == "write":
            buffers.write(placed, new)
        else:
            buffers.rows(placed)[:, : new.shape[1]].copy_(new)
            batch.forget_cached()
        for _ in range(2):
            assert torch.equal(batch.forward(ids, offsets).cpu(), new.view(torch.float32)[[3, 4, 3]])
        assert 3 in rows_in(batch._lookup) or 4 in rows_in(batch._lookup)
    TritonBatch(uncached([placed]), SUM, buffers).forget_cached()  # nothing to empty


def test_copies_start_with_an_empty_cache_and_ids_from_the_host_use_it() -> None:
    buffers, placed = in_memory([(DataType.INT8, 8, "cached"), (DataType.INT4, 12, "near")])
    batch = TritonBatch(placed, SUM, buffers)
    assert batch.graphs is None, "a replay would not take its turn"
    ids, offsets, weights = bags(2, 3, 1)
    want = TritonBatch(uncached(placed), SUM, buffers).forward(*to_device(ids, offsets, weights))
    for _ in range(2):
        assert torch.equal(batch._of_host(ids, offsets, weights, 3), want)
    assert rows_in(batch._lookup)
    for other in (copy.deepcopy(batch), pickle.loads(pickle.dumps(batch))):
        assert not rows_in(other._lookup)
        assert torch.equal(other.forward(*to_device(ids, offsets, weights)), want) and rows_in(other._lookup)
    nothing = to_device(torch.zeros(0, dtype=torch.int64), torch.zeros(7, dtype=torch.int64))
    assert not batch.forward(*nothing).any()


def test_threads_share_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes(monkeypatch, 4)
    buffers, placed = in_memory([(DataType.INT8, 8, "cached"), (DataType.FP16, 8, "cached")])
    batch, plain = TritonBatch(placed, SUM, buffers), TritonBatch(uncached(placed), SUM, buffers)
    given = [to_device(*bags(2, 3, seed)[:2]) for seed in range(6)]
    wanted = [plain.forward(*each) for each in given]

    def ask(turn: int) -> bool:
        return torch.equal(batch.forward(*given[turn % 6]), wanted[turn % 6])

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(ask, range(24)))
    rows_in(batch._lookup)


def test_a_lookup_waits_for_the_fill_before_it_on_another_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams and events that note what is asked of them; the kernels run in between."""
    noted: list[str] = []

    class Stream:
        def wait_event(self, event: Event) -> None:
            noted.append("wait")

    class Event:
        def record(self, stream: Stream) -> None:
            noted.append("record")

    buffers, (placed,) = in_memory([(DataType.INT8, 8, "cached")])
    lookup = TritonTables([Read(placed, 0)], buffers)
    cache = lookup.cache
    assert cache is not None
    fill = cache.fill
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(cache, "_over", Event())
    monkeypatch.setattr(cache, "fill", lambda *given: (noted.append("fill"), fill(*given)))
    given = to_device(torch.tensor([1, 2]), torch.tensor([0, 2]))
    for _ in range(2):
        lookup(*given, batch=1, bad=lookup.new_counter())
    assert noted == ["wait", "fill", "record"] * 2
