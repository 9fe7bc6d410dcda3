"""Sharded modules for training: collections, their steps, parameters and state. See docs/explanation/request.md."""
