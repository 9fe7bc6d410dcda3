"""An archive's folder appears under its name when it is complete, or not at all."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from recinfer import files
from recinfer.archive import writer
from recinfer.archive.check import REQUESTS
from recinfer.archive.delta import delta_file
from recinfer.archive.writer import archive_folder
from recinfer.errors import ArchiveError, CheckpointError, InputError, UnavailableError
from recinfer.inference.verify import verify
from tests.archive.models import Ranker, make_archive, make_plan, save_weights
from tests.warm import Program, run_program


def test_an_existing_target_is_kept(tmp_path: Path) -> None:
    _, archive = make_archive(tmp_path)
    before = sorted(p.stat().st_mtime_ns for p in archive.root.rglob("*"))
    with pytest.raises(ArchiveError, match="exists"):
        make_archive(tmp_path)
    assert sorted(p.stat().st_mtime_ns for p in archive.root.rglob("*")) == before


def test_overwrite_replaces_it(tmp_path: Path) -> None:
    make_archive(tmp_path, name="one")
    _, archive = make_archive(tmp_path, name="two", overwrite=True)
    assert archive.manifest.model == "two"
    assert verify(archive.root).ok
    assert {p.name for p in tmp_path.iterdir()} == {"small.rqa", "weights.pt"}


def test_overwrite_where_names_cannot_be_swapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "exchange", lambda root, target: False)
    make_archive(tmp_path, name="one")
    _, archive = make_archive(tmp_path, name="two", overwrite=True)
    assert archive.manifest.model == "two"
    assert {p.name for p in tmp_path.iterdir()} == {"small.rqa", "weights.pt"}


@pytest.mark.parametrize("what", ["file", "folder", "link"])
def test_overwrite_replaces_nothing_but_an_archive(tmp_path: Path, what: str) -> None:
    target = tmp_path / "target"
    if what == "file":
        target.write_text("mine")
    elif what == "folder":
        target.mkdir()
        (target / "mine.txt").write_text("mine")
    else:
        target.symlink_to(tmp_path)
    with pytest.raises(ArchiveError, match="not an archive"), archive_folder(target, overwrite=True):
        pass
    assert os.path.lexists(target)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, SystemExit])
def test_an_interrupted_export_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), archive_folder(tmp_path / "a.rqa") as folder:
        folder.add("plan.json", b"{}")
        raise error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("make", [archive_folder, delta_file])
@pytest.mark.parametrize("name", ["mkdir", "rmdir"])
def test_control_c_while_the_folder_is_made_or_removed_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], Any], name: str
) -> None:
    """The signal's handler runs after the call has returned and before its result is stored."""
    real, calls = getattr(os, name), []

    def interrupted(path: object, *arguments: object, **options: object) -> None:
        if name == "mkdir":
            real(path, *arguments, **options)
        calls.append(path)
        if len(calls) == 1:
            raise KeyboardInterrupt
        if name == "rmdir":
            real(path, *arguments, **options)

    monkeypatch.setattr(os, name, interrupted)
    with pytest.raises(KeyboardInterrupt), make(tmp_path / "target"):
        raise ValueError
    assert calls and list(tmp_path.iterdir()) == []


def test_bad_weights_leave_nothing(tmp_path: Path) -> None:
    model = Ranker()
    model.ebc.embedding_bags["item"].weight.data[777, 3] = float("nan")
    with pytest.raises(InputError, match=r"'ebc\.item', row 777, column 3"):
        make_archive(tmp_path, model=model, max_chunk_bytes=1000)
    assert [p.name for p in tmp_path.iterdir()] == ["weights.pt"]


def test_a_checkpoint_of_another_shape_leaves_nothing(tmp_path: Path) -> None:
    from recinfer.inference.export import export_archive

    model = Ranker()
    reader = save_weights(model, tmp_path)
    other = Ranker()
    other.ebc.embedding_bag_configs()[0].num_embeddings = 54
    with pytest.raises(CheckpointError, match=r"users\.weight is \[53, 12\].*\[54, 12\]"):
        export_archive(other, reader, make_plan(other, 1), tmp_path / "a.rqa", name="a", version="1", progress=False)
    assert [p.name for p in tmp_path.iterdir()] == ["weights.pt"]


FULL_DISK = """
import resource, sys
from pathlib import Path
from recinfer.errors import UnavailableError
from tests.archive.models import Ranker, make_plan, save_weights
from recinfer.inference.export import export_archive
folder = Path(sys.argv[1])
model = Ranker()
reader = save_weights(model, folder)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # files end where a full disk would end them
try:
    export_archive(model, reader, make_plan(model, 1), folder / "a.rqa", name="a", version="1", progress=False)
except UnavailableError as error:
    print("refused:", error)
"""


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    _, out, err = run_program(FULL_DISK, tmp_path)
    assert out.startswith("refused: cannot write the archive"), err[-2000:]
    assert [p.name for p in tmp_path.iterdir()] == ["weights.pt"]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UnavailableError, match="cannot write"), archive_folder(tmp_path / "file" / "a.rqa"):
        pass


def test_hashes_are_those_of_the_files(tmp_path: Path) -> None:
    _, archive = make_archive(tmp_path, kinds=("grid_shard", "column_wise"), ranks=2, max_chunk_bytes=500)
    for file in archive.manifest.files:
        archive.check_hash(file)
    assert archive.read(REQUESTS)
    assert archive.manifest.bytes_total == sum(f.bytes for f in archive.manifest.files)


KILLED = """
import os, signal, sys
from pathlib import Path
from recinfer.archive.delta import delta_file
from recinfer.archive.writer import archive_folder

make = {"archive": archive_folder, "delta": delta_file}[sys.argv[1]]
with make(Path(sys.argv[2])) as made:
    if sys.argv[1] == "archive":
        made.add("plan.json", b"{}")
    else:
        made.write_bytes(b"{}")
    print("writing", flush=True)
    if sys.argv[3] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.stdin.readline()
"""


def start_writer(kind: str, target: Path, then: str) -> Program:
    process = Program(KILLED, kind, target, then)
    assert process.stdout.readline() == "writing\n", process.communicate()
    return process


@pytest.mark.parametrize("kind", ["archive", "delta"])
def test_the_next_writer_removes_what_a_killed_one_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """It keeps the folder of a running writer, of another target, and any that no writer made."""
    target = tmp_path / "m.rq[a]"
    killed = start_writer(kind, target, "kill")
    killed.communicate()
    left = set(tmp_path.iterdir())
    for folder in left:
        os.utime(folder, (time.time() + 3600,) * 2)  # it stays young, however long the next writer takes to start
    assert killed.returncode == -9 and len(left) == 1
    alive = start_writer(kind, target, "wait")
    try:
        kept = {path for path in tmp_path.iterdir() if path not in left}
        for name in (
            ".m.rq[a].mine.partial",
            ".m.rq[a].x.abcdefgh.partial",
            ".other.abcdefgh.partial",
            "m.rq[a].partial",
        ):
            (tmp_path / name).mkdir()
            kept.add(tmp_path / name)
        (tmp_path / ".m.rq[a].ghijklmn.partial").symlink_to(tmp_path / ".other.abcdefgh.partial")
        kept.add(tmp_path / ".m.rq[a].ghijklmn.partial")
        assert left <= set(tmp_path.iterdir())  # so new that its writer may still be about to lock it
        monkeypatch.setattr(writer, "_YOUNG_SECONDS", -math.inf)
        with writer.archive_folder(target) if kind == "archive" else delta_file(target) as made:
            mine = made.root if kind == "archive" else made.parent
            assert set(tmp_path.iterdir()) == kept | {mine}
            if kind == "delta":
                made.write_bytes(b"{}")
        assert set(tmp_path.iterdir()) == kept | {target}
    finally:
        alive.communicate("\n")


@pytest.mark.parametrize("system", ["renames to free names", "has no such call"])
@pytest.mark.parametrize("kind", ["archive", "delta"])
def test_one_of_several_writers_that_finish_together_gets_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, system: str
) -> None:
    if system == "has no such call":
        monkeypatch.setattr(files, "_LIBC", None)

    def write(target: Path, number: int, together: threading.Barrier) -> bool:
        try:
            with archive_folder(target) if kind == "archive" else delta_file(target) as made:
                file = made.root / "manifest.json" if kind == "archive" else made
                file.write_text(str(number))
                together.wait()
        except ArchiveError as error:
            assert str(error).startswith(f"{str(target)!r} exists; ")
            return False
        return True

    with ThreadPoolExecutor(4) as pool:
        for turn in range(25):
            target, together = tmp_path / f"{turn}.rqa", threading.Barrier(4, timeout=60)
            wrote = list(pool.map(write, [target] * 4, range(4), [together] * 4))
            assert sum(wrote) == 1, f"turn {turn}: {wrote}"
            file = target / "manifest.json" if kind == "archive" else target
            assert file.read_text() == str(wrote.index(True))
            assert len(list(tmp_path.iterdir())) == turn + 1
