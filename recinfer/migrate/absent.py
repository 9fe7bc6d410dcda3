"""The replacements for names of torchrec that recinfer lacks."""

from __future__ import annotations

__all__ = ["INSTEAD"]

# A key that ends in .* applies to every other name below it.
INSTEAD = {
    "torchrec.datasets.criteo.BinaryCriteoUtils.get_file_row_ranges_and_remainder": "InMemoryBinaryCriteoIterDataPipe(rank=, world_size=), which shares the rows among the ranks",
    "torchrec.datasets.criteo.BinaryCriteoUtils.shuffle": "InMemoryBinaryCriteoIterDataPipe(shuffle_training_set=True), which shuffles while it reads",
    "torchrec.datasets.scripts.*": "recinfer.datasets.criteo.BinaryCriteoUtils: tsv_to_npys and sparse_to_contiguous",
    "torchrec.datasets.test_utils.*": "nothing: TorchRec's own tests",
    "torchrec.datasets.utils.ParallelReadConcat": "one criteo_terabyte of the files of all pipes: the workers of a DataLoader share them",
    "torchrec.datasets.utils.idx_split_train_val": "two itertools.islice of the rows, or torch.utils.data.random_split of a list",
    "torchrec.datasets.utils.rand_split_train_val": "torch.utils.data.random_split of a list of the rows",
    "torchrec.distributed.batched_embedding_kernel.*": "nothing to import: create_embedding_sharding(...).create_lookup() gives the lookup modules",
    "torchrec.distributed.batched_embedding_kernel.BaseBatchedEmbedding": "recinfer's sharded modules do not support "
    "custom kernels; the kernels are dense, fused, fused_uvm and fused_uvm_caching "
    "(ParameterConstraints.compute_kernels)",
    "torchrec.distributed.batched_embedding_kernel.BaseBatchedEmbeddingBag": "recinfer's sharded modules do not "
    "support custom kernels; the kernels are dense, fused, fused_uvm and fused_uvm_caching "
    "(ParameterConstraints.compute_kernels)",
    "torchrec.distributed.benchmark.*": "recinfer bench and recinfer calibrate",
    "torchrec.distributed.embedding.pad_vbe_kjt_lengths": "KeyedJaggedTensor with inverse_indices: a sharded collection takes a variable batch as it is",
    "torchrec.distributed.embedding_kernel.BaseEmbedding": "torch.nn.Module: recinfer's lookups are plain modules",
    "torchrec.distributed.embedding_kernel.get_state_dict": "state_dict() of the sharded module",
    "torchrec.distributed.embedding_tower_sharding.*": "two modules: an EmbeddingBagCollection, then the tower",
    "torchrec.distributed.fused_embedding.*": "recinfer.modules.embedding_modules.EmbeddingCollection with recinfer.optim.apply_optimizer_in_backward",
    "torchrec.distributed.fused_embeddingbag.FusedEmbeddingBagCollectionSharder": "recinfer.distributed.embeddingbag.EmbeddingBagCollectionSharder after recinfer.optim.apply_optimizer_in_backward on the tables",
    "torchrec.distributed.global_settings.*": "nothing to set: shards are made on the device that is given",
    "torchrec.distributed.keyed_jagged_tensor_pool.*": "nothing: recinfer has no pools of rows by id; keep them in a "
    "tensor outside the model",
    "torchrec.distributed.mc_modules.InferManagedCollisionCollectionSharder": "recinfer export: a server maps raw ids by the archive's vocabulary",
    "torchrec.distributed.mc_modules.ShardedMCCRemapper": "recinfer export: a server maps raw ids by the archive's vocabulary",
    "torchrec.distributed.mc_modules.ShardedQuantManagedCollisionCollection": "recinfer export: a server maps raw ids by the archive's vocabulary",
    "torchrec.distributed.mc_modules.create_mc_sharding": "nothing to import: ManagedCollisionCollectionSharder takes the shardings of the embedding module",
    "torchrec.distributed.model_parallel.DMPCollection": "one DistributedModelParallel over all ranks; there is no 2-D parallel training",
    "torchrec.distributed.model_tracker.*": "recinfer delta: it writes the rows that changed since an archive",
    "torchrec.distributed.object_pool.*": "nothing: recinfer has no pools of rows by id; keep them in a tensor "
    "outside the model",
    "torchrec.distributed.planner.constants.KV_CACHING_RATIO": "recinfer.distributed.planner.constants.UVM_CACHING_RATIO: there are no kernels over SSD or a key-value store",
    "torchrec.distributed.planner.enumerators.EmbeddingTower": "two modules: an EmbeddingBagCollection, then the tower",
    "torchrec.distributed.planner.enumerators.EmbeddingTowerCollection": "two modules: an EmbeddingBagCollection, "
    "then the tower",
    "torchrec.distributed.planner.enumerators.GUARDED_COMPUTE_KERNELS": "ParameterConstraints(compute_kernels=[...]); recinfer has none of the guarded kernels",
    "torchrec.distributed.planner.enumerators.GUARDED_SHARDING_TYPES_FOR_FP_MODULES": "ParameterConstraints(sharding_types=[...]); behind feature processors, types that cut rows are offered only if the constraints name them",
    "torchrec.distributed.planner.enumerators._get_tower_index": "two modules: an EmbeddingBagCollection, then the "
    "tower",
    "torchrec.distributed.planner.enumerators.calculate_shard_sizes_and_offsets": "recinfer.distributed.sharding_plan.calculate_shard_sizes_and_offsets",
    "torchrec.distributed.planner.estimator.*": "recinfer.distributed.planner.shard_estimators (EmbeddingPerfEstimator), or a ShardEstimator of your own",
    "torchrec.distributed.planner.partitioners.MemoryBalancedPartitioner": "recinfer.distributed.planner.partitioners.GreedyPerfPartitioner, or "
    "the default search of EmbeddingShardingPlanner",
    "torchrec.distributed.planner.perf_models.NoopStorageModel": "a PerfModel of your own: rate(plan) reads shard.rank and shard.storage",
    "torchrec.distributed.planner.proposers.EmbeddingOffloadScaleupProposer": "the default search of EmbeddingShardingPlanner (no "
    "proposer): it fills device memory with the tables that gain most",
    "torchrec.distributed.planner.proposers.proposers_to_proposals_list": "load(), propose() and feedback() of each proposer",
    "torchrec.distributed.planner.shard_estimators.calculate_shard_storages": "recinfer.distributed.planner.shard_estimators.EmbeddingStorageEstimator(topology).estimate(options)",
    "torchrec.distributed.planner.shard_estimators.get_num_poolings": "ShardingOption.num_poolings",
    "torchrec.distributed.planner.storage_reservations.StorageReservationType": "the class of the reservation",
    "torchrec.distributed.planner.utils.BinarySearchPredicate": "bisect of the standard library",
    "torchrec.distributed.planner.utils.LuusJaakolaSearch": "scipy.optimize.minimize_scalar",
    "torchrec.distributed.planner.utils.mb_to_bytes": "int(mb * 1024**2)",
    "torchrec.distributed.planner.utils.reset_shard_rank": "a loop that sets shard.rank = None",
    "torchrec.distributed.planner.utils.storage_repr_in_gb": "str(storage), in bytes",
    "torchrec.distributed.quant_embedding_kernel.*": "recinfer.distributed.quant_embeddingbag",
    "torchrec.distributed.shard.*": "recinfer.distributed.model_parallel.DistributedModelParallel with the plan",
    "torchrec.distributed.sharding.cw_sequence_sharding.*": "recinfer.distributed.embedding.create_embedding_sharding",
    "torchrec.distributed.sharding.dp_sequence_sharding.DpSequenceEmbeddingSharding": "recinfer.distributed.embedding.create_embedding_sharding",
    "torchrec.distributed.sharding.rw_sequence_sharding.RwSequenceEmbeddingSharding": "recinfer.distributed.embedding.create_embedding_sharding",
    "torchrec.distributed.sharding.tw_sequence_sharding.*": "recinfer.distributed.embedding.create_embedding_sharding",
    "torchrec.distributed.sharding_plan._calculate_cw_shard_sizes_and_offsets": "recinfer.distributed.sharding_plan.calculate_shard_sizes_and_offsets",
    "torchrec.distributed.sharding_plan._calculate_uneven_rw_shard_sizes_and_offsets": "recinfer.distributed.sharding_plan.calculate_shard_sizes_and_offsets",
    "torchrec.distributed.tensor_pool.*": "nothing: recinfer has no pools of rows by id; keep them in a tensor "
    "outside the model",
    "torchrec.distributed.test_utils.*": "nothing: TorchRec's own tests; start ranks with torchrun or torch.multiprocessing",
    "torchrec.distributed.train_pipeline.TrainPipelineSemiSync": "recinfer.distributed.train_pipeline.TrainPipelineSparseDist; every step sees all updates before it",
    "torchrec.distributed.train_pipeline.train_pipelines.TrainPipelineSemiSync": "recinfer.distributed.train_pipeline.TrainPipelineSparseDist; every step sees all updates before it",
    "torchrec.distributed.utils.convert_to_fbgemm_types": "nothing: fused_params take recinfer's DataType",
    "torchrec.fx.utils.*": "torch.fx",
    "torchrec.fx.utils.assert_fx_safe": "assert, in code that is not traced",
    "torchrec.inference.client.*": "recinfer.serving: its gRPC and HTTP clients",
    "torchrec.inference.dlrm_packager.*": "recinfer export (recinfer.inference.export.export_archive): one archive instead of a torch.package",
    "torchrec.inference.dlrm_predict.*": "recinfer export --model pkg:build: a function that builds the model",
    "torchrec.inference.inference_legacy.*": "recinfer export (recinfer.inference.export.export_archive): one archive instead of a torch.package",
    "torchrec.inference.model_packager.*": "recinfer export (recinfer.inference.export.export_archive): one archive instead of a torch.package",
    "torchrec.inference.modules.*": "recinfer.inference.modules has quantize_embeddings, quantize_inference_model and shard_quant_model",
    "torchrec.inference.modules.PredictFactory": "recinfer export --model pkg:build: a function that builds the model",
    "torchrec.inference.modules.PredictModule": "the model itself; recinfer.load(archive) gives a model that is called like it",
    "torchrec.metrics.*": "torchmetrics, or recinfer.data.metrics (AUC, log loss, normalized entropy over numpy arrays)",
    "torchrec.models.deepfm.*": "nothing: recinfer has no DeepFM; recinfer.models.dlrm has DLRM, DLRM_DCN and "
    "DLRM_Projection",
    "torchrec.models.experimental.*": "nothing: recinfer.models.dlrm has DLRM, DLRM_DCN and DLRM_Projection",
    "torchrec.modules.deepfm.*": "nothing: recinfer has no DeepFM; its two modules are some lines of torch over "
    "KeyedTensor.values()",
    "torchrec.modules.embedding_tower.*": "two modules: an EmbeddingBagCollection, then the tower",
    "torchrec.modules.fused_embedding_modules.*": "recinfer.modules.embedding_modules with recinfer.optim.apply_optimizer_in_backward",
    "torchrec.modules.fused_embedding_modules.fuse_embedding_optimizer": "recinfer.optim.apply_optimizer_in_backward on the tables' parameters, before sharding",
    "torchrec.modules.hash_mc_evictions.*": "recinfer.modules.mc_modules.MCHManagedCollisionModule with an eviction policy: hashed modules look ids up, and are trained by TorchRec",
    "torchrec.modules.hash_mc_metrics.*": "num_admitted and num_evicted of recinfer.modules.mc_modules.MCHManagedCollisionModule; a server counts known and unknown ids (recinfer_vocabulary_ids_total)",
    "torchrec.modules.hash_mc_modules.TrainInputMapper": "recinfer.modules.mc_modules.MCHManagedCollisionModule: hashed modules look ids up, and are trained by TorchRec",
    "torchrec.modules.itep_embedding_modules.*": "nothing: no pruning of rows while training",
    "torchrec.modules.itep_modules.*": "nothing: no pruning of rows while training",
    "torchrec.modules.keyed_jagged_tensor_pool.*": "nothing: recinfer has no pools of rows by id; keep them in a "
    "tensor outside the model",
    "torchrec.modules.lazy_extension.*": "torch.nn.LazyLinear and its like",
    "torchrec.modules.mc_adapter.*": "recinfer.modules.mc_embedding_modules: a ManagedCollisionEmbeddingCollection or ManagedCollisionEmbeddingBagCollection of the tables and a ManagedCollisionCollection",
    "torchrec.modules.object_pool.*": "nothing: recinfer has no pools of rows by id; keep them in a tensor outside "
    "the model",
    "torchrec.modules.sorted_index_select.maybe_sorted_index_select": "torch.index_select",
    "torchrec.modules.tensor_pool.*": "nothing: recinfer has no pools of rows by id; keep them in a tensor outside "
    "the model",
    "torchrec.pt2.*": "torch.compiler and torch.export: recinfer's modules need no wrappers",
    "torchrec.pt2.checks.is_torchdynamo_compiling": "torch.compiler.is_dynamo_compiling",
    "torchrec.sparse.jagged_tensor_validator": "nothing: KeyedJaggedTensor checks sizes and signs when it is made",
    "torchrec.sparse.jagged_tensor_validator.*": "nothing: KeyedJaggedTensor checks sizes and signs when it is made",
    "torchrec.test_utils": 'nothing: TorchRec\'s own tests; a free port: socket.create_server(("127.0.0.1", 0))',
    "torchrec.test_utils.*": 'nothing: TorchRec\'s own tests; a free port: socket.create_server(("127.0.0.1", 0))',
}
