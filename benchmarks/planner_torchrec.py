"""The TorchRec side of ``benchmarks.planner``: plans or lists estimates of options, and prints one JSON object.

Run by the interpreter of an environment that has torchrec; it imports nothing of recinfer. The request (JSON) comes on
stdin: ``{"do": "plan" | "options", "tables": [...], ...}``.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from typing import Any


def _module(request: dict[str, Any]) -> tuple[Any, Any]:
    import torch
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.modules.embedding_configs import DataType

    pooled = request.get("pooled", True)
    config = EmbeddingBagConfig if pooled else EmbeddingConfig
    tables = [
        config(
            name=t["name"],
            num_embeddings=t["rows"],
            embedding_dim=t["dim"],
            feature_names=[f"{t['name']}_f{i}" for i in range(len(t["pooling"]))],
            data_type=DataType(t.get("data_type", "FP32")),
        )
        for t in request["tables"]
    ]
    if pooled:
        module: Any = EmbeddingBagCollection(tables=tables, device="meta", is_weighted=request.get("weighted", False))
        sharder: Any = EmbeddingBagCollectionSharder()
    else:
        module, sharder = EmbeddingCollection(tables=tables, device="meta"), EmbeddingCollectionSharder()
    name = request.get("optimizer")
    if name:
        from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

        kind = RowWiseAdagrad if name == "RowWiseAdagrad" else getattr(torch.optim, name)
        for parameter in module.parameters():
            parameter._optimizer_classes = [kind]
    return module, sharder


def _constraints(request: dict[str, Any]) -> dict[str, Any]:
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.distributed.types import CacheParams

    out = {}
    for t in request["tables"]:
        extra = dict(request.get("constraints", {}))
        if "load_factor" in extra:
            extra["cache_params"] = CacheParams(load_factor=extra.pop("load_factor"))
        out[t["name"]] = ParameterConstraints(pooling_factors=t["pooling"], **extra)
    return out


def _topology(request: dict[str, Any]) -> Any:
    from torchrec.distributed.planner.types import Topology

    return Topology(**request["topology"])


def _estimators(request: dict[str, Any], topology: Any, constraints: Any) -> list[Any]:
    from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator, EmbeddingStorageEstimator
    from torchrec.distributed.types import PipelineType

    inference = request.get("inference", False)
    pipeline = PipelineType(request.get("pipeline", "none"))
    return [
        EmbeddingPerfEstimator(topology, constraints, is_inference=inference),
        EmbeddingStorageEstimator(
            topology,
            constraints,
            pipeline_type=pipeline,
            run_embedding_at_peak_memory=request.get("at_peak", False),
            is_inference=inference,
        ),
    ]


def options(request: dict[str, Any]) -> dict[str, Any]:
    """Every option of every table with the estimates of its shards."""
    from torchrec.distributed.planner.enumerators import EmbeddingEnumerator

    module, sharder = _module(request)
    topology, constraints = _topology(request), _constraints(request)
    enumerator = EmbeddingEnumerator(
        topology, request["batch_size"], constraints, _estimators(request, topology, constraints)
    )
    found = []
    for o in enumerator.enumerate(module, [sharder]):
        shards = [
            {
                "rect": [*s.offset, *s.size],
                "perf": [
                    s.perf.fwd_compute,
                    s.perf.fwd_comms,
                    s.perf.bwd_compute,
                    s.perf.bwd_comms,
                    s.perf.input_dist_comms,
                    s.perf.prefetch_compute,
                ],
                "hbm": s.storage.hbm,
                "ddr": s.storage.ddr,
            }
            for s in o.shards
        ]
        found.append({"table": o.name, "type": o.sharding_type, "kernel": o.compute_kernel, "shards": shards})
    return {"options": found}


def plan(request: dict[str, Any]) -> dict[str, Any]:
    """A plan by TorchRec's default planner, its time and its peak memory."""
    from torchrec.distributed.planner import EmbeddingShardingPlanner
    from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
    from torchrec.distributed.planner.stats import NoopEmbeddingStats

    module, sharder = _module(request)
    topology, constraints = _topology(request), _constraints(request)
    begin, begin_cpu = time.monotonic(), time.process_time()
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=request["batch_size"],
        enumerator=EmbeddingEnumerator(
            topology, request["batch_size"], constraints, _estimators(request, topology, constraints)
        ),
        stats=NoopEmbeddingStats(),
        constraints=constraints,
        timeout_seconds=request.get("timeout"),
    )
    made = planner.plan(module, [sharder])
    seconds, cpu_seconds = time.monotonic() - begin, time.process_time() - begin_cpu
    tables = {}
    for name, sharding in made.plan[""].items():
        pieces = sharding.sharding_spec.shards if sharding.sharding_spec is not None else []
        rects = [[*p.shard_offsets, *p.shard_sizes] for p in pieces]
        tables[name] = {
            "type": sharding.sharding_type,
            "kernel": sharding.compute_kernel,
            "ranks": list(sharding.ranks),
            "rects": rects,
        }
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_mb": peak, "tables": tables}


def main() -> None:
    """Serve one request."""
    request = json.load(sys.stdin)
    print(json.dumps({"options": options, "plan": plan}[request["do"]](request)))


if __name__ == "__main__":
    main()
