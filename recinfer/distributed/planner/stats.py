"""Printed reports of a plan: TorchRec's text table, and rich tables for the command line."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from typing import Any

import numpy as np
from torch import nn

from recinfer.distributed.planner.constants import BIGINT_DTYPE
from recinfer.distributed.planner.interfaces import Enumerator, Stats, StorageReservation
from recinfer.distributed.planner.model.constraints import ParameterConstraints
from recinfer.distributed.planner.model.options import ShardingOption
from recinfer.distributed.planner.model.topology import Perf, Storage, Topology, storage_of, tier_bytes
from recinfer.distributed.planner.plan.plan import Plan
from recinfer.distributed.planner.solve.search_report import SearchReport
from recinfer.distributed.planner.units import bytes_to_gb, bytes_to_mb
from recinfer.distributed.types import ModuleSharder, ShardingPlan
from recinfer.distributed.types.sharding_types import SHARDING_RULES, rule_of
from recinfer.distributed.types.tiers import TIER_NAMES
from recinfer.printed import short_names, slim_table
from recinfer.sizes import size_text

__all__ = ["EmbeddingStats", "NoopEmbeddingStats", "format_plan", "round_to_one_sigfig"]

logger = logging.getLogger(__name__)

ABBREVIATIONS = {rule.kind.value: rule.short for rule in SHARDING_RULES}
_MIN_WIDTH = 90
_TIER_COLUMNS = [f"{name.upper()} (GB)" for name in TIER_NAMES]


def round_to_one_sigfig(x: float) -> str:
    """``x`` with one significant digit, without an exponent."""
    return "0" if x == 0 else f"{float(f'{x:.1g}'):f}".rstrip("0").rstrip(".")


def collapse_ranks(ranks: list[int]) -> str:
    """``0-3,6`` for distinct ascending ranks; every rank, repeats included, otherwise."""
    if ranks != sorted(set(ranks)):
        return ",".join(map(str, ranks))
    parts: list[str] = []
    start = previous = None
    for rank in [*ranks, None]:
        if previous is not None and rank == previous + 1:
            previous = rank
            continue
        if start is not None:
            parts.append(str(start) if start == previous else f"{start}-{previous}")
        start = previous = rank
    return ",".join(parts)


class NoopEmbeddingStats(Stats):
    """Prints nothing."""

    def log(self, *args: Any, **kwargs: Any) -> None:
        """No effect."""


class EmbeddingStats(Stats):
    """Logs a plan as a text table: load and memory of each rank, kernels, tables, lower bound and gap.

    ``stats_lines`` keeps the lines of the last call.
    """

    def __init__(self) -> None:
        self.stats_lines: list[str] = []

    def log(
        self,
        sharding_plan: ShardingPlan,
        topology: Topology,
        batch_size: int,
        storage_reservation: StorageReservation,
        num_proposals: int,
        num_plans: int,
        run_time: float,
        best_plan: list[ShardingOption],
        constraints: dict[str, ParameterConstraints] | None = None,
        sharders: list[ModuleSharder[nn.Module]] | None = None,
        enumerator: Enumerator | None = None,
        debug: bool = True,
        report: SearchReport | None = None,
    ) -> None:
        """Log one line at a time at level INFO, or print to stderr where logging is not set up.

        ``debug`` adds the tables and the imbalance.
        """
        ranks = _RankSums(best_plan, topology)
        sections = [
            [
                f"--- Evaluated {num_proposals} proposal(s), found {num_plans} possible plan(s), ran for "
                f"{run_time:.2f}s ---"
            ],
            self._rank_table(ranks, topology, storage_reservation),
            self._legend(),
            _bound_lines(ranks, report),
            _reservation_lines(storage_reservation, topology, ranks),
            _kernel_lines(best_plan),
        ]
        if debug:
            sections += [_table_lines(best_plan, constraints), _imbalance_lines(ranks)]
        width = max(_MIN_WIDTH, *(len(line) for lines in sections for line in lines)) + 8
        self.stats_lines = _frame(sections, width)
        if logger.hasHandlers():
            for line in self.stats_lines:
                logger.info(line)
        else:  # logging is not configured, as in a notebook or a script: print the table
            print("\n".join(self.stats_lines), file=sys.stderr)

    @staticmethod
    def _legend() -> list[str]:
        return [
            "Input: MB/iteration, Output: MB/iteration, Shards: number of tables",
            "HBM: estimated peak memory usage for shards, dense tensors, and features (KJT)",
        ]

    @staticmethod
    def _rank_table(ranks: _RankSums, topology: Topology, reservation: StorageReservation) -> list[str]:
        rows = [["Rank", *_TIER_COLUMNS, "Perf (ms)", "Input (MB)", "Output (MB)", "Shards"]]
        rows.append(["-" * len(h) for h in rows[0]])
        extra = _reserved(reservation)
        for rank, device in enumerate(topology.devices):
            used = storage_of(ranks.bytes[:, rank].astype(int).tolist()) + extra
            p = ranks.perf[rank]
            parts = ",".join(round_to_one_sigfig(float(x)) for x in p[:4])
            cells = list(map(_share, tier_bytes(used), tier_bytes(device.storage)))
            cells += [f"{ranks.total[rank]:.3g} ({parts})", f"{bytes_to_mb(ranks.inputs[rank]):.3g}"]
            cells += [f"{bytes_to_mb(ranks.outputs[rank]):.3g}"]
            cells += [" ".join(f"{name}: {n}" for name, n in sorted(ranks.shards[rank].items())) or "-"]
            rows.append([str(rank), *cells])
        return ["", *_aligned(rows), "", "Perf: Total perf (Forward compute, Forward comms, Backward compute, Backward comms)"]  # fmt: skip


def _share(used: int, cap: int) -> str:
    return f"{bytes_to_gb(used):.3g} ({used / cap:.0%})" if cap else f"{bytes_to_gb(used):.3g} (-)"


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["   ".join(cell.rjust(w) for cell, w in zip(row, widths)) for row in rows]


def _frame(sections: list[list[str]], width: int) -> list[str]:
    rule, thin = "#" * (width + 4), "# " + "-" * width + " #"
    lines = [rule, f"# {'--- Planner Statistics ---':^{width}} #"]
    for number, section in enumerate(s for s in sections if s):
        if number == 1:
            lines.append(thin)
        for text in section:
            lines.append(f"# {text:^{width}} #" if number == 0 else f"# {text:<{width}} #")
        if number:
            lines.append(f"# {'':<{width}} #")
    return [*lines[:-1], rule]


def _reserved(reservation: StorageReservation) -> Storage:
    total = Storage(0, 0)
    for name in ("_dense_storage", "_kjt_storage"):
        total += getattr(reservation, name, None) or Storage(0, 0)
    return total


def _reservation_lines(reservation: StorageReservation, topology: Topology, ranks: _RankSums) -> list[str]:
    lines = []
    percentage = getattr(reservation, "_percentage", None)
    dense, kjt = getattr(reservation, "_dense_storage", None), getattr(reservation, "_kjt_storage", None)
    for what, storage in (("Dense Storage (per rank)", dense), ("KJT Storage (per rank)", kjt)):
        if storage is not None:
            sizes = (f"{name.upper()}: {size_text(getattr(storage, name))}" for name in TIER_NAMES)
            lines.append(f"{what}: {', '.join(sizes)}")
    if percentage is not None:
        lines.insert(0, f"Reserved: {percentage:.0%} of memory ({type(reservation).__name__})")
    last = reservation.last_reserved_topology
    if last is not None:
        for name, used in zip(TIER_NAMES, ranks.bytes):
            caps = np.array([getattr(d.storage, name) for d in last.devices], float)
            if caps.max() > 0:
                left = caps - used
                rank = int(left.argmin())
                lines.append(f"Headroom: least free {name.upper()} is {size_text(left[rank])}, on rank {rank}")
    return lines


def _bound_lines(ranks: _RankSums, report: SearchReport | None) -> list[str]:
    worst = int(ranks.total.argmax())
    lines = [f"Longest critical path: {ranks.total[worst]:.4g} ms, on rank {worst}"]
    if report is not None and np.isfinite(report.lower_bound):
        lines.append(
            f"Lower bound: {report.lower_bound:.4g} ms for any plan with these options; "
            f"this plan takes {ranks.total[worst] / max(report.lower_bound, 1e-300):.4f} times that"
            + (", and proven optimal" if report.proven else "")
        )
        lines.append(f"Found by: {report.source}, {report.moves} improving moves")
    return lines


def _kernel_lines(best_plan: list[ShardingOption]) -> list[str]:
    counts = Counter(o.compute_kernel for o in best_plan)
    return ["Compute Kernels:", *(f"  {kernel}: {n}" for kernel, n in sorted(counts.items()))]


def _table_lines(
    best_plan: list[ShardingOption], constraints: dict[str, ParameterConstraints] | None, limit: int = 2000
) -> list[str]:
    heads = ["FQN", "Sharding", "Compute Kernel", "Perf (ms)", f"Storage ({', '.join(TIER_NAMES).upper()})"]
    heads += ["Pooling Factor", "Num Poolings"]
    heads += ["Num Indices", "Output", "Weighted", "Features", "Emb Dim", "Hash Size", "Ranks"]
    rows = [heads, ["-" * len(h) for h in heads]]
    for o in best_plan[:limit]:
        storage = o.total_storage
        poolings = o.num_poolings or [1.0] * len(o.input_lengths)
        module = o.module[1]
        method = getattr(module, "is_weighted", None)
        weighted = bool(method()) if callable(method) else False
        ranks = [r for s in o.shards if (r := s.rank) is not None]
        cols = o.shards[0].size[1]
        dims = str(o.tensor.shape[1]) if cols == o.tensor.shape[1] else f"{o.tensor.shape[1]} ({cols})"
        rows.append(
            [
                o.fqn,
                ABBREVIATIONS[o.sharding_type],
                o.compute_kernel,
                f"{o.total_perf:.4g}",
                f"({', '.join(map(size_text, tier_bytes(storage)))})",
                f"{sum(o.input_lengths):.4g}",
                f"{sum(poolings):.4g}",
                f"{sum(n * p * o.batch_size for n, p in zip(o.input_lengths, poolings)):.4g}",
                "pooled" if o.is_pooled else "sequence",
                "weighted" if weighted else "unweighted",
                str(len(o.input_lengths)),
                dims,
                str(o.tensor.shape[0]),
                collapse_ranks(ranks) if ranks else "None",
            ]
        )
    lines = ["Parameter Info:", *_aligned(rows)]
    if len(best_plan) > limit:
        lines.append(f"... and {len(best_plan) - limit} more tables")
    return lines


def _imbalance_lines(ranks: _RankSums) -> list[str]:
    lines = ["Imbalance (max / mean over ranks):"]
    for name, values in (("perf", ranks.total), *((n.upper(), used) for n, used in zip(TIER_NAMES, ranks.bytes))):
        mean = float(values.mean())
        if mean > 0:
            lines.append(f"  {name}: {values.max() / mean:.3f}")
    return lines


class _RankSums:
    """Sums of a placed plan over its shards, by rank."""

    def __init__(self, best_plan: list[ShardingOption], topology: Topology) -> None:
        world = topology.world_size
        self.bytes = np.zeros((len(TIER_NAMES), world))
        self.total = np.zeros(world)
        self.inputs = np.zeros(world)
        self.outputs = np.zeros(world)
        self.perf = np.zeros((world, 6))
        self.shards: list[Counter[str]] = [Counter() for _ in range(world)]
        for option in best_plan:
            ids, vectors = _traffic(option, topology)
            for shard in option.shards:
                r = shard.rank
                if r is None:
                    continue
                storage, perf = shard.storage or Storage(0, 0), shard.perf or Perf(0, 0, 0, 0)
                self.bytes[:, r] += tier_bytes(storage)
                self.total[r] += perf.total
                self.perf[r] += (
                    perf.fwd_compute,
                    perf.fwd_comms,
                    perf.bwd_compute,
                    perf.bwd_comms,
                    perf.input_dist_comms,
                    perf.prefetch_compute,
                )
                self.inputs[r] += ids
                self.outputs[r] += vectors * shard.size[1]
                self.shards[r][ABBREVIATIONS[option.sharding_type]] += 1


def _traffic(option: ShardingOption, topology: Topology) -> tuple[float, float]:
    """(bytes of received ids, bytes of sent vectors per column) of one shard and iteration."""
    poolings = option.num_poolings or [1.0] * len(option.input_lengths)
    ids = sum(n * p for n, p in zip(option.input_lengths, poolings)) * option.batch_size
    vectors = sum(poolings[: len(option.input_lengths)]) * option.batch_size
    rule = rule_of(option.sharding_type)
    spread = rule.row_pieces(topology.world_size, topology.local_world_size)
    one = rule.replicated or option.compute_kernel.startswith("quant")
    replicas = 1 if one else topology.world_size
    ids = ids / spread * replicas
    out = vectors * replicas if option.is_pooled else ids
    return ids * BIGINT_DTYPE, out * option.tensor.element_size()


# --------------------------------------------------------------------------------------------------- rich


def format_plan(plan: Plan, *, max_tables: int = 60) -> list[Any]:
    """Rich renderables of a plan: a summary line, one row per rank, one row per table (the heaviest ``max_tables``)."""
    from rich.text import Text

    e = plan.estimates
    head = f"{len(plan.tables)} tables on {plan.world_size} {plan.compute_device} rank(s), plan {plan.hash[:12]}"
    if "max_perf_ms" in e:
        head += f"; busiest rank {e['max_perf_ms']:.4g} ms per batch of {e.get('batch_size', '?')}"
        head += f", lower bound {e['lower_bound_ms']:.4g} ms (gap {e['gap']:.3f})"
    parts: list[Any] = [Text(head)]
    if "perf_ms_per_rank" in e:
        parts.append(_rank_renderable(plan))
    headings = ("table", "rows", "dim", "precision", "sharding", "kernel", "perf\n(ms)", "MB", "ranks")
    table = slim_table(*headings, numbers=("rows", "dim", "perf\n(ms)", "MB"), title="Tables")
    order = sorted(plan.tables, key=lambda t: -float(t.estimates.get("perf_ms", 0.0)))
    shown = {id(t) for t in order[:max_tables]}
    for name, t in zip(short_names([t.name for t in plan.tables]), plan.tables):
        if id(t) in shown:
            num_bytes = sum(t.estimates.get(f"{tier}_bytes", 0) for tier in TIER_NAMES)
            sharding = ABBREVIATIONS[t.sharding_type]
            if len(t.shards) > 1:
                sharding += f" x{len(t.shards)}"
            table.add_row(
                name,
                f"{t.num_embeddings:,}",
                str(t.embedding_dim),
                str(t.precision).lower(),
                sharding,
                t.compute_kernel,
                f"{t.estimates.get('perf_ms', 0.0):.4g}",
                f"{bytes_to_mb(num_bytes):,.2f}",
                collapse_ranks(list(t.ranks)),
            )
    parts.append(table)
    indexes = [t.estimates["index_bytes"] for t in plan.tables if "index_bytes" in t.estimates]
    if indexes:
        parts.append(
            Text(
                f"{len(indexes)} tables have indexes of raw ids or strings: {bytes_to_mb(sum(indexes)):,.2f} of these MB"
            )
        )
    if len(plan.tables) > max_tables:
        parts.append(Text(f"... and {len(plan.tables) - max_tables} lighter tables (all of them are in the JSON)"))
    return parts


def _rank_renderable(plan: Plan) -> Any:
    e = plan.estimates
    numbers = [name.replace(" ", "\n") for name in ("rank", "perf (ms)", *_TIER_COLUMNS, "input (MB)", "output (MB)")]
    table = slim_table(*numbers, "shards", numbers=numbers, title="Ranks")
    shards: list[Counter[str]] = [Counter() for _ in range(plan.world_size)]
    for t in plan.tables:
        for s in t.shards:
            shards[s.rank][ABBREVIATIONS[t.sharding_type]] += 1
    none = [0] * plan.world_size
    sizes = [(e.get(f"{n}_bytes_per_rank", none), e.get(f"{n}_cap_per_rank", none)) for n in TIER_NAMES]
    for r in range(plan.world_size):
        table.add_row(
            str(r),
            f"{e['perf_ms_per_rank'][r]:.4g}",
            *(_share(used[r], caps[r]) for used, caps in sizes),
            f"{bytes_to_mb(e['input_bytes_per_rank'][r]):.3g}",
            f"{bytes_to_mb(e['output_bytes_per_rank'][r]):.3g}",
            " ".join(f"{k}: {n}" for k, n in sorted(shards[r].items())) or "-",
        )
    return table
