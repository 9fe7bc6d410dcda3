"""The vocabulary of sharding: enums, plans as objects, the sharder interface, awaitables and communication codecs.

Names, fields and values are TorchRec's (``torchrec.distributed.types``), so code written for it runs after replacing
the package's name. Nothing here touches a device or a process group.
"""

from __future__ import annotations

import abc
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, unique
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardingSpec

from recinfer.errors import ConfigError
from recinfer.modules.embedding_configs import DataType

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = [
    "Awaitable",
    "BoundsCheckMode",
    "CacheAlgorithm",
    "CacheParams",
    "CacheStatistics",
    "CommOp",
    "ComputeDevice",
    "ComputeKernel",
    "DataType",
    "EmbeddingModuleShardingPlan",
    "EnumerableShardingSpec",
    "GenericMeta",
    "LazyAwaitable",
    "LazyNoWait",
    "ModuleSharder",
    "ModuleShardingPlan",
    "Multistreamable",
    "NoOpQuantizedCommCodec",
    "NoWait",
    "NullShardedModuleContext",
    "NullShardingContext",
    "ParameterSharding",
    "ParameterStorage",
    "PipelineType",
    "QuantizedCommCodec",
    "QuantizedCommCodecs",
    "ShardMetadata",
    "ShardedModule",
    "ShardingEnv",
    "ShardingPlan",
    "ShardingPlanner",
    "ShardingSpec",
    "ShardingType",
    "rank_device",
]

M = TypeVar("M", bound=nn.Module)
W = TypeVar("W")
CompIn = TypeVar("CompIn")
DistOut = TypeVar("DistOut")
Out = TypeVar("Out")
ShrdCtx = TypeVar("ShrdCtx")
QuantizationContext = TypeVar("QuantizationContext")


# --------------------------------------------------------------------------------------------------- enums


@unique
class ShardingType(Enum):
    """How one table becomes rectangles on ranks."""

    DATA_PARALLEL = "data_parallel"  # the whole table on every rank
    TABLE_WISE = "table_wise"  # the whole table on one rank
    COLUMN_WISE = "column_wise"  # column pieces, each on any rank
    ROW_WISE = "row_wise"  # row pieces, one on each rank of the world
    TABLE_ROW_WISE = "table_row_wise"  # row pieces, one on each rank of one host
    TABLE_COLUMN_WISE = "table_column_wise"  # column pieces on the ranks of one host
    GRID_SHARD = "grid_shard"  # column pieces, each cut into rows over the ranks of one host


class PipelineType(Enum):
    """Which training pipeline runs the model; it decides how many batches of input live in memory at once."""

    NONE = "none"
    TRAIN_BASE = "train_base"
    TRAIN_SPARSE_DIST = "train_sparse_dist"
    TRAIN_PREFETCH_SPARSE_DIST = "train_prefetch_sparse_dist"


class ParameterStorage(Enum):
    """The two memories a planner budgets."""

    HBM = "hbm"
    DDR = "ddr"


class ComputeKernel(Enum):
    """The kernel of a module that is not an embedding module."""

    DEFAULT = "default"


class ComputeDevice(Enum):
    """Kinds of device a topology is made of."""

    CUDA = "cuda"
    CPU = "cpu"
    MTIA = "mtia"


@unique
class CommOp(Enum):
    """Collectives whose payload a codec may shrink."""

    POOLED_EMBEDDINGS_ALL_TO_ALL = "pooled_embeddings_all_to_all"
    POOLED_EMBEDDINGS_REDUCE_SCATTER = "pooled_embeddings_reduce_scatter"
    SEQUENCE_EMBEDDINGS_ALL_TO_ALL = "sequence_embeddings_all_to_all"


class CacheAlgorithm(Enum):
    """Eviction of the UVM cache."""

    LRU = 0
    LFU = 1


class BoundsCheckMode(Enum):
    """What a lookup does with an id outside its table (FBGEMM's values)."""

    FATAL = 0
    WARNING = 1
    IGNORE = 2
    NONE = 3


# --------------------------------------------------------------------------------------------------- cache


class CacheStatistics(abc.ABC):
    """What is known of the reuse of a table's rows; lets the planner size its cache."""

    @property
    @abc.abstractmethod
    def expected_lookups(self) -> int:
        """Distinct rows looked up in one global batch."""

    @abc.abstractmethod
    def expected_miss_rate(self, clf: float) -> float:
        """Share of lookups that miss a cache holding the fraction ``clf`` of the rows."""

    @property
    @abc.abstractmethod
    def cacheability(self) -> float:
        """Area under the miss curve: 0 is perfectly cacheable, 1 is hopeless."""


@dataclass
class CacheParams:
    """Cache settings of a table kept in host memory.

    Args:
        algorithm: eviction.
        load_factor: share of the table's rows that the cache holds, 0 to 1.
        reserved_memory: bytes set aside for the cache.
        precision: element type of the cached rows.
        prefetch_pipeline: the training pipeline prefetches cache lines.
        stats: reuse statistics of the table.
        multipass_prefetch_config: passed on to the kernel as it is.
    """

    algorithm: CacheAlgorithm | None = None
    load_factor: float | None = None
    reserved_memory: float | None = None
    precision: DataType | None = None
    prefetch_pipeline: bool | None = None
    stats: CacheStatistics | None = None
    multipass_prefetch_config: Any | None = None

    def __hash__(self) -> int:
        stats = self.stats
        return hash(
            (
                self.algorithm,
                self.load_factor,
                self.reserved_memory,
                self.precision,
                self.prefetch_pipeline,
                (stats.expected_lookups, stats.cacheability) if stats is not None else None,
            )
        )


# --------------------------------------------------------------------------------------------------- plans


@dataclass
class ParameterSharding:
    """How one parameter (a table) is sharded.

    Args:
        sharding_type: a :class:`ShardingType` value.
        compute_kernel: an ``EmbeddingComputeKernel`` value.
        ranks: the rank of each shard, in the order of ``sharding_spec.shards`` (for table_row_wise the ranks of its
            host; for data_parallel all ranks).
        sharding_spec: one ``ShardMetadata`` (offsets, sizes, placement) a shard; None for data_parallel.
        cache_params, enforce_hbm, stochastic_rounding, bounds_check_mode: kernel settings, passed on.
        output_dtype: element type of the looked-up vectors.
    """

    sharding_type: str
    compute_kernel: str
    ranks: list[int] | None = None
    sharding_spec: ShardingSpec | None = None
    cache_params: CacheParams | None = None
    enforce_hbm: bool | None = None
    stochastic_rounding: bool | None = None
    bounds_check_mode: BoundsCheckMode | None = None
    output_dtype: DataType | None = None
    key_value_params: Any | None = None


class ModuleShardingPlan:
    """Base of the plans of one module."""


class EmbeddingModuleShardingPlan(ModuleShardingPlan, dict[str, ParameterSharding]):
    """The plan of one embedding module: table name -> :class:`ParameterSharding`."""

    def __str__(self) -> str:
        """A table of parameters, then a table of shards."""
        heads = ["param", "sharding type", "compute kernel", "ranks"]
        rows = [[n, p.sharding_type, p.compute_kernel, str(p.ranks)] for n, p in self.items()]
        shard_rows = [
            [n, str(s.shard_offsets), str(s.shard_sizes), str(s.placement)]
            for n, p in self.items()
            for s in getattr(p.sharding_spec, "shards", [])
        ]
        shard_heads = ["param", "shard offsets", "shard sizes", "placement"]
        return f"{_text_table(heads, rows)}\n\n{_text_table(shard_heads, shard_rows)}"


def _text_table(heads: list[str], rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(heads, *rows)]
    lines = [heads, ["-" * w for w in widths], *rows]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths)).rstrip() for line in lines)


@dataclass
class ShardingPlan:
    """The plan of a model: module path -> plan of that module. The path is the one in the wrapped model."""

    plan: dict[str, ModuleShardingPlan]

    def get_plan_for_module(self, module_path: str) -> ModuleShardingPlan | None:
        """The plan of ``module_path``, or None when that module is not planned."""
        return self.plan.get(module_path)

    def __str__(self) -> str:
        return "\n\n".join(f"module: {path}\n\n{plan}" for path, plan in self.plan.items())


class ShardingEnv:
    """Where a sharded module runs: how many ranks, which one this is, and the process group if there is one.

    Args:
        world_size: ranks in total.
        rank: this rank.
        pg: the process group; None when all ranks live in this process (inference).
        output_dtensor: state dicts hold DTensors.
    """

    def __init__(
        self,
        world_size: int,
        rank: int,
        pg: dist.ProcessGroup | None = None,
        output_dtensor: bool = False,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ConfigError(
                f"rank {rank} is outside the world of {world_size} ranks; expected 0 <= rank < world_size"
            )
        self.world_size = world_size
        self.rank = rank
        self.process_group = pg
        self.output_dtensor = output_dtensor

    @classmethod
    def from_process_group(cls, pg: dist.ProcessGroup) -> ShardingEnv:
        """The environment of this process in ``pg``."""
        import torch.distributed as dist

        return cls(dist.get_world_size(pg), dist.get_rank(pg), pg)

    @classmethod
    def from_local(cls, world_size: int, rank: int) -> ShardingEnv:
        """All ranks in this process: no process group."""
        return cls(world_size, rank, None)

    def __repr__(self) -> str:
        return f"ShardingEnv(world_size={self.world_size}, rank={self.rank}, pg={self.process_group})"


def rank_device(device_type: str, rank: int) -> torch.device:
    """The torch device of a local rank: ``cpu`` for CPU, else ``<type>:<rank>``."""
    return torch.device("cpu") if device_type == "cpu" else torch.device(f"{device_type}:{rank}")


# --------------------------------------------------------------------------------------------------- sharders


class ModuleSharder(abc.ABC, Generic[M]):
    """Knows how to shard one kind of module: which parameters, which sharding types, which kernels.

    Args:
        qcomm_codecs_registry: ``CommOp`` name -> codecs of that collective.
    """

    def __init__(self, qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None) -> None:
        self._qcomm_codecs_registry = qcomm_codecs_registry

    @abc.abstractmethod
    def shard(
        self,
        module: M,
        params: EmbeddingModuleShardingPlan,
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> Any:
        """Build the sharded module that ``params`` describes, on ``device``."""

    @property
    @abc.abstractmethod
    def module_type(self) -> type[M]:
        """The class of modules this sharder takes."""

    @property
    def qcomm_codecs_registry(self) -> dict[str, QuantizedCommCodecs] | None:
        """``CommOp`` name -> codecs."""
        return self._qcomm_codecs_registry

    def shardable_parameters(self, module: M) -> dict[str, nn.Parameter]:
        """Parameters that can be sharded, by name."""
        return dict(module.named_parameters())

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Sharding types offered on a device; the base offers replication."""
        return [ShardingType.DATA_PARALLEL.value]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Kernels offered for a sharding type on a device."""
        return [ComputeKernel.DEFAULT.value]

    def storage_usage(self, tensor: torch.Tensor, compute_device_type: str, compute_kernel: str) -> dict[str, int]:
        """Bytes of ``tensor`` by memory (``hbm`` or ``ddr``)."""
        storage = ParameterStorage.DDR if compute_device_type == "cpu" else ParameterStorage.HBM
        return {storage.value: tensor.element_size() * tensor.nelement()}


class ShardingPlanner(abc.ABC):
    """Makes the plan of a model."""

    @abc.abstractmethod
    def plan(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> ShardingPlan:
        """The plan, computed in this process."""

    @abc.abstractmethod
    def collective_plan(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> ShardingPlan:
        """The plan of rank 0, on every rank."""


# --------------------------------------------------------------------------------------------------- awaitables


class Awaitable(abc.ABC, Generic[W]):
    """A value that is on its way; :meth:`wait` returns it and runs the callbacks on it in order."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[W], W]] = []

    @abc.abstractmethod
    def _wait_impl(self) -> W: ...

    def wait(self) -> W:
        """Block until the value is there."""
        value = self._wait_impl()
        for callback in self.callbacks:
            value = callback(value)
        return value

    @property
    def callbacks(self) -> list[Callable[[W], W]]:
        """Functions applied to the value once it is there; append to it to add one."""
        return self._callbacks


class NoWait(Awaitable[W]):
    """An awaitable whose value is already there."""

    def __init__(self, obj: W) -> None:
        super().__init__()
        self._obj = obj

    def _wait_impl(self) -> W:
        return self._obj


class GenericMeta(type):
    """Kept for code that names it as a metaclass."""


class LazyAwaitable(Awaitable[W]):
    """An awaitable that waits by itself when its value is used: by a torch function, an attribute or an operator."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self._result: W | None = None
        self._done = False

    def wait(self) -> W:
        """The value; computed once."""
        if not self._done:
            self._result = super().wait()
            self._done = True
        return self._result  # type: ignore[return-value]

    @staticmethod
    def _wait_async(obj: Any) -> Any:
        return obj.wait() if isinstance(obj, LazyAwaitable) else obj

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = torch.utils._pytree.tree_map(cls._wait_async, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # Reached only for names that are not on the awaitable itself.
        if name.startswith("__") or name in ("_result", "_done", "_callbacks"):
            raise AttributeError(name)
        return getattr(self.wait(), name)

    def __getitem__(self, key: Any) -> Any:
        return self.wait()[key]  # type: ignore[index]

    def __len__(self) -> int:
        return len(self.wait())  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.wait())  # type: ignore[call-overload]


class LazyNoWait(LazyAwaitable[W]):
    """A lazy awaitable whose value is already there."""

    def __init__(self, obj: W) -> None:
        super().__init__()
        self._obj = obj

    def _wait_impl(self) -> W:
        return self._obj


def _forward(op: Callable, reflected: bool) -> Callable:
    def method(self: LazyAwaitable, other: Any) -> Any:
        mine, theirs = self.wait(), LazyAwaitable._wait_async(other)
        return op(theirs, mine) if reflected else op(mine, theirs)

    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"):
    setattr(LazyAwaitable, f"__{_name}__", _forward(getattr(operator, _name), False))
    setattr(LazyAwaitable, f"__r{_name}__", _forward(getattr(operator, _name), True))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(LazyAwaitable, f"__{_name}__", _forward(getattr(operator, _name), False))
LazyAwaitable.__hash__ = object.__hash__  # type: ignore[method-assign,assignment]


# --------------------------------------------------------------------------------------------------- sharded modules


class Multistreamable(abc.ABC):
    """Something that several CUDA streams use."""

    @abc.abstractmethod
    def record_stream(self, stream: Any) -> None:
        """Keep the memory alive until ``stream`` is done with it."""


class NullShardingContext(Multistreamable):
    """The context of a sharding that needs none."""

    def record_stream(self, stream: Any) -> None:
        """Nothing to keep."""


class NullShardedModuleContext(Multistreamable):
    """The context of a sharded module that needs none."""

    def record_stream(self, stream: Any) -> None:
        """Nothing to keep."""


class ShardedModule(abc.ABC, nn.Module, Generic[CompIn, DistOut, Out, ShrdCtx]):
    """A module whose forward is: move inputs to their shards, compute, move outputs back."""

    def __init__(self, qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None) -> None:
        super().__init__()
        self._qcomm_codecs_registry = qcomm_codecs_registry or {}

    @property
    def qcomm_codecs_registry(self) -> dict[str, QuantizedCommCodecs]:
        """``CommOp`` name -> codecs."""
        return self._qcomm_codecs_registry

    @abc.abstractmethod
    def create_context(self) -> ShrdCtx:
        """State of one forward."""

    @abc.abstractmethod
    def input_dist(self, ctx: ShrdCtx, *input: Any, **kwargs: Any) -> Awaitable[Awaitable[CompIn]]:
        """Start moving the inputs to the shards."""

    @abc.abstractmethod
    def compute(self, ctx: ShrdCtx, dist_input: CompIn) -> DistOut:
        """Look up on the shards."""

    @abc.abstractmethod
    def output_dist(self, ctx: ShrdCtx, output: DistOut) -> LazyAwaitable[Out]:
        """Start moving the outputs back and combining them."""

    def compute_and_output_dist(self, ctx: ShrdCtx, input: CompIn) -> LazyAwaitable[Out]:
        """Both steps; overridden where they overlap."""
        return self.output_dist(ctx, self.compute(ctx, input))

    def forward(self, *input: Any, **kwargs: Any) -> Any:
        """All steps."""
        ctx = self.create_context()
        dist_input = self.input_dist(ctx, *input, **kwargs).wait().wait()
        return self.compute_and_output_dist(ctx, dist_input)

    def prefetch(self, dist_input: CompIn, forward_stream: Any = None, ctx: ShrdCtx | None = None) -> None:
        """Bring the rows of a coming batch into the cache, where there is one."""

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """Names of the parameters that are sharded, not replicated."""
        for name, _ in self.named_parameters(prefix):
            yield name

    def preprocess_input(self, args: list[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], Mapping[str, Any]]:
        """Hook that a pipeline runs before input_dist."""
        return args, kwargs


# --------------------------------------------------------------------------------------------------- codecs


class QuantizedCommCodec(Generic[QuantizationContext]):
    """Shrinks a float32 tensor for a collective and restores it behind it."""

    def encode(self, input_tensor: torch.Tensor, ctx: QuantizationContext | None = None) -> torch.Tensor:
        """The tensor to send."""
        raise NotImplementedError(f"{type(self).__name__} must implement encode")

    def decode(self, input_grad: torch.Tensor, ctx: QuantizationContext | None = None) -> torch.Tensor:
        """The float32 tensor again."""
        raise NotImplementedError(f"{type(self).__name__} must implement decode")

    @property
    def quantized_dtype(self) -> torch.dtype:
        """dtype of the encoded tensor."""
        raise NotImplementedError(f"{type(self).__name__} must implement quantized_dtype")

    def calc_quantized_size(self, input_len: int, ctx: QuantizationContext | None = None) -> int:
        """Elements after encoding ``input_len`` elements."""
        raise NotImplementedError(f"{type(self).__name__} must implement calc_quantized_size")

    def create_context(self) -> QuantizationContext | None:
        """State shared by encode and decode of one collective."""
        return None


class NoOpQuantizedCommCodec(QuantizedCommCodec[QuantizationContext]):
    """Sends float32 as it is."""

    def encode(self, input_tensor: torch.Tensor, ctx: QuantizationContext | None = None) -> torch.Tensor:
        """``input_tensor``."""
        return input_tensor

    def decode(self, input_grad: torch.Tensor, ctx: QuantizationContext | None = None) -> torch.Tensor:
        """``input_grad``."""
        return input_grad

    @property
    def quantized_dtype(self) -> torch.dtype:
        """float32."""
        return torch.float32

    def calc_quantized_size(self, input_len: int, ctx: QuantizationContext | None = None) -> int:
        """``input_len``."""
        return input_len


@dataclass
class QuantizedCommCodecs:
    """Codecs of one collective, forward and backward."""

    forward: QuantizedCommCodec = field(default_factory=NoOpQuantizedCommCodec)
    backward: QuantizedCommCodec = field(default_factory=NoOpQuantizedCommCodec)
