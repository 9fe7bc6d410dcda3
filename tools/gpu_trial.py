"""Runs the GPU tests and the lookup benchmarks on one machine and writes the results to one JSON file.

From a built checkout: ``python tools/gpu_trial.py --out gpu_trial.json``. The kernel's part needs torch (a CUDA build), Triton, a C
compiler for it, numpy and pytest: neither FBGEMM nor a network. Tests of what is not installed there are left out, and the file says
which; FBGEMM's kernel is timed too where it is installed, and the served Predict where serving's packages are. On a machine without a
GPU ``TRITON_INTERPRET=1 python tools/gpu_trial.py --device cpu --tiny`` runs all of it except the CUDA graphs; its times mean nothing.

Each part is a process of its own and writes each result to the file at once: one that fails, crashes or takes too long costs no
other's results, and ``--parts`` adds to the file of an earlier run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
if not any((ROOT / "recinfer").rglob("*.so")):  # a bare checkout; Triton needs a C compiler and Python's headers too
    subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=ROOT, check=True)

import torch  # noqa: E402
import triton  # noqa: E402

from recinfer.layout.rect import Rect  # noqa: E402
from recinfer.modules.embedding_configs import DataType, PoolingType  # noqa: E402
from recinfer.quant import cuda_graphs  # noqa: E402
from recinfer.quant.buffers import Placed, allocate  # noqa: E402
from recinfer.quant.triton_batch import TritonBatch  # noqa: E402
from recinfer.quant.triton_lookup import Launch, Read, TritonTables  # noqa: E402

ALIGNMENTS = (4, 16, 32)
LAUNCHES = (Launch(1024, 2), Launch(2048, 4), Launch(4096, 4), Launch(4096, 8))
# Every launch at the default alignment, and every alignment with the default launch.
VARIANTS = [(16, launch) for launch in LAUNCHES] + [
    (alignment, Launch()) for alignment in ALIGNMENTS if alignment != 16
]
MODELS = {"criteo_26x64": (26, 64, 1), "tables_200x128": (200, 128, 20)}  # tables, dim, ids per bag


def timed(run: Callable[[], Any], device: torch.device, repeats: int, *, warm_up: int = 2) -> float:
    """Median seconds of ``repeats`` calls of ``run``, after ``warm_up`` others."""
    seconds = []
    for number in range(repeats + warm_up):
        if device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            end.synchronize()
            took = start.elapsed_time(end) / 1e3
        else:
            at = time.perf_counter()
            run()
            took = time.perf_counter() - at
        if number >= warm_up:
            seconds.append(took)
    return statistics.median(seconds)


def copy_rate(device: torch.device, size: int) -> float:
    """Bytes per second of a copy on the device, counting read and written bytes."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / timed(lambda: target.copy_(source), device, 20)


def tables_of(count: int, dim: int, rows: int, kind: DataType, device: torch.device, alignment: int) -> Any:
    """Tables of random bytes: the time does not depend on the values."""
    wanted = [Placed(Rect(0, 0, rows, 0, dim, f"t{i}"), kind) for i in range(count)]
    buffers, placed = allocate(wanted, device, alignment)
    buffers.near.random_(0, 100)
    return buffers, placed


def graph_of(run: Callable[[], Any]) -> Any:
    """``run`` as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def lookups(device: torch.device, batches: list[int], rows: int, repeats: int, tiny: bool) -> Iterator[dict[str, Any]]:
    """One result per model, precision, alignment and launch, and batch."""
    for name, count, dim, length in models(tiny):
        for kind in (DataType.INT8, DataType.INT4):
            for alignment, launch in VARIANTS:
                buffers, placed = tables_of(count, dim, rows, kind, device, alignment)
                lookup = TritonTables([Read(table, key) for key, table in enumerate(placed)], buffers, launch=launch)
                about = {"model": name, "precision": kind.value, "alignment": alignment, "launch": list(launch)}
                for batch in batches:
                    yield {**about, **one_lookup(lookup, batch, length, rows, device, repeats)}
                del buffers, placed, lookup  # before the next ones take as much


def one_lookup(
    lookup: TritonTables, batch: int, length: int, rows: int, device: torch.device, repeats: int
) -> dict[str, Any]:
    """Seconds and bytes of a lookup; 32 samples and fewer also as a CUDA graph. Bytes: rows as stored, ids, offsets, outputs.
    ``first_seconds`` of a kernel's first batch includes its compilation."""
    keys = len(lookup.reads)
    ids = torch.randint(0, rows, (keys * batch * length,), device=device)
    offsets = torch.arange(0, keys * batch * length + 1, length, device=device)
    bad, out = lookup.new_counter(), torch.empty(batch, lookup.total_dim, device=device)

    def run() -> None:
        lookup(ids, offsets, batch=batch, bad=bad, out=out)

    first = timed(run, device, 1, warm_up=0)
    seconds = timed(run, device, repeats)
    row_bytes = sum(r.placed.row_bytes(lookup.buffers.row_alignment) for r in lookup.reads) * batch * length
    moved = row_bytes + 8 * (ids.numel() + offsets.numel()) + out.numel() * out.element_size()
    line = {"batch": batch, "first_seconds": first, "seconds": seconds, "row_bytes": row_bytes, "bytes": moved}
    line["rate"] = moved / seconds
    if device.type == "cuda" and batch <= 32:
        graph = graph_of(run)
        line["graph_seconds"] = timed(graph.replay, device, repeats)
    return line


def models(tiny: bool) -> list[tuple[str, int, int, int]]:
    """Name, tables, dim and ids per bag of each model."""
    return [
        (name, 3 if tiny else count, dim, min(length, 2) if tiny else length)
        for name, (count, dim, length) in MODELS.items()
    ]


def requests_of_host(device: torch.device, rows: int, repeats: int, tiny: bool) -> Iterator[dict[str, Any]]:
    """Time of a small request from ids on the host to vectors on the device, with CUDA graphs and without."""
    for name, count, dim, length in models(tiny):
        buffers, placed = tables_of(count, dim, rows, DataType.INT8, device, 16)
        for batch in (1, 3) if tiny else (1, 32, 256):
            ids = torch.randint(0, rows, (count * batch * length,))
            offsets = torch.arange(0, ids.numel() + 1, length)
            for graphs in (True, False):
                lookup = TritonBatch(placed, PoolingType.SUM, buffers)
                if not graphs:
                    lookup.graphs = None
                seconds = []
                for number in range(repeats + 3):
                    at = time.perf_counter()
                    lookup._of_host(ids, offsets, None, batch)
                    if device.type == "cuda":
                        torch.cuda.synchronize()
                    if number >= 3:
                        seconds.append(time.perf_counter() - at)
                made = len(lookup.graphs or ())
                yield {"model": name, "batch": batch, "graphs": made, "seconds": statistics.median(seconds)}
                del lookup
        del buffers, placed


def host_rows(
    device: torch.device, batches: list[int], rows: int, repeats: int, tiny: bool
) -> Iterator[dict[str, Any]]:
    """Lookups of rows on the device, in host memory, and in host memory with the cache of row_cache.py; log-uniform ids, of which
    few are most. ``hits``: share of the ids whose rows the cache has."""
    count, dim = (3 if tiny else 26), 64
    for memory in ("near", "managed", "cached"):
        wanted: list[Any] = [Placed(Rect(0, 0, rows, 0, dim, f"t{i}"), DataType.INT8, 0, memory) for i in range(count)]
        buffers, placed = allocate(wanted, device, 16)
        lookup = TritonTables([Read(table, key) for key, table in enumerate(placed)], buffers)
        bad = lookup.new_counter()
        for batch in batches:
            inputs = [(rows ** torch.rand(count * batch, device=device)).long() - 1 for _ in range(repeats + 2)]
            offsets = torch.arange(count * batch + 1, device=device)
            given = iter(inputs)
            out = torch.empty(batch, lookup.total_dim, device=device)

            def run() -> None:
                lookup(next(given), offsets, batch=batch, bad=bad, out=out)  # noqa: B023

            line: dict[str, Any] = {"memory": memory, "batch": batch, "seconds": timed(run, device, repeats)}
            if lookup.cache is not None:
                line["hits"] = lookup.cache.hits(placed[0], inputs[-1][:batch]).float().mean().item()
            yield line


def fbgemm_lookups(
    device: torch.device, batches: list[int], rows: int, repeats: int, tiny: bool
) -> Iterator[dict[str, Any] | str]:
    """FBGEMM's kernel on the same tables and bags, where its build for the device is installed."""
    from recinfer import fbgemm

    if not (fbgemm.HAS_CUDA if device.type == "cuda" else fbgemm.INSTALLED):
        yield "not installed for this device"
        return
    from recinfer.quant.tbe import TableBatch

    for name, count, dim, length in models(tiny):
        for kind in (DataType.INT8, DataType.INT4):
            buffers, placed = tables_of(count, dim, rows, kind, device, 16 if device.type == "cuda" else 1)
            lookup = TableBatch(placed, PoolingType.SUM, buffers)
            for batch in batches:
                ids = torch.randint(0, rows, (count * batch * length,), device=device)
                offsets = torch.arange(0, ids.numel() + 1, length, device=device)
                seconds = timed(partial(lookup, ids, offsets), device, repeats)
                yield {"model": name, "precision": kind.value, "batch": batch, "seconds": seconds}
            del buffers, placed, lookup


def served(device: torch.device, tiny: bool) -> Iterator[dict[str, Any] | str]:
    """See tools/gpu_trial_served.py; says what is missing where servers cannot run."""
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    try:
        from gpu_trial_served import served_predictions

        if tiny:
            yield from served_predictions(device, [1, 3], 100, 0.3, callers=(1,))
        else:
            yield from served_predictions(device, [1, 256, 2048], 200_000, 5.0)
    except ImportError as error:
        yield f"not measured: {error}"


def bags_of_torch(
    device: torch.device, batches: list[int], rows: int, repeats: int, tiny: bool
) -> Iterator[dict[str, Any]]:
    """``torch.nn.functional.embedding_bag`` on FP16 rows, one call per table; FP32 when tested on the CPU."""
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    for name, count, dim, length in models(tiny):
        tables = [torch.zeros(rows, dim, dtype=dtype, device=device) for _ in range(count)]
        for batch in batches:
            ids = [torch.randint(0, rows, (batch, length), device=device) for _ in tables]

            def run(ids: list[torch.Tensor] = ids, tables: list[torch.Tensor] = tables) -> None:
                for table, mine in zip(tables, ids):
                    torch.nn.functional.embedding_bag(mine, table, mode="sum")

            yield {"model": name, "batch": batch, "dtype": str(dtype), "seconds": timed(run, device, repeats)}


def gpu_tests(device: torch.device) -> Iterator[dict[str, Any]]:
    """Run the kernel's tests, then those marked ``gpu``: the numbers that passed and failed, and the end of the output."""
    # 0 also where tests/conftest.py would choose the interpreter, because it does not see the GPU's device file.
    environment = {**os.environ} if device.type == "cpu" else {**os.environ, "TRITON_INTERPRET": "0"}
    trials = {
        "kernel": [f"tests/quant/test_{name}.py" for name in ("triton", "row_cache", "host_inputs")],
        "gpu": ["tests/gpu", "-m", "gpu"],
    }
    # Most of the time goes to compiling a kernel for each case.
    together = ["-n", "8"] if device.type == "cuda" and importlib.util.find_spec("xdist") else []
    for name, chosen in trials.items():
        # Tests of what is not installed fail to be collected: the summary has them as errors.
        options = ["-p", "no:cacheprovider", "--continue-on-collection-errors", *together]
        command = [sys.executable, "-m", "pytest", *options, *chosen]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
        summary = re.findall(r"^.*\d+ (?:passed|failed|skipped|error).* in .*$", done.stdout, re.M)
        tail = done.stdout[-6000:] + done.stderr[-1000:]
        yield {"tests": name, "rc": done.returncode, "summary": summary[-1:], "tail": tail}


def parts_of(device: torch.device, rows: int, tiny: bool) -> dict[str, Callable[[], Iterable[Any]]]:
    """The parts by name, in the order in which they run; each gives its results one by one."""
    batches = [1, 3] if tiny else [1, 32, 256, 2048, 16384, 65536]
    sizes = (batches, rows, 1 if tiny else 20, tiny)
    return {
        "copy_rate": lambda: [copy_rate(device, 1 << 20 if tiny else 1 << 30)],
        "tests": lambda: gpu_tests(device),
        "lookups": lambda: lookups(device, *sizes),
        "host_rows": lambda: host_rows(device, *sizes),
        "requests": lambda: requests_of_host(device, *sizes[1:]),
        "fbgemm_lookups": lambda: fbgemm_lookups(device, *sizes),
        "embedding_bag": lambda: bags_of_torch(device, *sizes),
        "served": lambda: served(device, tiny),
    }


def run_here(name: str, run: Callable[[], Iterable[Any]], out: Path) -> None:
    """Run a part and write each of its results to ``out`` at once."""
    report = json.loads(out.read_text())
    found = report[name] = []
    for result in run():
        found.append(result)
        out.write_text(json.dumps(report, indent=1))


def run_apart(name: str, given: argparse.Namespace) -> str | None:
    """Run a part in a process of its own, since an error of a GPU ends all work of a process on it; returns what went wrong."""
    options = [*(["--tiny"] if given.tiny else []), *(["--rows", str(given.rows)] if given.rows else [])]
    command = [sys.executable, __file__, "--only", name, "--out", str(given.out), "--device", given.device, *options]
    # A group of its own, so that what it starts ends with it.
    part = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, process_group=0)
    try:
        _, said = part.communicate(timeout=given.limit)
    except subprocess.TimeoutExpired:
        os.killpg(part.pid, signal.SIGINT)  # it stops the servers that it started
        try:
            part.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(part.pid, signal.SIGKILL)
            part.communicate()
        return f"stopped after {given.limit:g} seconds"
    return f"ended with {part.returncode}: {said[-2000:]}" if part.returncode else None


def main() -> None:
    names = list(parts_of(torch.device("cpu"), 0, True))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_trial.json"), help="the JSON file to write or add to")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument(
        "--tiny", action="store_true", help="small sizes for Triton's interpreter; the times mean nothing"
    )
    parser.add_argument("--parts", nargs="+", choices=names, default=names, help="what to run; default: all")
    parser.add_argument("--no-tests", action="store_true", help="run only the benchmarks")
    parser.add_argument("--rows", type=int, help="rows of each table; default 1,000,000, or 100 with --tiny")
    parser.add_argument("--limit", type=float, default=240, help="seconds after which a part is stopped")
    parser.add_argument("--only", choices=names, help=argparse.SUPPRESS)  # the part that this process is
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            "torch sees no CUDA device; on a machine without one: --device cpu --tiny, with TRITON_INTERPRET=1"
        )
    device, tiny = torch.device(given.device), given.tiny
    rows = given.rows or (100 if tiny else 1_000_000)
    if given.only:
        if tiny:  # the interpreter takes minutes for all sizes
            cuda_graphs._MOST_BATCH, cuda_graphs._MOST_IDS = 4, 512
        run_here(given.only, parts_of(device, rows, tiny)[given.only], given.out)
        return
    report: dict[str, Any] = json.loads(given.out.read_text()) if given.out.exists() else {}
    report |= {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else f"cpu {platform.machine()}, interpreted",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "fbgemm": importlib.util.find_spec("fbgemm_gpu") is not None,
        "rows": rows,
    }
    given.out.write_text(json.dumps(report, indent=1))
    for name in given.parts:
        if name == "tests" and given.no_tests:
            continue
        print(f"{name} ...", flush=True)
        error = run_apart(name, given)
        report = json.loads(given.out.read_text())
        report.setdefault("errors", {}).pop(name, None)
        if error is not None:
            print(f"  {error}", flush=True)
            report["errors"][name] = error
        given.out.write_text(json.dumps(report, indent=1))
    print(f"wrote {given.out}")


if __name__ == "__main__":
    main()
