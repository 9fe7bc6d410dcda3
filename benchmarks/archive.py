"""Measures large archives: time to open, memory of several processes, and speed and memory of export, reshard and
delta.

A synthetic checkpoint is written to a temporary folder (--size GiB of float32), exported to INT8, opened by 1, 2 and 4
processes that read every page, and resharded. A delta with a share --changed of new rows is written and applied. Every
speed is compared with plain file I/O of the same bytes in the same run and the same state of the page cache: read the
one file with read(), write the other with write() and fsync it, as export does too. Needs about 2.7 times --size of
disk.

    python -m benchmarks.archive --size 4
    python -m benchmarks.archive --size 4 --checkpoint-ranks 4 --stages export  # from a sharded checkpoint
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

DIM = 64
TABLES = 16
CHUNK = 16 << 20


def build(rows: int) -> torch.nn.Module:
    """A DLRM on the meta device with ``TABLES`` tables of ``rows`` rows in total, a few of them large."""
    from recinfer.models.dlrm import DLRM
    from recinfer.modules.embedding_configs import EmbeddingBagConfig
    from recinfer.modules.embedding_modules import EmbeddingBagCollection

    weights = [2.0**-i for i in range(TABLES)]
    sizes = [max(16, int(rows * w / sum(weights))) for w in weights]
    tables = [EmbeddingBagConfig(n, DIM, f"t{i}", feature_names=[f"f{i}"]) for i, n in enumerate(sizes)]
    with torch.device("meta"):
        collection = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        return DLRM(collection, 13, [64, DIM], [128, 64, 1], dense_device=torch.device("meta"))


def write_checkpoint(model: torch.nn.Module, path: Path, change: float = 0.0, seed: int = 0) -> None:
    """Write a ``.pt`` state dict; with ``change``, that share of the rows and the dense part differ from the one with
    0."""
    torch.manual_seed(seed)
    state = {}
    for key, value in model.state_dict().items():
        tensor = torch.empty(value.shape, dtype=value.dtype)
        for start in range(0, len(tensor), 1 << 16):
            block = tensor[start : start + (1 << 16)]
            block.normal_(std=0.05)
        if change and tensor.dim() == 2:
            rows = torch.randperm(len(tensor), generator=torch.Generator().manual_seed(1))[
                : max(1, int(change * len(tensor)))
            ]
            tensor[rows] += 0.01
        elif change:
            tensor += 0.01
        state[key] = tensor
    torch.save(state, path)


def write_sharded_checkpoint(model: torch.nn.Module, path: Path, ranks: int) -> None:
    """Write a torch.distributed.checkpoint folder with every tensor sharded by rows over ``ranks`` processes."""
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_write_rank, (model.state_dict(), path, ranks, Path(folder) / "store"), nprocs=ranks)


def _write_rank(rank: int, shapes: dict[str, torch.Tensor], path: Path, ranks: int, store: Path) -> None:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    torch.manual_seed(rank)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    state = {}
    for key, value in shapes.items():
        step = -(-len(value) // ranks)
        rows = max(0, min(step, len(value) - rank * step))
        part = torch.empty(rows, *value.shape[1:]).normal_(std=0.05)
        state[key] = DTensor.from_local(part, mesh, [Shard(0)], shape=value.shape, stride=value.stride())
    dcp.save(state, checkpoint_id=path)
    dist.destroy_process_group()


def drop_cache(path: Path) -> None:
    """Drop the cached pages of a file or of all files in a folder."""
    for file in [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def size_of(path: Path) -> int:
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file()) if path.is_dir() else path.stat().st_size


def plain_io(read: list[Path], write_bytes: int, folder: Path) -> float:
    """Seconds to read files and to write (and fsync) so many bytes, in a loop over one buffer."""
    buffer = memoryview(bytearray(os.urandom(1 << 20) * (CHUNK >> 20)))
    started = time.perf_counter()
    for path in read:
        for file in [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]:
            with open(file, "rb", buffering=0) as opened:
                while opened.readinto(buffer):  # type: ignore[attr-defined]
                    pass
    target = folder / "plain.bin"
    with open(target, "wb", buffering=0) as opened:
        for start in range(0, write_bytes, CHUNK):
            opened.write(buffer[: min(CHUNK, write_bytes - start)])
        os.fsync(opened.fileno())
    seconds = time.perf_counter() - started
    target.unlink()
    return seconds


def memory_of(pid: int | str, what: str = "Pss") -> int:
    """Bytes of a process: ``Pss``, ``Rss``, ``Private_Dirty`` ... of /proc/PID/smaps_rollup."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith(f"{what}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(what)


class Watch:
    """Records the peak anonymous memory of this process in a ``with`` block above its start, and the seconds."""

    def __enter__(self) -> Watch:
        self._base = memory_of("self", "Anonymous")
        self.peak = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self._started = time.perf_counter()
        return self

    def _run(self) -> None:
        while not self._stop.wait(0.02):
            self.peak = max(self.peak, memory_of("self", "Anonymous") - self._base)

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._started
        self._stop.set()
        self._thread.join()


CHILD = """
import json, sys, time
import torch
import recinfer.inference.predictor as predictor_module
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
options = json.loads(sys.argv[2])
torch.set_num_threads(1)
started = time.perf_counter()
predictor = predictor_module.load(sys.argv[1], **options)
opened = time.perf_counter() - started
names = [f.name for f in predictor.manifest.features]
ids = KeyedJaggedTensor(names, torch.zeros(len(names), dtype=torch.int64), lengths=torch.ones(len(names), dtype=torch.int32))
predictor.predict(torch.zeros(1, predictor.num_dense), ids)
answered = time.perf_counter() - started
int(predictor._mapped.buffer[::4096].max())
print(json.dumps({"opened": opened, "answered": answered}), flush=True)
sys.stdin.readline()
"""


def open_in_child(archive: Path, **options: Any) -> tuple[subprocess.Popen[str], dict[str, float]]:
    """A process that has opened the archive and read all its pages, and its measurements."""
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(archive), json.dumps(options)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())


def close(process: subprocess.Popen[str]) -> None:
    process.communicate("\n")


def measure_open(archive: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, cold, options in (
        ("cold", True, {}),
        ("warm", False, {}),
        ("preload", False, {"preload": True}),
        ("lock", False, {"lock": True}),
    ):
        if cold:
            drop_cache(archive)
        process, times = open_in_child(archive, **options)
        close(process)
        found[f"{name} s"] = times["opened"]
        found[f"{name} first answer s"] = times["answered"]
    return found


def measure_sharing(archive: Path, counts: tuple[int, ...] = (1, 2, 4)) -> dict[str, Any]:
    """Measure the total proportional set size of processes that have each read every page."""
    found: dict[str, Any] = {"archive bytes": size_of(archive)}
    for count in counts:
        children = [open_in_child(archive)[0] for _ in range(count)]
        total = sum(memory_of(child.pid) for child in children)
        alone = sum(memory_of(child.pid, "Anonymous") for child in children)
        for child in children:
            close(child)
        found[f"{count} processes PSS bytes"] = total
        found[f"{count} processes anonymous bytes"] = alone
    return found


def against_plain(
    name: str,
    work: Callable[[], Any],
    read: list[Path],
    target: Path,
    folder: Path,
    *,
    expected: int,
    cold: bool = False,
    rounds: int = 1,
) -> dict[str, Any]:
    """Time and memory of ``work``, and the ratio of its speed to plain I/O of the same bytes.

    ``target``: what it writes, new each time; ``expected``: about how many bytes. The files read are in the page cache in
    both, or, with ``cold``, in neither. What is written is on the disk in both (fsync). Plain I/O takes its turn before
    and after each round of the work, and medians count, as a disk and a shared machine change their speed from minute to
    minute; the first round of a process also pays for imports.
    """

    def in_turn(do: Callable[[], float]) -> float:
        for path in read if cold else ():
            drop_cache(path)
        os.sync()  # no measurement includes the write-back of an earlier one's pages
        return do()

    def timed() -> float:
        if target.is_dir():
            shutil.rmtree(target)
        target.unlink(missing_ok=True)
        with Watch() as watch:
            work()
        peaks.append(watch.peak)
        return watch.seconds

    peaks: list[int] = []
    plains = [in_turn(lambda: plain_io(read, expected, folder))]
    times = []
    for _ in range(rounds):
        times.append(in_turn(timed))
        out = size_of(target)
        plains.append(in_turn(partial(plain_io, read, out, folder)))
    seconds, plain = median(times), median(plains)
    moved = sum(size_of(path) for path in read) + out
    return {
        f"{name} s": seconds,
        f"{name} plain I/O s": plain,
        f"{name} speed, of plain I/O": plain / seconds,
        f"{name} MiB/s": moved / seconds / 2**20,
        f"{name} peak bytes above start": max(peaks),
        f"{name} s, each round": [round(t, 2) for t in times],
        f"{name} plain I/O s, each round": [round(t, 2) for t in plains],
    }


def run(
    folder: Path, size: float, changed: float, precision: str, stages: set[str], rounds: int, ranks: int
) -> dict[str, Any]:
    from recinfer.checkpoint import CheckpointReader
    from recinfer.distributed.planner import plan_inference
    from recinfer.inference.export import export_archive
    from recinfer.inference.reshard import plan_archive, reshard_archive
    from recinfer.modules.embedding_configs import DataType
    from recinfer.quant.rows import row_bytes

    model = build(int(size * 2**30 / (4 * DIM)))
    path, archive, moved = folder / ("model.ckpt" if ranks else "model.pt"), folder / "model.rqa", folder / "moved.rqa"
    make_checkpoint(path, size, 0.0, ranks)
    plan = plan_inference(model, world_size=2, precision=DataType.parse(precision))
    results: dict[str, Any] = {"checkpoint bytes": size_of(path)}

    def show(found: dict[str, Any]) -> None:
        results.update(found)
        for name, value in found.items():
            if isinstance(value, list):
                text = " ".join(map(str, value))
            else:
                text = f"{value / 2**20:,.1f} MiB" if name.endswith(("bytes", "bytes above start")) else f"{value:.3f}"
            print(f"{name:45} {text:>16}", flush=True)

    show({"checkpoint bytes": results["checkpoint bytes"]})

    def export() -> None:
        reader = CheckpointReader(path)
        export_archive(model, reader, plan, archive, name="m", version="1", progress=False, overwrite=True)

    def measure_export(name: str, cold: bool) -> dict[str, Any]:
        return against_plain(name, export, [path], archive, folder, expected=expected, cold=cold, rounds=rounds)

    expected = sum(t.num_embeddings * row_bytes(t.embedding_dim, t.precision) for t in plan.tables)
    if "export-cold" in stages or "export" not in stages:
        show(measure_export("export, cold", True))
    if "export" in stages:
        show(measure_export("export, warm", False))
    if "open" in stages:
        show(measure_open(archive))
        show(measure_sharing(archive))
    if "reshard" in stages:
        target = plan_archive(json_manifest(archive), world_size=3)

        def reshard() -> None:
            reshard_archive(archive, target, moved, progress=False)

        show(against_plain("reshard", reshard, [archive], moved, folder, expected=expected, rounds=rounds))
        shutil.rmtree(moved)
    if "delta" in stages:
        show(measure_delta(folder, archive, model, size, changed, rounds))
    show({"peak resident bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024})
    return results


def measure_delta(
    folder: Path, archive: Path, model: torch.nn.Module, size: float, changed: float, rounds: int
) -> dict[str, Any]:
    """Measure writing a delta against plain I/O, and time and memory of applying and undoing it in a serving
    process."""
    from recinfer.checkpoint import CheckpointReader
    from recinfer.inference.delta import make_delta
    from recinfer.inference.predictor import load

    shutil.rmtree(folder / "model.ckpt", ignore_errors=True)
    (folder / "model.pt").unlink(missing_ok=True)
    new, delta = folder / "new.pt", folder / "d.rqd"
    make_checkpoint(new, size, changed)
    found = against_plain(
        "delta",
        lambda: make_delta(archive, model, CheckpointReader(new), delta, progress=False),
        [new, archive],
        delta,
        folder,
        expected=int(changed * size_of(archive)),
        rounds=rounds,
    )
    found["delta bytes"] = size_of(delta)
    predictor = load(archive)
    before = memory_of("self", "Anonymous")
    started = time.perf_counter()
    predictor.apply_delta(delta)
    found["delta apply s"] = time.perf_counter() - started
    found["delta private bytes"] = memory_of("self", "Anonymous") - before
    started = time.perf_counter()
    predictor.undo_delta()
    found["delta undo s"] = time.perf_counter() - started
    return found


def make_checkpoint(path: Path, size: float, changed: float, ranks: int = 0) -> None:
    """Write the checkpoint in a separate process, so that its memory is not measured."""
    command = [sys.executable, "-m", "benchmarks.archive", "--make", str(path), "--size", str(size)]
    subprocess.run([*command, "--changed", str(changed), "--checkpoint-ranks", str(ranks)], check=True)


def json_manifest(archive: Path) -> Any:
    from recinfer.archive.reader import open_archive

    return open_archive(archive).manifest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=float, default=0.25, help="GiB of float32 tables")
    parser.add_argument("--changed", type=float, default=0.01, help="share of the rows that the delta changes")
    parser.add_argument("--precision", default="int8", help="of the archive")
    parser.add_argument(
        "--checkpoint-ranks", type=int, default=0, help="ranks of the written checkpoint; 0 writes one file"
    )
    parser.add_argument(
        "--stages", default="export-cold,export,open,reshard,delta", help="measurements, separated by commas"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="rounds of measurements against plain I/O; medians are reported"
    )
    parser.add_argument("--folder", type=Path, help="parent of the temporary folder; default: the system's")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.make:
        model = build(int(args.size * 2**30 / (4 * DIM)))
        if args.checkpoint_ranks:
            write_sharded_checkpoint(model, args.make, args.checkpoint_ranks)
        else:
            write_checkpoint(model, args.make, args.changed)
        return
    with tempfile.TemporaryDirectory(prefix="recinfer-bench-", dir=args.folder) as folder:
        stages = set(args.stages.split(","))
        results = run(Path(folder), args.size, args.changed, args.precision, stages, args.rounds, args.checkpoint_ranks)
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
