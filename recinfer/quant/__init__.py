"""Quantized tables: packed row formats, lookup kernels, and quantized embedding collections."""
