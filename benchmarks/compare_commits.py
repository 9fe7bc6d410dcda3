"""Compares the serving speed of two commits in turns, on one archive.

    OMP_NUM_THREADS=1 python -m benchmarks.compare_commits HEAD~1            # against the working tree, four minutes
    OMP_NUM_THREADS=1 python -m benchmarks.compare_commits v0.1.0 main --turns 9
    OMP_NUM_THREADS=1 python -m benchmarks.compare_commits HEAD HEAD         # the noise: two equal servers

Each commit is checked out into a worktree of its own and its C parts are built there; "." is the working tree as it is. The
first commit writes the archive (26 INT8 tables, two ranks), so the second one must read what the first one wrote. Of each
commit run one ``recinfer serve`` with all tables, and a ranker with two shard servers. The load is one process with one
asyncio channel. A cell is a call, a batch and a number of callers; its ratio is the median over turns of the second commit's
rate over the first one's, and both are measured in each turn, so that a change of the machine affects both. Next to it is
the same ratio of the servers' CPU time per answer: where the load generator is the slower side, the rates show its limit and
the CPU time shows the server's.
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
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class Running:
    """A server that callers reach on ``port``; ``pids`` are the processes that work for its answers."""

    port: int
    pids: tuple[int, ...]

    def cpu(self) -> float:
        """Seconds of processor that the processes took so far."""
        tasks = (task for pid in self.pids for task in Path(f"/proc/{pid}/task").iterdir())
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


@dataclass
class Ratios:
    """The second commit over the first one, by turn: answers per second, and CPU time per answer."""

    rates: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


@contextmanager
def serving(tree: Path, *arguments: object) -> Iterator[Running]:
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
        yield Running(int(json.loads(line)["port"]), (server.pid,))
    finally:
        server.terminate()
        server.wait(30)


def start(stack: ExitStack, tree: Path, archive: Path, folder: Path) -> dict[str, Running]:
    """A tree's server, and its ranker with two shard servers."""
    server = stack.enter_context(serving(tree, archive))
    ranks = [stack.enter_context(serving(tree, archive, "--ranks", rank)) for rank in (0, 1)]
    shards = folder / "shards.json"
    folder.mkdir(exist_ok=True)
    addresses = {str(rank): [f"127.0.0.1:{running.port}"] for rank, running in enumerate(ranks)}
    shards.write_text(json.dumps({"format": "recinfer.shards", "version": 1, "ranks": addresses}))
    ranker = stack.enter_context(serving(tree, archive, "--shards", shards))
    for running in (server, ranker):
        with InferenceClient(f"127.0.0.1:{running.port}") as client:
            client.wait_until_ready(60)
    pids = ranker.pids + tuple(pid for running in ranks for pid in running.pids)
    return {"server": server, "ranker": Running(ranker.port, pids)}


def encoded(cell: Cell) -> bytes:
    """The cell's request."""
    dense, features = request(cell.batch)
    if cell.call == "Lookup":
        return codec.encode_lookup_request(features)
    return codec.encode_predict_request(dense, features)


def compare(servers: list[dict[str, Running]], cells: list[Cell], turns: int, seconds: float) -> dict[Cell, Ratios]:
    """The second server over the first one, by cell and turn."""
    loop: asyncio.AbstractEventLoop = new_loop()
    found = {cell: Ratios() for cell in cells}
    for turn in range(turns):
        for cell in cells:
            data, path = encoded(cell), f"/{SERVICE_NAME}/{cell.call}"
            rates, cpu = [0.0, 0.0], [0.0, 0.0]
            for at in (0, 1) if turn % 2 == 0 else (1, 0):  # so that neither commit is always measured first
                running = servers[at][cell.where]
                before = running.cpu()
                rates[at] = len(loop.run_until_complete(calls(running.port, path, data, seconds, cell.callers)))
                cpu[at] = (running.cpu() - before) / rates[at]
            found[cell].rates.append(rates[1] / rates[0])
            found[cell].cpu.append(cpu[1] / cpu[0])
        print(f"turn {turn + 1} of {turns}", file=sys.stderr, flush=True)
    return found


def show(found: dict[Cell, Ratios]) -> None:
    """A line a cell, and the geometric mean of all."""
    for cell, ratios in found.items():
        rates, cpu = ratios.rates, ratios.cpu
        print(
            f"{cell}: answers a second {statistics.median(rates):5.2f} times ({min(rates):.2f} to {max(rates):.2f}), "
            f"CPU per answer {statistics.median(cpu):5.2f} times ({min(cpu):.2f} to {max(cpu):.2f})"
        )
    medians = [statistics.median(ratios.rates) for ratios in found.values()]
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
    print(f"{options.after} over {options.before}")
    show(found)


if __name__ == "__main__":
    main()
