"""Measures samples per second of sharded training for every sharding type, with and without the pipeline, against
TorchRec.

    python -m benchmarks.training                                   # recinfer alone
    python -m benchmarks.training --torchrec-python PATH            # and TorchRec, run by that interpreter
    python -m benchmarks.training --types table_wise,data_parallel --steps 20 --rounds 5 --out training.json
    python -m benchmarks.training --before HEAD~3                   # and recinfer as of another commit
    python -m benchmarks.training --threads 0                       # torch's own number of threads, as OMP_NUM_THREADS

8 tables of 100,000 x 64, pooling 5, batch 512 per rank, row-wise Adagrad in the backward pass, 2 gloo ranks on this
host. The same program trains with either package; only the imported name differs. All contenders of a sharding type run
at once and take turns, so that noise affects all of them. Samples per second are those of both ranks, from the median
turn. A ratio compares the better variant of each side (by median); it is the median over turns, with the least and the
largest.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TYPES = (
    "table_wise",
    "row_wise",
    "column_wise",
    "table_column_wise",
    "table_row_wise",
    "grid_shard",
    "data_parallel",
)
TABLES, ROWS, DIM, POOLING, BATCH, RANKS = 8, 100_000, 64, 5, 512, 2
BARS = {"data_parallel": 5.0}  # samples per second divided by TorchRec's; 1.1 for the others


# --------------------------------------------------------------------------------------------------- one rank


def _plan(package: str, ebc: Any, sharding: str) -> Any:
    """Every table sharded by ``sharding``, made by the package's own generators."""
    plans = importlib.import_module(f"{package}.distributed.sharding_plan")
    bags = importlib.import_module(f"{package}.distributed.embeddingbag")
    types = importlib.import_module(f"{package}.distributed.types")
    names = [config.name for config in ebc.embedding_bag_configs()]
    make = {
        "table_wise": lambda i: plans.table_wise(rank=i % RANKS),
        "row_wise": lambda i: plans.row_wise(),
        "column_wise": lambda i: plans.column_wise(ranks=list(range(RANKS))),
        "table_column_wise": lambda i: plans.column_wise(ranks=list(range(RANKS))),
        "table_row_wise": lambda i: plans.table_row_wise(host_index=0),
        "grid_shard": lambda i: plans.grid_shard(host_indexes=[0]),
        # TorchRec's replicas are dense, whatever the plan says.
        "data_parallel": lambda i: plans.data_parallel(
            **({"compute_kernel": "fused"} if package == "recinfer" else {})
        ),
    }[sharding]

    class Sharder(bags.EmbeddingBagCollectionSharder):  # type: ignore[name-defined,misc]
        """A sharder that offers every sharding type also on the CPU."""

        def sharding_types(self, compute_device_type: str) -> list[str]:
            return list(TYPES)

    sharder = Sharder()
    module_plan = plans.construct_module_sharding_plan(
        ebc,
        per_param_sharding={name: make(i) for i, name in enumerate(names)},
        sharder=sharder,
        local_size=RANKS,
        world_size=RANKS,
        device_type="cpu",
    )
    if sharding == "table_column_wise":
        for parameter in module_plan.values():
            parameter.sharding_type = sharding
    return sharder, types.ShardingPlan(plan={"ebc": module_plan})


def _rank(package: str, sharding: str, pipeline: bool, rank: int, store: str) -> None:
    """Train on demand: reads a number of steps per line from stdin and writes the seconds that they took."""
    import torch
    import torch.distributed as dist
    from torch import nn

    os.environ["LOCAL_WORLD_SIZE"] = str(RANKS)
    os.environ["LOCAL_RANK"] = os.environ["RANK"] = str(rank)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    configs = importlib.import_module(f"{package}.modules.embedding_configs")
    collections = importlib.import_module(f"{package}.modules.embedding_modules")
    jagged = importlib.import_module(f"{package}.sparse.jagged_tensor")
    parallel = importlib.import_module(f"{package}.distributed.model_parallel")
    pipelines = importlib.import_module(f"{package}.distributed.train_pipeline")
    types = importlib.import_module(f"{package}.distributed.types")
    in_backward = importlib.import_module(f"{package}.optim.apply_optimizer_in_backward")
    adagrad = importlib.import_module(f"{package}.optim.rowwise_adagrad")
    keyed = importlib.import_module(f"{package}.optim.keyed")
    optimizers = importlib.import_module(f"{package}.optim.optimizers")
    streamable = importlib.import_module(f"{package}.streamable")

    class Batch(streamable.Pipelineable):  # type: ignore[name-defined,misc]
        def __init__(self, sparse: Any, labels: torch.Tensor) -> None:
            self.sparse, self.labels = sparse, labels

        def to(self, device: torch.device, non_blocking: bool = False) -> Any:
            return self

        def record_stream(self, stream: Any) -> None:
            pass

    class Model(nn.Module):
        def __init__(self, ebc: nn.Module) -> None:
            super().__init__()
            self.ebc = ebc
            self.over = nn.Linear(TABLES * DIM, 1)

        def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
            logits = self.over(self.ebc(batch.sparse).values()).squeeze(1)
            return nn.functional.binary_cross_entropy_with_logits(logits, batch.labels), logits.detach()

    torch.manual_seed(0)
    ebc = collections.EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            configs.EmbeddingBagConfig(name=f"t{i}", num_embeddings=ROWS, embedding_dim=DIM, feature_names=[f"f{i}"])
            for i in range(TABLES)
        ],
    )
    in_backward.apply_optimizer_in_backward(adagrad.RowWiseAdagrad, ebc.parameters(), {"lr": 0.02, "eps": 1e-8})
    sharder, plan = _plan(package, ebc, sharding)
    model = parallel.DistributedModelParallel(
        Model(ebc),
        env=types.ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=plan,
        sharders=[sharder],
    )
    dense = keyed.KeyedOptimizerWrapper(
        dict(optimizers.in_backward_optimizer_filter(model.named_parameters())),
        lambda params: torch.optim.Adagrad(params, lr=0.02),
    )
    optimizer = keyed.CombinedOptimizer([model.fused_optimizer, dense])
    kind = pipelines.TrainPipelineSparseDist if pipeline else pipelines.TrainPipelineBase
    trainer = kind(model, optimizer, torch.device("cpu"))

    random = torch.Generator().manual_seed(1 + rank)
    batches = []
    for _ in range(8):
        lengths = torch.randint(0, 2 * POOLING + 1, (TABLES * BATCH,), generator=random)
        ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=random)
        sparse = jagged.KeyedJaggedTensor(keys=[f"f{i}" for i in range(TABLES)], values=ids, lengths=lengths)
        batches.append(Batch(sparse, torch.randint(0, 2, (BATCH,), generator=random).float()))

    def endless() -> Iterator[Any]:
        while True:
            yield from batches

    stream = endless()
    for _ in range(4):
        trainer.progress(stream)
    print("ready", flush=True)
    for line in sys.stdin:
        start = time.perf_counter()
        for _ in range(int(line)):
            trainer.progress(stream)
        print(f"took {time.perf_counter() - start}", flush=True)
    os._exit(0)  # batches of the pipeline are still in flight and are not needed


# --------------------------------------------------------------------------------------------------- the contenders


@dataclass(frozen=True)
class Side:
    """A package, the interpreter that runs it, and the checkout of this repository that it runs in."""

    name: str
    package: str
    python: str
    tree: Path


class Contender:
    """Both ranks of one side, sharding type and pipeline, as processes that train on demand."""

    def __init__(self, side: Side, sharding: str, pipeline: bool, threads: int, folder: str) -> None:
        self.side = side
        self.name = f"{side.name}{' pipelined' if pipeline else ''}"
        store = f"{folder}/{side.name}-{pipeline}"
        self.log = f"{store}.log"
        env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        env |= {"PYTHONPATH": str(side.tree)} | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
        self.processes = []
        for rank in range(RANKS):
            # This file whatever the tree; -P leaves its folder off the path.
            command = [side.python, "-P", __file__, "--rank", side.package, sharding, str(int(pipeline)), str(rank)]
            with open(self.log, "a") as log:
                self.processes.append(
                    subprocess.Popen(
                        [*command, store],
                        env=env, cwd=side.tree, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                    )
                )  # fmt: skip

    def wait_ready(self) -> None:
        """Wait until all ranks have trained their first steps."""
        self._lines("ready")

    def train(self, steps: int) -> float:
        """Seconds of the slowest rank for ``steps`` steps."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(f"{steps}\n")
            process.stdin.flush()
        return max(float(line.split()[1]) for line in self._lines("took"))

    def _lines(self, start: str) -> list[str]:
        found = []
        for process in self.processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            while line and not line.startswith(start):
                line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"{self.name}: a rank died\n{Path(self.log).read_text()[-3000:]}")
            found.append(line)
        return found

    def stop(self) -> None:
        """End the ranks."""
        for process in self.processes:
            process.kill()
            process.wait()


def measure(sharding: str, sides: list[Side], steps: int, rounds: int, threads: int) -> dict[str, list[float] | str]:
    """Samples per second of every contender in each round; an error text for one that could not run."""
    results: dict[str, list[float] | str] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        contenders = []
        for side in sides:
            for pipeline in (False, True):
                contender = Contender(side, sharding, pipeline, threads, folder)
                stack.callback(contender.stop)
                try:
                    contender.wait_ready()
                    contenders.append(contender)
                except RuntimeError as error:
                    results[contender.name] = str(error)
        turns: dict[str, list[float]] = {c.name: [] for c in contenders}
        for _ in range(rounds):
            for contender in contenders:
                turns[contender.name].append(steps * BATCH * RANKS / contender.train(steps))
    return results | turns


def better(found: dict[str, list[float] | str], side: Side) -> list[float] | None:
    """The rounds of a side's better variant; None if neither ran."""
    ran = [rates for name in variants(side) if isinstance(rates := found[name], list)]
    return max(ran, key=statistics.median, default=None)


def variants(side: Side) -> tuple[str, str]:
    """Names of a side's contenders."""
    return side.name, f"{side.name} pipelined"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default=",".join(TYPES), help="sharding types, separated by commas")
    parser.add_argument("--torchrec-python", help="Python interpreter with torchrec installed")
    parser.add_argument("--before", help="commit to compare the working tree with")
    parser.add_argument("--threads", type=int, default=1, help="OMP_NUM_THREADS of each rank; 0 leaves it unset")
    parser.add_argument("--steps", type=int, default=20, help="steps per turn")
    parser.add_argument("--rounds", type=int, default=5, help="turns per contender")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument(
        "--rank", nargs=5, metavar=("PACKAGE", "TYPE", "PIPELINE", "RANK", "STORE"), help=argparse.SUPPRESS
    )
    args = parser.parse_args()
    if args.rank:
        package, sharding, pipeline, rank, store = args.rank
        return _rank(package, sharding, bool(int(pipeline)), int(rank), store)
    with contextlib.ExitStack() as stack:
        ours = Side("recinfer", "recinfer", sys.executable, ROOT)
        peers = [Side("torchrec", "torchrec", args.torchrec_python, ROOT)] if args.torchrec_python else []
        if args.before:
            from benchmarks.compare_commits import tree_of  # imports what serves

            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            peers.append(
                Side("before", "recinfer", sys.executable, stack.enter_context(tree_of(args.before, folder / "tree")))
            )
        compare(ours, peers, args)


def compare(ours: Side, peers: list[Side], args: argparse.Namespace) -> None:
    """Print one line per sharding type."""
    names = [name for side in (ours, *peers) for name in variants(side)]
    print("samples a second; ratio: the better of recinfer's two over the better of each other side's two")
    heads = "".join(f"{'over ' + peer.name:>22}" for peer in peers)
    print(f"{'':18}" + "".join(f"{name:>20}" for name in names) + heads)
    report = {}
    for sharding in args.types.split(","):
        found = measure(sharding, [ours, *peers], args.steps, args.rounds, args.threads)
        report[sharding] = found
        cells = [f"{statistics.median(v):,.0f}" if isinstance(v := found[n], list) else "failed" for n in names]
        for peer in peers:
            mine, theirs = better(found, ours), better(found, peer)
            if mine is None or theirs is None:
                cells.append("")
                continue
            ratios = [a / b for a, b in zip(mine, theirs)]
            bar = f", bar {BARS.get(sharding, 1.1):g}" if peer.name == "torchrec" else ""
            cells.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f}{bar})")
        widths = [20] * len(names) + [22] * len(peers)
        print(f"{sharding:18}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths)), flush=True)
        for name, value in found.items():
            if isinstance(value, str):
                print(f"  {name}: {value}")
    if args.out:
        args.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
