"""Rectangles of tables on ranks, below all code that plans, stores or reads tables. See docs/explanation/sharding.md."""
