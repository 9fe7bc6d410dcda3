"""The documented places of the sharding types. See docs/tour.md."""
