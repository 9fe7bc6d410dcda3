"""Runs the side-by-side benchmarks and writes docs/benchmarks.json, docs/benchmarks.md, its plots and the README's table.

    python -m benchmarks.report --torchrec-python PATH           # everything, about 25 minutes on two quiet cores
    python -m benchmarks.report --only serving                   # one section; the others keep their figures
    python -m benchmarks.report --quick                          # tiny settings, to test the program; ignore the figures
    python -m benchmarks.report --render                         # page, plots and table from docs/benchmarks.json
    python -m benchmarks.report --check                          # fails if page or table differ from the data

A section is stored as soon as it is measured, with its date, commit, machine, versions, commands and the raw result of every run,
so a stopped run can be continued with ``--only``. TorchRec is measured with ``--torchrec-python``, an interpreter with
TorchRec, and TorchServe if it is installed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import report_page

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "fbgemm-gpu-cpu", "onnxruntime", "grpcio", "numpy", "torchserve")


@dataclass
class Run:
    """Settings for running benchmarks: interpreters, quick mode and folders.

    Attributes:
        quick: tiny settings.
        torchrec: an interpreter that has torchrec, or "".
        commands: what was called, for the page.
    """

    quick: bool
    torchrec: str
    commands: list[str] = field(default_factory=list)

    def module(self, name: str, *arguments: object, out: bool = True, more_packages: str = "") -> Any:
        """The JSON result of ``python -m benchmarks.NAME``: of its ``--out`` file, or its last line.

        Args:
            more_packages: a folder of further packages, at the end of the path.
        """
        words = [str(argument) for argument in arguments]
        shown = " ".join(["python -m benchmarks." + name, *("PATH" if w == self.torchrec else w for w in words)])
        if shown not in self.commands:
            self.commands.append(shown)
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "result.json"
            (Path(folder) / "sitecustomize.py").write_text(
                f"import sys\nsys.path.append({more_packages!r})\n" if more_packages else ""
            )
            command = [sys.executable, "-m", f"benchmarks.{name}", *words, *(["--out", str(result)] if out else [])]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
            print("+", shown, flush=True)
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"{shown} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
            return json.loads(result.read_text() if out else done.stdout.strip().splitlines()[-1])


def lookup(run: Run) -> list[Any]:
    """Measure quantized lookups, the bare operator and TorchRec's modules, with one thread."""
    more_packages = ""
    if run.torchrec:
        where = "import pathlib, torchrec; print(pathlib.Path(torchrec.__file__).parents[1])"
        more_packages = subprocess.run(
            [run.torchrec, "-c", where], capture_output=True, text=True, check=True
        ).stdout.strip()
    settings = ["--rows", 100_000, "--seconds", 0.2] if run.quick else ["--seconds", 3]
    return [run.module("lookup", *settings, more_packages=more_packages) for _ in range(1 if run.quick else 3)]


def serving(run: Run) -> list[Any]:
    """Measure recinfer's server, a bare gRPC echo server and TorchServe, by number of callers."""
    settings: list[object] = ["--batches", 1, 256, "--concurrency", 1, 8, 32, "--seconds", 1.5]
    if run.quick:
        settings = ["--batches", 1, 256, "--concurrency", 1, 8, "--seconds", 0.1]
    if importlib.util.find_spec("ts") is not None:
        settings.append("--torchserve")
    return [run.module("serving", *settings) for _ in range(1 if run.quick else 3)]


def planner(run: Run) -> list[Any]:
    """Measure time and gap of the planners. TorchRec's plan of the largest case takes minutes, so it runs once."""
    peer = ["--torchrec-python", run.torchrec] if run.torchrec else []
    if run.quick:
        return [run.module("planner", "--modes", "train", "--cases", "26x8", *peer)]
    runs = []
    for number in range(3):
        found = run.module("planner", "--modes", "train", "--cases", "26x8,200x16", *peer)
        largest = [*peer, "--timeout", 600] if peer and not number else []
        runs.append(found | run.module("planner", "--modes", "train", "--cases", "1000x64", *largest))
    return runs


def training(run: Run) -> list[Any]:
    """Measure samples per second of sharded training on two processes, by sharding type."""
    peer = ["--torchrec-python", run.torchrec] if run.torchrec else []
    if run.quick:
        return [run.module("training", "--types", "table_wise", "--steps", 2, "--rounds", 2, *peer)]
    return [run.module("training", "--steps", 10, "--rounds", 3, *peer) for _ in range(3)]


def scaleout(run: Run) -> list[Any]:
    """Measure a ranker with two shard servers and one process with all tables, on loopback."""
    settings = ["--turns", 1, "--seconds", 0.1] if run.quick else ["--turns", 3, "--seconds", 0.4]
    return [run.module("scaleout", *settings, "--json", out=False) for _ in range(1 if run.quick else 3)]


def context(run: Run) -> list[Any]:
    """Measure one user with many candidates, with the user as the request's context and repeated for each candidate."""
    settings = ["--candidates", 1, 50, "--turns", 2] if run.quick else ["--candidates", 1, 50, 500, "--turns", 40]
    return [run.module("context", *settings) for _ in range(1 if run.quick else 3)]


def vocabulary(run: Run) -> list[Any]:
    """Measure the rows of raw ids by our index, a sorted tensor, TorchRec's steps and FBGEMM's operator, with one thread."""
    settings = ["--rounds", 9, "--queries", 50_000]
    if run.quick:
        settings = ["--rounds", 1, "--queries", 1000, "--ids", 100_000]
    return [run.module("vocabulary", *settings) for _ in range(1 if run.quick else 3)]


SECTIONS: dict[str, Callable[[Run], list[Any]]] = {
    "lookup": lookup,
    "serving": serving,
    "planner": planner,
    "training": training,
    "scaleout": scaleout,
    "context": context,
    "vocabulary": vocabulary,
}
"""Name -> what measures it; the raw results of its runs."""


def machine() -> dict[str, Any]:
    """The properties of the machine that affect the figures, without its name."""
    processor = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {"processor": processor, "cores": os.cpu_count(), "memory_gib": round(memory), "system": platform.system()}


def versions(torchrec: str) -> dict[str, str]:
    """Versions of Python and of the compared packages."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torchrec:
        code = "import importlib.metadata as m; print(m.version('torchrec'))"
        found["torchrec"] = subprocess.run([torchrec, "-c", code], capture_output=True, text=True).stdout.strip()
    return found


def commit() -> str:
    """The commit of the working tree, with "+" if code has changed since."""
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain", "recinfer"], capture_output=True, text=True).stdout
    return head + ("+" if changed.strip() else "")


def measure(name: str, quick: bool, torchrec: str) -> dict[str, Any]:
    """One section, measured now."""
    run = Run(quick, torchrec)
    load = os.getloadavg()[0]
    section: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit(),
        "quick": quick,
        "machine": machine(),
        "versions": versions(torchrec),
        "load_before": round(load, 2),
    }
    section["runs"] = SECTIONS[name](run)
    section["commands"] = run.commands
    return section


def main() -> int:
    """Measure, render or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=list(SECTIONS), help="section to measure; repeatable")
    parser.add_argument("--torchrec-python", default="", help="Python interpreter with torchrec installed")
    parser.add_argument("--quick", action="store_true", help="one run with tiny settings, to test the program")
    parser.add_argument("--out", type=Path, default=ROOT, help="repository root; its docs/ and README.md are written")
    parser.add_argument("--render", action="store_true", help="measure nothing")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit code 1 if the page or the table is stale"
    )
    options = parser.parse_args()
    if options.check:
        found = report_page.stale(options.out)
        print(
            f"stale: {', '.join(found)}; run python -m benchmarks.report --render"
            if found
            else "benchmarks: up to date"
        )
        return 1 if found else 0
    data_file = options.out / report_page.DATA
    data = json.loads(data_file.read_text()) if data_file.exists() else {"format": 1, "sections": {}}
    for name in [] if options.render else options.only or list(SECTIONS):
        data["sections"][name] = measure(name, options.quick, options.torchrec_python)
        data["sections"] = {known: data["sections"][known] for known in SECTIONS if known in data["sections"]}
        data_file.parent.mkdir(parents=True, exist_ok=True)
        data_file.write_text(json.dumps(data, indent=1) + "\n")
    report_page.write(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
