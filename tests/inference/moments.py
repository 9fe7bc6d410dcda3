"""Runs a verb again and again in forked processes and ends each at a random moment; prints what was left behind as JSON.

``python -m tests.inference.moments export|replace|reshard|delta FOLDER TRIALS``: so many times with SIGINT and with SIGKILL at a
random moment, and with a random size (DISK) beyond which no file may grow.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from recinfer.archive.delta import read_delta
from recinfer.archive.reader import open_archive
from recinfer.checkpoint import CheckpointReader
from recinfer.distributed.planner import plan_inference
from recinfer.errors import UnavailableError
from recinfer.inference.delta import make_delta
from recinfer.inference.export import export_archive
from recinfer.inference.reshard import plan_archive, reshard_archive
from recinfer.modules.embedding_configs import EmbeddingBagConfig
from recinfer.modules.embedding_modules import EmbeddingBagCollection

ROWS, DIM, CHUNK = 30_000, 32, 1 << 17
_LONGEST_S = 100.0  # of a trial, which takes less than one


def model_on_meta() -> nn.Module:
    """Two tables, no dense part: all the time goes into rows."""
    tables = [EmbeddingBagConfig(ROWS, DIM, f"t{i}", feature_names=[f"f{i}"]) for i in range(2)]
    return EmbeddingBagCollection(tables=tables, device=torch.device("meta"))


def export(folder: Path, out: Path, weights: str = "old.pt", overwrite: bool = False) -> None:
    """The archive of a checkpoint."""
    model = model_on_meta()
    export_archive(
        model,
        CheckpointReader(folder / weights),
        plan_inference(model, world_size=2),
        out,
        name="m",
        version="1",
        max_chunk_bytes=CHUNK,
        progress=False,
        overwrite=overwrite,
    )


def reshard(folder: Path, out: Path) -> None:
    """Three ranks of two."""
    plan = plan_archive(open_archive(folder / "base.rqa").manifest, world_size=3)
    reshard_archive(folder / "base.rqa", plan, out, progress=False, max_chunk_bytes=CHUNK)


def delta(folder: Path, out: Path) -> None:
    """What the new checkpoint changed: every row."""
    reader = CheckpointReader(folder / "new.pt")
    make_delta(folder / "base.rqa", model_on_meta(), reader, out, progress=False, max_chunk_bytes=CHUNK)


def replace(folder: Path, out: Path) -> None:
    """An export over an archive that is there."""
    export(folder, out, "new.pt", overwrite=True)


VERBS: dict[str, Callable[[Path, Path], None]] = {
    "delta": delta,
    "export": export,
    "replace": replace,
    "reshard": reshard,
}


def write_inputs(folder: Path) -> None:
    """The two checkpoints, and the archive of the first."""
    torch.manual_seed(0)
    state = {f"embedding_bags.t{i}.weight": torch.randn(ROWS, DIM) for i in range(2)}
    torch.save(state, folder / "old.pt")
    torch.save({key: value + 1 for key, value in state.items()}, folder / "new.pt")
    export(folder, folder / "base.rqa")


def trial(work: Callable[[Path, Path], None], folder: Path, out: Path, how: str, at: float) -> tuple[int, float]:
    """Run in a process of its own; its exit code (negative: the signal that ended it), and the seconds until it ended.

    ``at``: seconds, or bytes.
    """
    started = time.monotonic()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # until the child can take it
    child = os.fork()
    if not child:
        code = 1
        try:
            faulthandler.dump_traceback_later(_LONGEST_S, exit=True)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            if how == "DISK":
                resource.setrlimit(resource.RLIMIT_FSIZE, (int(at), resource.RLIM_INFINITY))
            work(folder, out)
            code = 0
        except KeyboardInterrupt:
            code = 130
        except UnavailableError:
            code = 28
        except BaseException:
            traceback.print_exc()
        finally:
            try:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            finally:  # also if Ctrl-C comes this late: the child must not run on in parallel to its parent
                os._exit(code)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if how in ("INT", "KILL"):
        while (left := started + at - time.monotonic()) > 0:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:  # it ended before the moment that was drawn
                return os.waitstatus_to_exitcode(status), time.monotonic() - started
            time.sleep(min(left, 0.01))
        os.kill(child, signal.SIGINT if how == "INT" else signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), time.monotonic() - started


def main(verb: str, folder: Path, trials: int) -> dict[str, Any]:
    """The exit codes by what ended the verb, and every fault: something half under the name, or rubbish where there may be none."""
    torch.set_num_threads(1)
    write_inputs(folder)
    place = folder / "out"
    place.mkdir()
    out = place / ("m.rqd" if verb == "delta" else "m.rqa")
    base = open_archive(folder / "base.rqa").manifest.files
    chance = random.Random(7)
    codes: dict[str, list[int]] = {}
    faults: list[str] = []

    def prepare() -> None:
        shutil.rmtree(place)
        place.mkdir()
        if verb == "replace":
            shutil.copytree(folder / "base.rqa", out)

    prepare()
    code, seconds = trial(VERBS[verb], folder, out, "", 0)
    assert code == 0
    whole = [] if verb == "delta" else open_archive(out).manifest.files
    largest = max(p.stat().st_size for p in [out, *out.rglob("*")] if p.is_file())
    for how in ("INT", "KILL", "DISK") * trials:
        prepare()
        code, took = trial(VERBS[verb], folder, out, how, chance.random() * (largest if how == "DISK" else seconds))
        if code == 0:  # if the first trial was delayed, all later signals would come too late
            seconds = min(seconds, took)
        codes.setdefault(how, []).append(code)
        names = sorted(p.name for p in place.iterdir())
        if how != "KILL" and [name for name in names if name != out.name]:
            faults.append(f"exit {code} left {names}")
        if out.exists() and verb == "delta":
            read_delta(out)
        elif out.exists():
            found = open_archive(out, check_hashes=True)
            # Ctrl-C may come when all is done but for the old one, which is being removed.
            fine = {0: (whole,), 28: (base,)}.get(code, (base, whole)) if verb == "replace" else (whole,)
            if found.manifest.files not in fine:
                faults.append(f"exit {code}, and another archive is there")
        elif verb == "replace" or code == 0:
            faults.append(f"exit {code}, and nothing is there")
    return {"codes": codes, "faults": faults}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))))
