"""From a float model to a quantized one, and from that to a sharded one; names and signatures are TorchRec's.

Both return a new model that shares the dense parameters with the one they were given, which is not changed. Only the
embedding collections differ. ``shard_quant_model`` returns the module with its weights (TorchRec's comes without).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import torch
from torch import nn

from recinfer.distributed.embedding_types import BaseQuantEmbeddingSharder
from recinfer.distributed.planner.inference import plan_inference
from recinfer.distributed.planner.plan import embedding_tables
from recinfer.distributed.planner.topology import Topology
from recinfer.distributed.planner.types import ParameterConstraints
from recinfer.distributed.quant_embedding import QuantEmbeddingCollectionSharder
from recinfer.distributed.quant_embeddingbag import QuantEmbeddingBagCollectionSharder
from recinfer.distributed.types import EmbeddingModuleShardingPlan, ShardingEnv, ShardingPlan
from recinfer.errors import ConfigError
from recinfer.modules.embedding_configs import DataType, dtype_to_data_type
from recinfer.quant.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

__all__ = ["quantize_inference_model", "replace_modules", "shard_quant_model"]

_DEFAULT_SHARDERS: tuple[BaseQuantEmbeddingSharder, ...] = (
    QuantEmbeddingBagCollectionSharder(),
    QuantEmbeddingCollectionSharder(),
)


def replace_modules(model: nn.Module, replacement: Callable[[str, nn.Module], nn.Module | None]) -> nn.Module:
    """A model in which every module for which ``replacement(path, module)`` is not None is that replacement.

    Modules on the way to a replaced one are copied shallowly; everything else, parameters too, is shared with
    ``model``, which stays as it is.
    """

    def rebuilt(path: str, module: nn.Module) -> nn.Module:
        new = replacement(path, module)
        if new is not None:
            return new
        prefix = f"{path}." if path else ""
        children = {
            name: child if child is None else rebuilt(prefix + name, child) for name, child in module._modules.items()
        }
        if all(child is module._modules[name] for name, child in children.items()):
            return module
        clone = copy.copy(module)
        clone._modules = children
        return clone

    return rebuilt("", model)


def _float_collection(module: nn.Module) -> type[EmbeddingBagCollection] | type[EmbeddingCollection] | None:
    """Which quantized class replaces a float collection (ours or TorchRec's, known by their attributes)."""
    if isinstance(module, EmbeddingBagCollection | EmbeddingCollection):
        return None
    if hasattr(module, "embedding_bags") and callable(getattr(module, "embedding_bag_configs", None)):
        return EmbeddingBagCollection
    if hasattr(module, "embeddings") and callable(getattr(module, "embedding_configs", None)):
        return EmbeddingCollection
    return None


def quantize_inference_model(
    model: nn.Module,
    quantization_mapping: Mapping[str, type[nn.Module]] | None = None,
    per_table_weight_dtype: Mapping[str, torch.dtype | DataType] | None = None,
    fp_weight_dtype: torch.dtype | DataType = torch.int8,
    quantization_dtype: torch.dtype | DataType = torch.int8,
    output_dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """Replace the float embedding collections by quantized ones.

    Args:
        model: a model whose collections are recinfer's or TorchRec's, with weights or on meta.
        quantization_mapping: qualified class name -> class with ``from_float(module)``, for classes of your own.
        per_table_weight_dtype: table -> precision, where it differs from the rest.
        fp_weight_dtype: precision of tables behind feature processors (FeatureProcessedEmbeddingBagCollection).
        quantization_dtype: precision of the rest: ``torch.int8`` (or ``qint8``), ``torch.quint4x2`` (INT4),
            ``torch.quint2x4`` (INT2), ``torch.float16``, ``torch.float32``, or a :class:`DataType`.
        output_dtype: element type of the looked-up vectors: float32, float16 or bfloat16.

    Returns:
        a new model; the dense parameters are shared with ``model``.

    Raises:
        ConfigError: no embedding collection in the model, or an unknown table in ``per_table_weight_dtype``.
        InputError: a weight is not finite (names table and row).
    """
    per_table = {name: _data_type(dtype) for name, dtype in (per_table_weight_dtype or {}).items()}
    mapping = dict(quantization_mapping or {})
    known: set[str] = set()
    replaced: list[str] = []

    def quantized(path: str, module: nn.Module) -> nn.Module | None:
        own = mapping.get(f"{type(module).__module__}.{type(module).__qualname__}")
        kind = _float_collection(module)
        if kind is None:
            if own is None:
                return None
            replaced.append(path)
            return own.from_float(module)  # type: ignore[attr-defined]
        configs = module.embedding_bag_configs() if kind is EmbeddingBagCollection else module.embedding_configs()  # type: ignore[operator]
        names = {config.name for config in configs}
        known.update(names)
        replaced.append(path)
        if own is not None and own is not kind:
            return own.from_float(module)  # type: ignore[attr-defined]
        behind_processors = path.rpartition(".")[2] == "_embedding_bag_collection"
        return kind.from_float(
            module,
            data_type=_data_type(fp_weight_dtype if behind_processors else quantization_dtype),
            per_table={name: dtype for name, dtype in per_table.items() if name in names},
            output_dtype=output_dtype,
        )

    result = replace_modules(model, quantized)
    if not replaced:
        raise ConfigError(
            f"{type(model).__name__} holds no float EmbeddingBagCollection or EmbeddingCollection; nothing to quantize"
        )
    unknown = sorted(set(per_table) - known)
    if unknown:
        raise ConfigError(
            f"per_table_weight_dtype names {', '.join(unknown)}; the model has: {', '.join(sorted(known))}"
        )
    return result


def _data_type(dtype: torch.dtype | DataType) -> DataType:
    return dtype if isinstance(dtype, DataType) else dtype_to_data_type(dtype)


def shard_quant_model(
    model: nn.Module,
    world_size: int = 1,
    compute_device: str = "cuda",
    sharding_device: str = "meta",
    sharders: list[BaseQuantEmbeddingSharder] | None = None,
    device_memory_size: int | None = None,
    constraints: dict[str, ParameterConstraints] | None = None,
    ddr_cap: int | None = None,
    sharding_plan: ShardingPlan | None = None,
) -> tuple[nn.Module, ShardingPlan]:
    """Plan a quantized model for the ranks of one process, and shard it.

    Args:
        model: from :func:`quantize_inference_model`, with weights or on meta.
        world_size: ranks.
        compute_device: ``"cpu"``: all ranks on this host; ``"cuda"``: rank r on ``cuda:r``.
        sharding_device: accepted for compatibility. The sharded module always holds the weights that ``model`` holds.
        sharders: default: both quantized collections'.
        device_memory_size: bytes of device memory a rank.
        constraints: table -> what the planner may choose.
        ddr_cap: bytes of host memory a rank.
        sharding_plan: use this plan instead of making one.

    Returns:
        the sharded model (dense parameters shared with ``model``) and its plan.

    Raises:
        PlannerError: nothing fits; says what binds. ConfigError: the plan does not match, or a device is not there.
    """
    chosen = tuple(sharders) if sharders else _DEFAULT_SHARDERS
    plan = sharding_plan or _plan(model, world_size, compute_device, device_memory_size, constraints, ddr_cap)
    env = ShardingEnv.from_local(world_size, 0)
    met: set[str] = set()

    def sharded(path: str, module: nn.Module) -> nn.Module | None:
        module_plan = plan.get_plan_for_module(path)
        if not isinstance(module_plan, EmbeddingModuleShardingPlan):
            return None
        met.add(path)
        for sharder in chosen:
            if isinstance(module, sharder.module_type):
                return sharder.shard(module, module_plan, env, None)  # type: ignore[call-arg]
        raise ConfigError(
            f"module {path!r} is planned, but no sharder takes a {type(module).__name__}; quantize the model first"
        )

    result = replace_modules(model, sharded)
    unknown = sorted(set(plan.plan) - met)
    if unknown:
        raise ConfigError(f"the plan names modules {', '.join(map(repr, unknown))} that the model does not have")
    return result, plan


def _plan(
    model: nn.Module,
    world_size: int,
    compute_device: str,
    device_memory_size: int | None,
    constraints: dict[str, ParameterConstraints] | None,
    ddr_cap: int | None,
) -> ShardingPlan:
    topology = Topology(
        world_size=world_size,
        compute_device=compute_device,
        hbm_cap=device_memory_size,
        ddr_cap=ddr_cap,
        local_world_size=world_size,
    )
    precisions = {config.name: config.data_type for _, _, configs, _ in embedding_tables(model) for config in configs}
    return plan_inference(
        model,
        world_size=world_size,
        compute_device=compute_device,
        per_table_precision=precisions,
        constraints=constraints,
        topology=topology,
    ).to_sharding_plan()
