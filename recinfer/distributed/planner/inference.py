"""The easy entry: a model on meta in, a :class:`Plan` for quantized inference out."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import nn

from recinfer.distributed.planner.constants import BATCH_SIZE
from recinfer.distributed.planner.model.constraints import ParameterConstraints, PlannerError
from recinfer.distributed.planner.model.estimates import (
    FloatN,
    IntN,
    ShardArrays,
    inference_time,
    packed_row_bytes,
    row_alignment,
    storage_bytes,
)
from recinfer.distributed.planner.model.facts import TableFacts
from recinfer.distributed.planner.model.hardware import Company, HardwareProfile
from recinfer.distributed.planner.model.tables import inference_tables
from recinfer.distributed.planner.model.topology import Topology, topology_of
from recinfer.distributed.planner.plan.plan import Plan
from recinfer.distributed.planner.plan.table_plan import TablePlan
from recinfer.distributed.planner.solve.explain import error_type, explain
from recinfer.distributed.planner.solve.outcome import build_plan, pin_tables
from recinfer.distributed.planner.solve.problem import make_problem
from recinfer.distributed.planner.solve.search import search
from recinfer.distributed.planner.solve.space import Estimate, build_space
from recinfer.distributed.planner.utils import gb_to_bytes
from recinfer.errors import ConfigError
from recinfer.modules.embedding_configs import DataType

__all__ = ["inference_estimate", "plan_inference"]


def plan_inference(
    model: nn.Module,
    *,
    world_size: int,
    compute_device: str = "cpu",
    precision: DataType = DataType.INT8,
    per_table_precision: Mapping[str, DataType] | None = None,
    hbm_gb: float | None = None,
    ddr_gb: float | None = None,
    batch_size: int = BATCH_SIZE,
    constraints: Mapping[str, ParameterConstraints] | None = None,
    topology: Topology | None = None,
    pinned: Plan | list[TablePlan] | None = None,
    hardware: HardwareProfile | None = None,
    timeout_seconds: float | None = None,
) -> Plan:
    """The plan of ``model`` (meta is enough) for quantized inference: all ranks in one process.

    Args:
        world_size: ranks (GPUs, or parts of one CPU host).
        compute_device: ``"cpu"`` or ``"cuda"``.
        precision, per_table_precision: element type of the stored rows, for all tables and by table name.
        hbm_gb, ddr_gb: GiB of device and host memory a rank (defaults of :class:`Topology`).
        batch_size: samples a request batch.
        constraints: by table name.
        topology: used instead of one built from the sizes above; its world size and device must agree.
        pinned: tables to leave where this plan has them; the rest is planned around them.
        hardware: measured figures of the machine (``recinfer calibrate``); not together with ``topology``.
        timeout_seconds: return the best plan found by then.

    Raises:
        ConfigError: sizes or names that do not fit together.
        PlannerError: nothing fits; the message says what binds and what would help.
    """
    begin = time.monotonic()
    deadline = begin + timeout_seconds if timeout_seconds is not None else float("inf")
    if topology is None:
        caps = {"hbm_cap": hbm_gb, "ddr_cap": ddr_gb}
        sizes: dict[str, Any] = {name: gb_to_bytes(gb) for name, gb in caps.items() if gb is not None}
        if hardware is not None:
            if hardware.device != compute_device:
                raise ConfigError(f"the hardware profile is of a {hardware.device}, the plan is for {compute_device!r}")
            topology = topology_of(hardware, world_size, **sizes)
        else:
            topology = Topology(world_size, compute_device, **sizes)
    elif hardware is not None:
        raise ConfigError("give topology or hardware, not both (a topology carries its own hardware profile)")
    if (topology.world_size, topology.compute_device) != (world_size, compute_device):
        raise ConfigError(
            f"world_size={world_size}, compute_device={compute_device!r} were asked for, but the topology has "
            f"{topology.world_size} ranks of {topology.compute_device!r}"
        )

    def tables_at(kind: DataType) -> list[TableFacts]:
        return inference_tables(
            model,
            compute_device=compute_device,
            precision=kind,
            per_table_precision=per_table_precision if kind == precision else None,
            batch_size=batch_size,
            constraints=constraints,
        )

    tables = tables_at(precision)
    space = build_space(tables, topology, inference_estimate(topology, tables))
    pins = list(pinned.tables) if isinstance(pinned, Plan) else pinned or []
    problem = make_problem(space, topology, pin_tables(space, pins, topology))
    placement, report = search(problem, deadline=deadline)
    if placement is None:
        narrower = {DataType.FP32: DataType.FP16, DataType.FP16: DataType.INT8, DataType.INT8: DataType.INT4}
        smaller = tables_at(narrower.get(precision, DataType.INT2)) if precision != DataType.INT2 else None

        def estimator(other: Topology) -> Estimate:
            return inference_estimate(other, tables)

        message = explain(space, problem, topology, estimator, pinned=pins, smaller_tables=smaller)
        raise PlannerError(message, error_type(problem))
    plan = build_plan(space, problem, placement, report, topology, batch_size=batch_size, keep_empty=False)
    return plan


def inference_estimate(topology: Topology, tables: Sequence[TableFacts] = ()) -> Estimate:
    """The estimator of quantized inference on ``topology``, for :func:`build_space`.

    With measured figures a lookup costs more the more other tables pass through the caches; where they will be is not
    known yet, so every shard is taken to share its rank with an equal part of ``tables``.
    """
    alignment = row_alignment(topology.compute_device)
    company = company_of_tables(tables, topology) if tables and topology.hardware is not None else None

    def estimate(arrays: ShardArrays) -> tuple[FloatN, IntN, IntN]:
        perf = inference_time(arrays, topology, alignment, company)
        perf[np.asarray(arrays.rows) == 0] = 0.0  # an empty piece is not even looked at
        hbm, ddr = storage_bytes(arrays, topology, is_inference=True, alignment=alignment)
        return perf, hbm, ddr

    return estimate


def company_of_tables(tables: Sequence[TableFacts], topology: Topology) -> Company:
    """What an average rank looks up."""
    alignment = row_alignment(topology.compute_device)
    cols, bits = np.array([t.cols for t in tables]), np.array([t.precision.bits for t in tables])
    written = [(t.batch_outputs if t.pooled else t.batch_inputs) * t.cols * t.output_bytes for t in tables]
    return Company.of(
        rows=np.array([t.rows for t in tables], float),
        ids=np.array([t.batch_inputs for t in tables], float),
        row_bytes=packed_row_bytes(cols, bits, alignment).astype(float),
        output_bytes=np.array(written, float),
        share=1 / topology.world_size,
    )
