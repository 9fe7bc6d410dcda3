"""A full disk and Ctrl-C during an export, a reshard or a delta leave no partial archive and no temporary files."""

from __future__ import annotations

import gc
import json
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from recinfer.archive.writer import ShardWriter
from recinfer.errors import UnavailableError
from recinfer.inference.reshard import plan_archive, reshard_archive
from tests.archive.models import make_archive, save_weights
from tests.warm import Program, run_program

LIMITED = """
import resource, sys
from pathlib import Path
from recinfer.errors import UnavailableError
from recinfer.inference.export import export_archive
from tests.archive.models import Ranker, make_plan
from recinfer.checkpoint import CheckpointReader

folder = Path(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
model = Ranker()
try:
    export_archive(model, CheckpointReader(folder / "weights.pt"), make_plan(model, 2), folder / "out" / "m.rqa",
                   name="m", version="1", progress=False)
except UnavailableError as error:
    print(error)
"""


@pytest.mark.parametrize("limit", [6_000, 22_000])
def test_a_file_that_cannot_grow_ends_the_export(tmp_path: Path, limit: int) -> None:
    """RLIMIT_FSIZE makes writes fail as a full disk does: in the first shard, or between two pieces of it."""
    from tests.archive.models import Ranker

    save_weights(Ranker(), tmp_path)
    _, out, err = run_program(LIMITED, tmp_path, limit)
    assert "cannot write the archive" in out, err
    assert not list((tmp_path / "out").iterdir())


def test_too_little_space_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(UnavailableError, match="1000 are free"):
        make_archive(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["weights.pt"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_between_chunks_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    _, archive = make_archive(tmp_path)
    before = sorted(p.name for p in tmp_path.iterdir())
    write = ShardWriter.write_rows

    def fail(self: ShardWriter, table: object, first_row: int, packed: torch.Tensor) -> None:
        if first_row > 300:
            raise error
        write(self, table, first_row, packed)  # type: ignore[arg-type]

    monkeypatch.setattr(ShardWriter, "write_rows", fail)
    expected = UnavailableError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        reshard_archive(
            archive.root,
            plan_archive(archive.manifest, world_size=2),
            tmp_path / "out.rqa",
            progress=False,
            max_chunk_bytes=2000,
        )
    with pytest.raises(expected):
        make_archive(tmp_path, name="other", overwrite=True, max_chunk_bytes=2000)
    assert sorted(p.name for p in tmp_path.iterdir()) == before  # and the old archive is whole
    assert json.loads((archive.root / "manifest.json").read_text())["model"] == "small"


INTERRUPTED = """
import sys, torch
import time
from pathlib import Path
from torch import nn
from recinfer.archive.writer import ShardWriter
from recinfer.checkpoint import CheckpointReader
from recinfer.cli.console import verb
from recinfer.distributed.planner import plan_inference
from recinfer.inference.export import export_archive
from recinfer.modules.embedding_configs import EmbeddingBagConfig
from recinfer.modules.embedding_modules import EmbeddingBagCollection

folder = Path(sys.argv[1])
tables = [EmbeddingBagConfig(20_000, 64, "t", feature_names=["f"])]
model = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))

write, written = ShardWriter.write_rows, []

def half(self, *rest):  # stands still in the middle of the file, so that this is where Ctrl-C comes
    write(self, *rest)
    written.append(1)
    if len(written) == 100:
        print("half", flush=True)
        time.sleep(600)

ShardWriter.write_rows = half

@verb
def export():
    export_archive(model, CheckpointReader(folder / "w.pt"), plan_inference(model, world_size=1), folder / "out/m.rqa",
                   name="m", version="1", max_chunk_bytes=1 << 14)

try:
    export()
except Exception as error:
    sys.exit(error.exit_code)
"""


def test_control_c_leaves_no_half_archive(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    torch.save({"embedding_bags.t.weight": torch.zeros(20_000, 64)}, tmp_path / "w.pt")
    with Program(INTERRUPTED, tmp_path) as process:
        assert process.stdout.readline() == "half\n", process.communicate()
        assert list(tmp_path.glob("out/.m.rqa.*/shards/*"))
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
        assert process.returncode == 130, err
    assert "interrupted" in err
    assert not list((tmp_path / "out").iterdir())


def test_chunks_of_any_size_give_the_same_files(tmp_path: Path) -> None:
    whole = make_archive(tmp_path / "a")[1].manifest.files
    for i, size in enumerate((1, 1000, 50_000)):
        _, archive = make_archive(tmp_path / str(i), max_chunk_bytes=size)
        for old, new in zip(whole, archive.manifest.files, strict=True):
            if old.path.startswith(("shards", "plan", "check")):
                assert old == new


LOCKED = """
import os, sys, threading, torch
from pathlib import Path
from tests.inference import moments

verb, folder, number = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
enter, entered = threading.Condition.__enter__, 0

def interrupted(self):  # as Ctrl-C does that comes when the lock is taken and the block has not begun
    global entered
    found = enter(self)
    if threading.current_thread() is threading.main_thread():
        entered += 1
        if entered == number:
            raise KeyboardInterrupt
    return found

threading.Condition.__enter__ = interrupted
try:
    moments.VERBS[verb](folder, folder / f"out-{number}")
    ended = "written"
except KeyboardInterrupt:
    ended = "interrupted"
print(ended, flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("verb", ["delta", "export", "reshard"])
def test_ctrl_c_leaves_no_lock_for_which_the_end_waits(tmp_path: Path, verb: str) -> None:
    from tests.inference import moments

    moments.write_inputs(tmp_path)
    for number in (1, 2, 20, 200):
        with Program(LOCKED, verb, tmp_path, number) as program:
            out, err = program.communicate(timeout=60)
        assert out in ("written\n", "interrupted\n"), err


@pytest.mark.parametrize("verb", ["delta", "export", "replace", "reshard"])
def test_target_name_holds_a_complete_archive_or_none(tmp_path: Path, verb: str) -> None:
    """Ctrl-C, SIGKILL and files that cannot grow, at random moments of the real verbs."""
    code = "import runpy; runpy.run_module('tests.inference.moments', run_name='__main__')"
    ended, out, err = run_program(code, verb, tmp_path, 5)
    assert ended == 0, err[-2000:]
    found = json.loads(out)
    assert found["faults"] == [], err[-6000:]
    for how, ended in {"INT": 130, "KILL": -9, "DISK": 28}.items():
        assert set(found["codes"][how]) <= {0, ended}, err[-2000:]
    assert {130, -9} & {*found["codes"]["INT"], *found["codes"]["KILL"]} and 28 in found["codes"]["DISK"]


@pytest.mark.parametrize("verb", ["delta", "export", "reshard"])
def test_a_disk_that_is_really_full(tmp_path: Path, verb: str) -> None:
    """A file system with too few blocks: it fills up while tables or later files are written."""
    from tests.inference import moments

    moments.write_inputs(tmp_path)
    shards = sum(p.stat().st_size for p in tmp_path.glob("base.rqa/shards/*"))
    small = tmp_path / "small"
    small.mkdir()
    room = shards + (0 if verb == "delta" else 5 * 4096)  # space for the shards, and little more
    mount = ["mount", "-t", "tmpfs", "-o", f"size={room}", "tmpfs", str(small)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small file system needs root and mount")
    try:
        (small / "other").write_bytes(bytes(4096))
        with pytest.raises(UnavailableError, match="No space left"):
            moments.VERBS[verb](tmp_path, small / "out")
        assert [p.name for p in small.iterdir()] == ["other"]
    finally:
        gc.collect()  # the error's traceback may be part of a cycle, and its frames hold mapped files
        subprocess.run(["umount", str(small)], check=True)
