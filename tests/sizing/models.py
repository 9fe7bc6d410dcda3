"""A model for sizing without an archive: a manifest of tables, and round figures of what calls cost."""

from __future__ import annotations

from recinfer.archive.manifest import (  # fmt: skip
    CheckInfo,
    DenseInfo,
    DenseOutput,
    FeatureInfo,
    Manifest,
    ModuleInfo,
    QuantizationInfo,
    TableInfo,
)
from recinfer.sizing.costs import EndCosts, FanCosts, RunCosts, ServingCosts
from recinfer.sizing.workload import Curve, Model

COSTS = ServingCosts(
    server=EndCosts(100e-6, 60e-6, 30e-6, 200e-6, 100e-6, 50e-6, 1e-9, 5e-10, 0.0),
    client=EndCosts(50e-6, 0.0, 20e-6, 140e-6, 0.0, 90e-6, 5e-10, 0.0, 5e-10),
    run=RunCosts(250e-6, 30e-6, 1e-9),
    shard=RunCosts(250e-6, 0.0, 1e-9),
    fan=FanCosts(40e-6, 80e-6, 0.0, 80e-6, 40e-6, 30e-6, 50e-6),
    wire_s=100e-6,
    spread=tuple(0.7 + 0.6 * i / 39 for i in range(40)),
    stalls_per_s=0.0,
    stall_s=(),
)


def manifest_of(tables: int = 8, rows: int = 100_000, dim: int = 32, precision: str = "int8") -> Manifest:
    """One pooled module of equal tables with a feature each, and a dense part of 4 columns."""
    names = tuple(f"t{i}" for i in range(tables))
    features = tuple(f"f{i}" for i in range(tables))
    no_error = QuantizationInfo(0.0, 0.0, 0.0, 0.0)
    return Manifest(
        format="recinfer.archive",
        format_version=1,
        model="sized",
        version="1",
        created="",
        versions={},
        precision=precision,  # type: ignore[arg-type]
        world_size=1,
        plan_hash="",
        tables=tuple(
            TableInfo(name, "ebc", rows, dim, precision, "sum", (feature,), "table_wise", (0,), no_error)  # type: ignore[arg-type]
            for name, feature in zip(names, features)
        ),
        modules=(ModuleInfo("ebc", "pooled", False, names, features, features, None),),
        features=tuple(FeatureInfo(name, "empty", "reject", 0) for name in features),
        dense=DenseInfo("onnx", 4, (), (DenseOutput("output", (1,)),), None, None),
        contract=None,
        check=CheckInfo(0, 0.0, None),
        files=(),
        bytes_total=0,
    )


def model_of(manifest: Manifest | None = None, *, dense_s: float | None = None) -> Model:
    """One id a feature; Predict with a dense program of ``dense_s`` a sample, or Lookup."""
    dense = None if dense_s is None else Curve((1.0, 100.0), (dense_s, 100 * dense_s))
    return Model.of(manifest or manifest_of(), {}, dense)
