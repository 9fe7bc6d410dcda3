"""Locked mappings, and mappings edited before use: other processes don't see the edit, untouched pages stay shared."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import nn

from recinfer.archive.mapping import MappedShards
from recinfer.archive.reader import Archive
from recinfer.errors import UnavailableError
from tests.archive.models import make_archive
from tests.warm import run_program


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("preload", [False, True])
def test_other_mappings_do_not_see_an_edit(small: tuple[nn.Module, Archive], copy: bool, preload: bool) -> None:
    archive = small[1]
    plain = archive.map_shards()
    before = plain.buffer.clone()
    places = [shard.offset + 5 for shard in plain.shards]  # in every piece, also where two share a page

    def edit(mapped: MappedShards) -> None:
        mapped.buffer[places] = mapped.buffer[places] ^ 255

    edited = archive.map_shards(copy=copy, preload=preload, edit=edit)
    expected = before.clone()
    expected[places] ^= 255
    assert torch.equal(edited.buffer, expected)
    assert torch.equal(plain.buffer, before)
    assert torch.equal(archive.map_shards().buffer, before)
    assert edited.copied_bytes == (edited.copied_bytes if copy else plain.copied_bytes)


def test_an_edited_mapping_is_read_only_afterwards(small: tuple[nn.Module, Archive]) -> None:
    code = f"""
import torch
from recinfer.archive.reader import open_archive
mapped = open_archive({str(small[1].root)!r}).map_shards(edit=lambda m: m.buffer[:4].fill_(1))
assert mapped.buffer[:4].tolist() == [1] * 4
print("edited", flush=True)
mapped.buffer[0] = 2
print("written")
"""
    ended, out, err = run_program(code)
    assert out == "edited\n", err
    assert ended < 0  # ended by the kernel: a write to a served row is a bug that must not pass


def _locked_kib(pid: str = "self") -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmLck:"))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_lock_keeps_all_pages(tmp_path: Path) -> None:
    _, archive = make_archive(tmp_path)
    gc.collect()  # memory that other tests of this process locked is freed now, not later
    before = _locked_kib()
    try:
        mapped = archive.map_shards(lock=True)
    except UnavailableError as error:
        assert "ulimit -l" in str(error)
        return
    assert _locked_kib() - before >= mapped.buffer.numel() // 1024
    del mapped
    assert _locked_kib() == before


def test_error_reports_a_limit_on_locked_memory(small: tuple[nn.Module, Archive]) -> None:
    code = f"""
import ctypes, os, resource
resource.setrlimit(resource.RLIMIT_MEMLOCK, (4096, 4096))
if os.getuid() == 0:  # root may lock all the same, unless it gives the capability up
    os.setgroups([]); os.setuid(65534)
import recinfer
from recinfer.inference.predictor import load
try:
    load({str(small[1].root)!r}, lock=True)
except recinfer.errors.UnavailableError as error:
    print(error)
"""
    code = code.replace("import recinfer\n", "import recinfer, recinfer.errors\n").replace(
        "if os.getuid", "import recinfer.inference.predictor\nif os.getuid"
    )
    _, out, err = run_program(code)
    if "Permission denied" in err:
        pytest.skip("the temporary folder is not readable for another user")
    assert "the limit is 4096 bytes (ulimit -l)" in out, err
