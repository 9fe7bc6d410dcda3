"""Damaged and hostile checkpoints: a clear CheckpointError, and no code in them ever runs."""

from __future__ import annotations

import os
import pickle
import random
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

from recinfer.checkpoint import CheckpointReader
from recinfer.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    state = {"a.weight": torch.arange(24.0).view(6, 4), "b.weight": torch.ones(3, 2)}
    dcp.save({"model": state}, checkpoint_id=tmp_path / "ck", no_dist=True)
    return tmp_path / "ck"


def edit(folder: Path, change: Callable[[Metadata], None]) -> None:
    metadata = dcp.FileSystemReader(folder).read_metadata()
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.marker),)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        CheckpointReader(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"no \.metadata in it"):
        CheckpointReader(tmp_path)


def test_code_in_the_index_is_refused_and_does_not_run(folder: Path, tmp_path: Path) -> None:
    edit(folder, lambda m: setattr(m, "planner_data", Bomb(tmp_path / "ran")))
    with pytest.raises(CheckpointError, match=r"contains (posix|nt)\.mkdir, .* could run code"):
        CheckpointReader(folder)
    assert not (tmp_path / "ran").exists()


def test_code_in_a_state_dict_does_not_run(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "args": Bomb(tmp_path / "ran")}, tmp_path / "bad.pt")
    assert CheckpointReader(tmp_path / "bad.pt").keys() == ["w"]
    assert not (tmp_path / "ran").exists()


class OtherFile:
    """A tensor whose pickle then names another file for its bytes."""

    def __reduce__(self) -> tuple[object, ...]:
        rebuild, args = torch.ones(2).__reduce_ex__(2)[:2]
        return rebuild, args, {"path": "/etc/hostname", "offset": 0, "available": 8}


def test_a_state_dict_cannot_name_another_file(tmp_path: Path) -> None:
    torch.save({"w": OtherFile()}, tmp_path / "bad.pt")
    with pytest.raises(CheckpointError, match="sets attributes of a tensor"):
        CheckpointReader(tmp_path / "bad.pt")


def test_a_saved_module_is_refused(tmp_path: Path) -> None:
    torch.save({"model": torch.nn.Linear(2, 1), "w": torch.ones(2)}, tmp_path / "module.pt")
    with pytest.raises(CheckpointError, match=r"inside of an object of a class \(torch\.nn\.modules\.linear\.Linear\)"):
        CheckpointReader(tmp_path / "module.pt")


def test_code_in_a_shard_is_refused_and_does_not_run(folder: Path, tmp_path: Path) -> None:
    data = folder / "__0_0.distcp"
    torch.save(Bomb(tmp_path / "ran"), data)

    def point(metadata: Metadata) -> None:
        for info in metadata.storage_data.values():
            info.offset, info.length = 0, data.stat().st_size

    edit(folder, point)
    with pytest.raises(CheckpointError, match="found mkdir at byte 0, expected a tensor"):
        CheckpointReader(folder).read("a.weight")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("keep", [0, 1, 0.3, 0.9])
def test_a_truncated_shard_file(folder: Path, keep: float) -> None:
    data = folder / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[: int(data.stat().st_size * keep) if keep < 1 else 1])
    reader = CheckpointReader(folder)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp: has \d+ bytes, expected at least \d+"):
        _ = [reader.read(key) for key in ("a.weight", "b.weight")]


def test_a_missing_shard_file(folder: Path) -> None:
    (folder / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp: cannot be opened"):
        CheckpointReader(folder).read("a.weight")


@pytest.mark.parametrize("keep", [0, 10, 200, -1])
def test_a_truncated_index(folder: Path, keep: int) -> None:
    index = folder / ".metadata"
    index.write_bytes(index.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"\.metadata: cannot be read"):
        CheckpointReader(folder)


def test_an_index_of_something_else(folder: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(CheckpointError, match="holds a dict, expected the index"):
        CheckpointReader(folder)


@pytest.mark.parametrize("outside", ["../secret", "/etc/hostname", "sub/../../secret"])
def test_a_shard_outside_the_folder(folder: Path, outside: str) -> None:
    def point(metadata: Metadata) -> None:
        metadata.storage_data[MetadataIndex("model.a.weight", [0, 0])].relative_path = outside

    edit(folder, point)
    with pytest.raises(CheckpointError, match=r"the file of model\.a\.weight is outside the folder"):
        CheckpointReader(folder)


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([((0, 0), (3, 4))], "do not cover it once"),
        ([], "do not cover it once"),
        ([((0, 0), (6, 5))], "reach beyond it"),
        ([((-1, 0), (6, 4))], "reach beyond it"),
        ([((0, 0), (4, 4)), ((2, 0), (2, 4))], "overlap"),
        ([((0,), (6,))], "have other dimensions"),
    ],
)
def test_shards_that_do_not_make_up_their_table(
    folder: Path, chunks: list[tuple[tuple[int, ...], tuple[int, ...]]], message: str
) -> None:
    def cut(metadata: Metadata) -> None:
        info = metadata.storage_data[MetadataIndex("model.a.weight", [0, 0])]
        entry = metadata.state_dict_metadata["model.a.weight"]
        entry.chunks = [ChunkStorageMetadata(torch.Size(()), torch.Size(())) for _ in chunks]
        for chunk, (offsets, sizes) in zip(entry.chunks, chunks):
            # torch.Size takes no negative numbers; a forged index may hold any.
            chunk.offsets, chunk.sizes = offsets, sizes
            metadata.storage_data[MetadataIndex("model.a.weight", offsets)] = info

    edit(folder, cut)
    with pytest.raises(CheckpointError, match=rf"shards of model\.a\.weight {message}"):
        CheckpointReader(folder)


def test_a_shard_without_a_place(folder: Path) -> None:
    edit(folder, lambda m: m.storage_data.pop(MetadataIndex("model.a.weight", [0, 0])))
    with pytest.raises(CheckpointError, match=r"shard of model\.a\.weight at \(0, 0\) is in no file"):
        CheckpointReader(folder)


def test_shards_swapped_by_a_wrong_index(folder: Path) -> None:
    def swap(metadata: Metadata) -> None:
        a, b = (MetadataIndex(f"model.{name}.weight", [0, 0]) for name in "ab")
        metadata.storage_data[a], metadata.storage_data[b] = metadata.storage_data[b], metadata.storage_data[a]

    edit(folder, swap)
    with pytest.raises(CheckpointError, match=r"found \(3, 2\) at byte \d+, expected a tensor of shape \(6, 4\)"):
        CheckpointReader(folder).read("a.weight")


def test_dtype_differs_from_the_index(folder: Path) -> None:
    def lie(metadata: Metadata) -> None:
        metadata.state_dict_metadata["model.a.weight"].properties.dtype = torch.int32

    edit(folder, lie)
    with pytest.raises(CheckpointError, match=r"shard of model\.a\.weight|a\.weight is torch\.float32, expected"):
        CheckpointReader(folder).read_rows("a.weight", 0, 1)


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04 not a zip", b"\x80\x02}q\x00."])
def test_no_torch_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"not a complete torch\.save file"):
        CheckpointReader(tmp_path / "x.pt")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"F32"', b'"F99"', "a tensor is F99; expected one of F64"),
        (b"[0,80]", b"[0,99]", "the bytes 0 to 99, beyond the end"),
        (b"[5,4]", b"[9,4]", r"shape \(9, 4\) and torch.float32 needs 144 bytes, its storage has 80"),
        (b'"shape"', b'"shade"', "the head of this safetensors file is damaged"),
        (b"@\x00\x00", b"\xff\xff\xff", "the head has .* bytes, the file"),
    ],
)
def test_a_damaged_safetensors_file(old: bytes, new: bytes, message: str, tmp_path: Path) -> None:
    save_file({"w": torch.ones(5, 4)}, tmp_path / "x.safetensors")
    data = (tmp_path / "x.safetensors").read_bytes().replace(old, new, 1)
    (tmp_path / "x.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        CheckpointReader(tmp_path / "x.safetensors")


def test_a_zip_of_something_else(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        archive.writestr("a/b", "c")
    with pytest.raises(CheckpointError, match=r"without data\.pkl"):
        CheckpointReader(tmp_path / "x.pt")


def test_a_state_dict_without_tensors(tmp_path: Path) -> None:
    torch.save({"epoch": 3}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="does not hold a dict of tensors"):
        CheckpointReader(tmp_path / "x.pt")


def repack(source: Path, target: Path, change: Callable[[str, bytes], bytes], compress: bool = False) -> None:
    kind = zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", kind) as new:
        for name in old.namelist():
            new.writestr(name, change(name, old.read(name)))


def test_storages_that_are_short_compressed_or_of_the_other_byte_order(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(100, 4)}, tmp_path / "good.pt")
    bad = tmp_path / "bad.pt"
    repack(tmp_path / "good.pt", bad, lambda name, data: data[:-8] if name.endswith("data/0") else data)
    with pytest.raises(CheckpointError, match="needs 1600 bytes, its storage has 1592"):
        CheckpointReader(bad)
    repack(tmp_path / "good.pt", bad, lambda name, data: data, compress=True)
    with pytest.raises(CheckpointError, match="is compressed"):
        CheckpointReader(bad)
    repack(tmp_path / "good.pt", bad, lambda name, data: b"big" if name.endswith("byteorder") else data)
    with pytest.raises(CheckpointError, match="byte order b'big'"):
        CheckpointReader(bad)


def test_random_damage_never_escapes_the_error(folder: Path, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(5, 4), "v": torch.ones(3)}, tmp_path / "x.pt")
    save_file({"w": torch.ones(5, 4), "v": torch.ones(3)}, tmp_path / "x.safetensors")
    files = [tmp_path / "x.pt", tmp_path / "x.safetensors"]
    rng = random.Random(0)
    for path, opened in [*zip(files, files), (folder / ".metadata", folder)] * 150:
        good = path.read_bytes()
        bad = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            bad[rng.randrange(len(bad))] = rng.randrange(256)
        path.write_bytes(bytes(bad))
        try:
            reader = CheckpointReader(opened)
            _ = [reader.read(key) for key in reader.keys()]  # noqa: SIM118 - no dict
        except CheckpointError:
            pass
        finally:
            path.write_bytes(good)
