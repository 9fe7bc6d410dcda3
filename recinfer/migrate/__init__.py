"""Migrates programs from TorchRec to recinfer: rewrites their imports and lists the names that recinfer lacks."""

from __future__ import annotations

from recinfer.migrate.files import FileChange, MissingName, python_files
from recinfer.migrate.rewrite import migrate_file

__all__ = ["FileChange", "MissingName", "migrate_file", "python_files"]
