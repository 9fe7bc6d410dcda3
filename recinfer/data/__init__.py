"""Reads raw rows, converts them to model inputs by a feature contract, and computes metrics."""

from __future__ import annotations

from recinfer.data.contract import FeatureContract
from recinfer.data.dataset import Dataset, load_dataset, read_columns
from recinfer.data.tables import read_csv, write_csv

__all__ = ["Dataset", "FeatureContract", "load_dataset", "read_columns", "read_csv", "write_csv"]
