"""Quantized tables over the ranks of one process: where their rows lie, the steps that run them, and what they cost."""
