"""Compares the serving speed of two commits in turns, on one archive.

    OMP_NUM_THREADS=1 python -m benchmarks.compare_commits HEAD~1            # against the working tree, four minutes
    OMP_NUM_THREADS=1 python -m benchmarks.compare_commits v0.1.0 main --turns 9
    OMP_NUM_THREADS=1 python -m benchmarks.compare_commits HEAD HEAD         # the noise: two equal servers

Each commit is checked out into its own worktree and its C modules are built there; "." is the working tree. The first
commit writes the archive (26 INT8 tables, two ranks), so the second must be able to read it. Each commit runs one
``recinfer serve`` with all tables, and a ranker with two shard servers. The load is one process with one asyncio
channel. A cell is a kind of call, a batch and a number of callers; its ratio is the median over turns of the second
commit's rate divided by the first's. Both are measured in every turn, so that noise affects both.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.scaleout import calls, request
from recinfer.serving.client.client import InferenceClient
from recinfer.serving.server.server import SERVICE_NAME
from recinfer.serving.wire import codec
from recinfer.serving.wire.loop import new_loop

ROOT = Path(__file__).resolve().parent.parent
_BUILD = """
import sys
from pathlib import Path
from benchmarks.scaleout import build
print(build(Path(sys.argv[1]), 16, "table_wise"))
"""


@dataclass(frozen=True)
class Cell:
    """One kind of load: ``where`` is "server" or "ranker"."""

    where: str
    call: str
    batch: int
    callers: int

    def __str__(self) -> str:
        return f"{self.where:7s}{self.call:8s}batch {self.batch:<4d}{self.callers:3d} callers"


@contextmanager
def tree_of(commit: str, folder: Path) -> Iterator[Path]:
    """A folder with the commit's files and its C parts built."""
    if commit == ".":
        yield ROOT
        return
    subprocess.run(["git", "worktree", "add", "--quiet", "--detach", folder, commit], cwd=ROOT, check=True)
    try:
        build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
        subprocess.run(build, cwd=folder, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        yield folder
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", folder], cwd=ROOT, check=True)


def environment(tree: Path) -> dict[str, str]:
    """The environment in which ``import recinfer`` imports the tree's package."""
    return {**os.environ, "PYTHONPATH": str(tree)}


@contextmanager
def serving(tree: Path, *arguments: object) -> Iterator[int]:
    """``recinfer serve`` of a tree on a free port, which it prints."""
    command = [sys.executable, "-m", "recinfer", "serve", *map(str, arguments), "--port", "0", "--json"]
    server = subprocess.Popen(
        command, cwd=tree, env=environment(tree), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert server.stdout is not None
        line = next((line for line in server.stdout if line.startswith("{")), None)
        if line is None:
            raise SystemExit(f"a server did not start: {' '.join(command)} in {tree}")
        yield int(json.loads(line)["port"])
    finally:
        server.terminate()
        server.wait(30)


def start(stack: ExitStack, tree: Path, archive: Path, folder: Path) -> dict[str, int]:
    """Start a tree's server and ranker; returns their ports."""
    ports = {"server": stack.enter_context(serving(tree, archive))}
    ranks = {
        str(rank): [f"127.0.0.1:{stack.enter_context(serving(tree, archive, '--ranks', rank))}"] for rank in (0, 1)
    }
    shards = folder / "shards.json"
    folder.mkdir(exist_ok=True)
    shards.write_text(json.dumps({"format": "recinfer.shards", "version": 1, "ranks": ranks}))
    ports["ranker"] = stack.enter_context(serving(tree, archive, "--shards", shards))
    for port in ports.values():
        with InferenceClient(f"127.0.0.1:{port}") as client:
            client.wait_until_ready(60)
    return ports


def encoded(cell: Cell) -> bytes:
    """The cell's request."""
    dense, features = request(cell.batch)
    if cell.call == "Lookup":
        return codec.encode_lookup_request(features)
    return codec.encode_predict_request(dense, features)


def compare(servers: list[dict[str, int]], cells: list[Cell], turns: int, seconds: float) -> dict[Cell, list[float]]:
    """The second server's rate over the first one's, by cell and turn."""
    loop: asyncio.AbstractEventLoop = new_loop()
    found: dict[Cell, list[float]] = {cell: [] for cell in cells}
    for turn in range(turns):
        for cell in cells:
            data, path = encoded(cell), f"/{SERVICE_NAME}/{cell.call}"
            rates = [0.0, 0.0]
            for at in (0, 1) if turn % 2 == 0 else (1, 0):  # neither is always the first
                took = loop.run_until_complete(calls(servers[at][cell.where], path, data, seconds, cell.callers))
                rates[at] = len(took)
            found[cell].append(rates[1] / rates[0])
        print(f"turn {turn + 1} of {turns}", file=sys.stderr, flush=True)
    return found


def show(found: dict[Cell, list[float]]) -> None:
    """Print one line per cell, and the geometric mean of all."""
    for cell, ratios in found.items():
        print(f"{cell}: {statistics.median(ratios):5.2f} times  ({min(ratios):.2f} to {max(ratios):.2f})")
    medians = [statistics.median(ratios) for ratios in found.values()]
    print(f"all cells, geometric mean: {math.exp(statistics.fmean(map(math.log, medians))):.3f} times")
    print(f"worst cell: {min(medians):.2f} times, best: {max(medians):.2f}")


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", help="a commit")
    parser.add_argument("after", nargs="?", default=".", help="a commit, or . for the working tree")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.4, help="seconds per server in a turn of a cell")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--callers", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--where", choices=["server", "ranker"], nargs="+", default=["server", "ranker"])
    options = parser.parse_args()
    cells = [
        Cell(where, call, batch, callers)
        for where in options.where
        for call in ("Lookup", "Predict")
        for batch in options.batches
        for callers in options.callers
    ]
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        trees = [
            stack.enter_context(tree_of(commit, folder / which))
            for which, commit in (("before", options.before), ("after", options.after))
        ]
        command = [sys.executable, "-c", _BUILD, str(folder)]
        built = subprocess.run(
            command, cwd=trees[0], env=environment(trees[0]), check=True, capture_output=True, text=True
        )
        archive = Path(built.stdout.splitlines()[-1])
        servers = [start(stack, tree, archive, folder / f"shards-{at}") for at, tree in enumerate(trees)]
        found = compare(servers, cells, options.turns, options.seconds)
    print(f"{options.after} over {options.before}: answers a second")
    show(found)


if __name__ == "__main__":
    main()
