"""Sharded quantized tables in one process: positions of rows, lookups, TorchRec's classes, and calibration."""
