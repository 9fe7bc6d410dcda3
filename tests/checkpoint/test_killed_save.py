"""A process or rank that dies while it saves leaves the last complete checkpoint under its name."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

from recinfer import files
from recinfer.checkpoint import CheckpointReader, load_checkpoint, save_checkpoint
from recinfer.errors import CheckpointError
from recinfer.files import put
from tests.distributed.spawn import RankError, run_ranks
from tests.warm import run_program

# Children of one warm process save on and on, each until its alarm kills it; what is left is then looked at.
SAVING = """
import itertools, os, random, signal, sys, torch
from pathlib import Path
from recinfer.checkpoint import save_checkpoint
from tests.checkpoint.test_killed_save import number_of
folder, rng, last = Path(sys.argv[1]), random.Random(0), 0
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 16))
for _ in range(int(sys.argv[2])):
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(100)  # should it stand still: then nothing was written
        optimizer = torch.optim.Adagrad(model.parameters())
        for number in itertools.count(last + 1):
            with torch.no_grad():
                for tensor in (*model.parameters(), *(s["sum"] for s in optimizer.state.values())):
                    tensor.fill_(number)
            save_checkpoint(folder, model, optimizer=optimizer, model_version=str(number))
            os.write(writing, f"{number}\\n".encode())
            if number == last + 2:
                signal.setitimer(signal.ITIMER_REAL, rng.random() * 0.05)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGALRM, status
    os.close(writing)
    done = int(os.read(reading, 1 << 16).split()[-1])
    last = number_of(folder)
    assert last in (done, done + 1), (last, done)  # never none, and never a mix of two
    print(last, flush=True)
    rng.random()
"""


def number_of(folder: Path) -> int:
    """The one number that all of a checkpoint's tensors hold."""
    reader = CheckpointReader(folder, prefix="")
    found = {float(n) for key in reader.stored_keys() if "step" not in key for n in reader.read(key).unique()}
    assert len(found) == 1, found
    assert reader.model_json is not None
    assert reader.model_json["version"] == str(int(min(found)))
    return int(min(found))


def test_a_killed_save_leaves_the_last_whole_checkpoint(tmp_path: Path) -> None:
    ended, out, err = run_program(SAVING, tmp_path / "ck", 5)
    assert ended == 0, err
    assert len(out.split()) == 5
    save_checkpoint(tmp_path / "ck", nn.Linear(2, 1))
    assert [p.name for p in tmp_path.iterdir()] == ["ck"]  # the next save removes the files of the killed process


@pytest.mark.parametrize("atomic", [True, False])
def test_a_folder_takes_the_place_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, atomic: bool) -> None:
    if not atomic:
        monkeypatch.setattr(files, "exchange", lambda one, other: False)
    for name in ("first", "second"):
        partial = tmp_path / ".ck.partial"
        partial.mkdir()
        (partial / "x").write_text(name)
        put(partial, tmp_path / "ck", replace=True)
        assert (tmp_path / "ck" / "x").read_text() == name
        assert [p.name for p in tmp_path.iterdir()] == ["ck"]


def dies_while_saving(rank: int, world_size: int, folder: str) -> None:
    import torch.distributed.checkpoint as dcp

    model = nn.Linear(4, 4)
    nn.init.constant_(model.weight, 1.0)
    nn.init.constant_(model.bias, 1.0)
    save_checkpoint(folder, model)
    nn.init.constant_(model.weight, 2.0)
    write = dcp.FileSystemWriter.write_data

    def write_and_die(self: object, *args: object, **kwargs: object) -> object:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(self, *args, **kwargs)  # type: ignore[arg-type]

    dcp.FileSystemWriter.write_data = write_and_die  # type: ignore[method-assign,assignment]
    try:
        save_checkpoint(folder, model)
    finally:
        dcp.FileSystemWriter.write_data = write  # type: ignore[method-assign]


def test_a_rank_that_dies_while_saving_fails_the_save(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="rank 1 of 2 failed"):
        run_ranks(2, dies_while_saving, str(tmp_path / "ck"))
    reader = CheckpointReader(tmp_path / "ck")
    assert torch.equal(reader.read("weight"), torch.ones(4, 4))
    with pytest.raises(
        CheckpointError, match=r"no \.metadata in it|does not exist"
    ):  # rank 0 removes it, if it still can
        load_checkpoint(tmp_path / ".ck.partial", nn.Linear(4, 4))
