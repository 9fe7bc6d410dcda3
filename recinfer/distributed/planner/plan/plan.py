"""A plan as plain data: table -> sharding type, kernel, precision, rectangles on ranks; JSON and a content hash.

A :class:`Plan` is frozen, contains no devices or tensors, and is checked when built. The planner returns it, export
takes it, an archive stores it as ``plan.json``, and ``recinfer inspect`` prints it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from recinfer.distributed.planner.model.walk import embedding_tables
from recinfer.distributed.planner.plan.table_plan import TableJson, TablePlan, table_plan
from recinfer.distributed.types import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
    ShardingType,
)
from recinfer.distributed.types.edges import placement, sharding_spec
from recinfer.distributed.types.tiers import TIER_NAMES
from recinfer.errors import ConfigError, NotFoundError
from recinfer.excerpts import some
from recinfer.files import write_file
from recinfer.layout.rect import TilingError
from recinfer.modules.embedding_configs import DataType
from recinfer.modules.plain_tables import is_plain
from recinfer.printed import Printed
from recinfer.strict_json import build, loads, raising_config_error

if TYPE_CHECKING:
    from recinfer.distributed.planner.model.topology import Topology

__all__ = ["MAX_RANKS", "Plan", "PlanChange", "misfits", "of_tables"]

PLAN_FORMAT = "recinfer.plan/1"
MAX_RANKS = 1 << 16  # an archive has a file per rank, so a wrong number would fill the disk and the memory


@dataclass(frozen=True)
class PlanChange:
    """One difference between two plans: the table, what differs (``added``, ``removed`` or a field), both values."""

    table: str
    what: str
    before: Any = None
    after: Any = None

    def __str__(self) -> str:
        if self.what in ("added", "removed"):
            return f"{self.table}: {self.what}"
        return f"{self.table}: {self.what} {self.before} -> {self.after}"


@dataclass(frozen=True)
class _PlanJson:
    """The JSON of a :class:`Plan`."""

    format: str
    world_size: int
    compute_device: str
    tables: tuple[TableJson, ...]
    local_world_size: int = 0
    estimates: dict[str, Any] = field(default_factory=dict)
    hash: str | None = None


@dataclass(frozen=True)
class Plan(Printed):
    """A plan of all tables of a model.

    Args:
        world_size: ranks.
        compute_device: ``"cpu"`` or ``"cuda"``.
        tables: one entry per table, in the order of the model.
        estimates: figures of the whole plan (max rank perf in ms, lower bound, per-rank lists ...); not hashed.
        local_world_size: ranks per host; 0 means all on one host.

    Raises:
        ConfigError: a table twice; its subclass TilingError for a rank outside the world.
    """

    world_size: int
    compute_device: str
    tables: tuple[TablePlan, ...]
    estimates: dict[str, Any] = field(default_factory=dict, compare=False)
    local_world_size: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.world_size <= MAX_RANKS:
            raise ConfigError(f"world_size {self.world_size}; expected 1 to {MAX_RANKS}")
        if self.compute_device not in ("cpu", "cuda", "mtia"):
            raise ConfigError(f"compute_device {self.compute_device!r}; expected cpu, cuda or mtia")
        if not self.local_world_size:
            object.__setattr__(self, "local_world_size", self.world_size)
        if self.local_world_size < 1 or self.world_size % self.local_world_size:
            raise ConfigError(f"local_world_size {self.local_world_size} must divide world_size {self.world_size}")
        names = [(t.module, t.table) for t in self.tables]
        if len(set(names)) != len(names):
            twice = sorted({".".join(n) for n in names if names.count(n) > 1})
            raise ConfigError(f"tables planned twice: {', '.join(twice)}")
        for t in self.tables:
            outside = sorted({r for r in t.ranks if r >= self.world_size})
            if outside:
                raise TilingError(f"table {t.name!r} is placed on ranks {outside}, outside {self.world_size} ranks")

    def __repr__(self) -> str:
        precisions = some(sorted({t.precision.value.lower() for t in self.tables}), 4)
        return f"<plan {self.hash[:12]}: {len(self.tables)} tables, {precisions}, on {self.world_size} {self.compute_device} ranks>"

    def __str__(self) -> str:
        rows = [("table", "rows x dim", "precision", "sharding", "ranks")]
        rows += [
            (
                t.name,
                f"{t.num_embeddings} x {t.embedding_dim}",
                t.precision.value.lower(),
                t.sharding_type,
                some([str(rank) for rank in sorted(set(t.ranks))], 4),
            )
            for t in self.tables
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        head = f"plan {self.hash[:12]}: {self.world_size} ranks on {self.compute_device}"
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        return "\n".join([head, *lines])

    # ------------------------------------------------------------------ JSON

    def placement_data(self) -> dict[str, Any]:
        """The data that the hash covers."""
        return {
            "format": PLAN_FORMAT,
            "world_size": self.world_size,
            "local_world_size": self.local_world_size,
            "compute_device": self.compute_device,
            "tables": [t.placement_data() for t in self.tables],
        }

    @property
    def hash(self) -> str:
        """sha256 (hex) of the placement; estimates do not change it."""
        text = json.dumps(self.placement_data(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def to_json(self) -> str:
        """Deterministic text: the same plan gives the same bytes."""
        data = self.placement_data()
        for entry, t in zip(data["tables"], self.tables):
            if t.estimates:
                entry["estimates"] = t.estimates
        data["estimates"] = self.estimates
        data["hash"] = self.hash
        head = {k: v for k, v in data.items() if k != "tables"}
        lines = [f"  {json.dumps(k)}: {json.dumps(v, sort_keys=True)}" for k, v in sorted(head.items())]
        rows = ",\n".join("    " + json.dumps(t, sort_keys=True) for t in data["tables"])
        lines.append(f'  "tables": [\n{rows}\n  ]' if rows else '  "tables": []')
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Plan:
        """Read :meth:`to_json`'s text; raises ConfigError for anything else, including a changed hash."""
        with raising_config_error():
            data = loads(text.encode() if isinstance(text, str) else text, "the plan")
            if data.get("format") != PLAN_FORMAT:
                raise ConfigError(
                    f"got an object of format {repr(data.get('format'))[:80]}; expected a plan of `recinfer plan`, of format "
                    f"{PLAN_FORMAT!r}"
                )
            read = build(_PlanJson, data, "plan")
        tables = tuple(table.plan() for table in read.tables)
        plan = cls(read.world_size, read.compute_device, tables, read.estimates, read.local_world_size)
        if read.hash not in (None, plan.hash):
            raise ConfigError(
                f"the plan was changed after it was written: hash {read.hash}, content {plan.hash}; "
                "remove the hash field if the change is intended"
            )
        return plan

    def save(self, path: str | Path) -> None:
        """Write the JSON; an error leaves the file as it was."""
        write_file(path, self.to_json().encode())

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read the JSON; raises ConfigError, or NotFoundError when there is no such file."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except FileNotFoundError:
            raise NotFoundError(f"no plan file {str(path)!r}") from None
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no text"
            raise ConfigError(
                f"cannot read the plan {str(path)!r}: {reason}; expected a JSON file of `recinfer plan`"
            ) from None
        try:
            return cls.from_json(text)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    # ------------------------------------------------------------------ look-ups and checks

    def table(self, module: str, name: str) -> TablePlan:
        """The entry of a table; raises NotFoundError if there is none."""
        for t in self.tables:
            if t.module == module and t.table == name:
                return t
        raise NotFoundError(f"table {name!r} of module {module!r} is not in the plan of {len(self.tables)} tables")

    def check_model(self, model: nn.Module) -> None:
        """Raise ConfigError unless the plan covers exactly the tables of ``model``, with their shapes; of a model without embedding
        collections: unless it has some of them, see :func:`of_tables`."""
        if found := misfits(self, model):
            raise ConfigError(f"the plan does not fit the model: {found}; plan this model again")

    def check_topology(self, topology: Topology) -> None:
        """Raise ConfigError unless the plan was made for ranks, device and capacities like ``topology``'s."""
        problems = []
        for what in ("world_size", "local_world_size", "compute_device"):
            mine, theirs = getattr(self, what), getattr(topology, what)
            if mine != theirs:
                problems.append(f"{what} is {mine} in the plan, {theirs} in the topology")
        for tier in TIER_NAMES:
            used = self.estimates.get(f"{tier}_bytes_per_rank", [])
            for rank, (num_bytes, device) in enumerate(zip(used, topology.devices)):
                cap = getattr(device.storage, tier)
                if num_bytes > cap:
                    problems.append(f"rank {rank} needs {num_bytes} bytes of {tier}, the topology has {cap}")
        if problems:
            raise ConfigError(f"the plan does not fit the topology: {'; '.join(problems[:10])}")

    def diff(self, other: Plan) -> list[PlanChange]:
        """The changes from this plan to ``other``, table by table; empty when the hashes are equal."""
        changes = [
            PlanChange("(plan)", what, getattr(self, what), getattr(other, what))
            for what in ("world_size", "local_world_size", "compute_device")
            if getattr(self, what) != getattr(other, what)
        ]
        mine, theirs = ({(t.module, t.table): t for t in p.tables} for p in (self, other))
        changes += [PlanChange(mine[k].name, "removed") for k in mine if k not in theirs]
        changes += [PlanChange(theirs[k].name, "added") for k in theirs if k not in mine]
        for key in mine:
            if key in theirs:
                a, b = mine[key].placement_data(), theirs[key].placement_data()
                changes += [PlanChange(mine[key].name, what, a[what], b[what]) for what in a if a[what] != b[what]]
        return changes

    # ------------------------------------------------------------------ TorchRec's plan

    def to_sharding_plan(self) -> ShardingPlan:
        """The placement as TorchRec's ShardingPlan."""
        modules: dict[str, EmbeddingModuleShardingPlan] = {}
        for t in self.tables:
            spec = None
            if t.sharding_type != ShardingType.DATA_PARALLEL.value:
                places = [placement(self.compute_device, rank, self.local_world_size) for rank in t.ranks]
                spec = sharding_spec(t.shards, places)
            modules.setdefault(t.module, EmbeddingModuleShardingPlan())[t.table] = ParameterSharding(
                sharding_type=t.sharding_type,
                compute_kernel=t.compute_kernel,
                ranks=list(t.ranks),
                sharding_spec=spec,
            )
        return ShardingPlan(dict(modules))

    @classmethod
    def from_sharding_plan(
        cls,
        sharding_plan: ShardingPlan,
        model: nn.Module,
        world_size: int,
        compute_device: str = "cpu",
        precision: DataType | dict[str, DataType] | None = None,
        local_world_size: int = 0,
    ) -> Plan:
        """Convert ``sharding_plan`` of ``model`` to plain data.

        Args:
            precision: of all tables, or by table name; default is each config's own.

        Raises:
            ConfigError: a table without a plan, or shards that do not tile it.
        """
        tables: list[TablePlan] = []
        for path, _, configs, _ in embedding_tables(model):
            module_plan = sharding_plan.get_plan_for_module(path)
            for config in configs:
                sharding = module_plan.get(config.name) if isinstance(module_plan, dict) else None
                if sharding is None:
                    raise ConfigError(f"table {config.name!r} of module {path!r} is not in the sharding plan")
                chosen = precision.get(config.name) if isinstance(precision, dict) else precision
                tables.append(table_plan(path, config, sharding, chosen or config.data_type, world_size))
        return cls(world_size, compute_device, tuple(tables), {}, local_world_size)


def of_tables(plan: Plan, tables: AbstractSet[tuple[str, str]]) -> Plan:
    """``plan`` of these tables (module path, table) alone; raises ConfigError if one is not planned."""
    missing = sorted(tables - {(table.module, table.table) for table in plan.tables})
    if missing:
        raise ConfigError(f"the plan lacks {some([*map(_dotted, missing)], 10)}; plan this model again")
    kept = tuple(table for table in plan.tables if (table.module, table.table) in tables)
    return plan if len(kept) == len(plan.tables) else replace(plan, tables=kept)


def misfits(plan: Plan, model: nn.Module) -> str:
    """The differences between the tables of ``model`` and of ``plan``, as text; empty if names and shapes are equal."""
    found = list(embedding_tables(model))
    have = {(p, c.name): (c.num_embeddings, c.embedding_dim) for p, _, cs, _ in found for c in cs}
    planned = {(t.module, t.table): (t.num_embeddings, t.embedding_dim) for t in plan.tables}
    if any(is_plain(module) for _, module, _, _ in found) and have.keys() & planned.keys():
        both = have.keys() & planned.keys()  # export leaves the others in the dense part
        have, planned = ({key: shapes[key] for key in both} for shapes in (have, planned))
    problems = [f"{_dotted(k)} of the model is not planned" for k in sorted(have.keys() - planned.keys())]
    problems += [f"{_dotted(k)} of the plan is not in the model" for k in sorted(planned.keys() - have.keys())]
    for key in sorted(have.keys() & planned.keys()):
        if have[key] != planned[key]:
            problems.append(f"{_dotted(key)} is {_by(have[key])} in the model, {_by(planned[key])} in the plan")
    return some(problems, 10, "; ")


def _dotted(key: tuple[str, str]) -> str:
    return ".".join(part for part in key if part)


def _by(shape: tuple[int, int]) -> str:
    return f"{shape[0]} x {shape[1]}"
