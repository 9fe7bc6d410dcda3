"""Measures quantized lookups from KeyedJaggedTensor to KeyedTensor against the bare FBGEMM operator on ready offsets.

    python -m benchmarks.lookup                  # 26 Criteo-shaped tables, INT8, dim 64, pooling 1
    python -m benchmarks.lookup --full           # and 200 tables of 20,000 rows, dim 128, pooling 20, INT4
    python -m benchmarks.lookup --full --cases "200 tables, dim 128, pooling 20, int4" --reuse-outputs
    python -m benchmarks.lookup --out lookup.json

One thread, one process; all columns are timed in turn within one run. The table shows the bare operator's microseconds
and the other times as multiples of it. TorchRec's columns appear if torchrec is installed too.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from benchmarks import lookup_torchrec
from benchmarks.measure import side_by_side
from recinfer.distributed.planner.types import ParameterConstraints
from recinfer.distributed.quant_embeddingbag import ShardedQuantEmbeddingBagCollection
from recinfer.inference.modules import shard_quant_model
from recinfer.modules.embedding_configs import DataType, EmbeddingBagConfig
from recinfer.quant.embedding_modules import EmbeddingBagCollection
from recinfer.quant.outputs import keep_outputs
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

CRITEO_ROWS = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652,
    2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
"""Distinct values of the 26 categorical columns of Criteo's display-advertising challenge."""


def criteo_rows(total: int) -> list[int]:
    """The 26 tables scaled to about ``total`` rows."""
    factor = total / sum(CRITEO_ROWS)
    return [max(3, round(rows * factor)) for rows in CRITEO_ROWS]


def build(rows: list[int], dim: int, precision: DataType) -> EmbeddingBagCollection:
    """A collection with random codes and sane scales; no float table is made."""
    configs = [
        EmbeddingBagConfig(
            num_embeddings=n, embedding_dim=dim, name=f"t{i}", feature_names=[f"f{i}"], data_type=precision
        )
        for i, n in enumerate(rows)
    ]
    module = EmbeddingBagCollection(configs, False)
    generator = torch.Generator().manual_seed(0)
    scale_bias = torch.tensor([0.01, -1.0], dtype=torch.float16).view(torch.uint8)
    for config in configs:
        table = module.packed_table(config.name)
        table.random_(0, 256, generator=generator)
        table[:, :4] = scale_bias
    return module


def sharded(module: EmbeddingBagCollection, kind: str, ranks: int) -> ShardedQuantEmbeddingBagCollection:
    """``module`` sharded ``kind``-wise over ``ranks`` ranks of this host."""
    names = [c.name for c in module.embedding_bag_configs() if kind == "table_wise" or c.num_embeddings >= ranks]
    limits = {
        n: ParameterConstraints(
            sharding_types=[kind], min_partition=module.embedding_bag_configs()[0].embedding_dim // ranks
        )
        for n in names
    }
    wrapped, _ = shard_quant_model(
        torch.nn.ModuleDict({"ebc": module}), world_size=ranks, compute_device="cpu", constraints=limits
    )
    return wrapped["ebc"]


def mapped(
    module: EmbeddingBagCollection, shards: ShardedQuantEmbeddingBagCollection, ranks: int
) -> ShardedQuantEmbeddingBagCollection:
    """The same shards as in an archive: each packed separately, in one buffer."""
    order = {c.name: i for i, c in enumerate(module.embedding_bag_configs())}
    pieces, parts, at = [], [], 0
    for shard in sorted(shards.shards, key=lambda s: (order[s.rect.table], s.rect.col_start, s.rect.row_start)):
        packed = shards._packed.rows_of(shard)
        pieces.append(replace(shard, offset=at))
        parts.append(packed.reshape(-1))
        at += packed.numel()
    buffer = torch.cat([*parts, torch.zeros(64, dtype=torch.uint8)])
    return ShardedQuantEmbeddingBagCollection.from_packed(
        module.embedding_bag_configs(), pieces, buffer, world_size=ranks
    )


def run_case(
    name: str,
    rows: list[int],
    dim: int,
    pooling: int,
    precision: DataType,
    batches: list[int],
    seconds: float,
    torchrec: bool = True,
) -> list[dict[str, Any]]:
    """One model at all batch sizes."""
    module = build(rows, dim, precision)
    keys = [f"f{i}" for i in range(len(rows))]
    ours: dict[str, Any] = {"unsharded": module}
    for kind in ("table_wise", "row_wise", "column_wise"):
        shards = sharded(module, kind, 2)
        ours[kind.replace("_", "-")] = shards
        if kind == "column_wise":
            ours["column-wise mapped"] = mapped(module, shards, 2)
    peers = lookup_torchrec.contenders(rows, dim, precision.value) if torchrec else {}
    results = []
    for batch in batches:
        generator = torch.Generator().manual_seed(batch)
        values = torch.cat([torch.randint(0, n, (batch * pooling,), generator=generator) for n in rows])
        lengths = torch.full((len(rows) * batch,), pooling, dtype=torch.int32)
        features = KeyedJaggedTensor(keys=keys, values=values, lengths=lengths)
        offsets = features.offsets()
        bare = functools.partial(module._lookup.batch.forward, values, offsets)
        contenders: dict[str, Callable[[], object]] = {"bare op": bare}

        def ready(collection: Any, given: Any = features) -> Callable[[], object]:
            return lambda: collection(given)

        def built(collection: Any, ids: Any = values, bags: Any = lengths) -> Callable[[], object]:
            return lambda: collection(KeyedJaggedTensor(keys=keys, values=ids, lengths=bags))

        contenders |= {title: ready(collection) for title, collection in ours.items()}
        contenders["unsharded + build KJT"] = built(module)
        for title, collection in peers.items():
            given = lookup_torchrec.features(keys, values, lengths)
            contenders[title] = ready(collection, given)
        with torch.inference_mode():
            for call in contenders.values():  # TorchScript compiles in its first calls of a size
                for _ in range(20 if peers else 1):
                    call()
            times = side_by_side(contenders, seconds=seconds)
        results.append(
            {"case": name, "dim": dim, "pooling": pooling, "precision": precision.value, "batch": batch, "us": times}
        )
    return results


def show(results: list[dict[str, Any]]) -> None:
    """Print one table per case: the bare operator in microseconds, the others as multiples of it."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for title, group in itertools.groupby(results, key=lambda r: (r["case"], r["precision"], r["dim"], r["pooling"])):
        rows = list(group)
        names = [name for name in rows[0]["us"] if name != "bare op"]
        table = Table(title=f"{title[0]}, {title[1]}, dim {title[2]}, pooling {title[3]}: times the bare op")
        table.add_column("batch")
        for row in rows:
            table.add_column(str(row["batch"]), justify="right")
        table.add_row("bare op, us", *[f"{row['us']['bare op']:.1f}" for row in rows], end_section=True)
        for name in names:
            table.add_row(name, *[f"{row['us'][name] / row['us']['bare op']:.2f}" for row in rows])
        console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="all shapes, dims, poolings and precisions")
    parser.add_argument("--rows", type=int, default=5_000_000, help="total rows of the Criteo-shaped tables")
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds per batch size and case")
    parser.add_argument(
        "--cases", default="", help="run only cases whose title contains this text, as in '200 tables, int4'"
    )
    parser.add_argument("--reuse-outputs", action="store_true", help="reuse output memory, for all contenders")
    parser.add_argument("--no-torchrec", action="store_true", help="skip TorchRec even if it is installed")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.reuse_outputs:
        keep_outputs()
    shapes = {"26 Criteo-shaped tables": criteo_rows(args.rows)}
    dims, poolings, precisions = [64], [1], [DataType.INT8]
    if args.full:
        shapes["200 tables of 20,000 rows"] = [20_000] * 200
        dims, poolings, precisions = [64, 128], [1, 20], [DataType.INT8, DataType.INT4]
    results = []
    for (name, rows), precision, dim, pooling in itertools.product(shapes.items(), precisions, dims, poolings):
        title = f"{name}, {precision.value}, dim {dim}, pooling {pooling}".lower()
        if any(word.strip().lower() not in title for word in args.cases.split(",")):
            continue
        found = run_case(
            name, rows, dim, pooling, precision, [1, 32, 256, 2048], args.seconds, torchrec=not args.no_torchrec
        )
        show(found)
        results += found
    if args.out:
        args.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
