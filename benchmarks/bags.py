"""Sums of bags by recinfer's compiled loop, which reads a request's bytes, against FBGEMM's operator on ready tensors.

    python -m benchmarks.bags                                              # formats, widths and lengths of bags
    python -m benchmarks.bags --formats INT4 --widths 64 --lengths 1 20

One thread, random ids. Both take turns in each round; a figure is the least CPU time of a round. The table shows the operator's
nanoseconds per id, and the loop's time as a multiple of it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from recinfer.quant._tables import pool

from recinfer.modules.embedding_configs import DataType, EmbeddingBagConfig
from recinfer.quant.bags import BagPlaces
from recinfer.quant.embedding_modules import EmbeddingBagCollection
from recinfer.quant.formats.registry import row_format
from recinfer.quant.packing import pack_rows

FORMATS = ("INT8", "INT4", "INT2", "FP16", "FP32")
"""Those that FBGEMM has."""


def main() -> None:
    """Print the figures, and write them as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", default=FORMATS, choices=FORMATS)
    parser.add_argument("--widths", nargs="+", type=int, default=[16, 64, 128])
    parser.add_argument("--lengths", nargs="+", type=int, default=[1, 5, 20, 100], help="ids per bag")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 64])
    parser.add_argument("--rows", type=int, default=200_000, help="rows of a table")
    parser.add_argument("--tables", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, help="also write the figures as JSON to this file")
    options = parser.parse_args()
    found = []
    for name, width in itertools.product(options.formats, options.widths):
        tables = _Tables(DataType[name], width, options.rows, options.tables)
        for batch, length in itertools.product(options.batches, options.lengths):
            operator, loop = tables.ns_per_id(batch, length, options.rounds)
            shown = f"{operator:8.1f} ns, {loop / operator:5.2f}"
            print(f"{name:5s}{width:4d} columns, batch {batch:4d}, {length:4d} ids per bag: {shown}", flush=True)
            figures = {"operator_ns": operator, "loop_ns": loop}
            found.append({"format": name, "width": width, "batch": batch, "length": length, **figures})
    if options.out is not None:
        options.out.write_text(json.dumps(found))


class _Tables:
    """Tables of one format and width, for both sides."""

    def __init__(self, data_type: DataType, width: int, rows: int, count: int) -> None:
        configs = [
            EmbeddingBagConfig(rows, width, f"t{i}", data_type=data_type, feature_names=[f"f{i}"]) for i in range(count)
        ]
        self.module = EmbeddingBagCollection(configs, False)
        generator = torch.Generator().manual_seed(0)
        for config in configs:
            packed = pack_rows(torch.randn(rows, width, generator=generator), data_type)
            self.module.packed_table(config.name).copy_(packed)
        tables = [self.module.packed_table(config.name).contiguous().numpy() for config in configs]
        self.buffer = np.concatenate([table.reshape(-1) for table in tables])
        stride, code = tables[0].shape[1], row_format(data_type).code
        self.pieces = np.array([(i * rows * stride, rows, stride, width, code, 0) for i in range(count)], np.int64)
        self.steps = np.array([(i, i, i * width) for i in range(count)], np.int64)
        self.rows, self.count, self.columns = rows, count, count * width

    def ns_per_id(self, batch: int, length: int, rounds: int) -> tuple[float, float]:
        """The least CPU time of the operator and of the loop; asserts equal sums."""
        bags = self.count * batch
        ids = torch.randint(0, self.rows, (bags * length,), generator=torch.Generator().manual_seed(batch))
        lengths = torch.full((bags,), length, dtype=torch.int32)
        offsets = torch.arange(0, bags * length + 1, length)
        data = lengths.numpy().tobytes() + ids.numpy().tobytes()
        places = BagPlaces(0, 4 * bags, len(ids), True, self.count, batch)
        into = np.empty((batch, self.columns), np.float32)

        def operator() -> Any:
            return self.module._lookup.batch.forward(ids, offsets)

        def loop() -> Any:
            return pool(self.buffer, self.pieces, self.steps, data, places, self.columns, into)

        assert loop() is True and np.array_equal(operator().reshape(batch, -1).numpy(), into)
        calls = max(1, 20_000 // len(ids))
        best = [float("inf"), float("inf")]
        for _ in range(rounds):
            for side, call in enumerate((operator, loop)):
                best[side] = min(best[side], _cpu_ns(call, calls) / len(ids))
        return best[0], best[1]


def _cpu_ns(call: Callable[[], object], calls: int) -> float:
    start = time.thread_time_ns()
    for _ in range(calls):
        call()
    return (time.thread_time_ns() - start) / calls


if __name__ == "__main__":
    main()
