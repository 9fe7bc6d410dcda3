"""Sharded training, samples a second: every sharding type, with and without the pipeline, beside TorchRec.

    python -m benchmarks.training                                   # recinfer alone
    python -m benchmarks.training --torchrec-python PATH            # and TorchRec, run by that interpreter
    python -m benchmarks.training --types table_wise,data_parallel --steps 20 --rounds 5 --out training.json

8 tables of 100,000 x 64, pooling 5, batch 512 a rank, row-wise Adagrad in the backward, 2 gloo ranks on this host. One
program trains with either package: only the name that it imports differs. All contenders of a sharding type are alive
at once and take turns, so that a noisy moment hits all of them; samples a second are those of both ranks, from the
median turn.
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
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

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
BARS = {"data_parallel": 5.0}  # times TorchRec's samples a second; 1.0 for the others


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
        """Offers every type on CPU too."""

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
    """Train when told: reads a number of steps a line from stdin, writes the seconds that they took."""
    import torch
    import torch.distributed as dist
    from torch import nn

    torch.set_num_threads(1)
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
    os._exit(0)  # batches of the pipeline are still under way; nobody waits for them


# --------------------------------------------------------------------------------------------------- the contenders


class Contender:
    """Both ranks of one package, sharding type and pipeline, as processes that train on demand."""

    def __init__(self, python: str, package: str, sharding: str, pipeline: bool, folder: str) -> None:
        self.name = f"{package}{' pipelined' if pipeline else ''}"
        store = f"{folder}/{package}-{pipeline}"
        self.log = f"{store}.log"
        root = Path(__file__).resolve().parent.parent
        env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
        self.processes = []
        for rank in range(RANKS):
            command = [python, "-m", "benchmarks.training", "--rank", package, sharding, str(int(pipeline)), str(rank)]
            with open(self.log, "a") as log:
                self.processes.append(
                    subprocess.Popen(
                        [*command, store],
                        env=env, cwd=root, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                    )
                )  # fmt: skip

    def wait_ready(self) -> None:
        """Until all ranks have trained their first steps."""
        self._lines("ready")

    def train(self, steps: int) -> float:
        """Seconds that ``steps`` steps take: the slowest rank's."""
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


def measure(sharding: str, pythons: dict[str, str], steps: int, rounds: int) -> dict[str, float | str]:
    """Samples a second of every contender; a text where one could not run."""
    results: dict[str, float | str] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        contenders = []
        for package, python in pythons.items():
            for pipeline in (False, True):
                contender = Contender(python, package, sharding, pipeline, folder)
                stack.callback(contender.stop)
                try:
                    contender.wait_ready()
                    contenders.append(contender)
                except RuntimeError as error:
                    results[contender.name] = str(error)
        turns: dict[str, list[float]] = {c.name: [] for c in contenders}
        for _ in range(rounds):
            for contender in contenders:
                turns[contender.name].append(contender.train(steps))
        for name, seconds in turns.items():
            results[name] = steps * BATCH * RANKS / statistics.median(seconds)
    return results


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default=",".join(TYPES), help="sharding types, separated by commas")
    parser.add_argument("--torchrec-python", help="an interpreter that has torchrec")
    parser.add_argument("--steps", type=int, default=20, help="steps a turn")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument(
        "--rank", nargs=5, metavar=("PACKAGE", "TYPE", "PIPELINE", "RANK", "STORE"), help=argparse.SUPPRESS
    )
    args = parser.parse_args()
    if args.rank:
        package, sharding, pipeline, rank, store = args.rank
        return _rank(package, sharding, bool(int(pipeline)), int(rank), store)
    pythons = {"recinfer": sys.executable}
    if args.torchrec_python:
        pythons["torchrec"] = args.torchrec_python
    names = [f"{p}{way}" for p in pythons for way in ("", " pipelined")]
    print("samples a second; ratio: the better of recinfer's two over the better of torchrec's two")
    print(f"{'':18}" + "".join(f"{name:>20}" for name in names) + f"{'ratio':>8}{'bar':>6}")
    report = {}
    for sharding in args.types.split(","):
        found = measure(sharding, pythons, args.steps, args.rounds)
        report[sharding] = found
        cells = [f"{v:20,.0f}" if isinstance(v := found.get(n, "failed"), float) else f"{'failed':>20}" for n in names]
        best = {
            p: max((v for n, v in found.items() if n.startswith(p) and isinstance(v, float)), default=0)
            for p in pythons
        }
        ratio = best["recinfer"] / best["torchrec"] if best.get("torchrec") else None
        bar = BARS.get(sharding, 1.0)
        tail = f"{ratio:8.2f}{bar:6.1f}" if ratio is not None else ""
        print(f"{sharding:18}" + "".join(cells) + tail, flush=True)
        for name, value in found.items():
            if isinstance(value, str):
                print(f"  {name}: {value}")
    if args.out:
        args.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
