"""Quantizes float models and shards quantized ones, with TorchRec's names and signatures.

``quantize_inference_model`` and ``shard_quant_model`` return a new model that shares the dense parameters with the
given model, which is unchanged. Only the embedding collections differ. ``shard_quant_model`` returns the module with
its weights (TorchRec returns it without).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace

import torch
from torch import nn

from recinfer.distributed.embedding_types import BaseQuantEmbeddingSharder
from recinfer.distributed.planner.inference import plan_inference
from recinfer.distributed.planner.model.topology import Topology
from recinfer.distributed.planner.plan import embedding_tables
from recinfer.distributed.planner.types import ParameterConstraints
from recinfer.distributed.quant.sharded import QuantEmbeddingBagCollectionSharder, QuantEmbeddingCollectionSharder
from recinfer.distributed.types import EmbeddingModuleShardingPlan, ShardingEnv, ShardingPlan
from recinfer.errors import ConfigError
from recinfer.module_tree import module_names, named_children, outermost_modules
from recinfer.modules import embedding_modules as float_modules
from recinfer.modules.embedding_configs import BaseEmbeddingConfig, DataType, QuantConfig, dtype_to_data_type
from recinfer.quant.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

__all__ = ["quantize_embeddings", "quantize_inference_model", "replace_modules", "shard_quant_model"]

_DEFAULT_SHARDERS: tuple[BaseQuantEmbeddingSharder, ...] = (
    QuantEmbeddingBagCollectionSharder(),
    QuantEmbeddingCollectionSharder(),
)


def replace_modules(model: nn.Module, replacement: Callable[[str, nn.Module], nn.Module | None]) -> nn.Module:
    """A model in which each module is replaced by ``replacement(path, module)``, unless that is None.

    Modules on the way to a replaced one are copied shallowly; everything else, parameters too, is shared with
    ``model``, which stays as it is. A module with several names is replaced once, by its first path, under all of them.
    """
    done: dict[int, nn.Module] = {}

    def rebuilt(path: str, module: nn.Module) -> nn.Module:
        if id(module) not in done:
            done[id(module)] = replacement(path, module) or with_rebuilt_children(path, module)
        return done[id(module)]

    def with_rebuilt_children(path: str, module: nn.Module) -> nn.Module:
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
    """The quantized class that replaces a float collection (recinfer's or TorchRec's, recognized by attributes)."""
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
            ``torch.quint2x4`` (INT2), ``torch.float16``, ``torch.bfloat16``, ``torch.float32``, or a :class:`DataType`.
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


def quantize_embeddings(
    module: nn.Module,
    dtype: torch.dtype,
    inplace: bool,
    additional_qconfig_spec_keys: list[type[nn.Module]] | None = None,
    additional_mapping: dict[type[nn.Module], type[nn.Module]] | None = None,
    output_dtype: torch.dtype = torch.float,
    per_table_weight_dtype: dict[str, torch.dtype] | None = None,
) -> nn.Module:
    """Replace modules by class: every EmbeddingBagCollection by its quantized one, and the classes that the caller
    adds.

    Args:
        module: the model.
        dtype: precision of the rows, as in :func:`quantize_inference_model`.
        inplace: change ``module``; else a deep copy of it is changed (its float tables are not copied).
        additional_qconfig_spec_keys: more classes to replace, such as the float EmbeddingCollection; each needs an entry in
            ``additional_mapping``.
        additional_mapping: float class -> class with ``from_float(module)``, which finds a :class:`QuantConfig` at
            ``module.qconfig``.
        output_dtype: element type of the looked-up vectors.
        per_table_weight_dtype: table -> precision, where it differs.

    Returns:
        the model; the quantized collection itself if ``module`` is one to replace.

    Raises:
        ConfigError: nothing to replace, a class without a mapping, or an unknown table in ``per_table_weight_dtype``.
        InputError: a weight is not finite (names table and row).
    """
    mapping: dict[type[nn.Module], type[nn.Module]] = {
        float_modules.EmbeddingBagCollection: EmbeddingBagCollection,
        **(additional_mapping or {}),
    }
    kinds: set[type[nn.Module]] = {float_modules.EmbeddingBagCollection, *(additional_qconfig_spec_keys or [])}
    unmapped = [kind.__name__ for kind in kinds if kind not in mapping]
    if unmapped:
        raise ConfigError(f"no quantized class for {', '.join(unmapped)}; add it to additional_mapping")
    qconfig = QuantConfig(
        activation=partial(SimpleNamespace, dtype=output_dtype),
        weight=partial(SimpleNamespace, dtype=dtype),
        per_table_weight_dtype=per_table_weight_dtype,
    )
    found = [child for _, child in outermost_modules(module, lambda m: type(m) in kinds)]
    if not found:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise ConfigError(f"{type(module).__name__} holds no {names}; nothing to quantize")
    known = {config.name for child in found for config in _configs_of(child)}
    unknown = sorted(set(per_table_weight_dtype or {}) - known)
    if unknown:
        raise ConfigError(
            f"per_table_weight_dtype names {', '.join(unknown)}; the model has: {', '.join(sorted(known))}"
        )
    swapped = {id(child): _from_float(child, mapping[type(child)], qconfig) for child in found}
    if id(module) in swapped:
        return swapped[id(module)]
    if not inplace:
        return copy.deepcopy(module, dict(swapped))
    for parent in list(module.modules()):
        for name, child in list(named_children(parent)):
            if id(child) in swapped:
                setattr(parent, name, swapped[id(child)])
    return module


def _configs_of(module: nn.Module) -> list[BaseEmbeddingConfig]:
    """The tables of a collection; [] for any other module."""
    for method in ("embedding_bag_configs", "embedding_configs"):
        configs = getattr(module, method, None)
        if callable(configs):
            return list(configs())
    return []


def _from_float(module: nn.Module, kind: type[nn.Module], qconfig: QuantConfig) -> nn.Module:
    """``kind.from_float(module)``, with ``qconfig`` temporarily set on the module."""
    before = module.__dict__.get("qconfig")
    module.qconfig = qconfig  # type: ignore[assignment]
    try:
        if issubclass(kind, EmbeddingBagCollection | EmbeddingCollection):
            quantized: nn.Module = kind.from_float(module, output_dtype=qconfig.activation().dtype)
        else:
            quantized = kind.from_float(module)  # type: ignore[attr-defined]
    finally:
        module.__dict__.pop("qconfig")
        if before is not None:
            module.qconfig = before
    return quantized


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
        sharding_device: does nothing (:mod:`recinfer.ignored`): the sharded module holds the weights that ``model`` holds.
        sharders: default: both quantized collections'.
        device_memory_size: bytes of device memory a rank.
        constraints: table -> what the planner may choose.
        ddr_cap: bytes of host memory a rank.
        sharding_plan: use this plan instead of making one.

    Returns:
        the sharded model (dense parameters shared with ``model``) and its plan.

    Raises:
        PlannerError: no plan fits; names the limit. ConfigError: the plan does not match, or a device does not exist.
    """
    chosen = tuple(sharders) if sharders else _DEFAULT_SHARDERS
    plan = sharding_plan or _plan(model, world_size, compute_device, device_memory_size, constraints, ddr_cap)
    env = ShardingEnv.from_local(world_size, 0)
    met: set[str] = set()
    names = module_names(model)

    def sharded(path: str, module: nn.Module) -> nn.Module | None:
        planned = [name for name in names.get(id(module), [path]) if name in plan.plan]
        met.update(planned)
        module_plan = plan.get_plan_for_module(planned[0]) if planned else None
        if not isinstance(module_plan, EmbeddingModuleShardingPlan):
            return None
        for sharder in chosen:
            if isinstance(module, sharder.module_type):
                return sharder.shard(module, module_plan, env, None)  # type: ignore[call-arg]
        raise ConfigError(
            f"module {path!r} is planned, but no sharder supports a {type(module).__name__}; quantize the model first"
        )

    result = replace_modules(model, sharded)
    unknown = sorted(set(plan.plan) - met)
    if unknown:
        raise ConfigError(f"the plan has modules {', '.join(map(repr, unknown))}, which the model lacks")
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
    precisions = {
        f"{path}.{config.name}" if path else config.name: config.data_type
        for path, _, configs, _ in embedding_tables(model)
        for config in configs
    }
    return plan_inference(
        model,
        world_size=world_size,
        compute_device=compute_device,
        per_table_precision=precisions,
        constraints=constraints,
        topology=topology,
    ).to_sharding_plan()
