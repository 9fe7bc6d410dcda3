"""The inputs of a performance estimate under TorchRec's module name; the estimates are
:mod:`recinfer.distributed.planner.shard_estimators`."""
