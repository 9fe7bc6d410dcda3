"""Files that are written as a whole."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from recinfer.files import write_file
from tests.warm import run_program

FULL = """
import resource, sys
from recinfer.files import write_file

resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, resource.RLIM_INFINITY))  # writes fail as they do on a full disk
try:
    write_file(sys.argv[1], b"x" * 2_000)
except OSError as error:
    print(error.filename)
"""


def test_an_error_leaves_the_file_as_it_was_and_names_it(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("before")
    code, out, err = run_program(FULL, path)
    assert (code, out.strip()) == (0, str(path)), err
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]
    path.unlink()
    assert run_program(FULL, path)[1].strip() == str(path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(OSError) as caught:
        write_file(tmp_path / "no folder" / "a", b"")
    assert caught.value.filename == str(tmp_path / "no folder" / "a")


def test_the_content_is_replaced_and_the_mode_stays(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("before")
    path.chmod(0o750)
    write_file(path, b"after")
    assert path.read_text() == "after" and stat.S_IMODE(path.stat().st_mode) == 0o750


def test_links_and_pipes_are_written_in_place(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("before")
    (tmp_path / "b").symlink_to("a")
    write_file(tmp_path / "b", b"after")
    assert (tmp_path / "b").is_symlink() and (tmp_path / "a").read_text() == "after"
    os.mkfifo(tmp_path / "pipe")
    reads = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_file(tmp_path / "pipe", b"content")
    assert os.read(reads, 100) == b"content"
    os.close(reads)
