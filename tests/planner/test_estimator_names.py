"""TorchRec's names of the inputs of an estimate, which TorchEasyRec imports (tzrec/utils/dynamicemb_util.py)."""

from __future__ import annotations

from recinfer.distributed.embeddingbag import EmbeddingBagCollectionSharder
from recinfer.distributed.planner import Topology
from recinfer.distributed.planner.enumerators import EmbeddingEnumerator
from recinfer.distributed.planner.estimator.types import HardwarePerfConfig, ShardPerfContext
from recinfer.modules.embedding_configs import EmbeddingBagConfig
from recinfer.modules.embedding_modules import EmbeddingBagCollection


class Twice(HardwarePerfConfig):
    """Memory that is twice as fast."""

    def get_device_bw(self, *args: object, **kwargs: object) -> float | None:
        return 2 * (super().get_device_bw(*args, **kwargs) or 0.0)  # type: ignore[arg-type]


def test_contexts_of_shards_have_the_bandwidth_of_the_hardware() -> None:
    topology = Topology(world_size=2, compute_device="cuda", hbm_mem_bw=1000.0)
    model = EmbeddingBagCollection(tables=[EmbeddingBagConfig(10, 4, "t", feature_names=["f"])])
    options = EmbeddingEnumerator(topology).enumerate(model, [EmbeddingBagCollectionSharder()])
    option = next(o for o in options if (o.sharding_type, o.compute_kernel) == ("row_wise", "fused"))
    sizes = [shard.size for shard in option.shards]
    plain, fast = (
        ShardPerfContext.build_shard_perf_contexts(config, sizes, option, topology, None, object(), is_inference=False)
        for config in (HardwarePerfConfig(), Twice())
    )
    assert plain[0] == ShardPerfContext("row_wise", "fused", 5, 4, 1000.0)
    assert [context.device_bw for context in fast] == [2000.0, 2000.0]
