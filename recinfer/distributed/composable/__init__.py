"""Parameter classes of sharded modules."""
