"""Comparisons of sharded computation with the unsharded module."""
