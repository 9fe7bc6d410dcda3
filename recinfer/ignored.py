"""TorchRec's arguments that have no effect in recinfer, and whether they cause a warning or an error.

An argument for a feature that recinfer lacks causes one warning, or a ConfigError if the result would differ. All other
arguments of the list give the same result for any value. docs/explanation/coming-from-torchrec.md lists the first two
kinds.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Literal

__all__ = ["IGNORED", "Ignored", "IgnoredArgumentWarning", "warn_ignored"]


class IgnoredArgumentWarning(UserWarning):
    """An argument was given that has no effect in recinfer."""


@dataclass(frozen=True, slots=True)
class Ignored:
    """Parameters that have no effect.

    Attributes:
        of: functions and classes with these parameters, without ``recinfer.``.
        parameters: their names; ``*`` for all of a class.
        happens: the effect of a value: a warning, a ConfigError, or nothing.
        why: the reason, or what recinfer does instead.
    """

    of: tuple[str, ...]
    parameters: tuple[str, ...]
    happens: Literal["warns", "refused", "nothing"]
    why: str


_BAGS = "quant.embedding_modules.EmbeddingBagCollection"
_ROWS = "quant.embedding_modules.EmbeddingCollection"
_TABLE = "modules.embedding_configs.BaseEmbeddingConfig"
_ALL_ROWS = "recinfer allocates all rows of a table at the start and never evicts or moves them"
_KNOWN = "a value that TorchRec's callers precompute; it follows from the other arguments"
_FOR_READERS = "stored for readers of the object, not used"

IGNORED = (
    Ignored((_BAGS, _ROWS), ("register_tbes",), "warns", "TBE modules are not submodules; `tbes()` returns them"),
    Ignored(
        (_BAGS, _ROWS),
        ("quant_state_dict_split_scale_bias",),
        "warns",
        "the state holds packed rows that include scale and bias",
    ),
    Ignored(
        (f"{_BAGS}.from_float", f"{_ROWS}.from_float"),
        ("use_precomputed_fake_quant",),
        "warns",
        "rows are quantized from the float weights",
    ),
    Ignored(
        (
            "distributed.quant_embeddingbag.ShardedQuantEmbeddingBagCollection",
            "distributed.quant_embedding.ShardedQuantEmbeddingCollection",
        ),
        ("fused_params",),
        "warns",
        "for keys other than `output_dtype`: the quantized module and the plan define the rows, their caches and the "
        "form of the state",
    ),
    Ignored((_TABLE,), ("num_embeddings_post_pruning",), "warns", "tables are not pruned: all rows are kept"),
    Ignored(
        ("distributed.types.KeyValueParams",),
        ("*",),
        "warns",
        "recinfer has no kernel that keeps rows on SSD or in a key-value store",
    ),
    Ignored(
        ("distributed.planner.Topology",),
        ("ssd_cap", "ssd_mem_bw"),
        "warns",
        "recinfer has no kernel that keeps rows on SSD, so the planner places none there",
    ),
    Ignored(
        ("distributed.planner.Topology",),
        ("pod_size",),
        "warns",
        "the planner models only links inside a host and between hosts",
    ),
    Ignored(
        ("distributed.planner.Topology",),
        ("hbm_cap",),
        "warns",
        "for `compute_device='cpu'`: its ranks have host memory only, which `ddr_cap` limits",
    ),
    Ignored(
        (_TABLE,),
        (
            "input_dim",
            "total_num_buckets",
            "use_virtual_table",
            "virtual_table_eviction_policy",
            "enable_embedding_update",
            "stash_weights",
        ),
        "refused",
        _ALL_ROWS,
    ),
    Ignored(("distributed.planner.ParameterConstraints",), ("use_virtual_table",), "refused", _ALL_ROWS),
    # ------------------------------------------------------------------------------- any value gives the same result
    Ignored((_BAGS, _ROWS), ("cache_features_order",), "nothing", "the order of keys is always cached"),
    Ignored(
        ("quant.embedding_modules.quant_prep_enable_cache_features_order",),
        ("module", "module_types"),
        "nothing",
        "the order of keys is always cached",
    ),
    Ignored(
        ("modules.regroup.KTRegroupAsDict",), ("multi_device",), "nothing", "the device is that of the keyed tensors"
    ),
    Ignored(
        ("modules.embedding_modules.EmbeddingCollection",),
        ("use_gather_select", "use_gather_select_per_sharding"),
        "nothing",
        "it selects how TorchRec gathers outputs; the outputs are the same",
    ),
    Ignored(
        ("inference.modules.shard_quant_model",),
        ("sharding_device",),
        "nothing",
        "the sharded module uses the model's weights",
    ),
    Ignored(
        ("distributed.embeddingbag.create_embedding_bag_sharding",),
        ("permute_embeddings",),
        "nothing",
        "outputs are always in the module's order",
    ),
    Ignored(
        (
            "distributed.embeddingbag.ShardedEmbeddingBagCollection",
            "distributed.embedding.ShardedEmbeddingCollection",
            "distributed.embeddingbag.EmbeddingBagCollectionSharder.shard",
        ),
        ("module_fqn",),
        "nothing",
        "a name for TorchRec's logs",
    ),
    Ignored(
        ("distributed.fbgemm_qcomm_codec.get_qcomm_codecs_registry",),
        ("device",),
        "nothing",
        "codecs work on every device",
    ),
    Ignored(
        (
            "distributed.dist_data.PooledEmbeddingsAllToAll",
            "distributed.dist_data.VariableBatchPooledEmbeddingsAllToAll",
        ),
        ("device",),
        "nothing",
        "buffers are on the device of the input",
    ),
    Ignored(("distributed.dist_data.EmbeddingsAllToOneReduce",), ("cat_dim",), "nothing", "a sum concatenates nothing"),
    Ignored(("distributed.dist_data.KJTAllToAllTensorsAwaitable",), ("splits",), "nothing", _KNOWN),
    Ignored(
        ("distributed.comm_ops.alltoall_pooled", "distributed.comm_ops.All2AllPooledInfo"),
        ("dim_sum_per_rank_tensor", "cumsum_dim_sum_per_rank_tensor"),
        "nothing",
        _KNOWN,
    ),
    Ignored(("distributed.comm_ops.All2AllDenseInfo",), ("input_shape",), "nothing", _FOR_READERS),
    Ignored(
        ("distributed.comm_ops.All2AllVInfo",),
        ("B_global", "B_local", "input_split_sizes", "output_split_sizes"),
        "nothing",
        _FOR_READERS,
    ),
    Ignored(("distributed.comm_ops.ReduceScatterVInfo",), ("equal_splits",), "nothing", _FOR_READERS),
    Ignored(("distributed.embedding_sharding.KJTSplitsAllToAllMeta",), ("splits_cumsum",), "nothing", _KNOWN),
    Ignored(
        ("distributed.exchange.sequence.SequenceShardingContext",),
        ("unbucketize_permute_tensor",),
        "nothing",
        _FOR_READERS,
    ),
    Ignored(
        ("distributed.planner.types.SharderData",),
        ("qcomm_dtype_sizes", "storage_usage_type"),
        "nothing",
        "read only by custom estimators",
    ),
    Ignored(
        ("distributed.planner.shard_estimators.EmbeddingPerfEstimator.perf_func_emb_wall_time",),
        ("output_data_type_size",),
        "nothing",
        "vectors have the size that the collective sends, as in TorchRec's model",
    ),
    Ignored(
        ("distributed.planner.types.ShardingOption.module_pooled",),
        ("sharding_option_name",),
        "nothing",
        "the module defines whether it pools",
    ),
    Ignored(
        ("distributed.planner.enumerators.EmbeddingEnumerator",),
        ("use_exact_enumerate_order",),
        "nothing",
        "options are always in the order of the modules",
    ),
    Ignored(("distributed.train_pipeline.EvalPipelineSparseDist",), ("optimizer",), "nothing", "nothing is trained"),
    Ignored(
        ("distributed.types.LazyAwaitable",), ("args", "kwargs"), "nothing", "accepted for classes with several bases"
    ),
)
_WHY = {(of, parameter): row.why for row in IGNORED for of in row.of for parameter in row.parameters}


def warn_ignored(of: str, parameter: str, given: object, stacklevel: int = 3) -> None:
    """Warn that ``parameter`` of ``of``, a row of :data:`IGNORED`, has no effect, if it is ``given`` (not None, False
    or 0).

    The default filter of :mod:`warnings` prints one warning per location in the program.

    Args:
        stacklevel: as of :func:`warnings.warn`; 3 is the caller of the calling function.
    """
    if given:
        what = of if parameter == "*" else f"{of}: {parameter}"
        warnings.warn(f"{what} has no effect: {_WHY[of, parameter]}", IgnoredArgumentWarning, stacklevel)
