"""Mapped shards: pieces stitched into whole tables, equal to the unsharded quantized rows, shared between processes."""

from __future__ import annotations

import gc
import hashlib
import mmap
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from recinfer.archive.rank_files import PHASE
from recinfer.archive.reader import Archive, open_archive
from recinfer.distributed.planner.plan import embedding_tables
from recinfer.distributed.quant_embeddingbag import ShardedQuantEmbeddingBagCollection
from recinfer.errors import ArchiveError, InputError
from recinfer.modules.embedding_configs import DataType
from recinfer.quant.buffers import SLACK_BYTES
from recinfer.quant.embedding_modules import EmbeddingBagCollection
from recinfer.quant.packing import pack_rows
from recinfer.quant.rows import row_bytes, slice_packed_columns
from tests.archive.models import RANKER_ROWS, Ranker, make_archive, make_request
from tests.warm import Program


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        config.name: module.embedding_bags[config.name].weight.detach()  # type: ignore[union-attr,index]
        for _, module, configs, _ in embedding_tables(model)
        for config in configs
    }


@pytest.mark.parametrize("precision", [DataType.INT8, DataType.INT4, DataType.INT2, DataType.FP16, DataType.FP32])
@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "column_wise", "grid_shard"])
def test_every_piece_is_its_rectangle_of_the_quantized_table(tmp_path: Path, precision: DataType, kind: str) -> None:
    model, archive = make_archive(tmp_path, model=EbcOnly(), precision=precision, kinds=(kind,))
    mapped = archive.map_shards()
    whole = {name: pack_rows(weight, precision) for name, weight in weights(model).items()}
    assert mapped.shards
    for shard in mapped.shards:
        dim = model.ebc.embedding_bags[shard.rect.table].embedding_dim
        width = row_bytes(shard.rect.col_stop - shard.rect.col_start, precision)
        stored = mapped.buffer[shard.offset : shard.offset + shard.rect.rows * width].view(-1, width)
        rows = whole[shard.rect.table][shard.rect.row_start : shard.rect.row_stop]
        assert torch.equal(
            stored, slice_packed_columns(rows, dim, precision, shard.rect.col_start, shard.rect.col_stop)
        )
    assert mapped.mapped_bytes + mapped.copied_bytes == sum(
        s.rect.rows * row_bytes(s.rect.cols, precision) for s in mapped.shards
    )


class EbcOnly(nn.Module):
    """The tables of Ranker without a dense part worth exporting."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.ebc = Ranker().ebc

    def forward(self, kjt: object) -> object:
        return self.ebc(kjt)


@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "column_wise", "grid_shard"])
def test_pieces_are_contiguous_and_look_up_as_one_table(tmp_path: Path, kind: str) -> None:
    model, archive = make_archive(tmp_path, model=EbcOnly(), kinds=(kind,), ranks=4)
    mapped = archive.map_shards()
    for shard in mapped.shards:
        width = row_bytes(shard.rect.cols, DataType.INT8)
        first = next(
            s
            for s in mapped.shards
            if (s.rect.table, s.rect.col_start, s.rect.row_start) == (shard.rect.table, shard.rect.col_start, 0)
        )
        assert shard.offset == first.offset + shard.rect.row_start * width
        assert first.offset % mmap.PAGESIZE == 0
    configs = archive.manifest.configs("ebc")
    sharded = ShardedQuantEmbeddingBagCollection.from_packed(configs, mapped.shards, mapped.buffer, world_size=4)
    assert sharded.fused  # one op call over all ranks
    types = {config.name: DataType.INT8 for config in configs}
    unsharded = EmbeddingBagCollection.from_float(model.ebc, types)
    kjt = make_request(RANKER_ROWS, 9)
    assert torch.equal(sharded(kjt).values(), unsharded(kjt).values())


def test_almost_nothing_is_copied(tmp_path: Path) -> None:
    class Tall(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ebc = Ranker().ebc
            table = self.ebc.embedding_bag_configs()[1]
            table.num_embeddings = 60_001
            self.ebc.embedding_bags["item"] = nn.EmbeddingBag(60_001, 16, mode="sum", include_last_offset=True)

        def forward(self, kjt: object) -> object:
            return self.ebc(kjt)

    _, archive = make_archive(tmp_path, model=Tall(), kinds=("row_wise",), ranks=5)
    mapped = archive.map_shards()
    pieces = len(mapped.shards)
    assert mapped.copied_bytes <= pieces * 2 * mmap.PAGESIZE
    assert mapped.mapped_bytes > 20 * mapped.copied_bytes


def test_fallback_and_preload_give_the_same_bytes(small: tuple[nn.Module, Archive]) -> None:
    archive = small[1]
    mapped, copied, loaded = archive.map_shards(), archive.map_shards(copy=True), archive.map_shards(preload=True)
    assert copied.mapped_bytes == 0
    assert mapped.shards == copied.shards == loaded.shards
    for shard in mapped.shards:
        span = slice(shard.offset, shard.offset + shard.rect.rows * row_bytes(shard.rect.cols, DataType.INT8))
        assert torch.equal(mapped.buffer[span], copied.buffer[span])
        assert torch.equal(mapped.buffer[span], loaded.buffer[span])


def test_larger_pages_fall_back_to_copying(small: tuple[nn.Module, Archive], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = small[1].map_shards().buffer
    monkeypatch.setattr(mmap, "PAGESIZE", 65536)  # as on some ARM machines
    mapped = small[1].map_shards()
    assert mapped.mapped_bytes == 0 or mapped.copied_bytes > 0
    monkeypatch.undo()
    first = mapped.shards[0]
    assert torch.equal(
        mapped.buffer[first.offset : first.offset + 100],
        expected[small[1].map_shards().shards[0].offset :][:100],
    )


@pytest.mark.parametrize("ranks", [[0], [1], [2], [0, 2]])
def test_some_ranks_only(small: tuple[nn.Module, Archive], ranks: list[int]) -> None:
    archive = small[1]
    everything, some = archive.map_shards(), archive.map_shards(ranks)
    assert {s.rect.rank for s in some.shards} == set(ranks)
    places = {(s.rect.table, s.rect.row_start, s.rect.col_start): s for s in everything.shards}
    for shard in some.shards:
        other = places[shard.rect.table, shard.rect.row_start, shard.rect.col_start]
        size = shard.rect.rows * row_bytes(shard.rect.cols, DataType.INT8)
        mine = some.buffer[shard.offset : shard.offset + size]
        assert torch.equal(mine, everything.buffer[other.offset : other.offset + size])


def test_unknown_ranks_are_refused(small: tuple[nn.Module, Archive]) -> None:
    with pytest.raises(InputError, match="ranks 0 to 2"):
        small[1].map_shards([3])


def test_slack_is_readable(small: tuple[nn.Module, Archive]) -> None:
    mapped = small[1].map_shards()
    last = max(s.offset + s.rect.rows * row_bytes(s.rect.cols, DataType.INT8) for s in mapped.shards)
    assert mapped.buffer.numel() >= last + SLACK_BYTES
    assert int(mapped.buffer[-SLACK_BYTES:].sum()) == 0


def test_the_tensor_keeps_the_mapping_alive_and_lets_it_go(small: tuple[nn.Module, Archive]) -> None:
    path = str(
        small[1].root / "shards/rank-00001.safetensors"
    )  # other tests of this process map files of the same name

    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count(path)

    if not Path("/proc/self/maps").exists():
        pytest.skip("needs /proc/self/maps")
    gc.collect()
    before = mappings()
    buffer = small[1].map_shards().buffer
    view = buffer[:100]
    del buffer
    gc.collect()
    assert mappings() > before
    assert int(view.sum()) > 0
    del view
    gc.collect()
    assert mappings() == before


def test_a_file_cut_after_opening_is_refused(tmp_path: Path) -> None:
    _, archive = make_archive(tmp_path, model=EbcOnly())
    path = archive.root / "shards/rank-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ArchiveError) as caught:
        archive.map_shards()
    assert caught.value.rule == "F4"
    with pytest.raises(ArchiveError):
        archive.map_shards(copy=True)


CHILD = """
import hashlib, sys
from recinfer.archive.reader import open_archive
mapped = open_archive(sys.argv[1]).map_shards(preload=True)
print(hashlib.sha256(mapped.buffer.numpy().tobytes()).hexdigest(), mapped.mapped_bytes, flush=True)
sys.stdin.read()
"""


def test_two_processes_share_the_pages(tmp_path: Path) -> None:
    if not Path("/proc/self/smaps").exists():
        pytest.skip("needs /proc/self/smaps")
    _, archive = make_archive(tmp_path, model=EbcOnly(), kinds=("row_wise",))
    mapped = open_archive(archive.root).map_shards(preload=True)
    digest = hashlib.sha256(mapped.buffer.numpy().tobytes()).hexdigest()
    with Program(CHILD, archive.root) as child:
        answer = child.stdout.readline().split()
        smaps = Path(f"/proc/{child.pid}/smaps").read_text()
        child.communicate()
    assert answer == [digest, str(mapped.mapped_bytes)]
    shared = private = 0
    for block in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", smaps):
        if ".safetensors" not in block.split("\n", 1)[0]:
            continue
        numbers = dict(re.findall(r"^(\w+): +(\d+) kB", block, flags=re.M))
        # A page that the disk does not have yet is dirty, shared all the same.
        shared += (int(numbers["Shared_Clean"]) + int(numbers["Shared_Dirty"])) * 1024
        private += int(numbers["Private_Clean"]) * 1024 + int(numbers["Private_Dirty"]) * 1024
    assert shared >= mapped.mapped_bytes - 2 * mmap.PAGESIZE
    assert private == 0


def test_phases(small: tuple[nn.Module, Archive]) -> None:
    for file in small[1].rank_files:
        for piece in file.rects:
            assert (piece.start - piece.rect.row_start * piece.row_bytes) % PHASE == 0
