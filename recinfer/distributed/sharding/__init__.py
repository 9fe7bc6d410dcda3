"""The documented places of the sharding types. See docs/explanation/request.md."""
