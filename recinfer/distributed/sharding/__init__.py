"""TorchRec's modules of the sharding types. See docs/explanation/request.md."""
