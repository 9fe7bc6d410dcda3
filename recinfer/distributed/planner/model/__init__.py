"""Inputs of the planner: hardware and its measured figures, tables, sharding options, and estimates of shards."""
