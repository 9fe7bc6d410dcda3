"""Compares estimates with TorchRec's, option by option: ``python -m benchmarks.planner_parity --torchrec-python PATH``.

Each case lists every option of a few tables on both sides and compares rectangles, six perf parts and both memories of
every shard. Intended differences are listed in ``EXPECTED`` (see
docs/decisions/0018-planner-estimates-follow-torchrec-with-listed-differences.md); any other difference is reported and
fails the run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

TABLES = [
    {"name": "a", "rows": 1001, "dim": 512, "pooling": [3.0]},
    {"name": "b", "rows": 100_000, "dim": 64, "pooling": [1.0, 7.5]},
    {"name": "c", "rows": 5, "dim": 4, "pooling": [20.0]},
    {"name": "d", "rows": 999_983, "dim": 600, "pooling": [0.7]},
]
HOSTS = {"world_size": 8, "local_world_size": 4, "compute_device": "cuda"}
CASES: dict[str, dict[str, Any]] = {
    "one host": {"topology": {"world_size": 4, "compute_device": "cuda"}},
    "one rank": {"topology": {"world_size": 1, "compute_device": "cuda"}},
    "two hosts": {"topology": HOSTS},
    "four hosts": {"topology": {**HOSTS, "world_size": 16}},
    "cpu": {"topology": {"world_size": 2, "compute_device": "cpu"}},
    "weighted": {"topology": HOSTS, "weighted": True},
    "sequence": {"topology": HOSTS, "pooled": False, "dim": 256},
    "fp16": {"topology": HOSTS, "data_type": "FP16"},
    "batch 100": {"topology": HOSTS, "batch_size": 100},
    "poolings": {"topology": HOSTS, "constraints": {"num_poolings": [2.0]}, "one_feature": True},
    "min_partition": {"topology": HOSTS, "constraints": {"min_partition": 32}},
    "grid": {"topology": HOSTS, "constraints": {"sharding_types": ["grid_shard"]}},
    "cache": {"topology": HOSTS, "constraints": {"load_factor": 0.5}},
    "adam": {"topology": HOSTS, "optimizer": "Adam"},
    "adagrad": {"topology": HOSTS, "optimizer": "Adagrad"},
    "row-wise adagrad": {"topology": HOSTS, "optimizer": "RowWiseAdagrad"},
    "pipeline base": {"topology": HOSTS, "pipeline": "train_base"},
    "pipeline sparse": {"topology": HOSTS, "pipeline": "train_sparse_dist"},
    "pipeline sparse, peak": {"topology": HOSTS, "pipeline": "train_sparse_dist", "at_peak": True},
    "pipeline prefetch": {"topology": HOSTS, "pipeline": "train_prefetch_sparse_dist"},
    "pipeline prefetch, peak": {"topology": HOSTS, "pipeline": "train_prefetch_sparse_dist", "at_peak": True},
    "bandwidths": {
        "topology": {**HOSTS, "hbm_mem_bw": 3e9, "intra_host_bw": 2e8, "inter_host_bw": 5e7, "hbm_to_ddr_mem_bw": 6e7}
    },
    "multipliers": {
        "topology": {**HOSTS, "bwd_compute_multiplier": 3, "weighted_feature_bwd_compute_multiplier": 2},
        "weighted": True,
    },
}
# (case or sharding type, field) -> why; docs/decisions/0018-planner-estimates-follow-torchrec-with-listed-differences.md says more.
EXPECTED = {
    ("row-wise adagrad", "hbm"): "state of 4 bytes a row and shard; TorchRec divides it over column shards",
    ("row-wise adagrad", "ddr"): "state of 4 bytes a row and shard; TorchRec divides it over column shards",
    **{
        (kind, memory): "partial sums come in by all-to-all; TorchRec's reduce-scatter adds them up on the way"
        for kind in ("row_wise", "table_row_wise", "grid_shard")
        for memory in ("hbm", "ddr")
    },
}
FIELDS = ("rect", "fwd_compute", "fwd_comms", "bwd_compute", "bwd_comms", "input_dist_comms", "prefetch_compute", "hbm", "ddr")  # fmt: skip


def request_of(case: dict[str, Any]) -> dict[str, Any]:
    """The full request of a case."""
    tables = [dict(t, data_type=case.get("data_type", "FP32")) for t in TABLES]
    if "dim" in case:
        tables = [dict(t, dim=case["dim"]) for t in tables]
    if case.get("one_feature"):
        tables = [dict(t, pooling=t["pooling"][:1]) for t in tables]
    return {"do": "options", "batch_size": 512, "tables": tables, **case}


def ours(request: dict[str, Any]) -> list[dict[str, Any]]:
    """The list of ``planner_torchrec.options``, from recinfer's enumerator."""
    import torch

    from recinfer.distributed.embedding import EmbeddingCollectionSharder
    from recinfer.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from recinfer.distributed.planner import ParameterConstraints, Topology
    from recinfer.distributed.planner.enumerators import EmbeddingEnumerator
    from recinfer.distributed.planner.shard_estimators import EmbeddingPerfEstimator, EmbeddingStorageEstimator
    from recinfer.distributed.types import CacheParams, PipelineType
    from recinfer.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig
    from recinfer.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

    pooled = request.get("pooled", True)
    config = EmbeddingBagConfig if pooled else EmbeddingConfig
    tables: list[Any] = [
        config(
            name=t["name"],
            num_embeddings=t["rows"],
            embedding_dim=t["dim"],
            feature_names=[f"{t['name']}_f{i}" for i in range(len(t["pooling"]))],
            data_type=DataType(t["data_type"]),
        )
        for t in request["tables"]
    ]
    sharder: Any
    if pooled:
        module: Any = EmbeddingBagCollection(tables, is_weighted=request.get("weighted", False), device="meta")
        sharder = EmbeddingBagCollectionSharder()
    else:
        module, sharder = EmbeddingCollection(tables, device="meta"), EmbeddingCollectionSharder()
    if name := request.get("optimizer"):
        kind = type(name, (), {}) if name == "RowWiseAdagrad" else getattr(torch.optim, name)
        for parameter in module.parameters():
            parameter._optimizer_classes = [kind]
    constraints = {}
    for t in request["tables"]:
        extra = dict(request.get("constraints", {}))
        if "load_factor" in extra:
            extra["cache_params"] = CacheParams(load_factor=extra.pop("load_factor"))
        constraints[t["name"]] = ParameterConstraints(pooling_factors=t["pooling"], **extra)
    topology = Topology(**request["topology"])
    storage = EmbeddingStorageEstimator(
        topology,
        constraints,
        pipeline_type=PipelineType(request.get("pipeline", "none")),
        run_embedding_at_peak_memory=request.get("at_peak", False),
    )
    estimators = [EmbeddingPerfEstimator(topology, constraints), storage]
    enumerator = EmbeddingEnumerator(topology, request["batch_size"], constraints, estimators)
    found = []
    for o in enumerator.enumerate(module, [sharder]):
        shards = [
            {
                "rect": [*s.offset, *s.size],
                "perf": [getattr(s.perf, f) for f in FIELDS[1:7]],
                "hbm": s.storage.hbm if s.storage else 0,
                "ddr": s.storage.ddr if s.storage else 0,
            }
            for s in o.shards
        ]
        found.append({"table": o.name, "type": o.sharding_type, "kernel": o.compute_kernel, "shards": shards})
    return found


def compare(case: str, theirs: list[dict[str, Any]], mine: list[dict[str, Any]]) -> tuple[int, list[str], list[str]]:
    """(shards compared, expected differences, unexpected differences)."""
    known = ("dense", "fused", "fused_uvm", "fused_uvm_caching", "quant", "quant_uvm", "quant_uvm_caching")
    their = {(o["table"], o["type"], o["kernel"]): o["shards"] for o in theirs if o["kernel"] in known}
    my = {(o["table"], o["type"], o["kernel"]): o["shards"] for o in mine}
    expected, unexpected, compared = [], [], 0
    for key in sorted(their.keys() ^ my.keys()):
        unexpected.append(f"{case}: option {key} only {'theirs' if key in their else 'ours'}")
    for key in sorted(their.keys() & my.keys()):
        if len(their[key]) != len(my[key]):
            unexpected.append(f"{case}: {key} has {len(their[key])} shards there, {len(my[key])} here")
            continue
        for a, b in zip(their[key], my[key]):
            compared += 1
            pairs = [("rect", a["rect"], b["rect"]), *zip(FIELDS[1:7], a["perf"], b["perf"])]
            pairs += [(m, a[m], b[m]) for m in ("hbm", "ddr")]
            for name, x, y in pairs:
                if not np.allclose(x, y, rtol=1e-9, atol={"rect": 0, "hbm": 2, "ddr": 2}.get(name, 1e-15)):
                    text = f"{case}: {key} {b['rect']} {name}: TorchRec {x}, recinfer {y}"
                    (expected if (case, name) in EXPECTED or (key[1], name) in EXPECTED else unexpected).append(text)
    return compared, expected, unexpected


def main(argv: list[str] | None = None) -> int:
    """Compare all cases; exit status 1 for an unexpected difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torchrec-python", default=sys.executable, help="interpreter that can import torchrec")
    args = parser.parse_args(argv)
    if subprocess.run([args.torchrec_python, "-c", "import torchrec"], capture_output=True, check=False).returncode:
        parser.error(f"{args.torchrec_python} cannot import torchrec; name an interpreter that can: --torchrec-python")
    script = Path(__file__).with_name("planner_torchrec.py")
    total, failed = 0, 0
    for name, case in CASES.items():
        request = request_of(case)
        run = subprocess.run(
            [args.torchrec_python, str(script)], input=json.dumps(request), capture_output=True, text=True, check=False
        )
        if run.returncode:
            print(f"{name}: TorchRec failed: {run.stderr.strip().splitlines()[-1:]}")
            failed += 1
            continue
        theirs = json.loads(run.stdout.strip().splitlines()[-1])["options"]
        compared, expected, unexpected = compare(name, theirs, ours(request))
        total += compared
        failed += bool(unexpected)
        print(f"{name}: {compared} shards, {len(expected)} explained differences, {len(unexpected)} others", flush=True)
        for line in unexpected[:6]:
            print("   ", line)
    print(f"{total} shards compared in {len(CASES)} cases; {failed} cases with unexplained differences")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
