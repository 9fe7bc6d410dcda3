"""A storage tier is a row of TIERS and a kernel: the planner places rows there and shows them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

# Edits of the two tables, made to their source while it is imported.
EDITS = """
import importlib.machinery, sys

EDITS = {
    "recinfer.distributed.types.tiers": [(
        "TIERS = (HBM, DDR)",
        "SSD = Tier('ssd', 'local disks', ('cpu', 'cuda'), capacity=0, bandwidth=2 * _GIB_PER_S)\\nTIERS = (HBM, DDR, SSD)",
    )],
    "recinfer.distributed.types.kernels": [
        ('    QUANT_UVM = "quant_uvm"', '    QUANT_UVM = "quant_uvm"\\n    QUANT_SSD = "quant_ssd"'),
        ("import DDR, TIERS,", "import DDR, SSD, TIERS,"),
        ("KERNEL_RULES = (", "KERNEL_RULES = (\\n    KernelRule(_K.QUANT_SSD, _L.HOST, packed=True, tier=SSD),"),
    ],
}
compiled = importlib.machinery.SourceFileLoader.get_code


def get_code(loader, name):
    if name not in EDITS:
        return compiled(loader, name)
    text = open(loader.path, encoding="utf-8").read()
    for old, new in EDITS[name]:
        assert text.count(old) == 1, (name, old)
        text = text.replace(old, new)
    return compile(text, loader.path, "exec")


importlib.machinery.SourceFileLoader.get_code = get_code
"""

PLANS = """
import io

from rich.console import Console

from recinfer.distributed.planner import PlannerError, Topology, plan_inference
from recinfer.distributed.planner.model.topology import CustomTopologyData
from recinfer.distributed.planner.plan.plan import Plan
from recinfer.distributed.planner.stats import format_plan
from recinfer.errors import ConfigError
from tests.planner.models import model

shapes = [(1000, 16), (4000, 16), (8000, 16)]


def planned(**sizes):
    topology = Topology(2, "cpu", **sizes)
    return plan_inference(model(shapes), world_size=2, topology=topology, batch_size=1), topology


in_memory, _ = planned(ddr_cap=10**7)
assert {t.compute_kernel for t in in_memory.tables} == {"quant"} and in_memory.estimates["ssd_bytes_per_rank"] == [0, 0]
plan, topology = planned(ddr_cap=50_000, ssd_cap=10**6)
assert {t.compute_kernel for t in plan.tables} == {"quant", "quant_ssd"}
on_disk = [t for t in plan.tables if t.compute_kernel == "quant_ssd"]
num_bytes = sum(plan.estimates["ssd_bytes_per_rank"])
assert num_bytes == sum(t.estimates["ssd_bytes"] for t in on_disk) == sum(20 * t.num_embeddings for t in on_disk)
assert all(used <= 50_000 for used in plan.estimates["ddr_bytes_per_rank"])
assert Plan.from_json(plan.to_json()).hash == plan.hash
text = io.StringIO()
for part in format_plan(plan):
    Console(file=text, width=160).print(part)
assert all(word in text.getvalue() for word in ("SSD", "(GB)"))
plan.check_topology(topology)
for sizes, message in (({"ssd_cap": 1}, "bytes of ssd"), ({"ssd_cap": 10**6}, "bytes of ddr")):
    try:
        plan.check_topology(Topology(2, "cpu", ddr_cap=50_000 if "ssd" in message else 1, **sizes))
    except ConfigError as error:
        assert message in str(error), error
    else:
        raise AssertionError(message)
slow = plan.estimates["max_perf_ms"]
fast, _ = planned(ddr_cap=50_000, ssd_cap=10**6, ssd_mem_bw=10**9)
assert fast.estimates["max_perf_ms"] < slow
caps = CustomTopologyData({"ssd_cap": [0, 10**6]}, 2)
assert planned(ddr_cap=50_000, custom_topology_data=caps)[0].estimates["ssd_bytes_per_rank"][0] == 0
try:
    planned(ddr_cap=50_000, ssd_cap=1000)
except PlannerError as error:
    assert "What would help" in str(error), error
else:
    raise AssertionError("no plan fits")
"""


def test_a_tier_is_a_row_of_two_tables() -> None:
    run = subprocess.run([sys.executable, "-c", EDITS + PLANS], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
