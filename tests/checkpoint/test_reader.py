"""Reading: every layout that torch.save writes, prefixes, bounded memory, and keys that do not fit a module."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor

from recinfer.checkpoint import CheckpointReader, load_into
from recinfer.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    base = torch.randn(40, 6)
    big = torch.arange(120, dtype=torch.int64)
    return {
        "plain": base,
        "view": big.view(20, 6)[5:15],
        "columns": base[:, 1:4],
        "transposed": torch.randn(6, 40).t(),
        "expanded": torch.randn(1, 5).expand(7, 5),
        "steps": base[::3],
        "scalar": torch.tensor(3.5),
        "one": torch.randn(1),
        "none": torch.empty(0, 4),
        "half": torch.randn(9, 3).half(),
        "brain": torch.randn(9, 3).bfloat16(),
        "double": torch.randn(9, 3).double(),
        "bytes": torch.arange(9, dtype=torch.uint8).view(3, 3),
        "flags": torch.tensor([True, False, True]),
        "wide": torch.arange(8).to(torch.uint16),  # has no storage class of its own
        "cube": torch.randn(5, 4, 3),
    }


@pytest.fixture(scope="module", params=["pt", "dcp", "safetensors"])
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stored")
    if request.param == "pt":
        torch.save(tensors(), folder / "all.pt")
        return folder / "all.pt"
    if request.param == "safetensors":
        save_file({name: tensor.contiguous() for name, tensor in tensors().items()}, folder / "all.safetensors")
        return folder / "all.safetensors"
    dcp.save(tensors(), checkpoint_id=folder / "all", no_dist=True)
    return folder / "all"


def test_every_layout_is_read(stored: Path) -> None:
    reader = CheckpointReader(stored)
    assert reader.keys() == sorted(tensors())
    for key, expected in tensors().items():
        got = reader.read(key)
        assert got.dtype == expected.dtype
        assert got.is_contiguous()
        assert torch.equal(got, expected), key


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_every_slice_is_read(stored: Path, data: st.DataObject) -> None:
    expected = {k: v for k, v in tensors().items() if v.dim()}
    key = data.draw(st.sampled_from(sorted(expected)))
    start = data.draw(st.integers(0, len(expected[key])))
    stop = data.draw(st.integers(start, len(expected[key])))
    assert torch.equal(CheckpointReader(stored).read_rows(key, start, stop), expected[key][start:stop])


def test_long_strided_reads_go_block_by_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recinfer.checkpoint.torch_file._BUFFER_BYTES", 64)
    torch.save(tensors(), tmp_path / "all.pt")
    reader = CheckpointReader(tmp_path / "all.pt")
    for key in ("transposed", "columns", "steps", "expanded", "cube"):
        out = torch.empty(reader.shape(key), dtype=torch.float64)
        reader.read_into(key, out)
        assert torch.equal(out.float(), tensors()[key])


def test_state_dict_may_hold_parameters_and_metadata(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    torch.save(module.state_dict(), tmp_path / "state.pt")
    torch.save(dict(module.named_parameters()), tmp_path / "parameters.pt")
    assert torch.equal(CheckpointReader(tmp_path / "state.pt").read("0.weight"), module[0].weight)
    assert torch.equal(CheckpointReader(tmp_path / "parameters.pt").read("0.weight"), module[0].weight)


def test_a_training_checkpoint_may_hold_other_objects(tmp_path: Path) -> None:
    module = nn.Linear(3, 2)
    tagged = nn.Parameter(torch.ones(2))
    tagged.tag = "of the optimizer"  # type: ignore[attr-defined]
    saved = {
        "state_dict": {**module.state_dict(), "tagged": tagged},
        "args": argparse.Namespace(lr=0.1, names={"a", "b"}),
        "best": np.float64(0.7),
        "config": {"at": Path("x"), "device": torch.device("cpu"), "counts": defaultdict(int, a=1)},
        "metrics": [{"sum": torch.ones(2)}],
    }
    torch.save(saved, tmp_path / "state.pt")
    reader = CheckpointReader(tmp_path / "state.pt")
    assert reader.keys() == ["bias", "tagged", "weight"]
    assert torch.equal(reader.read("weight"), module.weight)
    assert torch.equal(reader.read("tagged"), tagged)


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'ranks'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(table: torch.Tensor, pieces: list[tuple[slice, slice]]) -> ShardedTensor:
    """A sharded model's table, as DistributedModelParallel's state dict has it."""
    starts = [[rows.start, columns.start] for rows, columns in pieces]
    shards = [Shard.from_tensor_and_offsets(table[piece].clone(), at, rank=0) for piece, at in zip(pieces, starts)]
    return ShardedTensor._init_from_local_shards(shards, *table.shape)


def test_a_state_dict_of_a_model_sharded_on_one_rank(one_rank: None, tmp_path: Path) -> None:
    table = torch.randn(10, 6)
    rows, columns = [slice(0, 7), slice(7, 10)], [slice(0, 4), slice(4, 6)]
    state = {
        "whole.weight": sharded(table, [(slice(0, 10), slice(0, 6))]),
        "by_row.weight": sharded(table, [(piece, slice(0, 6)) for piece in rows]),
        "grid.weight": sharded(table, [(piece, column) for piece in rows for column in columns]),
        "over.weight": torch.ones(2, 2),
    }
    torch.save({"model": state}, tmp_path / "state.pt")
    reader = CheckpointReader(tmp_path / "state.pt")
    assert reader.keys() == sorted(state)
    for key in ("whole.weight", "by_row.weight", "grid.weight"):
        assert torch.equal(reader.read(key), table), key
        assert torch.equal(reader.read_rows(key, 5, 9), table[5:9]), key


def test_one_ranks_part_of_a_table_is_refused(one_rank: None, tmp_path: Path) -> None:
    part = sharded(torch.randn(10, 6), [(slice(0, 10), slice(0, 6))])
    part._local_shards[0].metadata.shard_offsets[0] = 10  # of the second of two ranks
    torch.save({"t.weight": part}, tmp_path / "rank1.pt")
    with pytest.raises(CheckpointError, match=r"holds one rank's shards of t\.weight, not all of its 10 rows; save"):
        CheckpointReader(tmp_path / "rank1.pt")


@pytest.mark.parametrize(("key", "start", "stop"), [("plain", -1, 2), ("plain", 3, 2), ("plain", 0, 41), ("one", 1, 2)])
def test_rows_outside_the_table_are_refused(stored: Path, key: str, start: int, stop: int) -> None:
    with pytest.raises(CheckpointError, match=f"rows {start} to {stop} of {key}, which has"):
        CheckpointReader(stored).read_rows(key, start, stop)


def test_an_unknown_key_is_named_with_the_known_ones(stored: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no 'weights'; it has brain, bytes"):
        CheckpointReader(stored).read("weights")


def test_a_target_of_another_shape_is_refused(stored: Path) -> None:
    with pytest.raises(CheckpointError, match=r"plain: the target has shape \(40, 5\), expected \(40, 6\)"):
        CheckpointReader(stored).read_into("plain", torch.empty(40, 5))


# ---- prefixes


@pytest.mark.parametrize(
    ("wrap", "prefix"),
    [
        (lambda s: s, ""),
        (lambda s: {"model": s}, "model."),
        (lambda s: {"model": s, "optim": {"state": {"0.weight": {"sum": torch.ones(3)}}}}, "model."),
        (lambda s: {"state_dict": s, "ema": {"0.weight": torch.zeros(1)}}, "state_dict."),
        (lambda s: {"app": {"model": s, "optimizer": {"x": torch.ones(1)}}}, "app.model."),
        (lambda s: {"net": s, "optimizer": {"x": torch.ones(1)}}, "net."),
    ],
)
@pytest.mark.parametrize("kind", ["pt", "dcp"])
def test_the_models_own_keys_are_found(wrap: object, prefix: str, kind: str, tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    state = wrap(module.state_dict())  # type: ignore[operator]
    path = tmp_path / "saved"
    if kind == "pt":
        torch.save(state, path)
    else:
        dcp.save(state, checkpoint_id=path, no_dist=True)
    reader = CheckpointReader(path)
    assert reader.prefix == prefix
    assert reader.keys() == sorted(module.state_dict())
    assert torch.equal(reader.read("1.weight"), module[1].weight)


def test_a_wrappers_prefix_is_found_by_the_modules_keys(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    flat = {f"trainer.ddp.module.{k}": v for k, v in module.state_dict().items()} | {"step": torch.tensor(3)}
    torch.save(flat, tmp_path / "flat.pt")
    reader = CheckpointReader(tmp_path / "flat.pt")
    assert reader.prefix == ""
    assert reader.align(module).prefix == "trainer.ddp.module."
    other = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    load_into(CheckpointReader(tmp_path / "flat.pt"), other)
    assert all(torch.equal(a, b) for a, b in zip(module.state_dict().values(), other.state_dict().values()))


# ---- into a module


class Net(nn.Module):
    def __init__(self, rows: int = 4, device: str = "cpu") -> None:
        super().__init__()
        self.table = nn.Embedding(rows, 2, device=device)
        self.head = nn.Linear(2, 1, device=device)
        self.register_buffer("scale", torch.ones(2, device=device))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.save({"model": Net().state_dict()}, tmp_path / "net.pt")
    return tmp_path / "net.pt"


def test_missing_extra_and_misshapen_keys_are_named_in_one_message(saved: Path) -> None:
    net = Net(rows=5)
    net.more = nn.Linear(1, 1)
    del net.head
    before = net.table.weight.detach().clone()
    with pytest.raises(CheckpointError) as caught:
        load_into(CheckpointReader(saved), net)
    message = str(caught.value)
    assert "2 missing in the checkpoint: more.weight; more.bias" in message
    assert "2 not in the module: head.bias; head.weight" in message
    assert "table.weight: [4, 2] in the checkpoint, [5, 2] in the module" in message
    assert torch.equal(net.table.weight, before)


def test_not_strict_loads_what_fits_but_no_other_shape(saved: Path) -> None:
    net = Net()
    net.more = nn.Linear(1, 1)
    report = load_into(CheckpointReader(saved), net, strict=False)
    assert report.missing == ("more.weight", "more.bias")
    assert "table.weight" in report.loaded
    with pytest.raises(CheckpointError, match="of another shape"):
        load_into(CheckpointReader(saved), Net(rows=5), strict=False)


def test_only_some_keys_are_loaded_and_the_tables_stay_on_meta(saved: Path) -> None:
    net = Net(device="meta")
    report = load_into(CheckpointReader(saved), net, only=lambda key: not key.startswith("table."))
    assert set(report.loaded) == {"head.weight", "head.bias", "scale"}
    assert net.table.weight.is_meta
    assert not net.head.weight.is_meta
    assert isinstance(net.head.weight, nn.Parameter)
    assert "scale" in dict(net.named_buffers())
    with pytest.raises(CheckpointError, match=r"only: the module has no head\.weights"):
        load_into(CheckpointReader(saved), net, only=["head.weights"])


def test_values_are_converted_to_the_modules_dtype(saved: Path) -> None:
    for net in (Net().half(), Net(device="meta").half()):
        load_into(CheckpointReader(saved), net)
        assert net.head.weight.dtype == torch.float16
        assert torch.equal(net.head.weight.detach(), CheckpointReader(saved).read("head.weight").half())


def test_tied_parameters_stay_tied(tmp_path: Path) -> None:
    def tied(device: str) -> nn.Module:
        net = nn.Sequential(nn.Linear(3, 3, device=device), nn.Linear(3, 3, device=device))
        net[1].weight = net[0].weight
        return net

    source = tied("cpu")
    torch.save(source.state_dict(), tmp_path / "tied.pt")
    target = tied("meta")
    load_into(CheckpointReader(tmp_path / "tied.pt"), target)
    assert target[0].weight is target[1].weight
    assert torch.equal(target[0].weight, source[0].weight)


def test_a_buffer_that_nothing_can_fill_is_named(tmp_path: Path) -> None:
    net = Net()
    torch.save(net.state_dict(), tmp_path / "net.pt")
    target = Net(device="meta")
    target.register_buffer("positions", torch.arange(3, device="meta"), persistent=False)
    with pytest.raises(CheckpointError, match="buffers positions are on the meta device"):
        load_into(CheckpointReader(tmp_path / "net.pt"), target)


# ---- memory


def peak_of(action: object) -> int:
    """Bytes by which the process's peak resident memory rises while ``action`` runs."""
    status = Path("/proc/self/status")
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("needs Linux's /proc to measure peak memory")

    def peak() -> int:
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")) << 10

    before = peak()
    action()  # type: ignore[operator]
    return peak() - before


@pytest.mark.parametrize("kind", ["pt", "dcp"])
def test_a_table_is_never_in_memory_twice(kind: str, tmp_path: Path) -> None:
    rows, dim = 1 << 19, 32
    size = rows * dim * 4  # 64 MiB
    path = tmp_path / "big"
    state = {"table.weight": torch.ones(rows, dim)}
    torch.save(state, path) if kind == "pt" else dcp.save(state, checkpoint_id=path, no_dist=True)
    del state
    reader = CheckpointReader(path)
    reader.read_rows("table.weight", 0, 1)  # imports what it needs, which is no copy of the table
    assert peak_of(lambda: reader.read_rows("table.weight", rows // 2, rows // 2 + 1000)) < size // 8
    net = nn.Module()
    net.table = nn.Embedding(rows, dim, device="meta")
    assert peak_of(lambda: load_into(reader, net)) < size * 1.25
