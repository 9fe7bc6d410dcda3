"""Sharded modules: a collection of tables, its steps, its place in the module tree, its state. See docs/explanation/request.md."""
