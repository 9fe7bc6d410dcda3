"""plan_inference: plans a model, which may be on the meta device, for quantized inference."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from torch import nn

from recinfer.distributed.planner.constants import BATCH_SIZE
from recinfer.distributed.planner.model.constraints import ParameterConstraints, PlannerError
from recinfer.distributed.planner.model.estimates import inference_estimate
from recinfer.distributed.planner.model.facts import TableFacts
from recinfer.distributed.planner.model.hardware import HardwareProfile
from recinfer.distributed.planner.model.tables import inference_tables
from recinfer.distributed.planner.model.topology import Topology, topology_of
from recinfer.distributed.planner.plan.plan import Plan
from recinfer.distributed.planner.plan.table_plan import TablePlan
from recinfer.distributed.planner.solve.explain import error_type, explain
from recinfer.distributed.planner.solve.outcome import build_plan, pin_tables
from recinfer.distributed.planner.solve.problem import make_problem
from recinfer.distributed.planner.solve.search import search
from recinfer.distributed.planner.solve.space import build_space
from recinfer.distributed.planner.units import gb_to_bytes
from recinfer.errors import ConfigError
from recinfer.modules.embedding_configs import DataType
from recinfer.quant.formats.registry import row_format

__all__ = ["plan_inference"]


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
    indexed: Mapping[str, int] | None = None,
    topology: Topology | None = None,
    pinned: Plan | list[TablePlan] | None = None,
    hardware: HardwareProfile | None = None,
    timeout_seconds: float | None = None,
) -> Plan:
    """Plan ``model`` (meta is enough) for quantized inference with all ranks in one process.

    Args:
        world_size: ranks (GPUs, or parts of one CPU host).
        compute_device: ``"cpu"`` or ``"cuda"``.
        precision, per_table_precision: element type of the stored rows, for all tables and by table name, or by path and
            name (``user.t``) where modules have tables of one name.
        hbm_gb, ddr_gb: GiB of device and host memory per rank (defaults of :class:`Topology`).
        batch_size: samples per request batch.
        constraints: by table name.
        indexed: feature -> number of strings or ids of which the archive will have an index; tables whose rows a module of the
            model makes of raw ids need no entry.
        topology: used instead of one built from the sizes above; its world size and device must agree.
        pinned: a plan whose tables keep their places; only the others are planned.
        hardware: measured figures of the machine (``recinfer calibrate``); not together with ``topology``.
        timeout_seconds: return the best plan found by then.

    Raises:
        ConfigError: arguments that contradict each other.
        PlannerError: no plan fits; the message names the limiting memory and a change that helps.
    """
    deadline = time.monotonic() + timeout_seconds if timeout_seconds is not None else float("inf")
    if hbm_gb is not None and compute_device == "cpu":
        raise ConfigError(
            f"hbm_gb={hbm_gb:g} in a plan for cpu: ranks on CPU have host memory only; set ddr_gb instead"
        )
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
        raise ConfigError("pass topology or hardware, not both (a topology carries its own hardware profile)")
    if (topology.world_size, topology.compute_device) != (world_size, compute_device):
        raise ConfigError(
            f"world_size={world_size}, compute_device={compute_device!r} were given, but the topology has "
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
            indexed=indexed,
        )

    tables = tables_at(precision)
    space = build_space(tables, topology, inference_estimate(topology))
    pins = list(pinned.tables) if isinstance(pinned, Plan) else pinned or []
    problem = make_problem(space, topology, pin_tables(space, pins, topology))
    placement, report = search(problem, deadline=deadline)
    if placement is None:
        narrower = row_format(precision).narrower
        smaller = None if narrower is None else tables_at(narrower)
        message = explain(space, problem, topology, inference_estimate, pinned=pins, smaller_tables=smaller)
        raise PlannerError(message, error_type(problem))
    return build_plan(space, problem, placement, report, topology, batch_size=batch_size, keep_empty=False)
